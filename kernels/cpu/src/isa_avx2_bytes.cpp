// Byte dot products with AVX2, for CPUs without VNNI: bytes and weights are widened to 16 bits, and one instruction
// multiplies sixteen of them and adds neighbours. (vpmaddubsw takes bytes as they are, but saturates.)
#include <immintrin.h>

#include "isa.h"

#define INLINE static inline __attribute__((always_inline))

namespace {

INLINE __m256i widened(const uint8_t* p) { return _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)p)); }
INLINE __m256i widened(const int8_t* p) { return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p)); }

// Eight vectors of eight lanes -> one vector of their sums.
INLINE __m256i sums_of(const __m256i* a) {
  const __m256i x0 = _mm256_hadd_epi32(a[0], a[1]), x1 = _mm256_hadd_epi32(a[2], a[3]);
  const __m256i x2 = _mm256_hadd_epi32(a[4], a[5]), x3 = _mm256_hadd_epi32(a[6], a[7]);
  const __m256i y0 = _mm256_hadd_epi32(x0, x1), y1 = _mm256_hadd_epi32(x2, x3);
  return _mm256_add_epi32(_mm256_permute2x128_si256(y0, y1, 0x20), _mm256_permute2x128_si256(y0, y1, 0x31));
}

void avx2_byte_dots(const ByteWeights* w, const uint8_t* const* rows, const uint8_t* const* upcoming, float* out) {
  __m256 total[kScoreTile];
#pragma GCC unroll 4
  for (int r = 0; r < kScoreTile; r++) {
    total[r] = _mm256_setzero_ps();
    __builtin_prefetch(upcoming[r] + w->scales_at, 0, 2);
  }
  for (int s = 0; s < w->segments; s++) {
    const int64_t at = (int64_t)s * w->width;
    // The offset of the bytes is taken back before anything is added: integers are exact.
    const __m256i begin = _mm256_setr_epi32(-w->bias[s], 0, 0, 0, 0, 0, 0, 0);
    __m256i sum[kScoreTile] = {begin, begin, begin, begin};
    for (int i = 0; i < w->width; i += 16) {
      const __m256i weights = widened(w->weights + at + i);
#pragma GCC unroll 4
      for (int r = 0; r < kScoreTile; r++) {
        if (i % 64 == 0) __builtin_prefetch(upcoming[r] + at + i, 0, 2);
        sum[r] = _mm256_add_epi32(sum[r], _mm256_madd_epi16(widened(rows[r] + at + i), weights));
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kScoreTile; r++) {
      const float factor = ((const float*)(rows[r] + w->scales_at))[s] * w->step[s];
      total[r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[r]), _mm256_set1_ps(factor), total[r]);
    }
  }
  for (int r = 0; r < kScoreTile; r++) {
    float sum = 0;
    for (int i = 0; i < 8; i++) sum += total[r][i];
    out[r] = sum;
  }
}

// Two heads by four rows at a time: eight accumulators, one tree of additions for all their lanes.
void avx2_byte_heads(const ByteWeights* w, int heads, const uint8_t* const* rows, const uint8_t* const* upcoming,
                     float* out) {
  for (int r = 0; r < kScoreTile; r++) __builtin_prefetch(upcoming[r] + w->scales_at, 0, 2);
  for (int first = 0; first < heads; first += 2) {
    const int a = first * w->segments, b = (first + 1 < heads ? first + 1 : first) * w->segments;
    __m256 total = _mm256_setzero_ps();
    for (int s = 0; s < w->segments; s++) {
      const int8_t *of_a = w->weights + (int64_t)(a + s) * w->width, *of_b = w->weights + (int64_t)(b + s) * w->width;
      const int64_t at = (int64_t)s * w->width;
      __m256i sum[2 * kScoreTile];
#pragma GCC unroll 8
      for (int i = 0; i < 2 * kScoreTile; i++) sum[i] = _mm256_setzero_si256();
      for (int i = 0; i < w->width; i += 16) {
        const __m256i weights_a = widened(of_a + i), weights_b = widened(of_b + i);
#pragma GCC unroll 4
        for (int r = 0; r < kScoreTile; r++) {
          if (first == 0 && i % 64 == 0) __builtin_prefetch(upcoming[r] + at + i, 0, 2);
          const __m256i row = widened(rows[r] + at + i);
          sum[r] = _mm256_add_epi32(sum[r], _mm256_madd_epi16(row, weights_a));
          sum[kScoreTile + r] = _mm256_add_epi32(sum[kScoreTile + r], _mm256_madd_epi16(row, weights_b));
        }
      }
      const __m256i bias = _mm256_setr_m128i(_mm_set1_epi32(w->bias[a + s]), _mm_set1_epi32(w->bias[b + s]));
      const __m256 step = _mm256_setr_m128(_mm_set1_ps(w->step[a + s]), _mm_set1_ps(w->step[b + s]));
      const __m128 scale =
          _mm_setr_ps(((const float*)(rows[0] + w->scales_at))[s], ((const float*)(rows[1] + w->scales_at))[s],
                      ((const float*)(rows[2] + w->scales_at))[s], ((const float*)(rows[3] + w->scales_at))[s]);
      const __m256 factor = _mm256_mul_ps(_mm256_setr_m128(scale, scale), step);
      total = _mm256_fmadd_ps(_mm256_cvtepi32_ps(_mm256_sub_epi32(sums_of(sum), bias)), factor, total);
    }
    _mm_storeu_ps(out + first * kScoreTile, _mm256_castps256_ps128(total));
    if (first + 1 < heads) _mm_storeu_ps(out + (first + 1) * kScoreTile, _mm256_extractf128_ps(total, 1));
  }
}

}  // namespace

extern "C" const ByteKernels hb_avx2_bytes = {avx2_byte_dots, avx2_byte_heads};
