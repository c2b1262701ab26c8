// Pages and frames as the operations get them (hb_paged): contiguous [pages, kv_heads, 2, page_size, head_dim].
#pragma once
#include <cstring>

#include "api.h"
#include "api_operations.h"
#include "isa.h"

namespace hb {

inline int64_t row_bytes(const hb_paged& x) { return x.head_dim * element_size((int)x.type); }
inline int64_t head_bytes(const hb_paged& x) { return 2 * x.page_size * row_bytes(x); }
inline int64_t page_bytes(const hb_paged& x) { return x.kv_heads * head_bytes(x); }
inline char* keys_of(const hb_paged& x, int64_t page, int64_t head) {
  return x.base + page * page_bytes(x) + head * head_bytes(x);
}

inline hb_cache cache_of(const hb_paged& x) {
  return {x.base, x.pages, page_bytes(x), head_bytes(x), x.page_size * row_bytes(x), row_bytes(x)};
}
// Stores a token's K and V, [kv_heads, head_dim] each, at `offset` of a page. `row` is the bytes of head_dim elements.
inline void store_token(const hb_cache& cache, int64_t kv_heads, int64_t page, int64_t offset, const char* k,
                        const char* v, int64_t row) {
  char* to = cache.base + page * cache.page_stride + offset * cache.token_stride;
  for (int64_t h = 0; h < kv_heads; h++, to += cache.head_stride) {
    std::memcpy(to, k + h * row, row);
    std::memcpy(to + cache.value_offset, v + h * row, row);
  }
}

inline hb_model model_of(const hb_paged& x, int64_t group, double scale) {
  return {(int32_t)x.type,
          (int32_t)x.kv_heads,
          (int32_t)group,
          (int32_t)x.head_dim,
          (int32_t)x.page_size,
          (float)scale,
          1.f};
}

}  // namespace hb
