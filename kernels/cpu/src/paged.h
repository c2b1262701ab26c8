// Pages and frames as the operations get them (hb_paged): contiguous [pages, kv_heads, 2, page_size, head_dim].
#pragma once
#include <cstring>

#include "api.h"
#include "api_operations.h"
#include "isa.h"
#include "kv_format.h"

namespace hb {

inline hb_model model_of(const hb_paged& x, int64_t group, double scale) {
  return {(int32_t)x.type,
          (int32_t)x.kv_heads,
          (int32_t)group,
          (int32_t)x.head_dim,
          (int32_t)x.page_size,
          (float)scale,
          1.f,
          (int32_t)x.kv_encoding};
}

inline int64_t row_bytes(const hb_paged& x) { return x.head_dim * element_size((int)x.type); }  // of new tokens
inline int64_t head_bytes(const hb_paged& x) { return head_bytes(model_of(x, 1, 1)); }
inline int64_t page_bytes(const hb_paged& x) { return x.kv_heads * head_bytes(x); }
inline char* keys_of(const hb_paged& x, int64_t page, int64_t head) {
  return x.base + page * page_bytes(x) + head * head_bytes(x);
}

inline hb_cache cache_of(const hb_paged& x) {
  const hb_model model = model_of(x, 1, 1);
  return {x.base, x.pages, page_bytes(x), head_bytes(x), part_bytes(model), kv_row_bytes(model)};
}
// Stores a token's K and V, [kv_heads, head_dim] each, at `offset` of a page.
inline void store_token(const hb_model& model, const hb_cache& cache, const Isa& isa, int64_t page, int64_t offset,
                        const char* k, const char* v) {
  const int64_t row = (int64_t)model.head_dim * element_size(model.type);
  char* to = cache.base + page * cache.page_stride;
  const bool is_plain = kv_type(model) != INT8;  // pages of the model's type may have any strides
  for (int h = 0; h < model.kv_heads; h++, to += cache.head_stride, k += row, v += row) {
    if (is_plain) {
      std::memcpy(to + offset * cache.token_stride, k, row);
      std::memcpy(to + offset * cache.token_stride + cache.value_offset, v, row);
    } else {
      encode_row(model, isa, k, to, KEYS_PART, offset);
      encode_row(model, isa, v, to, VALUES_PART, offset);
    }
  }
}

}  // namespace hb
