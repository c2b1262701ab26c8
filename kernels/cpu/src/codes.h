// Digests in codes (kernels/codes.py has the format and its reasons): made from a whole page, and scored.
#pragma once
#include <algorithm>
#include <vector>

#include "api.h"
#include "dispatch.h"

namespace hb {

// kernels/codes.py, Layout.
struct CodeLayout {
  static constexpr int kHeader = 12;

  int dim = 0, page_size = 0;
  int planes = 0;           // bytes of codes per token
  int fine = 0, coded = 0;  // rotated channels of two bits; of any
  float distortion = 0;

  CodeLayout() = default;
  CodeLayout(int head_dim, int tokens);
  int64_t row() const { return 4 * (int64_t)dim; }
  int scales_at() const { return dim + kHeader; }
  int planes_at() const { return dim + kHeader + page_size; }
};

// keys: [page_size, head_dim] of one KV head, rows `stride` bytes apart. Throws std::invalid_argument.
void encode_page(const CodeLayout& layout, const Isa& isa, int type, const char* keys, int64_t stride, uint8_t* row);

// The whole page's rows, of all KV heads.
void encode_page(const hb_model& model, const hb_digests& digests, const hb_cache& cache, const Isa& isa, int64_t page);

// Rows of digests, or the middles of some and what they need, one page after the other, from `first_head` on.
struct CodeRows {
  const uint8_t* base;
  int64_t page_stride, head_stride;
  int first_head;
};

// q . middle of pages, list by list, as CodeScorer::coarse was told to; of page i of a shortlist at positions[i].
struct Middles {
  const float* dots;
  const int32_t* positions;
};

// Scores of one query, one list per query head; prepared once, then for ranges of pages, from any thread.
class CodeScorer {
 public:
  void prepare(const hb_model& model, const hb_digests& digests, const Kernels& kernels,
               const ByteKernels& byte_kernels, const char* q, int64_t q_head_stride);

  // After prepare(), before estimate().
  void prepare_codes(const char* q, int64_t q_head_stride);

  CodeRows rows() const { return {(const uint8_t*)digests_.base, digests_.page_stride, digests_.head_stride, 0}; }

  // middles[head * stride + i]: q . middle, which reads a quarter of a row, of pages begin..end, in one KV head's lists
  // (-1: all); and, unless `out` is null, there the same + model.bound * |q| * spread.
  template <class PageOf>
  void coarse(const CodeRows& from, const PageOf& page_of, int kv_head, int begin, int end, float* middles, float* out,
              int64_t stride) {
    each_tile(from, page_of, begin, end, kv_head, [&](int h, const uint8_t* const* rows, const uint8_t* const* next,
                                                      int at, int n) {
      coarse_tile(h, rows, next, n, list_of(middles, h, stride) + at, out ? list_of(out, h, stride) + at : nullptr,
                  stride);
    });
  }

  // The pages' estimates (codes.estimates) over model.scale, of one KV head's lists (-1: all). `before`: what `coarse`
  // said of them, if it did.
  template <class PageOf>
  void estimate(const PageOf& page_of, int kv_head, int begin, int end, float* out, int64_t stride,
                const Middles* before = nullptr) {
    each_tile(rows(), page_of, begin, end, kv_head, [&](int h, const uint8_t* const* rows, const uint8_t* const* next,
                                                        int at, int n) {
      float middles[kMaxGroup * kScoreTile];
      if (before) {
        const float* dots = before->dots + h * model_.group * stride;
        for (int i = 0; i < kScoreTile; i++)
          for (int g = 0; g < model_.group; g++)
            middles[g * kScoreTile + i] = dots[g * stride + before->positions[at + std::min(i, n - 1)]];
      } else {
        coarse_tile(h, rows, next, kScoreTile, middles, nullptr, kScoreTile);
      }
      estimate_tile(h, rows, next, middles, n, list_of(out, h, stride) + at, stride);
    });
  }

 private:
  float* list_of(float* out, int kv_head, int64_t stride) const { return out + kv_head * model_.group * stride; }
  template <class PageOf, class Tile>
  void each_tile(const CodeRows& from, const PageOf& page_of, int begin, int end, int kv_head, const Tile& tile) const {
    const int first = std::max(kv_head, 0), last = kv_head < 0 ? model_.kv_heads : kv_head + 1;
    const uint8_t* base = from.base + (first - from.first_head) * from.head_stride;
    for (int c = begin; c < end; c += kScoreTile) {
      const uint8_t *rows[kScoreTile], *next[kScoreTile];
      for (int i = 0; i < kScoreTile; i++) {
        rows[i] = base + page_of(std::min(c + i, end - 1)) * from.page_stride;
        next[i] = base + page_of(std::min(c + i + kAhead, end - 1)) * from.page_stride;
      }
      for (int h = first; h < last; h++) {
        tile(h, rows, next, c, std::min(end - c, kScoreTile));
        for (int i = 0; i < kScoreTile; i++) rows[i] += from.head_stride, next[i] += from.head_stride;
      }
    }
  }
  static constexpr int kAhead = 4 * kScoreTile;
  // Into middles and out (null: nothing) at [g * stride + i], for a tile of this KV head's rows and its query heads g.
  void coarse_tile(int h, const uint8_t* const* rows, const uint8_t* const* next, int count, float* middles, float* out,
                   int64_t stride);
  void estimate_tile(int h, const uint8_t* const* rows, const uint8_t* const* next, float* middles, int count,
                     float* out, int64_t stride);

  hb_model model_{};
  hb_digests digests_{};
  CodeLayout layout_;
  const Isa* isa_ = nullptr;
  ByteKernels bytes_{};
  int tables_ = 0;               // bytes of one head's tables
  std::vector<int8_t> weights_;  // [heads, dim] of the middles
  std::vector<int32_t> bias_;    // of theirs
  std::vector<float> step_, bounds_, factor_, offset_, variance_;  // per head
  std::vector<uint8_t> luts_;
};

}  // namespace hb
