// Operations that write new tokens and keep the pages' digests up to date: hb_append_tokens, hb_build_digests and
// hb_extend_digests. Their contract is in kernels/operations.py.
#include <algorithm>
#include <cstring>

#include "api_operations.h"
#include "attend_job.h"
#include "codes.h"
#include "digest.h"
#include "digest_formats.h"
#include "guard.h"
#include "paged.h"
#include "team.h"

using hb::check_id;
using hb::guarded;
using hb::require;

namespace {

// Max and min of the first `tokens` keys of a page's head, in the model's type.
void fold_keys(const hb_model& model, const Isa& isa, const char* head, int64_t tokens, char* high, char* low) {
  float room[kMaxHeadDim];
  for (int64_t t = 0; t < tokens; t++)
    hb::fold_key(model.type, hb::key_of(model, isa, head, t, room), high, low, model.head_dim, t == 0);
}

// What converts numbers. Only digests of whole pages, and pages in 8 bits, limit the shape.
const Isa& converter(const hb_model& model, bool limits_shape) {
  if (limits_shape || model.kv_encoding != HB_KV_PLAIN) hb::check_model(model);
  return hb::base_isa(hb::best_isa());
}

// The digest of a whole page, as codes or as maxima and minima in 8 bits.
void digest_page(const hb_model& model, const hb_paged& kv, const hb_digests& digests, const Isa& isa, int64_t page) {
  if (digests.format == HB_CODES) return hb::encode_page(model, digests, hb::cache_of(kv), isa, page);
  hb_model one_head = model;  // what each has of a page is a row of a store of one head
  one_head.kv_heads = 1;
  if (hb::kv_type(model) == INT8) one_head.type = FP32;  // bytes of bytes: nothing is rounded in between
  const int64_t row = kv.head_dim * element_size(one_head.type);
  for (int64_t h = 0; h < kv.kv_heads; h++) {
    char ends[2 * kMaxHeadDim * sizeof(float)];
    fold_keys(one_head, isa, hb::keys_of(kv, page, h), kv.page_size, ends, ends + row);
    uint8_t* to = (uint8_t*)digests.base + page * digests.page_stride + h * digests.head_stride;
    std::memset(to, 0, digests.head_stride);
    hb::write_byte_digest(one_head, {ends, 0, 2 * row, HB_MINMAX}, {to, 0}, isa, 0);
  }
}

}  // namespace

HB_API int hb_append_tokens(const hb_append_tokens_args* args) {
  return guarded([&] {
    const hb_append_tokens_args& a = *args;
    const hb_model model = hb::model_of(a.host, 1, 1);
    hb_cache frames = hb::cache_of(a.host);
    const hb_cache host = frames;
    frames.base = a.frames;
    const hb_digests digests = hb::digests_of(a.digests, model, a.digest_format);
    const Isa& isa = converter(model, a.digests && a.digest_format != HB_MINMAX);
    for (int64_t r = 0; r < a.rows; r++) {
      const int64_t page = a.pages[r];
      if (page < 0) continue;
      check_id(page, a.host.pages, "page");
      const int64_t position = a.positions_are_64 ? ((const int64_t*)a.positions)[r] : ((const int32_t*)a.positions)[r];
      require(position >= 0, "a token's position is negative");
      const int64_t offset = position % a.host.page_size;
      const int64_t size = element_size((int)a.host.type);
      const char *k = a.k + r * a.k_stride * size, *v = a.v + r * a.v_stride * size;
      hb::store_token(model, host, isa, page, offset, k, v);
      if (a.frames) {
        const int64_t column = check_id(position / a.host.page_size, a.columns, "logical page");
        const int32_t frame = a.frame_of[check_id(a.requests[r], a.request_count, "request") * a.columns + column];
        if (frame >= 0) {
          check_id(frame, a.frame_count, "frame");
          hb::store_token(model, frames, isa, frame, offset, k, v);
        }
      }
      if (!a.digests) continue;
      if (a.digest_format == HB_MINMAX) hb::append_to_digest(model, digests, isa, host, page, offset);
      else if (offset == a.host.page_size - 1) digest_page(model, a.host, digests, isa, page);
    }
  });
}

HB_API int hb_build_digests(const hb_build_digests_args* args) {
  return guarded([&] {
    const hb_build_digests_args& a = *args;
    const hb_model model = hb::model_of(a.kv, 1, 1);
    require(model.head_dim <= kMaxHeadDim, "head_dim must be a multiple of 16 up to 512");
    const hb_digests digests = hb::digests_of(a.digests, model, a.digest_format);
    const int64_t row = hb::row_bytes(a.kv);
    const Isa& isa = converter(model, a.digest_format != HB_MINMAX);
    auto build = [&](int64_t i) {
      const int64_t page = a.pages[i], tokens = a.tokens[i];
      if (page < 0 || tokens <= 0) return;
      check_id(page, a.kv.pages, "page");
      require(tokens <= a.kv.page_size, "a page to digest has 1 to page_size tokens");
      if (a.digest_format != HB_MINMAX) {
        if (tokens == a.kv.page_size) digest_page(model, a.kv, digests, isa, page);
        return;
      }
      for (int64_t h = 0; h < a.kv.kv_heads; h++) {
        // Written at once, so that a page which is listed twice is right whoever builds it.
        char high[kMaxHeadDim * sizeof(float)], low[kMaxHeadDim * sizeof(float)];
        fold_keys(model, isa, hb::keys_of(a.kv, page, h), tokens, high, low);
        char* to = digests.base + page * digests.page_stride + h * digests.head_stride;
        std::memcpy(to, high, row);
        std::memcpy(to + row, low, row);
      }
    };
    hb::share(a.team, a.n * hb::page_bytes(a.kv) / 2, a.n, build);
  });
}

HB_API int hb_extend_digests(const hb_extend_digests_args* args) {
  return guarded([&] {
    const hb_extend_digests_args& a = *args;
    const int64_t size = element_size((int)a.type), row = a.head_dim * size;
    require(a.page_size > 0 && a.first >= 0 && a.first < a.page_size, "a chunk begins inside its first page");
    require(a.first + a.tokens <= a.n * a.page_size, "a chunk has more tokens than room in its pages");
    auto extend = [&](int64_t i) {
      const int64_t page = check_id(a.pages[i], a.page_count, "page");
      const int64_t begin = std::max(i * a.page_size - a.first, (int64_t)0);
      const int64_t end = std::min((i + 1) * a.page_size - a.first, a.tokens);
      for (int64_t h = 0; h < a.kv_heads; h++) {
        char* high = a.digests + (page * a.kv_heads + h) * 2 * row;
        for (int64_t t = begin; t < end; t++) {
          const bool is_new = t == begin && (i > 0 || a.first == 0);
          hb::fold_key((int)a.type, a.k + t * a.k_stride * size + h * row, high, high + row, (int)a.head_dim, is_new);
        }
      }
    };
    hb::share(a.team, a.tokens * a.kv_heads * row, a.n, extend);
  });
}
