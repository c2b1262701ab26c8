// Byte dot products with AVX-512 VNNI: one instruction multiplies 64 bytes of a quantized digest.
#include <immintrin.h>

#include "isa.h"
#include "nibble_tables.h"
#include "sums_avx512.h"

namespace {

void vnni_byte_dots(const ByteWeights* w, const uint8_t* const* rows, const uint8_t* const* upcoming, float* out) {
  const int scales_at = w->scales_at;
  __m512 total[kScoreTile];
  for (int r = 0; r < kScoreTile; r++) {
    total[r] = _mm512_setzero_ps();
    __builtin_prefetch(upcoming[r] + scales_at, 0, 2);
  }
  for (int s = 0; s < w->segments; s++) {
    const int64_t at = (int64_t)s * w->width;
    // The offset of the bytes is taken back before anything is added: integers are exact.
    const __m512i begin = _mm512_maskz_set1_epi32(1, -w->bias[s]);
    __m512i sum[kScoreTile] = {begin, begin, begin, begin};
    for (int i = 0; i < w->width; i += 64) {
      const __mmask16 live = w->width - i >= 64 ? 0xffff : (1 << (w->width - i) / 4) - 1;
      const __m512i weights = _mm512_maskz_loadu_epi32(live, w->weights + at + i);
#pragma GCC unroll 4
      for (int r = 0; r < kScoreTile; r++) {
        __builtin_prefetch(upcoming[r] + at + i, 0, 2);
        sum[r] = _mm512_dpbusd_epi32(sum[r], _mm512_maskz_loadu_epi32(live, rows[r] + at + i), weights);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kScoreTile; r++)
      total[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[r]),
                                 _mm512_set1_ps(((const float*)(rows[r] + scales_at))[s] * w->step[s]), total[r]);
  }
  for (int r = 0; r < kScoreTile; r++) out[r] = _mm512_reduce_add_ps(total[r]);
}

// Sixteen vectors of sixteen lanes -> one vector of their sums, by a transposing tree of additions.
inline __attribute__((always_inline)) __m512i sums_of_integers(__m512i* a) {
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++)
    a[i] =
        _mm512_add_epi32(_mm512_unpacklo_epi32(a[2 * i], a[2 * i + 1]), _mm512_unpackhi_epi32(a[2 * i], a[2 * i + 1]));
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++)
    a[i] =
        _mm512_add_epi32(_mm512_unpacklo_epi64(a[2 * i], a[2 * i + 1]), _mm512_unpackhi_epi64(a[2 * i], a[2 * i + 1]));
  const __m512i y = _mm512_add_epi32(_mm512_shuffle_i32x4(a[0], a[1], 0x88), _mm512_shuffle_i32x4(a[0], a[1], 0xdd));
  const __m512i z = _mm512_add_epi32(_mm512_shuffle_i32x4(a[2], a[3], 0x88), _mm512_shuffle_i32x4(a[2], a[3], 0xdd));
  return _mm512_add_epi32(_mm512_shuffle_i32x4(y, z, 0x88), _mm512_shuffle_i32x4(y, z, 0xdd));
}

