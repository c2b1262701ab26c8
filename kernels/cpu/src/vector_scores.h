// Scores of pages by their digests on vectors: dot products, sums of codes, softmax. Included once per instruction set,
// after vector.h.
#pragma once
#include "vector.h"

namespace {

template <int TYPE>
INLINE void dots_of(const char* const* rows, const char* const* upcoming, const float* weights, int n, float* out) {
  constexpr int BYTES = PAIR * kSize<TYPE>;
  constexpr int CALLS_PER_LINE = BYTES < 64 ? 64 / BYTES : 1;
  vf acc[kScoreTile][2] = {};
  for (int p = 0; p * PAIR < n; p++) {
    if (p % CALLS_PER_LINE == 0) {
#pragma GCC unroll 4
      for (int r = 0; r < kScoreTile; r++)
#pragma GCC unroll 2
        for (int b = 0; b < BYTES; b += 64) __builtin_prefetch(upcoming[r] + (int64_t)p * BYTES + b, 0, 2);
    }
    const vf wa = *(const vf_any*)&weights[p * PAIR], wb = *(const vf_any*)&weights[p * PAIR + LANES];
#pragma GCC unroll 4
    for (int r = 0; r < kScoreTile; r++) {
      const Two x = load_pair_of(TYPE, rows[r] + (int64_t)p * BYTES);
      acc[r][0] += x.a * wa;
      acc[r][1] += x.b * wb;
    }
  }
  for (int r = 0; r < kScoreTile; r++) out[r] = sum_of(acc[r][0] + acc[r][1]);
}

void vector_dots(int type, const char* const* rows, const char* const* upcoming, const float* weights, int n,
                 float* out) {
  if (type == BF16) dots_of<BF16>(rows, upcoming, weights, n, out);
  else if (type == FP16) dots_of<FP16>(rows, upcoming, weights, n, out);
  else dots_of<FP32>(rows, upcoming, weights, n, out);
}

// bf16 pairs load as even and odd elements: put the weights in the same order.
void vector_prepare_weights(int type, float* weights, int n, float* scratch) {
  if (type != BF16) return;
  memcpy(scratch, weights, n * sizeof(float));
  for (int d = 0; d < n; d++) {
    const int pair = d / PAIR, i = d % PAIR;
    weights[pair * PAIR + i / 2 + (i % 2) * LANES] = scratch[d];
  }
}

// Compilers turn these plain loops into widening multiplications.
void vector_byte_dots(const ByteWeights* w, const uint8_t* const* rows, const uint8_t* const* upcoming, float* out) {
  for (int r = 0; r < kScoreTile; r++) {
    const float* scales = (const float*)(rows[r] + w->scales_at);
    float total = 0;
    for (int s = 0; s < w->segments; s++) {
      const uint8_t* bytes = rows[r] + s * w->width;
      const int8_t* weights = w->weights + s * w->width;
      for (int b = 0; b < w->width; b += 64) __builtin_prefetch(upcoming[r] + s * w->width + b, 0, 2);
      int32_t sum = 0;
      for (int i = 0; i < w->width; i++) sum += (int16_t)bytes[i] * (int16_t)weights[i];
      total += scales[s] * w->step[s] * (float)(sum - w->bias[s]);
    }
    out[r] = total;
  }
}

#ifndef HAVE_CODES
// Writes the tables' sums of sixteen tokens to to[head][token].
template <int HEADS>
INLINE void add_codes(const CodeQuery* q, int head, const uint8_t* planes, float* to, int to_stride) {
  for (int g = 0; g < HEADS; g++) {
    const uint8_t* tables = q->tables + (int64_t)(head + g) * q->stride;
    uint16_t sums[16] = {};
    for (int p = 0; p < q->planes; p++) {
      const uint8_t* table = tables + p / 4 * 128 + p % 4 * 16;
      for (int t = 0; t < 16; t++) {
        const uint8_t codes = planes[p * 16 + t];
        sums[t] += table[codes & 15] + table[64 + (codes >> 4)];
      }
    }
    for (int t = 0; t < 16; t++) to[g * to_stride + t] = sums[t];
  }
}
#endif

template <int HEADS>
INLINE void code_sums_of(const CodeQuery* q, int head, const CodePage& page, const float* s, float* sums) {
  alignas(64) float x[HEADS * kMaxPageSize];
  for (int b = 0; b < q->blocks; b++)
    add_codes<HEADS>(q, head, page.planes + (int64_t)b * 16 * q->planes, x + b * 16, kMaxPageSize);
#pragma GCC unroll 4
  for (int g = 0; g < HEADS; g++) {
    const float* own = x + g * kMaxPageSize;
    const vf factor = splat(q->factor[head + g]), offset = splat(q->offset[head + g]);
    const vf variance = splat(q->variance[head + g]);
    vf sum = {};
    for (int t = 0; t < q->blocks * 16; t += LANES) {
      const vf scale = *(const vf*)&s[t], most = splat(126.f);
      const vf x = scale * (factor * *(const vf*)&own[t] + offset + variance * scale);
      sum += exp2_of(x < most ? x : most);  // a larger x, and NaN, give a sum beyond kMostSum
    }
    sums[(head + g) * kScoreTile] = sum_of(sum);
  }
}

void vector_code_sums(const CodeQuery* q, const CodePage* pages, float* sums) {
  alignas(64) float s[kMaxPageSize];
  for (int i = 0; i < kScoreTile; i++) {
    for (int t = 0; t < q->blocks * 16; t++) s[t] = pages[i].unit * pages[i].scales[t];
    int g = 0;
    for (; g + 4 <= q->group; g += 4) code_sums_of<4>(q, g, pages[i], s, sums + i);
    for (; g + 2 <= q->group; g += 2) code_sums_of<2>(q, g, pages[i], s, sums + i);
    for (; g < q->group; g++) code_sums_of<1>(q, g, pages[i], s, sums + i);
  }
}

bool vector_log_sums(float* base, const float* sums, int n, float factor) {
  vi usual = ~vi{};
  for (int i = 0; i < n; i += LANES) {
    const vf sum = *(const vf_any*)&sums[i];
    usual &= (sum > splat(kLeastSum)) & (sum < splat(kMostSum));
  }
  if (largest_of((vf)(~usual & (vi)splat(1.f))) > 0) return false;
  for (int i = 0; i < n; i += LANES) {
    // log2 of 2^e * m with m in [sqrt(1/2), sqrt(2)), by the series of the inverse hyperbolic tangent.
    const vi bits = *(const vi_any*)&sums[i], exponent = (bits - 0x3f3504f3) >> 23;
    const vf m = (vf)(bits - (exponent << 23)), z = (m - splat(1.f)) / (m + splat(1.f)), zz = z * z;
    const vf series = splat(2.f) + zz * (splat(2.f / 3) + zz * (splat(2.f / 5) + zz * splat(2.f / 7)));
    const vf log = __builtin_convertvector(exponent, vf) + z * series * splat(LOG2E);
    *(vf_any*)&base[i] = (*(const vf_any*)&base[i] + log) * splat(factor);
  }
  return true;
}

void vector_softmax_add(float* scores, int n, float scale, float* total) {
  const int whole = n / LANES * LANES;
  float rest[LANES];  // the elements after the last whole vector, padded
  for (int i = 0; i < LANES; i++) rest[i] = whole + i < n ? scores[whole + i] : -INFINITY;
  vf top = larger(*(const vf_any*)rest, splat(-INFINITY));  // ignores NaN
  for (int i = 0; i < whole; i += LANES) top = larger(*(const vf_any*)&scores[i], top);
  const float highest = largest_of(top);
  if (!(highest > -INFINITY && highest < INFINITY)) return;
  const vf factor = splat(scale * LOG2E), offset = splat(highest);
  vf sum = {};
  for (int i = 0; i < whole; i += LANES) {
    const vf e = exp2_of((*(const vf_any*)&scores[i] - offset) * factor);
    *(vf_any*)&scores[i] = e;
    sum += e;
  }
  const vf e = exp2_of((*(const vf_any*)rest - offset) * factor);
  *(vf_any*)rest = e;
  const float weight = 1.f / sum_of(sum + e);
  for (int i = 0; i < whole; i += LANES)
    *(vf_any*)&total[i] = *(const vf_any*)&total[i] + *(const vf_any*)&scores[i] * splat(weight);
  for (int i = whole; i < n; i++) total[i] += rest[i - whole] * weight;
}

uint64_t vector_read(const void* from, int64_t n) {
  const vi* at = (const vi*)from;
  vi seen[8] = {};
  for (int64_t i = 0; i + 8 <= n / LANE_BYTES; i += 8)
#pragma GCC unroll 8
    for (int k = 0; k < 8; k++) seen[k] |= at[i + k];
  for (int k = 1; k < 8; k++) seen[0] |= seen[k];
  uint64_t result = 0;
  for (int i = 0; i < LANES; i++) result |= (uint32_t)seen[0][i];
  return result;
}

}  // namespace
