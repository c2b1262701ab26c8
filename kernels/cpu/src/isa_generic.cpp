// 16-byte vectors: SSE2, NEON, or whatever the compiler makes of them.
#define LANE_BYTES 16
#define ACCUMULATORS 8
#define REGISTERS 16
#include "vector.h"

#include "prompt.h"

extern "C" const Isa hb_isa_generic = {"generic",
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
