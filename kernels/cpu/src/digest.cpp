#include "digest.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>

#include "kv_format.h"
#include "memory.h"

namespace hb {
namespace {

// bf16 and fp16 sort like sign-and-magnitude integers. This maps them to two's complement and back.
inline int16_t ordered(int16_t x) { return x ^ ((x >> 15) & 0x7fff); }

void fold_16(const int16_t* key, int16_t* high, int16_t* low, int n) {
  for (int d = 0; d < n; d++) {
    const int16_t k = ordered(key[d]);
    high[d] = ordered(std::max(k, ordered(high[d])));
    low[d] = ordered(std::min(k, ordered(low[d])));
  }
}

void fold_32(const float* key, float* high, float* low, int n) {
  for (int d = 0; d < n; d++) {
    high[d] = std::max(key[d], high[d]);
    low[d] = std::min(key[d], low[d]);
  }
}

}  // namespace

void fold_key(int type, const char* key, char* high, char* low, int n, bool reset) {
  if (reset) {
    std::memcpy(high, key, (size_t)n * element_size(type));
    std::memcpy(low, key, (size_t)n * element_size(type));
  } else if (type == FP32) {
    fold_32((const float*)key, (float*)high, (float*)low, n);
  } else {
    fold_16((const int16_t*)key, (int16_t*)high, (int16_t*)low, n);
  }
}

void append_to_digest(const hb_model& model, const hb_digests& digests, const Isa& isa, const hb_cache& cache,
                      int64_t page, int64_t offset) {
  const int64_t row = (int64_t)model.head_dim * element_size(model.type);
  const bool is_plain = kv_type(model) != INT8;
  float room[kMaxHeadDim];
  for (int h = 0; h < model.kv_heads; h++) {
    const char* head = cache.base + page * cache.page_stride + h * cache.head_stride;
    const char* key = is_plain ? head + offset * cache.token_stride : key_of(model, isa, head, offset, room);
    char* high = digests.base + page * digests.page_stride + h * digests.head_stride;
    fold_key(model.type, key, high, high + row, model.head_dim, offset == 0);
  }
}

// Integer arithmetic lets the compiler vectorize the loops, which run for each query.
float quantize_values(const float* from, uint8_t* to, int n) {
  constexpr float kRound = 12582912.f;  // 1.5 * 2^23: adding it leaves the rounded value in the lowest bits
  int32_t values[kMaxHeadDim], largest_bits = 0;
  for (int d = 0; d < n; d++) {
    int32_t bits;
    std::memcpy(&bits, &from[d], 4);
    const int32_t magnitude = bits & 0x7fffffff;
    const bool finite = magnitude < 0x7f800000;
    values[d] = finite ? bits : 0;
    largest_bits = std::max(largest_bits, finite ? magnitude : 0);
  }
  float largest;
  std::memcpy(&largest, &largest_bits, 4);
  const float scale = largest / 127.f, inverse = scale > 1e-37f ? 1.f / scale : 0.f;
  for (int d = 0; d < n; d++) {
    float x;
    std::memcpy(&x, &values[d], 4);
    x = x * inverse + kRound;
    int32_t bits;
    std::memcpy(&bits, &x, 4);
    to[d] = (uint8_t)(bits + 128);
  }
  return scale;
}

void write_byte_digest(const hb_model& model, const hb_digests& digests, const hb_byte_digests& byte_digests,
                       const Isa& isa, int64_t page) {
  const int dim = model.head_dim;
  uint8_t* row = byte_digests.base + page * byte_digests.page_stride;
  float* scales = (float*)(row + (int64_t)model.kv_heads * 2 * dim);
  float values[kMaxHeadDim];
  for (int s = 0; s < 2 * model.kv_heads; s++) {
    const char* from = digests.base + page * digests.page_stride + (s / 2) * digests.head_stride;
    isa.widen(model.type, from + (int64_t)(s % 2) * dim * element_size(model.type), values, dim);
    scales[s] = quantize_values(values, row + (int64_t)s * dim, dim);
  }
}

void SpanDigests::add(const hb_model& model, const hb_digests& digests, const Isa& isa, const int64_t* pages) {
  const int64_t row = (int64_t)model.head_dim * element_size(model.type);
  stride_ = byte_digest_stride(model.kv_heads, model.head_dim);
  std::vector<char> folded((size_t)model.kv_heads * 2 * row), unused((size_t)row);
  for (int h = 0; h < model.kv_heads; h++) {
    char* high = &folded[(size_t)h * 2 * row];
    for (int i = 0; i < kSpan; i++) {
      const char* page = digests.base + pages[i] * digests.page_stride + h * digests.head_stride;
      fold_key(model.type, page, high, unused.data(), model.head_dim, i == 0);
      fold_key(model.type, page + row, unused.data(), high + row, model.head_dim, i == 0);
    }
  }
  rows_.resize((size_t)(count_ + 1) * stride_);
  write_byte_digest(model, {folded.data(), 0, 2 * row, HB_MINMAX}, {&rows_[(size_t)count_ * stride_], stride_}, isa, 0);
  count_++;
}

// A digest estimates q.k by middle + bound * half-width = q.(max+min)/2 + bound * |q|.(max-min)/2, which is two dot
// products. At bound 1 they are relu(q).max + (-relu(-q)).min, Quest's sum_d max(q*min, q*max). A sum over heads
// commutes with the dot product, so summed scores need one weight vector for all heads of a KV head.
void Scorer::sum_weights(const hb_model& model, const Kernels& kernels, const char* q, int64_t q_head_stride) {
  model_ = model;
  isa_ = kernels.digests;
  const int dim = model.head_dim, heads = model.kv_heads * model.group;
  const int width = 2 * dim, sets = aggregate_ == SUM ? model.kv_heads : heads;
  weights_.assign((size_t)sets * width, 0.f);
  grown(scratch_, (size_t)sets * width);
  for (int head = 0; head < heads; head++) {
    isa_->widen(model.type, q + head * q_head_stride, scratch_.data(), dim);
    float* w = &weights_[(size_t)(aggregate_ == SUM ? head / model.group : head) * width];
    for (int d = 0; d < dim; d++) {
      const float middle = 0.5f * scratch_[d], half = 0.5f * model.bound * std::fabs(scratch_[d]);
      w[d] += middle + half;
      w[dim + d] += middle - half;
    }
  }
}

// Returns the prefetch distance in columns: about 16 KB, in whole tiles.
static int columns_ahead(int64_t row_bytes) {
  return (int)std::max<int64_t>(1, 16384 / (row_bytes * kScoreTile)) * kScoreTile;
}

void Scorer::prepare(const hb_model& model, const hb_digests& digests, const Kernels& kernels, bool per_head,
                     Aggregate aggregate, const char* q, int64_t q_head_stride) {
  base_ = digests.base;
  page_stride_ = digests.page_stride;
  head_stride_ = digests.head_stride;
  bytes_ = {};
  per_head_ = per_head;
  aggregate_ = aggregate;
  sum_weights(model, kernels, q, q_head_stride);
  isa_->prepare_weights(model.type, weights_.data(), (int)weights_.size(), scratch_.data());
  ahead_ = columns_ahead((int64_t)model.kv_heads * 2 * model.head_dim * element_size(model.type));
}

void Scorer::prepare_byte_digests(const hb_model& model, const hb_byte_digests& byte_digests, const Kernels& kernels,
                                  Aggregate aggregate, const char* q, int64_t q_head_stride) {
  base_ = (const char*)byte_digests.base;
  page_stride_ = byte_digests.page_stride;
  bytes_ = kernels.bytes;
  per_head_ = false;
  kv_head_ = -1;
  aggregate_ = aggregate;
  sum_weights(model, kernels, q, q_head_stride);
  const int dim = model.head_dim, segments = (int)(weights_.size() / dim);
  grown(byte_weights_, (size_t)segments * dim);
  grown(bias_, segments);
  grown(step_, segments);
  uint8_t offset[kMaxHeadDim];
  for (int s = 0; s < segments; s++) {
    step_[s] = quantize_values(&weights_[(size_t)s * dim], offset, dim);
    bias_[s] = 0;
    for (int d = 0; d < dim; d++) {
      const int weight = (int)offset[d] - 128;
      byte_weights_[(size_t)s * dim + d] = (int8_t)weight;
      bias_[s] += 128 * weight;
    }
  }
  ahead_ = columns_ahead((int64_t)model.kv_heads * 2 * dim);
}

void Scorer::score_tile_of_byte_digests(const char* const* rows, const char* const* upcoming, int column, int count,
                                        float* out, int64_t list_stride) {
  const int dim = model_.head_dim, scales_at = model_.kv_heads * 2 * dim;
  float sums[kMaxGroup * kScoreTile];
  if (aggregate_ == SUM) {
    const ByteWeights all{byte_weights_.data(), bias_.data(), step_.data(), 2 * model_.kv_heads, dim, scales_at};
    bytes_.dots(&all, (const uint8_t* const*)rows, (const uint8_t* const*)upcoming, sums);
    std::copy(sums, sums + count, out + column);
    return;
  }
  const int first = std::max(kv_head_, 0), end = kv_head_ < 0 ? model_.kv_heads : kv_head_ + 1;
  for (int h = first; h < end; h++) {
    const int skipped = h * 2 * dim;
    const uint8_t *at[kScoreTile], *ahead[kScoreTile];
    for (int i = 0; i < kScoreTile; i++) {
      at[i] = (const uint8_t*)rows[i] + skipped;
      ahead[i] = (const uint8_t*)upcoming[i] + skipped;
    }
    const int head = h * model_.group;
    ByteWeights weights{&byte_weights_[(size_t)head * 2 * dim],          &bias_[2 * head], &step_[2 * head], 2, dim,
                        scales_at - skipped + h * 2 * (int)sizeof(float)};
    if (bytes_.heads) {
      bytes_.heads(&weights, model_.group, at, ahead, sums);
    } else {
      for (int g = 0; g < model_.group; g++) {
        bytes_.dots(&weights, at, g ? at : ahead, sums + g * kScoreTile);
        weights.weights += 2 * dim, weights.bias += 2, weights.step += 2;
      }
    }
    for (int g = 0; g < model_.group; g++)
      std::copy(sums + g * kScoreTile, sums + g * kScoreTile + count, out + (head + g) * list_stride + column);
  }
}

void Scorer::score_tile(const char* const* rows, const char* const* upcoming, int column, int count, float* out,
                        int64_t list_stride) {
  const int width = 2 * model_.head_dim;
  const int64_t row = (int64_t)width * element_size(model_.type);
  float sums[kScoreTile];
  if (bytes_.dots) return score_tile_of_byte_digests(rows, upcoming, column, count, out, list_stride);
  const bool one_dot = !per_head_ && aggregate_ == SUM && head_stride_ == row;
  if (one_dot) {
    isa_->dots(model_.type, rows, upcoming, weights_.data(), model_.kv_heads * width, sums);
    std::copy(sums, sums + count, out + column);
    return;
  }
  float total[kScoreTile] = {};
  for (int h = 0; h < model_.kv_heads; h++) {
    const char *at[kScoreTile], *ahead[kScoreTile];
    for (int i = 0; i < kScoreTile; i++) {
      at[i] = rows[i] + h * head_stride_;
      ahead[i] = upcoming[i] + h * head_stride_;
    }
    float best[kScoreTile] = {};
    const int sets = aggregate_ == SUM ? 1 : model_.group;
    for (int g = 0; g < sets; g++) {
      isa_->dots(model_.type, at, g ? at : ahead, &weights_[((size_t)h * sets + g) * width], width, sums);
      if (aggregate_ == SOFTMAX) {
        std::copy(sums, sums + count, out + (h * sets + g) * list_stride + column);
        continue;
      }
      for (int i = 0; i < kScoreTile; i++) best[i] = g ? std::max(best[i], sums[i]) : sums[i];
    }
    if (aggregate_ == SOFTMAX) continue;
    for (int i = 0; i < kScoreTile; i++) total[i] += best[i];
    if (per_head_) std::copy(best, best + count, out + h * list_stride + column);
  }
  if (!per_head_ && aggregate_ != SOFTMAX) std::copy(total, total + count, out + column);
}

void combine_lists(Aggregate how, const float* scores, int64_t stride, int heads, int group, int n, float* total) {
  std::fill(total, total + n, 0.f);
  for (int first = 0; first < heads; first += group)
    for (int i = 0; i < n; i++) {
      float best = scores[first * stride + i];
      for (int head = first + 1; head < first + group; head++) {
        const float next = scores[head * stride + i];
        best = how == MAX ? std::max(best, next) : best + next;
      }
      total[i] += best;
    }
}

void add_shares(SoftmaxAddFn softmax_add, float* scores, int64_t stride, int heads, int n, float scale, float* total) {
  std::fill(total, total + n, 0.f);
  for (int head = 0; head < heads; head++) softmax_add(scores + head * stride, n, scale, total);
}

namespace {

constexpr int kBins = 4096;

struct SelectScratch {
  uint32_t histogram[kBins];
  std::vector<uint32_t> keys, boundary;
};

}  // namespace

int select_best(const float* scores, int n, int budget, int sinks, int recent, int32_t* out) {
  sinks = std::min(std::max(sinks, 0), n);
  recent = std::min(std::max(recent, 0), n - sinks);
  const int first = sinks, last = n - recent;  // the free choice
  const int num_free = std::min(std::max(budget - sinks - recent, 0), last - first);
  int m = 0;
  for (int i = 0; i < first; i++) out[m++] = i;
  if (num_free == last - first) {
    for (int i = first; i < last; i++) out[m++] = i;
  } else if (num_free > 0) {
    static thread_local SelectScratch scratch;
    uint32_t* keys = grown(scratch.keys, n);
    std::memset(scratch.histogram, 0, sizeof scratch.histogram);
    uint32_t highest = 0;
    for (int i = first; i < last; i++) {
      keys[i] = ordered_key(scores[i]);
      highest = std::max(highest, keys[i]);
      scratch.histogram[keys[i] >> 20]++;
    }
    // The bin in which the last wanted score lies, then that score itself.
    int above = 0, bin = (int)(highest >> 20);
    while (above + (int)scratch.histogram[bin] < num_free) above += scratch.histogram[bin--];
    scratch.boundary.clear();
    for (int i = first; i < last; i++)
      if ((int)(keys[i] >> 20) == bin) scratch.boundary.push_back(keys[i]);
    const int rank = num_free - above - 1;
    std::nth_element(scratch.boundary.begin(), scratch.boundary.begin() + rank, scratch.boundary.end(),
                     std::greater<uint32_t>());
    const uint32_t threshold = scratch.boundary[rank];
    int ties = num_free - above;
    for (const uint32_t key : scratch.boundary) ties -= key > threshold;
    for (int i = first; i < last; i++) {
      if (keys[i] > threshold) out[m++] = i;
      else if (keys[i] == threshold && ties-- > 0) out[m++] = i;
    }
  }
  for (int i = last; i < n; i++) out[m++] = i;
  return m;
}

}  // namespace hb
