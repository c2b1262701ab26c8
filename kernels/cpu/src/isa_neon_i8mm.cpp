// Byte dot products with I8MM: one instruction multiplies 8 bytes of two rows and of two heads' weights, 32 products.
#include "dots_neon.h"

namespace {

INLINE int8x16_t low_halves(int8x16_t a, int8x16_t b) {
  return vreinterpretq_s8_s64(vzip1q_s64(vreinterpretq_s64_s8(a), vreinterpretq_s64_s8(b)));
}
INLINE int8x16_t high_halves(int8x16_t a, int8x16_t b) {
  return vreinterpretq_s8_s64(vzip2q_s64(vreinterpretq_s64_s8(a), vreinterpretq_s64_s8(b)));
}

struct Matrices {
  template <int HEADS>
  INLINE void sums(const int8_t* const* weights, const uint8_t* const* rows, int width, int32x4_t* sums) {
    if constexpr (HEADS == 1) {
      Dots::sums<1>(weights, rows, width, sums);  // the second head's half would be lost
    } else {
      int32x4_t acc[HEADS / 2][2]
                   [2];  // two rows by two heads: of each pair of heads, of each pair of rows, of each half
#pragma GCC unroll 8
      for (int i = 0; i < 2 * HEADS; i++) acc[i / 4][i / 2 % 2][i % 2] = vdupq_n_s32(0);
      for (int i = 0; i < width; i += 16) {
        int8x16_t row[2][2];
#pragma GCC unroll 2
        for (int r = 0; r < 2; r++) {
          const int8x16_t a = signed_bytes(rows[2 * r] + i), b = signed_bytes(rows[2 * r + 1] + i);
          row[r][0] = low_halves(a, b), row[r][1] = high_halves(a, b);
        }
#pragma GCC unroll 2
        for (int g = 0; g < HEADS / 2; g++) {
          const int8x16_t a = vld1q_s8(weights[2 * g] + i), b = vld1q_s8(weights[2 * g + 1] + i);
          const int8x16_t low = low_halves(a, b), high = high_halves(a, b);
#pragma GCC unroll 2
          for (int r = 0; r < 2; r++) {
            acc[g][r][0] = vmmlaq_s32(acc[g][r][0], row[r][0], low);
            acc[g][r][1] = vmmlaq_s32(acc[g][r][1], row[r][1], high);
          }
        }
      }
#pragma GCC unroll 2
      for (int g = 0; g < HEADS / 2; g++) {
        const int32x4_t first = vaddq_s32(acc[g][0][0], acc[g][0][1]), last = vaddq_s32(acc[g][1][0], acc[g][1][1]);
        sums[2 * g] = vuzp1q_s32(first, last);
        sums[2 * g + 1] = vuzp2q_s32(first, last);
      }
    }
  }
};

}  // namespace

extern "C" const ByteKernels hb_neon_i8mm_bytes = {byte_dots<Matrices>, byte_heads<Matrices>};
