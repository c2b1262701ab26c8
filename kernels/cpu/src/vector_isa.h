// The functions of vector.h and prompt.h as an instruction set.
#include "code_query.h"
#include "prompt.h"

namespace {

constexpr Isa vector_isa(const char* name) {
  return {name,
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
          attend_prompt<Singles>,
          rotate,
          code_tables};
}

}  // namespace
