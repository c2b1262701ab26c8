// The three kinds of digests that operations accept, numbered as in kernels/operations.py (DIGESTS).
#pragma once
#include "api.h"
#include "guard.h"
#include "isa.h"

namespace hb {

// Digests of maxima and minima describe growing pages, too. Codes and bytes exist for whole pages only.
constexpr int64_t kMinMax = 0, kCodes = 1, kBytes = 2;
constexpr int kByteTail = 16;  // bytes after the channels of a digest in bytes (kernels/byte_digests.py)

// Size of one KV head's digest of one page, in bytes.
inline int64_t digest_bytes(int64_t kind, const hb_model& model) {
  const int64_t dim = model.head_dim;
  return kind == kCodes ? 4 * dim : kind == kBytes ? 2 * dim + kByteTail : 2 * dim * element_size(model.type);
}

// The layout of contiguous digests [pages, kv_heads, digest_bytes]. For bytes, only the address and strides hold.
inline hb_digests digests_of(const char* base, const hb_model& model, int64_t kind) {
  require(kind >= kMinMax && kind <= kBytes, "no such kind of digests");
  const int64_t head = digest_bytes(kind, model);
  return {(char*)base, model.kv_heads * head, head, kind == kCodes};
}

}  // namespace hb
