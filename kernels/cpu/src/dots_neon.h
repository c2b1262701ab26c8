// Byte products for bytes_neon.h, by DotProd.
#pragma once
#include "bytes_neon.h"

namespace {

struct Dots : ByLanes<Dots> {
  INLINE int32x4_t add(int32x4_t sum, int8x16_t a, int8x16_t b) { return vdotq_s32(sum, a, b); }
};

}  // namespace
