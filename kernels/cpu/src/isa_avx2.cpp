// AVX2, FMA and F16C.
#include "avx2.h"
#include "vector_isa.h"

extern "C" const Isa hb_isa_avx2 = vector_isa("avx2");
