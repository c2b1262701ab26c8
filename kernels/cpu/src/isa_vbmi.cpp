// Sums of codes with AVX-512 VBMI: one lookup takes six bits of each of 64 tokens' codes.
#include <immintrin.h>

#include "code_levels.h"
#include "isa.h"

#define INLINE inline __attribute__((always_inline))

namespace {

// A token's bytes of codes go by threes: a lookup of the low six bits of each, and one of their high two bits together.
INLINE int groups_of(int planes) { return (planes + 2) / 3; }
// Lookups are added up in bytes: where there are many, in parts, whose mean goes on, every two of them rounded up.
INLINE int parts_of(int planes) { return planes <= 6 ? 1 : planes <= 12 ? 2 : planes <= 24 ? 4 : 8; }
INLINE int edge(int planes, int part) { return groups_of(planes) * part / parts_of(planes); }

// Tables: 64 bytes of what zeros alone stand for, in steps; then for each three bytes of codes four tables of 64
// entries, the fourth of the high bits (the last three may lack the second and the third).
int vbmi_table_bytes(int planes) { return 64 + 256 * groups_of(planes); }

// Two bits of codes, a channel with a level of two bits or two with one, are looked up in four entries: of sixteen such
// pairs, to[pair][4]. Entries are what the bits give beyond the lowest, in steps.
INLINE void entries_of(const float* x, bool fine, float finer, uint8_t* to) {
  const __m512 unit = _mm512_set1_ps(finer);
  __m512 entry[4];
  if (fine) {
    const __m512 channel = _mm512_loadu_ps(x);
    const __m512 least = _mm512_mul_ps(_mm512_abs_ps(channel), _mm512_set1_ps(kOuter));
    const float levels[4] = {-kOuter, -kInner, kInner, kOuter};
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) entry[i] = _mm512_fmadd_ps(channel, _mm512_set1_ps(levels[i]), least);
  } else {
    const __m512i evens = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512 a = _mm512_loadu_ps(x), b = _mm512_loadu_ps(x + 16), coarse = _mm512_set1_ps(kCoarse);
    const __m512 first = _mm512_mul_ps(_mm512_permutex2var_ps(a, evens, b), coarse);
    const __m512i odds = _mm512_add_epi32(evens, _mm512_set1_epi32(1));
    const __m512 second = _mm512_mul_ps(_mm512_permutex2var_ps(a, odds, b), coarse);
    const __m512 both = _mm512_add_ps(_mm512_abs_ps(first), _mm512_abs_ps(second));
    const __m512 together = _mm512_add_ps(first, second), apart = _mm512_sub_ps(first, second);
    entry[0] = _mm512_sub_ps(both, together);
    entry[1] = _mm512_add_ps(both, apart);
    entry[2] = _mm512_sub_ps(both, apart);
    entry[3] = _mm512_add_ps(both, together);
  }
  __m512i bytes = _mm512_setzero_si512();
#pragma GCC unroll 4
  for (int i = 3; i >= 0; i--)
    bytes = _mm512_or_si512(_mm512_slli_epi32(bytes, 8), _mm512_cvtps_epi32(_mm512_mul_ps(entry[i], unit)));
  _mm512_storeu_si512(to, bytes);
}

// The entries of 64 codes of six bits, from those of their three pairs, each in eighths of a step; `half` of them is
// added before the rest is cut off.
INLINE __m512i table_of(const uint8_t* low, const uint8_t* middle, const uint8_t* high, int half) {
  alignas(64) static const struct Positions {
    uint8_t of[3][64];
    constexpr Positions() : of() {
      for (int i = 0; i < 64; i++)
        for (int pair = 0; pair < 3; pair++) of[pair][i] = i >> 2 * pair & 3;
    }
  } positions;
  const uint8_t* pairs[3] = {low, middle, high};
  __m512i sum = _mm512_set1_epi8((char)half);
#pragma GCC unroll 3
  for (int i = 0; i < 3; i++) {
    int32_t entries;
    __builtin_memcpy(&entries, pairs[i], 4);
    sum = _mm512_add_epi8(sum, _mm512_shuffle_epi8(_mm512_set1_epi32(entries), _mm512_load_si512(positions.of[i])));
  }
  return _mm512_and_si512(_mm512_srli_epi16(sum, 3), _mm512_set1_epi8(31));
}

