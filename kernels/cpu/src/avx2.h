// vector.h for AVX2, FMA and F16C.
#pragma once
#include <immintrin.h>
#define LANE_BYTES 32
#define ACCUMULATORS 8
#define REGISTERS 16

#include "isa.h"
namespace {
typedef float vf __attribute__((vector_size(32), may_alias));
struct Two {
  vf a, b;
};

#define HAVE_LOADS
static inline __attribute__((always_inline)) vf load_halves(const char* p) {
  return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
}
static inline __attribute__((always_inline)) vf load_bytes8(const char* p) {
  return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
static inline __attribute__((always_inline)) Two load_pair_of(int type, const char* p) {
  if (type == BF16) {
    const __m256i x = _mm256_loadu_si256((const __m256i*)p);
    return {(vf)_mm256_slli_epi32(x, 16), (vf)_mm256_and_si256(x, _mm256_set1_epi32((int)0xffff0000))};
  }
  if (type == FP16) return {load_halves(p), load_halves(p + 16)};
  if (type == INT8) return {load_bytes8(p), load_bytes8(p + 8)};
  return {(vf)_mm256_loadu_ps((const float*)p), (vf)_mm256_loadu_ps((const float*)(p + 32))};
}
static inline __attribute__((always_inline)) Two load_half_pair_of(int, const char*) { return {vf{}, vf{}}; }

#define HAVE_REDUCE
// Eight vectors of eight lanes -> one vector of their sums.
static inline __attribute__((always_inline)) __m256 sums_of(const __m256* a) {
  const __m256 x0 = _mm256_hadd_ps(a[0], a[1]), x1 = _mm256_hadd_ps(a[2], a[3]);
  const __m256 x2 = _mm256_hadd_ps(a[4], a[5]), x3 = _mm256_hadd_ps(a[6], a[7]);
  const __m256 y0 = _mm256_hadd_ps(x0, x1), y1 = _mm256_hadd_ps(x2, x3);
  return _mm256_add_ps(_mm256_permute2f128_ps(y0, y1, 0x20), _mm256_permute2f128_ps(y0, y1, 0x31));
}
template <int HEADS, int TOKENS>
static inline __attribute__((always_inline)) void reduce(vf (&acc)[HEADS][TOKENS], float* s, int s_stride) {
  __m256 flat[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) flat[i] = i / TOKENS < HEADS ? (__m256)acc[i / TOKENS][i % TOKENS] : _mm256_setzero_ps();
  alignas(32) float sums[8];
  _mm256_store_ps(sums, sums_of(flat));
#pragma GCC unroll 4
  for (int g = 0; g < HEADS; g++) __builtin_memcpy(&s[g * s_stride], &sums[g * TOKENS], TOKENS * sizeof(float));
}

#define HAVE_CODES
// Two planes at a time: a lane of a register has the codes of sixteen tokens in one plane, and the tables for them.
template <int HEADS>
static inline __attribute__((always_inline)) void add_codes(const CodeQuery* q, int head, const uint8_t* planes,
                                                            float* to, int to_stride) {
  const __m256i low_half = _mm256_set1_epi8(0x0f);
  const uint8_t* tables = q->tables + (int64_t)head * q->stride;
  __m256i bytes[HEADS], even[HEADS], odd[HEADS];  // sums; the latter of even and of odd tokens, in 16 bits
#pragma GCC unroll 4
  for (int g = 0; g < HEADS; g++) bytes[g] = even[g] = odd[g] = _mm256_setzero_si256();
  auto widen = [&] {
#pragma GCC unroll 4
    for (int g = 0; g < HEADS; g++) {
      even[g] = _mm256_add_epi16(even[g], _mm256_and_si256(bytes[g], _mm256_set1_epi16(0xff)));
      odd[g] = _mm256_add_epi16(odd[g], _mm256_srli_epi16(bytes[g], 8));
      bytes[g] = _mm256_setzero_si256();
    }
  };
  for (int p = 0; p < q->planes; p += 2, planes += 32) {
    if (p && p % 6 == 0) widen();
    const __m128i first = _mm_loadu_si128((const __m128i*)planes);
    const __m128i second = p + 1 < q->planes ? _mm_loadu_si128((const __m128i*)(planes + 16)) : _mm_setzero_si128();
    const __m256i codes = _mm256_setr_m128i(first, second);
    const __m256i low = _mm256_and_si256(codes, low_half);
    const __m256i high = _mm256_and_si256(_mm256_srli_epi16(codes, 4), low_half);
#pragma GCC unroll 4
    for (int g = 0; g < HEADS; g++) {
      const uint8_t* table = tables + (int64_t)g * q->stride + p / 4 * 128 + p % 4 * 16;
      const __m256i sum = _mm256_add_epi8(_mm256_shuffle_epi8(_mm256_loadu_si256((const __m256i*)table), low),
                                          _mm256_shuffle_epi8(_mm256_loadu_si256((const __m256i*)(table + 64)), high));
      bytes[g] = _mm256_add_epi8(bytes[g], sum);
    }
  }
  widen();
#pragma GCC unroll 4
  for (int g = 0; g < HEADS; g++) {
    const __m128i e = _mm_add_epi16(_mm256_castsi256_si128(even[g]), _mm256_extracti128_si256(even[g], 1));
    const __m128i o = _mm_add_epi16(_mm256_castsi256_si128(odd[g]), _mm256_extracti128_si256(odd[g], 1));
    _mm256_storeu_ps(to + g * to_stride, _mm256_cvtepi32_ps(_mm256_cvtepu16_epi32(_mm_unpacklo_epi16(e, o))));
    _mm256_storeu_ps(to + g * to_stride + 8, _mm256_cvtepi32_ps(_mm256_cvtepu16_epi32(_mm_unpackhi_epi16(e, o))));
  }
}

#define HAVE_FP16_CONVERSION
static void to_fp16(const float* from, uint16_t* to, int n) {
  int i = 0;
  for (; i + 8 <= n; i += 8)
    _mm_storeu_si128((__m128i*)(to + i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
  for (; i < n; i++) to[i] = _cvtss_sh(from[i], _MM_FROUND_TO_NEAREST_INT);
}
}  // namespace

#define VECTOR_TYPES_DEFINED
#include "vector.h"
