// Products of bf16 pairs for prompt.h, where AVX-512 has them.
#pragma once
#include "avx512.h"

#define HAVE_PAIRS
namespace {
INLINE vf add_pairs(vf sum, vf a, vf b) { return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b); }
INLINE vf pairs_of(vf low, vf high) { return (vf)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low); }

// n bf16 numbers of two rows each -> pairs.
INLINE void pair_rows(const char* low, const char* high, float* to, int n) {
  for (int i = 0; i < n; i += LANES) {
    const __m512i l = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(low + 2 * i)));
    const __m512i h = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(high + 2 * i)));
    _mm512_storeu_si512(to + i, _mm512_or_si512(l, _mm512_slli_epi32(h, 16)));
  }
}
}  // namespace