// Four heads by four rows at a time: sixteen accumulators, one tree of additions for all their lanes. WIDTH: a
// segment's bytes, a multiple of 64; 0: any.
template <int WIDTH>
inline __attribute__((always_inline)) void byte_heads(const ByteWeights* w, int heads, const uint8_t* const* rows,
                                                      const uint8_t* const* upcoming, float* out) {
  const int width = WIDTH ? WIDTH : w->width;
  const __m512i by_head = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
  for (int r = 0; r < kScoreTile; r++) __builtin_prefetch(upcoming[r] + w->scales_at, 0, 2);
  for (int first = 0; first < heads; first += 4) {
    int segment[4];  // of each head: its first one
    for (int g = 0; g < 4; g++) segment[g] = (first + g < heads ? first + g : heads - 1) * w->segments;
    __m512 total = _mm512_setzero_ps();
    for (int s = 0; s < w->segments; s++) {
      __m512i sum[16];
#pragma GCC unroll 16
      for (int i = 0; i < 16; i++) sum[i] = _mm512_setzero_si512();
#pragma GCC unroll 4
      for (int i = 0; i < width; i += 64) {
        const bool whole = WIDTH || width - i >= 64;
        const __mmask16 live = whole ? 0xffff : (1 << (width - i) / 4) - 1;
        __m512i row[kScoreTile];
#pragma GCC unroll 4
        for (int r = 0; r < kScoreTile; r++) {
          if (first == 0) __builtin_prefetch(upcoming[r] + (int64_t)s * width + i, 0, 2);
          row[r] = _mm512_maskz_loadu_epi32(live, rows[r] + (int64_t)s * width + i);
        }
#pragma GCC unroll 4
        for (int g = 0; g < 4; g++) {
          const __m512i weights = _mm512_maskz_loadu_epi32(live, w->weights + (int64_t)(segment[g] + s) * width + i);
#pragma GCC unroll 4
          for (int r = 0; r < kScoreTile; r++) sum[g * 4 + r] = _mm512_dpbusd_epi32(sum[g * 4 + r], row[r], weights);
        }
      }
      const int* at = segment;
      const __m128i bias =
          _mm_setr_epi32(w->bias[at[0] + s], w->bias[at[1] + s], w->bias[at[2] + s], w->bias[at[3] + s]);
      const __m128 step = _mm_setr_ps(w->step[at[0] + s], w->step[at[1] + s], w->step[at[2] + s], w->step[at[3] + s]);
      __m128 scale =
          _mm_setr_ps(((const float*)(rows[0] + w->scales_at))[s], ((const float*)(rows[1] + w->scales_at))[s],
                      ((const float*)(rows[2] + w->scales_at))[s], ((const float*)(rows[3] + w->scales_at))[s]);
      const __m512i centred =
          _mm512_sub_epi32(sums_of_integers(sum), _mm512_permutexvar_epi32(by_head, _mm512_castsi128_si512(bias)));
      const __m512 factor =
          _mm512_mul_ps(_mm512_broadcast_f32x4(scale), _mm512_permutexvar_ps(by_head, _mm512_castps128_ps512(step)));
      total = _mm512_fmadd_ps(_mm512_cvtepi32_ps(centred), factor, total);
    }
    const int left = heads - first;
    _mm512_mask_storeu_ps(out + first * kScoreTile, left >= 4 ? 0xffff : (1 << 4 * left) - 1, total);
  }
}

void vnni_byte_heads(const ByteWeights* w, int heads, const uint8_t* const* rows, const uint8_t* const* upcoming,
                     float* out) {
  switch (w->width) {
    case 64: return byte_heads<64>(w, heads, rows, upcoming, out);
    case 128: return byte_heads<128>(w, heads, rows, upcoming, out);
    default: return byte_heads<0>(w, heads, rows, upcoming, out);
  }
}

// 2^x to 3 %, by its bits: y is x in steps of the mantissa, with the exponent's bias (Schraudolph, Neural Computation
// 11, 1999). What codes say of a key is less sure than that. Ends where 2^x is next to nothing, and next to all.
inline __attribute__((always_inline)) __m512 rough_exp2(__m512 y) {
  const __m512 bounded = _mm512_min_ps(_mm512_max_ps(y, _mm512_set1_ps(8388608.f)), _mm512_set1_ps(2130706432.f));
  return _mm512_castsi512_ps(_mm512_cvtps_epi32(bounded));
}

