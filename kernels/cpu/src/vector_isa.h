// The kernels on vectors (vector_*.h, prompt.h) as the table of one instruction set. Included once per instruction set.
#pragma once
#include "vector_attend.h"
#include "vector_scores.h"
#include "vector_convert.h"
#include "code_query.h"
#include "nibble_tables.h"
#include "prompt_weights.h"

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
          {nibble_table_bytes, nibble_tables, nibble_steps, vector_code_sums},
          vector_log_sums,
          prompt_kernels<Singles>(),
          rotate};
}

}  // namespace
