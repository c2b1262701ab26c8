// Digests in codes, encoded from whole pages, and scored. kernels/codes.py describes the format and its reasons.
#pragma once
#include <algorithm>
#include <vector>

#include "api.h"
#include "dispatch.h"

namespace hb {

// The layout of a digest (Layout of kernels/codes.py).
struct CodeLayout {
  static constexpr int kHeader = 12;

  int dim = 0, page_size = 0;
  int planes = 0;           // bytes of codes per token
  int fine = 0, coded = 0;  // rotated channels of two bits; rotated channels that have a code
  float distortion = 0;

  CodeLayout() = default;
  CodeLayout(int head_dim, int tokens);
  int64_t row() const { return 4 * (int64_t)dim; }
  int scales_at() const { return dim + kHeader; }
  int planes_at() const { return dim + kHeader + page_size; }
};

// Encodes one KV head's digest. keys: the head's first key in the cache. Throws std::invalid_argument.
void encode_page(const hb_model& model, const hb_cache& cache, const Isa& isa, const char* keys, uint8_t* row);

// Encodes the digests of all KV heads of a whole page.
void encode_page(const hb_model& model, const hb_digests& digests, const hb_cache& cache, const Isa& isa, int64_t page);

// Coarse scores (CodeScorer::coarse), list by list. Page i of a shortlist has its score at columns[i].
struct Coarse {
  const float* scores;
  const int32_t* columns;
};

// Scores pages for one query, one list per query head. After the preparation any thread may score a range of pages.
class CodeScorer {
 public:
  void prepare(const hb_model& model, const hb_digests& digests, const Kernels& kernels, const char* q,
               int64_t q_head_stride);

  // Prepares the tables of estimate(). To be called after prepare().
  void prepare_codes(const char* q, int64_t q_head_stride);

  // out[head * stride + i]: q . middle + model.bound * |q| * spread, which reads a quarter of a row, of pages
  // begin..end.
  template <class PageOf>
  void coarse(const PageOf& page_of, int begin, int end, float* out, int64_t stride) {
    each_tile(page_of, begin, end, [&](const uint8_t* const* rows, const uint8_t* const* next, int at, int n) {
      for (int h = 0; h < model_.kv_heads; h++)
        coarse_tile(h, rows, next, bounds_.data(), n, list_of(out, h, stride) + at, stride);
    });
  }

  // out[head * stride + i]: estimates of the pages (codes.estimates) divided by model.scale, for one KV head's lists
  // (-1: all). `before`: the coarse scores of these pages, or null.
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
  // Writes out[g * stride + i], for a tile of pages i and a KV head's query heads g.
  void coarse_tile(int h, const uint8_t* const* rows, const uint8_t* const* next, const float* bounds, int count,
                   float* out, int64_t stride);
  // Restores q . middle, [group][kScoreTile], from the coarse scores.
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
  std::vector<int8_t> weights_;  // [heads, dim] weights of the middles
  std::vector<int32_t> bias_;    // biases of the middles
  std::vector<float> step_, bounds_, factor_, offset_, variance_;  // per head
  std::vector<float> no_bounds_;
  std::vector<uint8_t> luts_;
};

}  // namespace hb
