// Page digests (channel-wise max and min of K), Quest scores and top-k.
#pragma once
#include <cstring>
#include <limits>
#include <vector>

#include "api.h"
#include "dispatch.h"

namespace hb {

// Folds one key of `n` elements into a max row and a min row; `reset` overwrites them.
void fold_key(int type, const char* key, char* high, char* low, int n, bool reset);

// Folds the keys of the token at `offset`, of all KV heads and as the page holds them, into the page's digest.
void append_to_digest(const hb_model& model, const hb_digests& digests, const Isa& isa, const hb_cache& cache,
                      int64_t page, int64_t offset);

// Returns the bytes between two pages' byte digests: values and scales, padded to whole cache lines.
inline int64_t byte_digest_stride(int64_t kv_heads, int64_t head_dim) {
  return (2 * kv_heads * (head_dim + 4) + 63) / 64 * 64;
}

// Writes a page's byte digest from its maxima and minima.
void write_byte_digest(const hb_model& model, const hb_digests& digests, const hb_byte_digests& byte_digests,
                       const Isa& isa, int64_t page);

// Rounds values to bytes around 128 and returns the scale. Values that are not finite count as 0.
float quantize_values(const float* from, uint8_t* to, int n);

constexpr int kSpan = 8;  // pages

// Byte digests of the spans (kSpan consecutive whole pages) of one sequence in one layer. A selection over a long
// sequence scores the spans first, and then the pages of the best spans only.
class SpanDigests {
 public:
  // Sets the number of spans; `page_of(column)` returns the page id. Whole pages do not change, so only new spans are
  // read.
  template <class PageOf>
  void extend(const hb_model& model, const hb_digests& digests, const Isa& isa, int spans, const PageOf& page_of) {
    count_ = count_ < spans ? count_ : spans;
    while (count_ < spans) {
      int64_t pages[kSpan];
      for (int i = 0; i < kSpan; i++) pages[i] = page_of(count_ * kSpan + i);
      add(model, digests, isa, pages);
    }
  }
  hb_byte_digests digests() { return {rows_.data(), stride_}; }
  int64_t size() const { return (int64_t)rows_.capacity(); }

 private:
  void add(const hb_model& model, const hb_digests& digests, const Isa& isa, const int64_t* pages);

  int count_ = 0;
  int64_t stride_ = 0;
  std::vector<uint8_t> rows_;
};

// Returns the first page of part i of `parts` that score `pages` pages: a multiple of a tile.
inline int64_t score_edge(int64_t pages, int64_t i, int64_t parts) {
  return i == parts ? pages : pages * i / parts / kScoreTile * kScoreTile;
}

// Combination of the scores of query heads. With SOFTMAX each head's scores become shares first, so a scorer writes one
// list per query head for add_shares.
enum Aggregate { SUM = 0, MAX = 1, SOFTMAX = 2 };

// Scores pages for one query. After the preparation any thread may score a range of pages.
class Scorer {
 public:
  // per_head: one score per page and KV head; else one per page, combined over all heads.
  void prepare(const hb_model& model, const hb_digests& digests, const Kernels& kernels, bool per_head,
               Aggregate aggregate, const char* q, int64_t q_head_stride);

  // Prepares scores by byte digests, with SUM over all heads, or with SOFTMAX.
  void prepare_byte_digests(const hb_model& model, const hb_byte_digests& byte_digests, const Kernels& kernels,
                            Aggregate aggregate, const char* q, int64_t q_head_stride);

  // Scores other digests with the same query from now on, and with SOFTMAX only one KV head's lists (-1: all). Needs
  // prepare_byte_digests.
  void move_to(const hb_byte_digests& byte_digests, int kv_head = -1) {
    base_ = (const char*)byte_digests.base;
    page_stride_ = byte_digests.page_stride;
    kv_head_ = kv_head;
  }

  // out[list * list_stride + column] for columns begin..end; `page_of(column)` gives the page id.
  template <class PageOf>
  void score(const PageOf& page_of, int begin, int end, float* out, int64_t list_stride) {
    for (int c = begin; c < end; c += kScoreTile) {
      const char *rows[kScoreTile], *upcoming[kScoreTile];
      for (int i = 0; i < kScoreTile; i++) {
        const int column = c + i < end ? c + i : end - 1;
        const int ahead = column + ahead_ < end ? column + ahead_ : end - 1;
        rows[i] = base_ + page_of(column) * page_stride_;
        upcoming[i] = base_ + page_of(ahead) * page_stride_;
      }
      score_tile(rows, upcoming, c, end - c < kScoreTile ? end - c : kScoreTile, out, list_stride);
    }
  }

 private:
  void score_tile(const char* const* rows, const char* const* upcoming, int column, int count, float* out,
                  int64_t list_stride);

  void score_tile_of_byte_digests(const char* const* rows, const char* const* upcoming, int column, int count,
                                  float* out, int64_t list_stride);

  void sum_weights(const hb_model& model, const Kernels& kernels, const char* q, int64_t q_head_stride);

  hb_model model_{};
  const char* base_ = nullptr;
  int64_t page_stride_ = 0, head_stride_ = 0;
  const Isa* isa_ = nullptr;
  ByteKernels bytes_{};  // without dots: score the digests themselves
  bool per_head_ = false;
  int kv_head_ = -1;
  Aggregate aggregate_ = SUM;
  int ahead_ = kScoreTile;  // columns
  std::vector<float> weights_, scratch_;
  std::vector<int8_t> byte_weights_;
  std::vector<int32_t> bias_;
  std::vector<float> step_;
};

// Combines the scores of `heads` query heads (lists `stride` apart) into one list: their sum, or the sum of each
// group's maximum.
void combine_lists(Aggregate how, const float* scores, int64_t stride, int heads, int group, int n, float* total);

// total[i] = sum over `heads` lists of scores (`stride` apart, overwritten) of softmax(scale * scores)[i].
void add_shares(SoftmaxAddFn softmax_add, float* scores, int64_t stride, int heads, int n, float scale, float* total);

// Maps a score to an unsigned integer of the same order: NaN counts as -inf, and the two zeros are equal.
inline uint32_t ordered_key(float x) {
  x = (x == x ? x : -std::numeric_limits<float>::infinity()) + 0.f;  // -0 + 0 is 0
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits ^ ((uint32_t)((int32_t)bits >> 31) | 0x80000000u);
}

// Selects the `budget` best scores, the first `sinks` and the last `recent` always among them. Writes their indices to
// `out` in ascending order, and returns their number.
int select_best(const float* scores, int n, int budget, int sinks, int recent, int32_t* out);

}  // namespace hb
