// Byte dot products with AVX-512 VNNI: one instruction multiplies 64 bytes of a quantized digest.
#include <immintrin.h>

#include "isa.h"

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
      total[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[r]), _mm512_set1_ps(((const float*)(rows[r] + scales_at))[s] * w->step[s]), total[r]);
  }
  for (int r = 0; r < kScoreTile; r++) out[r] = _mm512_reduce_add_ps(total[r]);
}

}  // namespace

extern "C" const ByteDotsFn hb_vnni_byte_dots = vnni_byte_dots;