float vbmi_tables(const float* x, int fine, int coded, uint8_t* tables, float* least) {
  constexpr int kPairs = 2 * kMaxHeadDim;
  const int planes = (fine + coded) / 8, pairs = 4 * planes, groups = groups_of(planes), parts = parts_of(planes);
  float reach[kPairs], widest = 0;
  for (int i = 0; i < fine; i++) reach[i] = 2 * kOuter * __builtin_fabsf(x[i]);
  for (int i = fine, d = fine; i < pairs; i++, d += 2)
    reach[i] = 2 * kCoarse * (__builtin_fabsf(x[d]) + __builtin_fabsf(x[d + 1]));
  int most = 0;  // lookups of a part
  for (int part = 0; part < parts; part++) {
    const int n = 4 * (edge(planes, part + 1) - edge(planes, part));
    most = n > most ? n : most;
  }
  auto widen = [&widest](float together) { widest = together > widest ? together : widest; };
  for (int p = 0; p < planes; p++) widen(reach[4 * p] + reach[4 * p + 1] + reach[4 * p + 2]);
  for (int p = 0; p < planes; p += 3)
    widen(reach[4 * p + 3] + (p + 1 < planes ? reach[4 * p + 7] : 0) + (p + 2 < planes ? reach[4 * p + 11] : 0));
  const int largest = 250 / most < 30 ? 250 / most : 30;  // an entry's; their eighths are bytes too
  const float step = widest / largest, finer = step > 1e-37f ? 8 / step : 0.f;
  alignas(64) uint8_t entries[4 * kPairs] = {};
  float padded[kMaxHeadDim + 32] = {};
  __builtin_memcpy(padded, x, coded * sizeof(float));
  // Sixteen pairs at a time; the last of two bits may share them with the first of one.
  for (int i = 0; i < fine; i += 16) entries_of(padded + i, true, finer, entries + 4 * i);
  for (int i = fine, d = fine; i < pairs; i += 16, d += 32) entries_of(padded + d, false, finer, entries + 4 * i);
  // Levels are symmetric, so what zeros alone stand for is minus the mean. Most queries' is made a whole number of
  // steps by rounding some tables a little up or down: by eighths of a step in the sum, in the mean of a table's
  // entries.
  const __m512i zero = _mm512_setzero_si512();
  __m512i total = zero;
  for (int i = 0; i < 4 * pairs; i += 64)
    total = _mm512_add_epi64(total, _mm512_sad_epu8(_mm512_load_si512(entries + i), zero));
  const int doublings = parts == 8 ? 3 : parts / 2;
  // Of a token's parts; a sum of two is odd, so rounded up, in half of all cases.
  auto mean_of = [&](float sum) { return sum / parts + 0.25f * doublings; };
  const float expected = mean_of((0.25f * _mm512_reduce_add_epi64(total) + 0.5f * (planes + groups)) / 8);
  const int shift = (int)__builtin_nearbyintf(8 * parts * (__builtin_nearbyintf(expected) - expected));
  const uint8_t nothing[4] = {};
  auto pair_of = [&](int plane, int i) { return plane < planes ? entries + 4 * (4 * plane + i) : nothing; };
  total = zero;
  int made = 0;
  auto make = [&](uint8_t* to, const uint8_t* low, const uint8_t* middle, const uint8_t* high) {
    const int half = made++ >= __builtin_abs(shift) ? 4 : shift > 0 ? 5 : 3;
    const __m512i table = table_of(low, middle, high, half);
    total = _mm512_add_epi64(total, _mm512_sad_epu8(table, zero));
    _mm512_storeu_si512(to, table);
  };
  for (int group = 0; group < groups; group++) {
    uint8_t* to = tables + 64 + 256 * group;
    const int p = 3 * group;
    for (int i = 0; i < 3 && p + i < planes; i++)
      make(to + 64 * i, pair_of(p + i, 0), pair_of(p + i, 1), pair_of(p + i, 2));
    make(to + 192, pair_of(p, 3), pair_of(p + 1, 3), pair_of(p + 2, 3));
  }
  const int centre = (int)__builtin_nearbyintf(mean_of(_mm512_reduce_add_epi64(total) / 64.f));
  _mm512_storeu_si512(tables, _mm512_set1_epi8((char)-centre));
  *least = -centre * step * parts;
  return step * parts;
}

int vbmi_steps(const uint8_t* tables, const uint8_t* codes, int planes) {
  int sums[8] = {};
  for (int part = 0; part < parts_of(planes); part++)
    for (int group = edge(planes, part); group < edge(planes, part + 1); group++) {
      const uint8_t* table = tables + 64 + 256 * group;
      int high = 0;
      for (int i = 0; i < 3 && 3 * group + i < planes; i++) {
        const uint8_t code = codes[16 * (3 * group + i)];
        sums[part] += table[64 * i + code % 64];
        high |= code / 64 << 2 * i;
      }
      sums[part] += table[192 + high];
    }
  for (int parts = parts_of(planes); parts > 1; parts /= 2)
    for (int i = 0; i < parts / 2; i++) sums[i] = (sums[2 * i] + sums[2 * i + 1] + 1) / 2;
  return sums[0];
}

