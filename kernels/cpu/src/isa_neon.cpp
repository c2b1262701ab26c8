// NEON, and byte dot products for CPUs without DotProd: products of bytes fit 16 bits, and one instruction adds
// neighbours to 32.
#include "neon.h"
#include "bytes_neon.h"
#include "vector_isa.h"

namespace {

struct Widening : ByLanes<Widening> {
  INLINE int32x4_t add(int32x4_t sum, int8x16_t a, int8x16_t b) {
    sum = vpadalq_s16(sum, vmull_s8(vget_low_s8(a), vget_low_s8(b)));
    return vpadalq_s16(sum, vmull_high_s8(a, b));
  }
};

}  // namespace

extern "C" const Isa hb_isa_neon = vector_isa("neon");
extern "C" const ByteKernels hb_neon_bytes = {byte_dots<Widening>, byte_heads<Widening>};
