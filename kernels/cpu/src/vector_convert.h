// Conversions between fp32 and the element types, on vectors. Included once per instruction set, after vector.h.
#pragma once
#include "vector.h"

namespace {

#ifndef HAVE_FP16_CONVERSION
INLINE uint16_t fp16_of(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  const uint16_t sign = (u >> 16) & 0x8000;
  u &= 0x7fffffff;
  if (u > 0x7f800000) return sign | 0x7e00;
  if (u >= 0x477ff000) return sign | 0x7c00;
  if (u < 0x38800000) {  // subnormal: let fp32 addition do the rounding
    float magnitude;
    memcpy(&magnitude, &u, 4);
    magnitude += 0.5f;
    memcpy(&u, &magnitude, 4);
    return sign | (uint16_t)(u - 0x3f000000);
  }
  return sign | (uint16_t)((u + 0xc8000fff + ((u >> 13) & 1)) >> 13);
}
void to_fp16(const float* from, uint16_t* to, int n) {
  for (int i = 0; i < n; i++) to[i] = fp16_of(from[i]);
}
#endif

void vector_convert(int type, const float* from, void* to, int n) {
  if (type == FP32) {
    memcpy(to, from, n * sizeof(float));
  } else if (type == FP16) {
    to_fp16(from, (uint16_t*)to, n);
  } else {
    uint16_t* out = (uint16_t*)to;
    for (int i = 0; i < n; i++) {
      uint32_t u;
      memcpy(&u, &from[i], 4);
      const uint32_t rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
      out[i] = (u & 0x7fffffff) > 0x7f800000 ? (uint16_t)((u >> 16) | 0x40) : (uint16_t)rounded;
    }
  }
}

void vector_widen(int type, const void* from, float* to, int n) {
  if (type == FP32) {
    memcpy(to, from, n * sizeof(float));
  } else if (type == BF16) {
    for (int i = 0; i < n; i++) {
      const uint32_t bits = (uint32_t)((const uint16_t*)from)[i] << 16;
      memcpy(&to[i], &bits, 4);
    }
  } else {
    for (int i = 0; i < n; i += PAIR) {
      const char* at = (const char*)from + i * 2;
      const bool whole = i + PAIR <= n;  // fp16 pairs load in order
      const Two x = whole ? load_pair_of(FP16, at) : load_half_pair_of(FP16, at);
      *(vf_any*)&to[i] = x.a;
      if (whole) *(vf_any*)&to[i + LANES] = x.b;
    }
  }
}

}  // namespace
