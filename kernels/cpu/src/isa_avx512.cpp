// AVX-512 F, BW, DQ and VL, and F16C.
#include "avx512.h"
#include "vector_isa.h"

extern "C" const Isa hb_isa_avx512 = vector_isa("avx512");
