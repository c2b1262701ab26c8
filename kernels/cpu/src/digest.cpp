#include "digest.h"

#include <algorithm>
#include <cstring>
#include <functional>

#include "memory.h"

namespace hb {
namespace {

// bf16 and fp16 sort like sign-and-magnitude integers; this maps them to two's complement and back.
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

void append_to_digest(const hb_model& model, const hb_digests& digests, int64_t page, bool reset, const char* keys,
                      int64_t key_head_stride) {
  const int64_t row = (int64_t)model.head_dim * element_size(model.type);
  for (int h = 0; h < model.kv_heads; h++) {
    char* high = digests.base + page * digests.page_stride + h * digests.head_stride;
    fold_key(model.type, keys + h * key_head_stride, high, high + row, model.head_dim, reset);
  }
}

// sum_d max(q*min, q*max) = relu(q).max + (-relu(-q)).min, so weights are the positive, then the negative part of q;
// and a sum over heads commutes with the dot product, so summed scores need one weight vector for all of them.
void Scorer::prepare(const hb_model& model, const hb_digests& digests, const Kernels& kernels, bool per_head,
                     bool maximum, const char* q, int64_t q_head_stride) {
  model_ = model;
  digests_ = digests;
  isa_ = kernels.base;
  per_head_ = per_head;
  maximum_ = maximum;
  const int dim = model.head_dim, heads = model.kv_heads * model.group;
  const int width = 2 * dim, sets = maximum ? heads : model.kv_heads;
  weights_.assign((size_t)sets * width, 0.f);
  scratch_.resize(std::max<size_t>((size_t)sets * width, dim));
  for (int head = 0; head < heads; head++) {
    isa_->widen(model.type, q + head * q_head_stride, scratch_.data(), dim);
    float* w = &weights_[(size_t)(maximum ? head : head / model.group) * width];
    for (int d = 0; d < dim; d++) {
      w[d] += std::max(scratch_[d], 0.f);
      w[dim + d] += std::min(scratch_[d], 0.f);
    }
  }
  isa_->prepare_weights(model.type, weights_.data(), sets * width, scratch_.data());
  const int64_t row = (int64_t)model.kv_heads * width * element_size(model.type);
  // About 16 KB ahead, in whole tiles.
  ahead_ = (int)std::max<int64_t>(1, 16384 / (row * kScoreTile)) * kScoreTile;
}

void Scorer::score_tile(const char* const* rows, const char* const* upcoming, int column, int count, float* out,
                        int64_t list_stride) {
  const int width = 2 * model_.head_dim;
  const int64_t row = (int64_t)width * element_size(model_.type);
  float sums[kScoreTile];
  const bool one_dot = !per_head_ && !maximum_ && digests_.head_stride == row;
  if (one_dot) {
    isa_->dots(model_.type, rows, upcoming, weights_.data(), model_.kv_heads * width, sums);
    std::copy(sums, sums + count, out + column);
    return;
  }
  float total[kScoreTile] = {};
  for (int h = 0; h < model_.kv_heads; h++) {
    const char *at[kScoreTile], *ahead[kScoreTile];
    for (int i = 0; i < kScoreTile; i++) {
      at[i] = rows[i] + h * digests_.head_stride;
      ahead[i] = upcoming[i] + h * digests_.head_stride;
    }
    float best[kScoreTile] = {};
    const int sets = maximum_ ? model_.group : 1;
    for (int g = 0; g < sets; g++) {
      isa_->dots(model_.type, at, ahead, &weights_[((size_t)h * sets + g) * width], width, sums);
      for (int i = 0; i < kScoreTile; i++) best[i] = g ? std::max(best[i], sums[i]) : sums[i];
    }
    for (int i = 0; i < kScoreTile; i++) total[i] += best[i];
    if (per_head_) std::copy(best, best + count, out + h * list_stride + column);
  }
  if (!per_head_) std::copy(total, total + count, out + column);
}

namespace {

// Floats in the order of unsigned integers.
inline uint32_t key_of(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  return u ^ ((uint32_t)((int32_t)u >> 31) | 0x80000000u);
}

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
  const int wanted = std::min(std::max(budget - sinks - recent, 0), last - first);
  int m = 0;
  for (int i = 0; i < first; i++) out[m++] = i;
  if (wanted == last - first) {
    for (int i = first; i < last; i++) out[m++] = i;
  } else if (wanted > 0) {
    static thread_local SelectScratch scratch;
    uint32_t* keys = grown(scratch.keys, n);
    std::memset(scratch.histogram, 0, sizeof scratch.histogram);
    for (int i = first; i < last; i++) {
      keys[i] = key_of(scores[i]);
      scratch.histogram[keys[i] >> 20]++;
    }
    // The bin in which the last wanted score lies, then that score itself.
    int above = 0, bin = kBins - 1;
    while (above + (int)scratch.histogram[bin] < wanted) above += scratch.histogram[bin--];
    scratch.boundary.clear();
    for (int i = first; i < last; i++)
      if ((int)(keys[i] >> 20) == bin) scratch.boundary.push_back(keys[i]);
    const int rank = wanted - above - 1;
    std::nth_element(scratch.boundary.begin(), scratch.boundary.begin() + rank, scratch.boundary.end(),
                     std::greater<uint32_t>());
    const uint32_t threshold = scratch.boundary[rank];
    int ties = wanted - above;
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
