// Partial attention over pages in 8 bits with AVX2, whose instruction multiplies 16 numbers of 16 bits and adds products
// of two neighbours: half of the multiplications of fp32, and half of the conversions.
//
// Queries and weights have 15 bits and a sign, so that the result differs from that of fp32 by some 2^-15.
#include "avx2.h"
#include "byte_attend.h"

namespace {

constexpr int STRIP = 16;  // channels that are widened at once

struct PairKernel : Block {
  static constexpr float MOST_QUERY = 32512.f, MOST_WEIGHT = 32767.f;  // so that the sum of 512 products fits 32 bits
  alignas(64) int16_t q[kMaxGroup][kMaxHeadDim];
  alignas(64) int16_t weights[kMaxGroup][TILES * TILE];

  void set_shape(const Shape* of) {
    shape = of;
    width = of->head_dim;
  }
  int place(int d) const { return d; }
  void round_query(int head, const float* wide, float inverse) { round_numbers(wide, inverse, width, q[head]); }
  void products(int tile);
  void round_weights(int head, float inverse) { round_numbers(s[head][0], inverse, count * TILE, weights[head]); }
  void add_values();

  static void round_numbers(const float* from, float factor, int n, int16_t* to) {
    for (int i = 0; i < n; i += 16) {
      const __m256i a = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_load_ps(from + i), _mm256_set1_ps(factor)));
      const __m256i b = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_load_ps(from + i + 8), _mm256_set1_ps(factor)));
      const __m256i both = _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xd8);
      _mm256_store_si256((__m256i*)(to + i), both);
    }
  }
};

INLINE __m256i widen_strip(__m128i bytes) { return _mm256_cvtepi8_epi16(bytes); }
INLINE __m128i load_strip(const char* from) { return _mm_loadu_si128((const __m128i*)from); }
// The order is kept, because gcc would multiply everything first, and keep a sum in memory for want of registers.
INLINE void add_products(__m256i& sum, __m256i a, __m256i b) {
  __m256i products = _mm256_madd_epi16(a, b);
  asm volatile("" : "+x"(products));
  sum = _mm256_add_epi32(sum, products);
  asm volatile("" : "+x"(sum));
}

// Products of HEADS heads with a tile's keys, a few tokens at a time.
template <int HEADS>
INLINE void key_products(PairKernel& st, int head, int i, Prefetch* ahead) {
  constexpr int TOKENS = ACCUMULATORS / (HEADS == 3 ? 4 : HEADS);
  const int64_t stride = st.shape->token_stride;
  float* s = st.s[head][i];
  constexpr int S_STRIDE = TILES * TILE;
  for (int t = 0; t < TILE; t += TOKENS) {
    const char* row = st.tiles[i].keys + t * stride;
    __m256i sum[HEADS][TOKENS];
#pragma GCC unroll 4
    for (int g = 0; g < HEADS; g++)
#pragma GCC unroll 8
      for (int u = 0; u < TOKENS; u++) sum[g][u] = _mm256_setzero_si256();
    for (int d = 0; d < st.width; d += STRIP) {
      if (ahead && (d / STRIP * TOKENS) % 4 == 0) ahead->lines<(TOKENS > 4 ? TOKENS / 4 : 1)>();
      if constexpr (TOKENS <= HEADS) {
        __m256i k[TOKENS];
#pragma GCC unroll 8
        for (int u = 0; u < TOKENS; u++) k[u] = widen_strip(load_strip(row + u * stride + d));
#pragma GCC unroll 4
        for (int g = 0; g < HEADS; g++) {
          __m256i q = _mm256_load_si256((const __m256i*)&st.q[head + g][d]);
          IN_REGISTER(q);
#pragma GCC unroll 8
          for (int u = 0; u < TOKENS; u++) add_products(sum[g][u], k[u], q);
        }
      } else {
        __m256i q[HEADS];
#pragma GCC unroll 4
        for (int g = 0; g < HEADS; g++) q[g] = _mm256_load_si256((const __m256i*)&st.q[head + g][d]);
#pragma GCC unroll 8
        for (int u = 0; u < TOKENS; u++) {
          const __m256i k = widen_strip(load_strip(row + u * stride + d));
#pragma GCC unroll 4
          for (int g = 0; g < HEADS; g++) add_products(sum[g][u], k, q[g]);
        }
      }
    }
    vf products[HEADS][TOKENS];
#pragma GCC unroll 4
    for (int g = 0; g < HEADS; g++)
#pragma GCC unroll 8
      for (int u = 0; u < TOKENS; u++) products[g][u] = (vf)_mm256_cvtepi32_ps(sum[g][u]);
    reduce<HEADS, TOKENS>(products, s + t, S_STRIDE);
  }
#pragma GCC unroll 2
  for (int t = 0; t < TILE; t += LANES) {
    const vf scales = load_halves(st.tiles[i].key_scales + 2 * t);
#pragma GCC unroll 4
    for (int g = 0; g < HEADS; g++) *(vf*)&s[g * S_STRIDE + t] *= scales;
  }
}

void PairKernel::products(int tile) {
  for_heads(shape->group,
            [&](auto heads, int g) { key_products<heads.value>(*this, g, tile, g ? nullptr : &tiles[tile].ahead); });
}

// Adds the weighted values of one strip to the sums of HEADS heads. Values of two tokens are interleaved.
template <int HEADS>
INLINE void add_strip(PairKernel& st, int head, int d, bool prefetches) {
  __m256i low[HEADS], high[HEADS];
#pragma GCC unroll 4
  for (int g = 0; g < HEADS; g++) low[g] = high[g] = _mm256_setzero_si256();
  const int64_t stride = st.shape->token_stride;
  for (int i = 0; i < st.count; i++) {
    const char* row = st.tiles[i].values + d;
    if (prefetches) st.tiles[i].ahead.lines<4>();
#pragma GCC unroll 8
    for (int t = 0; t < TILE; t += 2, row += 2 * stride) {
      const __m128i a = load_strip(row), b = load_strip(row + stride);
      const __m256i first = widen_strip(_mm_unpacklo_epi8(a, b)), second = widen_strip(_mm_unpackhi_epi8(a, b));
#pragma GCC unroll 4
      for (int g = 0; g < HEADS; g++) {
        int32_t pair;
        memcpy(&pair, &st.weights[head + g][i * TILE + t], sizeof pair);
        const __m256i weights = _mm256_set1_epi32(pair);
        add_products(low[g], first, weights);
        add_products(high[g], second, weights);
      }
    }
  }
#pragma GCC unroll 4
  for (int g = 0; g < HEADS; g++) {
    const vf step = splat(st.weight_step[head + g]);
    float* o = &st.o[head + g][d];
    *(vf*)o += (vf)_mm256_cvtepi32_ps(low[g]) * step;
    *(vf*)(o + LANES) += (vf)_mm256_cvtepi32_ps(high[g]) * step;
  }
}

void PairKernel::add_values() {
  for (int d = 0; d < width; d += STRIP)
    for_heads(shape->group, [&](auto heads, int g) { add_strip<heads.value>(*this, g, d, g == 0); });
}

}  // namespace

extern "C" HB_HIDDEN AttendFn hb_avx2_attend(const Shape* shape) {
  return shape->kv_type == INT8 ? attend_bytes<PairKernel> : nullptr;
}
