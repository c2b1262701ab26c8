// Byte dot products on vectors of 16 bytes, over an instruction that multiplies them. Included once per instruction
// set, which has a struct with
//   add            sum of int32 lanes += the products of 16 signed bytes, each in some lane
//   sums<HEADS>    sums of one segment, see ByLanes
//
// Bytes are offset by 128. Flipping their top bit takes the offset back and makes them signed, so that no bias is left.
#pragma once
#include <arm_neon.h>

#include "isa.h"

#define INLINE static inline __attribute__((always_inline))

namespace {

INLINE int8x16_t signed_bytes(const uint8_t* p) { return vreinterpretq_s8_u8(veorq_u8(vld1q_u8(p), vdupq_n_u8(0x80))); }

// Four vectors of four lanes -> one vector of their sums.
INLINE int32x4_t sums_of(const int32x4_t* a) { return vpaddq_s32(vpaddq_s32(a[0], a[1]), vpaddq_s32(a[2], a[3])); }

template <class Product>
struct ByLanes {
  // sums[g][r]: product of row r's bytes and head g's weights.
  template <int HEADS>
  INLINE void sums(const int8_t* const* weights, const uint8_t* const* rows, int width, int32x4_t* sums) {
    int32x4_t acc[HEADS][kScoreTile];
#pragma GCC unroll 16
    for (int i = 0; i < HEADS * kScoreTile; i++) acc[i / kScoreTile][i % kScoreTile] = vdupq_n_s32(0);
    for (int i = 0; i < width; i += 16) {
      int8x16_t row[kScoreTile];
#pragma GCC unroll 4
      for (int r = 0; r < kScoreTile; r++) row[r] = signed_bytes(rows[r] + i);
#pragma GCC unroll 4
      for (int g = 0; g < HEADS; g++) {
        const int8x16_t of_head = vld1q_s8(weights[g] + i);
#pragma GCC unroll 4
        for (int r = 0; r < kScoreTile; r++) acc[g][r] = Product::add(acc[g][r], row[r], of_head);
      }
    }
#pragma GCC unroll 4
    for (int g = 0; g < HEADS; g++) sums[g] = sums_of(acc[g]);
  }
};

// Scores rows for the heads first..first + HEADS - 1. The first heads fetch the rows that are next.
template <class Product, int HEADS>
INLINE void byte_scores(const ByteWeights* w, int first, const uint8_t* const* rows, const uint8_t* const* upcoming,
                        float* out) {
  float32x4_t total[HEADS];
#pragma GCC unroll 4
  for (int g = 0; g < HEADS; g++) total[g] = vdupq_n_f32(0);
  for (int r = 0; first == 0 && r < kScoreTile; r++) __builtin_prefetch(upcoming[r] + w->scales_at, 0, 2);
  for (int s = 0; s < w->segments; s++) {
    const int64_t at = (int64_t)s * w->width;
    const int8_t* weights[HEADS];
    const uint8_t* segment[kScoreTile];
    for (int g = 0; g < HEADS; g++) weights[g] = w->weights + ((int64_t)(first + g) * w->segments + s) * w->width;
    float scales[kScoreTile];
#pragma GCC unroll 4
    for (int r = 0; r < kScoreTile; r++) {
      segment[r] = rows[r] + at;
      scales[r] = ((const float*)(rows[r] + w->scales_at))[s];
      for (int b = 0; first == 0 && b < w->width; b += 64) __builtin_prefetch(upcoming[r] + at + b, 0, 2);
    }
    int32x4_t sums[HEADS];
    Product::template sums<HEADS>(weights, segment, w->width, sums);
#pragma GCC unroll 4
    for (int g = 0; g < HEADS; g++) {
      const float step = w->step[(first + g) * w->segments + s];
      total[g] = vfmaq_f32(total[g], vcvtq_f32_s32(sums[g]), vmulq_n_f32(vld1q_f32(scales), step));
    }
  }
#pragma GCC unroll 4
  for (int g = 0; g < HEADS; g++) vst1q_f32(out + (first + g) * kScoreTile, total[g]);
}

template <class Product>
void byte_dots(const ByteWeights* w, const uint8_t* const* rows, const uint8_t* const* upcoming, float* out) {
  byte_scores<Product, 1>(w, 0, rows, upcoming, out);
}

template <class Product>
void byte_heads(const ByteWeights* w, int heads, const uint8_t* const* rows, const uint8_t* const* upcoming,
                float* out) {
  int g = 0;
  for (; g + 4 <= heads; g += 4) byte_scores<Product, 4>(w, g, rows, upcoming, out);
  for (; g + 2 <= heads; g += 2) byte_scores<Product, 2>(w, g, rows, upcoming, out);
  for (; g < heads; g++) byte_scores<Product, 1>(w, g, rows, upcoming, out);
}

}  // namespace