// Four planes at a time: a lane of a register has the codes of sixteen tokens in one plane, and the tables for them. A
// byte holds the sums of three such registers; then one instruction adds a token's four lanes, moved side by side.
template <int HEADS>
inline __attribute__((always_inline)) void code_sums_of(const CodeQuery* q, int head, const CodePage* pages,
                                                        float* out) {
  const __m512i low_half = _mm512_set1_epi8(0x0f), ones = _mm512_set1_epi8(1);
  const __m512i by_token = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const __m512i by_lane = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
  const __m512 steps_of_one = _mm512_set1_ps(8388608.f), bias = _mm512_set1_ps(8388608.f * (127 - 0.0573f));
  const uint8_t* tables = q->tables + (int64_t)head * q->stride;
  __m512 flat[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++) flat[i] = _mm512_setzero_ps();
#pragma GCC unroll 4
  for (int i = 0; i < kScoreTile; i++) {
    const __m512 unit = _mm512_set1_ps(pages[i].unit);
    for (int b = 0; b < q->blocks; b++) {
      const uint8_t* planes = pages[i].planes + (int64_t)b * 16 * q->planes;
      __m512i bytes[HEADS], sums[HEADS];
#pragma GCC unroll 4
      for (int g = 0; g < HEADS; g++) bytes[g] = sums[g] = _mm512_setzero_si512();
      auto add = [&] {
#pragma GCC unroll 4
        for (int g = 0; g < HEADS; g++) {
          const __m512i moved = _mm512_shuffle_epi8(_mm512_permutexvar_epi32(by_token, bytes[g]), by_lane);
          sums[g] = _mm512_dpbusd_epi32(sums[g], moved, ones);
          bytes[g] = _mm512_setzero_si512();
        }
      };
      for (int p = 0; p < q->planes; p += 4) {
        if (p && p % 12 == 0) add();
        const int left = q->planes - p;
        const __m512i codes = _mm512_maskz_loadu_epi32(left >= 4 ? 0xffff : (1 << 4 * left) - 1, planes + p * 16);
        const __m512i low = _mm512_and_si512(codes, low_half);
        const __m512i high = _mm512_and_si512(_mm512_srli_epi16(codes, 4), low_half);
#pragma GCC unroll 4
        for (int g = 0; g < HEADS; g++) {
          const uint8_t* table = tables + (int64_t)g * q->stride + p / 4 * 128;
          const __m512i sum = _mm512_add_epi8(_mm512_shuffle_epi8(_mm512_loadu_si512(table), low),
                                              _mm512_shuffle_epi8(_mm512_loadu_si512(table + 64), high));
          bytes[g] = _mm512_add_epi8(bytes[g], sum);
        }
      }
      add();
      const __m128i scales = _mm_loadu_si128((const __m128i*)(pages[i].scales + 16 * b));
      const __m512 scale = _mm512_mul_ps(unit, _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(scales)));
      const __m512 many = _mm512_mul_ps(scale, steps_of_one);
#pragma GCC unroll 4
      for (int g = 0; g < HEADS; g++) {
        const __m512 steps = _mm512_cvtepi32_ps(sums[g]);
        __m512 x = _mm512_fmadd_ps(_mm512_set1_ps(q->variance[head + g]), scale, _mm512_set1_ps(q->offset[head + g]));
        x = _mm512_fmadd_ps(_mm512_fmadd_ps(_mm512_set1_ps(q->factor[head + g]), steps, x), many, bias);
        flat[g * kScoreTile + i] = _mm512_add_ps(flat[g * kScoreTile + i], rough_exp2(x));
      }
    }
  }
  _mm512_mask_storeu_ps(out, (1 << HEADS * kScoreTile) - 1, sums_of(flat));
}

void vnni_code_sums(const CodeQuery* q, const CodePage* pages, float* sums) {
  int g = 0;
  for (; g + 4 <= q->group; g += 4) code_sums_of<4>(q, g, pages, sums + g * kScoreTile);
  for (; g + 2 <= q->group; g += 2) code_sums_of<2>(q, g, pages, sums + g * kScoreTile);
  for (; g < q->group; g++) code_sums_of<1>(q, g, pages, sums + g * kScoreTile);
}

}  // namespace

extern "C" const ByteKernels hb_vnni_bytes = {vnni_byte_dots, vnni_byte_heads};
extern "C" const CodeKernels hb_vnni_codes = {nibble_table_bytes, nibble_tables, nibble_steps, vnni_code_sums};
