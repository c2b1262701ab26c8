// Rotation of a query, by the same matrix as the keys in digests in codes (kernels/codes.py). Included once per ISA.
#pragma once
#include <stdint.h>

#include "isa.h"

namespace {

struct Flips {
  float sign[kMaxHeadDim];
  constexpr Flips() : sign() {
    for (int i = 0; i < kMaxHeadDim; i++) sign[i] = ((uint64_t)i * 2654435761u >> 16) & 1 ? 1.f : -1.f;
  }
};
constexpr Flips kFlips;

// One stage of Hadamard's transform. Inlined, as the short ones are vectorized only where `half` is known.
inline __attribute__((always_inline)) void mix(float* x, int n, int half) {
  for (int i = 0; i < n; i += 2 * half)
    for (int j = i; j < i + half; j++) {
      const float a = x[j], b = x[j + half];
      x[j] = a + b;
      x[j + half] = a - b;
    }
}

// Flips signs, then applies Hadamard's transform to blocks of the largest power of two that divides n, a multiple of
// 16.
void rotate(float* x, int n) {
  const int block = n & -n;
  const float norm = 1.f / __builtin_sqrtf((float)block);
  for (int i = 0; i < n; i++) x[i] *= kFlips.sign[i] * norm;
  mix(x, n, 1);
  mix(x, n, 2);
  mix(x, n, 4);
  mix(x, n, 8);
  for (int half = 16; half < block; half *= 2) mix(x, n, half);
}

}  // namespace
