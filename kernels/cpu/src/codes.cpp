#include "codes.h"

#include <cmath>
#include <cstring>
#include <stdexcept>

#include "code_levels.h"
#include "digest.h"
#include "kv_format.h"
#include "memory.h"

namespace hb {
namespace {

constexpr float kLog2e = 1.44269504f;

float inverse(float x) { return x > 1e-37f ? 1.f / x : 0.f; }

// Computes the largest x, and in `sum` the sum of 2^(x - top), for pages whose plain sums leave the range of fp32.
float code_top(const CodeKernels& kernels, const CodeQuery& q, int head, const CodePage& page, float* sum) {
  float x[kMaxPageSize], top = -INFINITY;
  const int tokens = 16 * q.blocks;
  for (int t = 0; t < tokens; t++) {
    const uint8_t* codes = page.planes + t / 16 * 16 * q.planes + t % 16;
    const int steps = kernels.steps(q.tables + (int64_t)head * q.stride, codes, q.planes);
    const float s = page.unit * page.scales[t];
    x[t] = s * (q.factor[head] * steps + q.offset[head] + q.variance[head] * s);
    if (!(std::fabs(x[t]) < INFINITY)) x[t] = 0;
    top = std::max(top, x[t]);
  }
  *sum = 0;
  for (int t = 0; t < tokens; t++) *sum += std::exp2(x[t] - top);
  return top;
}

// A number that is too large to square counts as 0.
float usable(float x) { return std::fabs(x) < 1e17f ? x : 0.f; }

// The size of a whole tile is a constant, so that the compiler unrolls its loops.
void keep_tile(const float* from, int count, float* to) {
  if (count == kScoreTile) std::memcpy(to, from, kScoreTile * sizeof(float));
  else std::memcpy(to, from, count * sizeof(float));
}

}  // namespace

CodeLayout::CodeLayout(int head_dim, int tokens) : dim(head_dim), page_size(tokens) {
  const int room = 3 * dim - kHeader - page_size;
  planes = std::max(0, std::min(room / page_size, dim / 4));
  fine = std::max(0, 8 * planes - dim);
  coded = std::min(dim, 8 * planes);
  distortion = (fine * kFineLoss + (coded - fine) * kCoarseLoss + (dim - coded)) / dim;
}

void encode_page(const hb_model& model, const hb_cache& cache, const Isa& isa, const char* keys, uint8_t* row) {
  const CodeLayout layout(model.head_dim, model.page_size);
  const int dim = layout.dim, tokens = layout.page_size, fine = layout.fine, coded = layout.coded;
  if (tokens > kMaxPageSize || tokens % 16)
    throw std::invalid_argument("a page has up to 128 tokens, a multiple of 16");
  static thread_local std::vector<float> scratch;
  float* x = grown(scratch, (size_t)tokens * dim);
  float high[kMaxHeadDim], low[kMaxHeadDim], scales[kMaxPageSize];
  for (int t = 0; t < tokens; t++) {
    float* key = x + t * dim;
    if (kv_type(model) == INT8) decode_row(model, isa, keys, KEYS_PART, t, key);
    else isa.widen(model.type, keys + t * cache.token_stride, key, dim);
    for (int d = 0; d < dim; d++) {
      key[d] = usable(key[d]);
      high[d] = t ? std::max(high[d], key[d]) : key[d];
      low[d] = t ? std::min(low[d], key[d]) : key[d];
    }
  }
  float largest = 0, spread = 0;
  for (int d = 0; d < dim; d++) {
    const float half = (high[d] - low[d]) / 2;
    spread += half * half;
    high[d] = (high[d] + low[d]) / 2;
    largest = std::max(largest, std::fabs(high[d]));
  }
  const float step = largest / 127, finer = inverse(step);
  for (int d = 0; d < dim; d++) {
    const float middle = std::nearbyint(high[d] * finer);
    row[d] = (uint8_t)((int)middle + 128);
    low[d] = middle * step;
  }
  std::memset(row + layout.planes_at(), 0, layout.row() - layout.planes_at());
  float unit = 0;
  for (int t = 0; t < tokens; t++) {
    float* y = x + t * dim;
    for (int d = 0; d < dim; d++) y[d] -= low[d];
    isa.rotate(y, dim);
    float square = 0, dot = 0, norm = 0;
    for (int d = 0; d < dim; d++) square += y[d] * y[d];
    const float edge = kFine * std::sqrt(square / dim);
    uint8_t* codes = row + layout.planes_at() + t / 16 * 16 * layout.planes + t % 16;
    for (int d = 0; d < coded; d++) {
      const bool is_fine = d < fine, positive = y[d] >= 0, outer = is_fine && std::fabs(y[d]) > edge;
      const float level = !is_fine ? kCoarse : outer ? kOuter : kInner;
      dot += std::fabs(y[d]) * level;
      norm += level * level;
      const int code = is_fine ? d / 2 : fine / 2 + (d - fine) / 4;
      const int bits = is_fine ? (2 * positive + (outer == positive)) << 2 * (d % 2) : positive << (d - fine) % 4;
      codes[code / 2 * 16] |= bits << 4 * (code % 2);
    }
    scales[t] = norm > 0 ? dot / norm : 0;
    unit = std::max(unit, scales[t]);
  }
  unit /= 255;
  const float per_unit = inverse(unit);
  for (int t = 0; t < tokens; t++) row[layout.scales_at() + t] = (uint8_t)std::nearbyint(scales[t] * per_unit);
  const float numbers[3] = {step, std::sqrt(spread / dim), unit};
  std::memcpy(row + dim, numbers, sizeof numbers);
}

void encode_page(const hb_model& model, const hb_digests& digests, const hb_cache& cache, const Isa& isa,
                 int64_t page) {
  for (int h = 0; h < model.kv_heads; h++)
    encode_page(model, cache, isa, cache.base + page * cache.page_stride + h * cache.head_stride,
                (uint8_t*)digests.base + page * digests.page_stride + h * digests.head_stride);
}

void CodeScorer::prepare(const hb_model& model, const hb_digests& digests, const Kernels& kernels, const char* q,
                         int64_t q_head_stride) {
  model_ = model;
  digests_ = digests;
  isa_ = kernels.base;
  bytes_ = kernels.bytes;
  codes_ = kernels.codes;
  layout_ = CodeLayout(model.head_dim, model.page_size);
  const int dim = model.head_dim, heads = model.kv_heads * model.group;
  tables_ = codes_->table_bytes(layout_.planes);
  grown(weights_, (size_t)heads * dim);
  grown(bias_, heads);
  for (auto* each : {&step_, &bounds_, &factor_, &offset_, &variance_}) grown(*each, heads);
  no_bounds_.assign(heads, 0.f);
  float x[kMaxHeadDim];
  uint8_t offset[kMaxHeadDim];
  for (int head = 0; head < heads; head++) {
    isa_->widen(model.type, q + head * q_head_stride, x, dim);
    step_[head] = quantize_values(x, offset, dim);
    int32_t totals[16] = {};
    float squares[16] = {};  // sixteen sums at a time, in vectors
    int8_t* weights = &weights_[(size_t)head * dim];
    for (int d = 0; d < dim; d += 16)
      for (int i = 0; i < 16; i++) {
        const float value = usable(x[d + i]);
        weights[d + i] = (int8_t)(offset[d + i] - 128);
        totals[i] += offset[d + i];
        squares[i] += value * value;
      }
    int32_t total = 0;
    float square = 0;
    for (int i = 0; i < 16; i++) total += totals[i], square += squares[i];
    bias_[head] = 128 * (total - 128 * dim);
    bounds_[head] = model.bound * std::sqrt(square);
    variance_[head] = 0.5f * kLog2e * layout_.distortion * model.scale * model.scale * square;
  }
}

void CodeScorer::prepare_codes(const char* q, int64_t q_head_stride) {
  const int dim = model_.head_dim, heads = model_.kv_heads * model_.group;
  const float log2_scale = model_.scale * kLog2e;
  luts_.assign((size_t)heads * tables_, 0);
  float x[kMaxHeadDim];
  for (int head = 0; head < heads; head++) {
    isa_->widen(model_.type, q + head * q_head_stride, x, dim);
    for (int d = 0; d < dim; d++) x[d] = usable(x[d]);
    isa_->rotate(x, dim);
    uint8_t* tables = &luts_[(size_t)head * tables_];
    factor_[head] = log2_scale * codes_->tables(x, layout_.fine, layout_.coded, tables, &offset_[head]);
    offset_[head] *= log2_scale;
  }
}

void CodeScorer::coarse_tile(int h, const uint8_t* const* rows, const uint8_t* const* next, const float* bounds,
                             int count, float* out, int64_t stride) {
  const uint8_t *at[kScoreTile], *ahead[kScoreTile];
  float sums[kMaxGroup * kScoreTile], spread[kScoreTile];
  const int head = h * model_.group, dim = model_.head_dim;
  for (int i = 0; i < kScoreTile; i++) {
    at[i] = rows[i] + h * digests_.head_stride;
    ahead[i] = next[i] + h * digests_.head_stride;
    std::memcpy(&spread[i], at[i] + dim + 4, 4);
  }
  ByteWeights weights{&weights_[(size_t)head * dim], &bias_[head], &step_[head], 1, dim, dim};
  if (bytes_.heads) {
    bytes_.heads(&weights, model_.group, at, ahead, sums);
  } else {
    for (int g = 0; g < model_.group; g++) {
      bytes_.dots(&weights, at, g ? at : ahead, sums + g * kScoreTile);
      weights.weights += dim, weights.bias++, weights.step++;
    }
  }
  for (int g = 0; g < model_.group; g++) {
    float found[kScoreTile];
    for (int i = 0; i < kScoreTile; i++) found[i] = sums[g * kScoreTile + i] + bounds[head + g] * spread[i];
    keep_tile(found, count, out + g * stride);
  }
}

void CodeScorer::recall_middles(int h, const uint8_t* const* rows, const float* scores, int64_t stride,
                                const int32_t* columns, int count, float* middles) const {
  for (int i = 0; i < kScoreTile; i++) {
    float spread;
    std::memcpy(&spread, rows[i] + h * digests_.head_stride + model_.head_dim + 4, 4);
    const int32_t column = columns[std::min(i, count - 1)];
    for (int g = 0; g < model_.group; g++)
      middles[g * kScoreTile + i] = scores[g * stride + column] - bounds_[h * model_.group + g] * spread;
  }
}

void CodeScorer::estimate_tile(int h, const uint8_t* const* rows, const uint8_t* const* next, float* found, int count,
                               float* out, int64_t stride) {
  float sums[kMaxGroup * kScoreTile];
  CodePage pages[kScoreTile];
  const int group = model_.group, head = h * group;
  const float log2_scale = model_.scale * kLog2e;
  for (int i = 0; i < group * kScoreTile; i++) found[i] *= log2_scale;
  CodeQuery query{group,          model_.page_size / 16, layout_.planes,   &luts_[(size_t)head * tables_],
                  &factor_[head], &offset_[head],        &variance_[head], tables_};
  for (int i = 0; i < kScoreTile; i++) {
    const uint8_t* row = rows[i] + h * digests_.head_stride;
    const uint8_t* upcoming = next[i] + h * digests_.head_stride;
    for (int64_t line = layout_.scales_at(); line < layout_.row(); line += 64)
      __builtin_prefetch(upcoming + line, 0, 2);
    float unit;
    std::memcpy(&unit, row + model_.head_dim + 8, 4);
    pages[i] = {row + layout_.scales_at(), row + layout_.planes_at(), unit};
  }
  const int n = group * kScoreTile;
  codes_->sums(&query, pages, sums);
  for (int i = n; i % 16; i++) sums[i] = 1.f;
  if (!isa_->log_sums(found, sums, n, 1.f / log2_scale)) {
    for (int i = 0; i < n; i++)
      if (!(sums[i] > kLeastSum && sums[i] < kMostSum))
        found[i] += code_top(*codes_, query, i / kScoreTile, pages[i % kScoreTile], &sums[i]);
    isa_->log_sums(found, sums, n, 1.f / log2_scale);
  }
  for (int g = 0; g < group; g++) keep_tile(&found[g * kScoreTile], count, out + g * stride);
}

}  // namespace hb
