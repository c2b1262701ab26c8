// 16-byte vectors: SSE2, NEON, or whatever the compiler makes of them.
#define LANE_BYTES 16
#define ACCUMULATORS 8
#define REGISTERS 16
#include "vector.h"
#include "vector_isa.h"

extern "C" const Isa hb_isa_generic = vector_isa("generic");
