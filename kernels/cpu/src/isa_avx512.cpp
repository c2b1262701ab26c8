// AVX-512 F, BW, DQ and VL, and F16C.
#include "avx512.h"
#include "prompt.h"

extern "C" const Isa hb_isa_avx512 = {"avx512",
                                      vector_attend,
                                      vector_dots,
                                      vector_prepare_weights,
                                      vector_convert,
                                      vector_widen,
                                      vector_byte_dots,
                                      vector_softmax_add,
                                      vector_read,
                                      vector_weigh,
                                      vector_code_sums,
                                      vector_log_sums,
                                      attend_prompt<Singles>};
