// vector.h for NEON, which every AArch64 CPU has.
#pragma once
#include <arm_neon.h>
#define LANE_BYTES 16
#define ACCUMULATORS 16
#define REGISTERS 32

#include "isa.h"
namespace {
typedef float vf __attribute__((vector_size(16), may_alias));
struct Two {
  vf a, b;
};

#define HAVE_LOADS
static inline __attribute__((always_inline)) vf load_halves(const char* p) {
  return (vf)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const uint16_t*)p)));
}
static inline __attribute__((always_inline)) Two load_pair_of(int type, const char* p) {
  if (type == BF16) {
    const uint32x4_t x = vreinterpretq_u32_u8(vld1q_u8((const uint8_t*)p));
    return {(vf)vshlq_n_u32(x, 16), (vf)vandq_u32(x, vdupq_n_u32(0xffff0000))};
  }
  if (type == FP16) return {load_halves(p), load_halves(p + 8)};
  if (type == INT8) {
    const int16x8_t x = vmovl_s8(vld1_s8((const int8_t*)p));
    return {(vf)vcvtq_f32_s32(vmovl_s16(vget_low_s16(x))), (vf)vcvtq_f32_s32(vmovl_high_s16(x))};
  }
  return {(vf)vld1q_u8((const uint8_t*)p), (vf)vld1q_u8((const uint8_t*)p + 16)};
}
static inline __attribute__((always_inline)) Two load_half_pair_of(int, const char*) { return {vf{}, vf{}}; }

#define HAVE_REDUCE
template <int HEADS, int TOKENS>
static inline __attribute__((always_inline)) void reduce(vf (&acc)[HEADS][TOKENS], float* s, int s_stride) {
  auto both = [](vf a, vf b) __attribute__((always_inline)) { return vpaddq_f32((float32x4_t)a, (float32x4_t)b); };
#pragma GCC unroll 4
  for (int g = 0; g < HEADS; g++)
#pragma GCC unroll 4
    for (int u = 0; u < TOKENS; u += 4)
      vst1q_f32(s + g * s_stride + u, vpaddq_f32(both(acc[g][u], acc[g][u + 1]), both(acc[g][u + 2], acc[g][u + 3])));
}

#define HAVE_CODES
// A plane at a time: a register has the codes of sixteen tokens, and one instruction looks all of them up.
template <int HEADS>
static inline __attribute__((always_inline)) void add_codes(const CodeQuery* q, int head, const uint8_t* planes,
                                                            float* to, int to_stride) {
  const uint8_t* tables = q->tables + (int64_t)head * q->stride;
  uint8x16_t bytes[HEADS];
  uint16x8_t low_sums[HEADS], high_sums[HEADS];  // of the first and of the last eight tokens
#pragma GCC unroll 4
  for (int g = 0; g < HEADS; g++) bytes[g] = vdupq_n_u8(0), low_sums[g] = high_sums[g] = vdupq_n_u16(0);
  auto widen = [&] {
#pragma GCC unroll 4
    for (int g = 0; g < HEADS; g++) {
      low_sums[g] = vaddw_u8(low_sums[g], vget_low_u8(bytes[g]));
      high_sums[g] = vaddw_high_u8(high_sums[g], bytes[g]);
      bytes[g] = vdupq_n_u8(0);
    }
  };
  for (int p = 0; p < q->planes; p++, planes += 16) {
    if (p && p % 3 == 0) widen();  // six entries fit a byte
    const uint8x16_t codes = vld1q_u8(planes), low = vandq_u8(codes, vdupq_n_u8(0x0f)), high = vshrq_n_u8(codes, 4);
#pragma GCC unroll 4
    for (int g = 0; g < HEADS; g++) {
      const uint8_t* table = tables + (int64_t)g * q->stride + p / 4 * 128 + p % 4 * 16;
      const uint8x16_t sum = vaddq_u8(vqtbl1q_u8(vld1q_u8(table), low), vqtbl1q_u8(vld1q_u8(table + 64), high));
      bytes[g] = vaddq_u8(bytes[g], sum);
    }
  }
  widen();
#pragma GCC unroll 4
  for (int g = 0; g < HEADS; g++) {
    float* out = to + g * to_stride;
    vst1q_f32(out, vcvtq_f32_u32(vmovl_u16(vget_low_u16(low_sums[g]))));
    vst1q_f32(out + 4, vcvtq_f32_u32(vmovl_high_u16(low_sums[g])));
    vst1q_f32(out + 8, vcvtq_f32_u32(vmovl_u16(vget_low_u16(high_sums[g]))));
    vst1q_f32(out + 12, vcvtq_f32_u32(vmovl_high_u16(high_sums[g])));
  }
}

#define HAVE_TRANSPOSE
// Sixteen cells of four bytes from each of sixteen rows -> to[16][stride], its rows those cells.
static inline __attribute__((always_inline)) void transpose(const float* const* rows, int at, float* to, int stride) {
  for (int i = 0; i < 16; i += 4)
    for (int c = 0; c < 16; c += 4) {
      const float32x4_t r0 = vld1q_f32(rows[i] + at + c), r1 = vld1q_f32(rows[i + 1] + at + c);
      const float32x4_t r2 = vld1q_f32(rows[i + 2] + at + c), r3 = vld1q_f32(rows[i + 3] + at + c);
      auto doubles = [](float32x4_t x) { return vreinterpretq_f64_f32(x); };
      const float64x2_t a = doubles(vtrn1q_f32(r0, r1)), b = doubles(vtrn2q_f32(r0, r1));
      const float64x2_t d = doubles(vtrn1q_f32(r2, r3)), e = doubles(vtrn2q_f32(r2, r3));
      vst1q_f32(to + c * stride + i, vreinterpretq_f32_f64(vtrn1q_f64(a, d)));
      vst1q_f32(to + (c + 1) * stride + i, vreinterpretq_f32_f64(vtrn1q_f64(b, e)));
      vst1q_f32(to + (c + 2) * stride + i, vreinterpretq_f32_f64(vtrn2q_f64(a, d)));
      vst1q_f32(to + (c + 3) * stride + i, vreinterpretq_f32_f64(vtrn2q_f64(b, e)));
    }
}

#define HAVE_FP16_CONVERSION
static void to_fp16(const float* from, uint16_t* to, int n) {
  int i = 0;
  for (; i + 4 <= n; i += 4) vst1_u16(to + i, vreinterpret_u16_f16(vcvt_f16_f32(vld1q_f32(from + i))));
  for (; i < n; i++) to[i] = vget_lane_u16(vreinterpret_u16_f16(vcvt_f16_f32(vdupq_n_f32(from[i]))), 0);
}
}  // namespace

#define VECTOR_TYPES_DEFINED
#include "vector.h"
