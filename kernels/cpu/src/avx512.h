// vector.h for AVX-512 F, BW, DQ and VL, and F16C.
#pragma once
#include <immintrin.h>
#define LANE_BYTES 64
#define ACCUMULATORS 16
#define REGISTERS 32

#include "exp2_avx512.h"
#include "isa.h"
#include "sums_avx512.h"
namespace {
typedef float vf __attribute__((vector_size(64), may_alias));
struct Two {
  vf a, b;
};

#define HAVE_LOADS
static inline __attribute__((always_inline)) Two widen_bf16(__m512i x) {
  return {(vf)_mm512_slli_epi32(x, 16), (vf)_mm512_and_si512(x, _mm512_set1_epi32((int)0xffff0000))};
}
static inline __attribute__((always_inline)) vf load_halves(const char* p) {
  return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
}
static inline __attribute__((always_inline)) vf load_bytes16(const char* p) {
  return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
static inline __attribute__((always_inline)) Two load_pair_of(int type, const char* p) {
  if (type == BF16) return widen_bf16(_mm512_loadu_si512(p));
  if (type == FP16) return {load_halves(p), load_halves(p + 32)};
  if (type == INT8) return {load_bytes16(p), load_bytes16(p + 16)};
  return {(vf)_mm512_loadu_ps(p), (vf)_mm512_loadu_ps(p + 64)};
}
static inline __attribute__((always_inline)) Two load_half_pair_of(int type, const char* p) {
  if (type == BF16) return widen_bf16(_mm512_maskz_loadu_epi32(0x00ff, p));
  if (type == FP16) return {load_halves(p), vf{}};
  if (type == INT8) return {load_bytes16(p), vf{}};
  return {(vf)_mm512_loadu_ps(p), vf{}};
}

#define HAVE_EXP2
static inline __attribute__((always_inline)) vf exp2_of(vf x) { return (vf)exp2_avx512((__m512)x); }

#define HAVE_REDUCE
template <int HEADS, int TOKENS>
static inline __attribute__((always_inline)) void reduce(vf (&acc)[HEADS][TOKENS], float* s, int s_stride) {
  __m512 flat[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++) flat[i] = i / TOKENS < HEADS ? (__m512)acc[i / TOKENS][i % TOKENS] : _mm512_setzero_ps();
  const __m512 sums = sums_of(flat);
  if constexpr (TOKENS == 16) {
    _mm512_storeu_ps(s, sums);
  } else if constexpr (TOKENS == 8) {
    _mm256_storeu_ps(s, _mm512_castps512_ps256(sums));
    _mm256_storeu_ps(s + s_stride, _mm512_extractf32x8_ps(sums, 1));
  } else {
    _mm_storeu_ps(s, _mm512_castps512_ps128(sums));
    _mm_storeu_ps(s + s_stride, _mm512_extractf32x4_ps(sums, 1));
    _mm_storeu_ps(s + 2 * s_stride, _mm512_extractf32x4_ps(sums, 2));
    if constexpr (HEADS == 4) _mm_storeu_ps(s + 3 * s_stride, _mm512_extractf32x4_ps(sums, 3));
  }
}

#define HAVE_CODES
// Four planes at a time: a lane of a register has the codes of sixteen tokens in one plane, and the tables for them.
template <int HEADS>
static inline __attribute__((always_inline)) void add_codes(const CodeQuery* q, int head, const uint8_t* planes,
                                                            float* to, int to_stride) {
  const __m512i low_half = _mm512_set1_epi8(0x0f);
  const uint8_t* tables = q->tables + (int64_t)head * q->stride;
  __m512i bytes[HEADS], even[HEADS], odd[HEADS];  // sums; the latter of even and of odd tokens, in 16 bits
#pragma GCC unroll 4
  for (int g = 0; g < HEADS; g++) bytes[g] = even[g] = odd[g] = _mm512_setzero_si512();
  auto widen = [&] {
#pragma GCC unroll 4
    for (int g = 0; g < HEADS; g++) {
      even[g] = _mm512_add_epi16(even[g], _mm512_and_si512(bytes[g], _mm512_set1_epi16(0xff)));
      odd[g] = _mm512_add_epi16(odd[g], _mm512_srli_epi16(bytes[g], 8));
      bytes[g] = _mm512_setzero_si512();
    }
  };
  for (int p = 0; p < q->planes; p += 4, planes += 64, tables += 128) {
    if (p && p % 12 == 0) widen();
    const int left = q->planes - p;
    const __m512i codes = _mm512_maskz_loadu_epi32(left >= 4 ? 0xffff : (1 << 4 * left) - 1, planes);
    const __m512i low = _mm512_and_si512(codes, low_half);
    const __m512i high = _mm512_and_si512(_mm512_srli_epi16(codes, 4), low_half);
#pragma GCC unroll 4
    for (int g = 0; g < HEADS; g++) {
      const uint8_t* table = tables + (int64_t)g * q->stride;
      const __m512i sum = _mm512_add_epi8(_mm512_shuffle_epi8(_mm512_loadu_si512(table), low),
                                          _mm512_shuffle_epi8(_mm512_loadu_si512(table + 64), high));
      bytes[g] = _mm512_add_epi8(bytes[g], sum);
    }
  }
  widen();
#pragma GCC unroll 4
  for (int g = 0; g < HEADS; g++) {
    const __m256i e = _mm256_add_epi16(_mm512_castsi512_si256(even[g]), _mm512_extracti64x4_epi64(even[g], 1));
    const __m256i o = _mm256_add_epi16(_mm512_castsi512_si256(odd[g]), _mm512_extracti64x4_epi64(odd[g], 1));
    const __m128i e8 = _mm_add_epi16(_mm256_castsi256_si128(e), _mm256_extracti128_si256(e, 1));
    const __m128i o8 = _mm_add_epi16(_mm256_castsi256_si128(o), _mm256_extracti128_si256(o, 1));
    const __m256i tokens = _mm256_setr_m128i(_mm_unpacklo_epi16(e8, o8), _mm_unpackhi_epi16(e8, o8));
    _mm512_storeu_ps(to + g * to_stride, _mm512_cvtepi32_ps(_mm512_cvtepu16_epi32(tokens)));
  }
}

#define HAVE_TRANSPOSE
// Sixteen cells of four bytes from each of sixteen rows -> to[16][stride], its rows those cells.
static inline __attribute__((always_inline)) void transpose(const float* const* rows, int at, float* to, int stride) {
  __m512 a[16], b[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_ps(rows[i] + at);
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_ps(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4)
#pragma GCC unroll 2
    for (int j = 0; j < 2; j++) {  // a[i + c]: column c of each lane, of rows i..i + 3
      const __m512d x = _mm512_castps_pd(b[i + j]), y = _mm512_castps_pd(b[i + j + 2]);
      a[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(x, y));
      a[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(x, y));
    }
#pragma GCC unroll 4
  for (int c = 0; c < 4; c++) {
    const __m512 even = _mm512_shuffle_f32x4(a[c], a[c + 4], 0x88), odd = _mm512_shuffle_f32x4(a[c], a[c + 4], 0xdd);
    const __m512 even2 = _mm512_shuffle_f32x4(a[c + 8], a[c + 12], 0x88);
    const __m512 odd2 = _mm512_shuffle_f32x4(a[c + 8], a[c + 12], 0xdd);
    _mm512_storeu_ps(to + c * stride, _mm512_shuffle_f32x4(even, even2, 0x88));
    _mm512_storeu_ps(to + (c + 4) * stride, _mm512_shuffle_f32x4(odd, odd2, 0x88));
    _mm512_storeu_ps(to + (c + 8) * stride, _mm512_shuffle_f32x4(even, even2, 0xdd));
    _mm512_storeu_ps(to + (c + 12) * stride, _mm512_shuffle_f32x4(odd, odd2, 0xdd));
  }
}

#define HAVE_FP16_CONVERSION
static void to_fp16(const float* from, uint16_t* to, int n) {
  for (int i = 0; i < n; i += 16) {
    const __mmask16 live = n - i >= 16 ? 0xffff : (1 << (n - i)) - 1;
    const __m256i x = _mm512_cvtps_ph(_mm512_maskz_loadu_ps(live, from + i), _MM_FROUND_TO_NEAREST_INT);
    _mm256_mask_storeu_epi16(to + i, live, x);
  }
}
}  // namespace

#define VECTOR_TYPES_DEFINED
#include "vector.h"