// The same sixteen bytes of four pages.
INLINE __m512i of_pages(const uint8_t* const* from, int64_t at) {
  auto load = [at](const uint8_t* p) { return _mm_loadu_si128((const __m128i*)(p + at)); };
  __m512i all = _mm512_castsi128_si512(load(from[0]));
  all = _mm512_mask_broadcast_i32x4(all, 0x00f0, load(from[1]));
  all = _mm512_mask_broadcast_i32x4(all, 0x0f00, load(from[2]));
  return _mm512_mask_broadcast_i32x4(all, 0xf000, load(from[3]));
}

// Logits are words: in steps of 1/128 of log2, with the exponent's bias, they are 2^x to 3 % as bf16 has it
// (Schraudolph, Neural Computation 11, 1999). What is beyond its range becomes NaN, infinity or nothing.
template <int HEADS, int PARTS>
INLINE void code_sums_of(const CodeQuery* q, int head, const CodePage* pages, float* out) {
  static_assert(kScoreTile == 4, "a register has a lane for each page of a tile");
  const __m512i low = _mm512_set1_epi16(0xff), bias = _mm512_set1_epi16((int16_t)(128 * (127 - 0.0573f)));
  const int planes = q->planes;
  const uint8_t* tables = q->tables + (int64_t)head * q->stride;
  const uint8_t *codes[4], *scales[4];
  for (int i = 0; i < 4; i++) codes[i] = pages[i].planes, scales[i] = pages[i].scales;
  // Words of 4 heads by 4 pages.
  const __m512i by_head = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
  const __mmask8 live = (1 << HEADS) - 1;
  const __m512 unit = _mm512_broadcast_f32x4(_mm_setr_ps(pages[0].unit, pages[1].unit, pages[2].unit, pages[3].unit));
  auto of_heads = [&](const float* from) {
    return _mm512_permutexvar_ps(by_head, _mm512_castps128_ps512(_mm_maskz_loadu_ps(live, from + head)));
  };
  const __m512 factor = _mm512_mul_ps(_mm512_mul_ps(of_heads(q->factor), unit), _mm512_set1_ps(128 * 32768.f));
  const __m512 variance =
      _mm512_mul_ps(_mm512_mul_ps(_mm512_mul_ps(of_heads(q->variance), unit), unit), _mm512_set1_ps(128 * 65536.f));
  const __m512 largest = _mm512_set1_ps(32767.f);
  const __mmask16 fits =
      _mm512_cmp_ps_mask(factor, largest, _CMP_LE_OQ) & _mm512_cmp_ps_mask(variance, largest, _CMP_LE_OQ);
  const __m512i factors = _mm512_castsi256_si512(_mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(factor)));
  const __m512i variances = _mm512_castsi256_si512(_mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(variance)));
  const __m512i by_page =
      _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_setr_m128i(_mm_set1_epi16(0), _mm_set1_epi16(1))),
                         _mm256_setr_m128i(_mm_set1_epi16(2), _mm_set1_epi16(3)), 1);
  __m512i times[HEADS], spread[HEADS];
  __m512 sums[4];
#pragma GCC unroll 4
  for (int g = 0; g < 4; g++) sums[g] = _mm512_setzero_ps();
