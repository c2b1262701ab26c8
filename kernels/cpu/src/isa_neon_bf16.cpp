// Prompts in bf16 for CPUs with BF16: one instruction multiplies four channels of two queries and of two keys.
#include "neon.h"

#define HAVE_PAIRS
namespace {
INLINE vf pairs_of(vf low, vf high) {
  return (vf)vcvtq_high_bf16_f32(vcvtq_low_bf16_f32((float32x4_t)low), (float32x4_t)high);
}

// n bf16 numbers of two rows each -> pairs.
INLINE void pair_rows(const char* low, const char* high, float* to, int n) {
  for (int i = 0; i < n; i += 8) {
    const uint16x8_t l = vreinterpretq_u16_u8(vld1q_u8((const uint8_t*)low + 2 * i));
    const uint16x8_t h = vreinterpretq_u16_u8(vld1q_u8((const uint8_t*)high + 2 * i));
    vst1q_f32(to + i, vreinterpretq_f32_u16(vzip1q_u16(l, h)));
    vst1q_f32(to + i + 4, vreinterpretq_f32_u16(vzip2q_u16(l, h)));
  }
}
INLINE vf add_pairs(vf sum, vf a, vf b) { return (vf)vbfdotq_f32((float32x4_t)sum, (bfloat16x8_t)a, (bfloat16x8_t)b); }
}  // namespace

#include "prompt_weights.h"

namespace {

// Eight queries by eight keys or channels, four numbers deep.
struct Matrices {
  static constexpr int DEPTH = 2, ROWS = 8, COLUMNS = 8, QUERY_STRIDE = 1;
  struct Session {};

  static float* query(float* q, int r, int cells) { return q + r * cells; }

  // to[ROWS][COLUMNS] = (ADDS: +=) left[ROWS][cells] * right[cells][COLUMNS]; strides in floats.
  template <bool ADDS>
  INLINE void multiply(const float* left, int left_stride, const float* right, int right_stride, int cells, float* to,
                       int to_stride) {
    constexpr int M = ROWS / 2, N = COLUMNS / 2;
    float32x4_t acc[M][N];  // two rows by two columns
#pragma GCC unroll 4
    for (int m = 0; m < M; m++)
#pragma GCC unroll 4
      for (int n = 0; n < N; n++) {
        const float* from = to + 2 * m * to_stride + 2 * n;
        acc[m][n] = ADDS ? vcombine_f32(vld1_f32(from), vld1_f32(from + to_stride)) : vdupq_n_f32(0);
      }
    for (int c = 0; c < cells; c += 2, left += 2, right += 2 * right_stride) {
      bfloat16x8_t rows[M], columns[N];
#pragma GCC unroll 4
      for (int m = 0; m < M; m++) {
        const float* row = left + 2 * m * left_stride;
        rows[m] = vreinterpretq_bf16_f32(vcombine_f32(vld1_f32(row), vld1_f32(row + left_stride)));
      }
#pragma GCC unroll 2
      for (int n = 0; n < N; n += 2) {
        const float32x4_t x = vld1q_f32(right + 2 * n), y = vld1q_f32(right + right_stride + 2 * n);
        columns[n] = vreinterpretq_bf16_f32(vzip1q_f32(x, y));
        columns[n + 1] = vreinterpretq_bf16_f32(vzip2q_f32(x, y));
      }
#pragma GCC unroll 4
      for (int m = 0; m < M; m++)
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) acc[m][n] = vbfmmlaq_f32(acc[m][n], rows[m], columns[n]);
    }
#pragma GCC unroll 4
    for (int m = 0; m < M; m++)
#pragma GCC unroll 4
      for (int n = 0; n < N; n++) {
        float* out = to + 2 * m * to_stride + 2 * n;
        vst1_f32(out, vget_low_f32(acc[m][n]));
        vst1_f32(out + to_stride, vget_high_f32(acc[m][n]));
      }
  }

  INLINE void logits(const float* q, const float* k, int cells, int n, float* s) {
    for (int t = 0; t < n; t += COLUMNS)
      multiply<false>(q, cells, k + t / PANEL * PANEL * cells + t % PANEL, PANEL, cells, s + t, KEYS);
  }
  INLINE void add_values(const float* s, const float* v, int cells, int dim, float* o) {
    for (int d = 0; d < dim; d += COLUMNS) multiply<true>(s, KEYS, v + d, dim, cells, o + d, dim);
  }
};
static_assert(Matrices::ROWS <= kPromptRows && PANEL % Matrices::COLUMNS == 0, "");

}  // namespace

extern "C" const PromptKernels hb_neon_bf16_prompt = prompt_kernels<Matrices>();
