// Vectors of fp32 by GCC's and Clang's vector extensions, which the kernels vector_*.h use. Included once per ISA,
// which defines
//   LANE_BYTES     bytes of a vector register
//   ACCUMULATORS   registers for one tile of logits (8 or 16)
//   REGISTERS      vector registers of the ISA
// and, if it has better instructions, versions of its own of the functions under #ifndef HAVE_* (then it also defines
// vf, Two and VECTOR_TYPES_DEFINED).
//
// bf16 is widened by shift and mask, not fed to vdpbf16ps: that instruction measured half the speed of fp32 FMA.
// A "pair" is 2 * LANES elements, loaded as two fp32 vectors. For bf16 they hold the even and the odd elements, else
// the lower and the upper half; queries go through the same load, so that dot products do not care. With K in 8 bits
// queries are widened in order first.
#pragma once
#include <math.h>
#include <string.h>

#include "isa.h"

#define INLINE static inline __attribute__((always_inline))

// Keeps a loaded vector in a register: otherwise gcc folds the load into every multiplication that uses it, and the
// load ports become the limit (logits of four heads on AVX2: 17 % slower).
#if defined(__AVX512F__)
#define IN_REGISTER(x) asm("" : "+v"(x))
#elif defined(__x86_64__)
#define IN_REGISTER(x) asm("" : "+x"(x))
#elif defined(__aarch64__)
#define IN_REGISTER(x) asm("" : "+w"(x))
#else
#define IN_REGISTER(x)
#endif

namespace {

constexpr int LANES = LANE_BYTES / 4;
constexpr int PAIR = 2 * LANES;
constexpr float RESCALE_ABOVE = 8.f;  // rescale the sums only when the maximum grows by more than 2^8
constexpr float LOG2E = 1.44269504f, LN2 = 0.69314718f;

#ifndef VECTOR_TYPES_DEFINED
typedef float vf __attribute__((vector_size(LANE_BYTES), may_alias));
struct Two {
  vf a, b;
};
#endif
typedef int32_t vi __attribute__((vector_size(LANE_BYTES), may_alias));
typedef float vf_any __attribute__((vector_size(LANE_BYTES), aligned(1), may_alias));
typedef int32_t vi_any __attribute__((vector_size(LANE_BYTES), aligned(1), may_alias));

INLINE vf splat(float x) { return x - vf{}; }  // minus zero is exact and folds away; plus zero would not
// NaN in `a` gives `b`: a masked or overflowed logit never poisons a sum.
INLINE vf larger(vf a, vf b) { return a > b ? a : b; }

#ifndef HAVE_LOADS
#define HAVE_LOADS
typedef uint16_t vh_any __attribute__((vector_size(LANE_BYTES / 2), aligned(1), may_alias));
// fp16 -> fp32 without F16C: move the bits, correct the exponent by a multiplication, restore inf and NaN.
INLINE vf widen_half(const char* p) {
  const vi x = __builtin_convertvector(*(const vh_any*)p, vi);
  const vi magnitude = x & 0x7fff;
  const vf value = (vf)(magnitude << 13) * 5.192296858534828e33f;  // 2^112
  const vi special = magnitude > 0x7bff;
  const vi bits = special ? ((vi)(magnitude << 13) | 0x7f800000) : (vi)value;
  return (vf)(bits | ((x & 0x8000) << 16));
}
typedef int8_t vb_any __attribute__((vector_size(LANES), aligned(1), may_alias));
INLINE vf widen_bytes(const char* p) { return __builtin_convertvector(*(const vb_any*)p, vf); }
INLINE vf load_halves(const char* p) { return widen_half(p); }
INLINE Two load_pair_of(int type, const char* p) {
  if (type == BF16) {
    const vi x = *(const vi_any*)p;
    return {(vf)(x << 16), (vf)(x & (vi{} + (int32_t)0xffff0000))};
  }
  if (type == FP16) return {widen_half(p), widen_half(p + LANE_BYTES / 2)};
  if (type == INT8) return {widen_bytes(p), widen_bytes(p + LANES)};
  return {*(const vf_any*)p, *(const vf_any*)(p + LANE_BYTES)};
}
// The first half of a pair, zero elsewhere. Only vectors of 16 lanes meet it: dimensions are multiples of 16.
INLINE Two load_half_pair_of(int, const char*) { return {vf{}, vf{}}; }
#endif

#ifndef HAVE_EXP2
// 2^x to 1e-6; 0 below -126 (and for NaN). x <= 126.
INLINE vf exp2_of(vf x) {
  const vi live = x >= splat(-126.f);
  x = live ? x : splat(-126.f);
  const vf shifted = x + splat(12582912.f);  // 1.5 * 2^23: the integer part ends up in the mantissa
  const vf f = x - (shifted - splat(12582912.f));
  vf p = splat(1.3333558e-3f);
  p = p * f + splat(9.6181291e-3f);
  p = p * f + splat(5.5504109e-2f);
  p = p * f + splat(2.4022651e-1f);
  p = p * f + splat(6.9314718e-1f);
  p = p * f + splat(1.f);
  const vi exponent = ((vi)shifted - (vi)splat(12582912.f)) << 23;
  return (vf)(((vi)p + exponent) & live);
}
#endif

typedef float quarter __attribute__((vector_size(16), may_alias));
INLINE float sum_of(vf a) {
  quarter s = *(const quarter*)&a;
  for (int i = 1; i < LANES / 4; i++) s += ((const quarter*)&a)[i];
  return (s[0] + s[1]) + (s[2] + s[3]);
}
INLINE float largest_of(vf a) {
  quarter s = *(const quarter*)&a;
  for (int i = 1; i < LANES / 4; i++) {
    const quarter other = ((const quarter*)&a)[i];
    s = other > s ? other : s;
  }
  const float low = s[0] > s[1] ? s[0] : s[1], high = s[2] > s[3] ? s[2] : s[3];
  return low > high ? low : high;
}

// Returns the largest of n numbers, which are whole vectors; ignores NaN.
INLINE float largest_in(const float* s, int n) {
  vf top = splat(-INFINITY);
  for (int t = 0; t < n; t += LANES) top = larger(*(const vf*)&s[t], top);
  return largest_of(top);
}

#ifndef HAVE_REDUCE
// [4 heads][T tokens] accumulators -> T sums per head. Unused heads hold zeros.
template <int HEADS, int TOKENS>
INLINE void reduce(vf (&acc)[HEADS][TOKENS], float* s, int s_stride) {
  for (int g = 0; g < HEADS; g++)
    for (int u = 0; u < TOKENS; u++) s[g * s_stride + u] = sum_of(acc[g][u]);
}
#endif

// Element size by type, as a constant where the type is one.
template <int TYPE> constexpr int kSize = TYPE == FP32 ? 4 : TYPE == INT8 ? 1 : 2;

}  // namespace