#pragma GCC unroll 4
  for (int g = 0; g < HEADS; g++) {
    const __m512i at = _mm512_add_epi16(by_page, _mm512_set1_epi16((int16_t)(4 * g)));
    times[g] = _mm512_permutexvar_epi16(at, factors);
    spread[g] = _mm512_permutexvar_epi16(at, variances);
  }
  for (int b = 0; b < q->blocks; b++) {
    __m512i bytes[HEADS], steps[HEADS];
    __m512i means[3][HEADS];  // of one, two and four parts, which wait for as many more
#pragma GCC unroll 8
    for (int part = 0; part < PARTS; part++) {
#pragma GCC unroll 4
      for (int g = 0; g < HEADS; g++)
        bytes[g] = PARTS == 1 ? _mm512_loadu_si512(tables + (int64_t)g * q->stride) : _mm512_setzero_si512();
      const int end = edge(planes, part + 1);
      for (int group = edge(planes, part); group < end; group++) {
        const uint8_t* table = tables + 64 + 256 * group;
        const int64_t at = (int64_t)16 * (b * planes + 3 * group);
        const int left = planes - 3 * group;
        auto add = [&](int which, __m512i of) {
#pragma GCC unroll 4
          for (int g = 0; g < HEADS; g++) {
            const __m512i entries = _mm512_loadu_si512(table + 64 * which + (int64_t)g * q->stride);
            bytes[g] = _mm512_add_epi8(bytes[g], _mm512_permutexvar_epi8(of, entries));
          }
        };
        // An index's upper bits are ignored; entries are the same for all values of bits that no plane has.
        const __m512i first = of_pages(codes, at);
        __m512i high = _mm512_srli_epi16(first, 6);
        add(0, first);
        if (left > 1) {
          const __m512i second = of_pages(codes, at + 16);
          add(1, second);
          high = _mm512_ternarylogic_epi32(_mm512_set1_epi8(3), high, _mm512_srli_epi16(second, 4), 0xca);
        }
        if (left > 2) {
          const __m512i third = of_pages(codes, at + 32);
          add(2, third);
          high = _mm512_ternarylogic_epi32(_mm512_set1_epi8(15), high, _mm512_srli_epi16(third, 2), 0xca);
        }
        add(3, high);
      }
#pragma GCC unroll 4
      for (int g = 0; g < HEADS; g++) {
        __m512i mean = bytes[g];
        if (part % 2 == 1) mean = _mm512_avg_epu8(means[0][g], mean);
        if (part % 4 == 3) mean = _mm512_avg_epu8(means[1][g], mean);
        if (part % 8 == 7) mean = _mm512_avg_epu8(means[2][g], mean);
        if (part == PARTS - 1) steps[g] = mean;
        else means[part % 2 == 0 ? 0 : part % 4 == 1 ? 1 : 2][g] = mean;
      }
    }
    if (PARTS > 1) {
#pragma GCC unroll 4
      for (int g = 0; g < HEADS; g++)
        steps[g] = _mm512_add_epi8(steps[g], _mm512_loadu_si512(tables + (int64_t)g * q->stride));
    }
    const __m512i scale = of_pages(scales, 16 * b);
    const __m512i even = _mm512_and_si512(scale, low), odd = _mm512_andnot_si512(low, scale);
    const __m512i wide = _mm512_srli_epi16(scale, 8);
    const __m512i even_square = _mm512_mullo_epi16(even, even), odd_square = _mm512_mullo_epi16(wide, wide);
#pragma GCC unroll 4
    for (int g = 0; g < HEADS; g++) {
      auto weigh = [&](__m512i scale, __m512i square) {
        const __m512i logit = _mm512_mulhrs_epi16(_mm512_maddubs_epi16(scale, steps[g]), times[g]);
        const __m512i raised = _mm512_adds_epi16(logit, _mm512_mulhi_epu16(square, spread[g]));
        const __m512i x = _mm512_max_epi16(_mm512_adds_epi16(raised, bias), _mm512_setzero_si512());
        // The upper word's lower bits are the other word's, less than a hundredth of it.
        sums[g] = _mm512_add_ps(sums[g], _mm512_castsi512_ps(x));
        sums[g] = _mm512_add_ps(sums[g], _mm512_castsi512_ps(_mm512_slli_epi32(x, 16)));
      };
      weigh(even, even_square);
      weigh(odd, odd_square);
    }
  }
  // [page][head] of four sums each -> [head][page].
  const __m512 x = _mm512_add_ps(_mm512_unpacklo_ps(sums[0], sums[1]), _mm512_unpackhi_ps(sums[0], sums[1]));
  const __m512 y = _mm512_add_ps(_mm512_unpacklo_ps(sums[2], sums[3]), _mm512_unpackhi_ps(sums[2], sums[3]));
  const __m512d xd = _mm512_castps_pd(x), yd = _mm512_castps_pd(y);
  const __m512 all =
      _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(xd, yd)), _mm512_castpd_ps(_mm512_unpackhi_pd(xd, yd)));
  const __m512i turned = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const __m512 found = _mm512_mask_mov_ps(_mm512_set1_ps(__builtin_inff()), fits, _mm512_permutexvar_ps(turned, all));
  _mm512_mask_storeu_ps(out, (1 << HEADS * kScoreTile) - 1, found);
}

template <int PARTS>
INLINE void code_sums(const CodeQuery* q, const CodePage* pages, float* sums) {
  int g = 0;
  for (; g + 4 <= q->group; g += 4) code_sums_of<4, PARTS>(q, g, pages, sums + g * kScoreTile);
  switch (q->group - g) {
    case 3: return code_sums_of<3, PARTS>(q, g, pages, sums + g * kScoreTile);
    case 2: return code_sums_of<2, PARTS>(q, g, pages, sums + g * kScoreTile);
    case 1: return code_sums_of<1, PARTS>(q, g, pages, sums + g * kScoreTile);
  }
}

void vbmi_code_sums(const CodeQuery* q, const CodePage* pages, float* sums) {
  switch (parts_of(q->planes)) {
    case 1: return code_sums<1>(q, pages, sums);
    case 2: return code_sums<2>(q, pages, sums);
    case 4: return code_sums<4>(q, pages, sums);
    default: return code_sums<8>(q, pages, sums);
  }
}

}  // namespace

extern "C" const CodeKernels hb_vbmi_codes = {vbmi_table_bytes, vbmi_tables, vbmi_steps, vbmi_code_sums};
