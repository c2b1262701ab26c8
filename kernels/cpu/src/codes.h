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

// What CodeScorer::coarse said: list by list, as it was told to; of page i of a shortlist at columns[i].
struct Coarse {
  const float* scores;
  const int32_t* columns;
};

// Scores of one query, one list per query head; prepared once, then for ranges of pages, from any thread.
class CodeScorer {
 public:
  void prepare(const hb_model& model, const hb_digests& digests, const Kernels& kernels, const char* q,
               int64_t q_head_stride);

  // After prepare(), before estimate().
  void prepare_codes(const char* q, int64_t q_head_stride);

  // out[head * stride + i]: q . middle + model.bound * |q| * spread, which reads a quarter of a row, of pages begin..end.
  template <class PageOf>
  void coarse(const PageOf& page_of, int begin, int end, float* out, int64_t stride) {
    each_tile(page_of, begin, end, [&](const uint8_t* const* rows, const uint8_t* const* next, int at, int n) {
      for (int h = 0; h < model_.kv_heads; h++)
        coarse_tile(h, rows, next, bounds_.data(), n, list_of(out, h, stride) + at, stride);
    });
  }

  // The pages' estimates (codes.estimates) over model.scale, of one KV head's lists (-1: all). `before`: what `coarse`
  // said of them, if it did.
  template <class PageOf>
  void estimate(const PageOf& page_of, int kv_head, int begin, int end, float* out, int64_t stride,
                const Coarse* before = nullptr) {
    const int first = std::max(kv_head, 0), last = kv_head < 0 ? model_.kv_heads : kv_head + 1;
    each_tile(page_of, begin, end, [&](const uint8_t* const* rows, const uint8_t* const* next, int at, int n) {
      for (int h = first; h < last; h++) {
        float middles[kMaxGroup * kScoreTile];
        if (before)
          recall_middles(h, rows, before->scores + h * model_.group * stride, stride, before->columns + at, n, middles);
        else coarse_tile(h, rows, next, no_bounds_.data(), kScoreTile, middles, kScoreTile);
        estimate_tile(h, rows, next, middles, n, list_of(out, h, stride) + at, stride);
      }
    });
  }

 private:
  float* list_of(float* out, int kv_head, int64_t stride) const { return out + kv_head * model_.group * stride; }
  template <class PageOf, class Tile>
  void each_tile(const PageOf& page_of, int begin, int end, const Tile& tile) const {
    for (int c = begin; c < end; c += kScoreTile) {
      const uint8_t *rows[kScoreTile], *next[kScoreTile];
      for (int i = 0; i < kScoreTile; i++) {
        rows[i] = row_of(page_of(std::min(c + i, end - 1)));
        next[i] = row_of(page_of(std::min(c + i + kAhead, end - 1)));
      }
      tile(rows, next, c, std::min(end - c, kScoreTile));
    }
  }
  static constexpr int kAhead = 8 * kScoreTile;
  const uint8_t* row_of(int64_t page) const { return (const uint8_t*)digests_.base + page * digests_.page_stride; }
  // Into out[g * stride + i], for a tile and a KV head's query heads g.
  void coarse_tile(int h, const uint8_t* const* rows, const uint8_t* const* next, const float* bounds, int count,
                   float* out, int64_t stride);
  // [group][kScoreTile]: q . middle, from what coarse_tile made of it.
  void recall_middles(int h, const uint8_t* const* rows, const float* scores, int64_t stride, const int32_t* columns,
                      int count, float* middles) const;
  void estimate_tile(int h, const uint8_t* const* rows, const uint8_t* const* next, float* middles, int count,
                     float* out, int64_t stride);

  hb_model model_{};
  hb_digests digests_{};
  CodeLayout layout_;
  const Isa* isa_ = nullptr;
  ByteKernels bytes_{};
  const CodeKernels* codes_ = nullptr;
  int tables_ = 0;               // bytes of one head's tables
  std::vector<int8_t> weights_;  // [heads, dim] of the middles
  std::vector<int32_t> bias_;    // of theirs
  std::vector<float> step_, bounds_, factor_, offset_, variance_;  // per head
  std::vector<float> no_bounds_;
  std::vector<uint8_t> luts_;
};

}  // namespace hb
