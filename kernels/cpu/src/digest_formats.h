// The formats of digests that operations accept (kernels/digest_format.py).
#pragma once
#include "api.h"
#include "guard.h"
#include "isa.h"

namespace hb {

constexpr int kByteTail = 16;  // bytes after the channels of a digest in 8 bits (kernels/byte_digests.py)

// Size of one KV head's digest of one page, in bytes.
inline int64_t digest_bytes(int64_t format, const hb_model& model) {
  const int64_t dim = model.head_dim;
  if (format == HB_CODES) return 4 * dim;
  return format == HB_MINMAX_INT8 ? 2 * dim + kByteTail : 2 * dim * element_size(model.type);
}

// The layout of contiguous digests [pages, kv_heads, digest_bytes].
inline hb_digests digests_of(const char* base, const hb_model& model, int64_t format) {
  require(format >= HB_MINMAX && format <= HB_MINMAX_INT8, "no such format of digests");
  const int64_t head = digest_bytes(format, model);
  return {(char*)base, model.kv_heads * head, head, format};
}

}  // namespace hb
