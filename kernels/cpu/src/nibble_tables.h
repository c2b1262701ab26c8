// Tables that look up codes of digests (kernels/codes.py) by nibbles. Each head has, for every four planes, the tables
// [4][16] of their low codes, then those of their high codes; planes beyond the last one have zeros. Included once per
// ISA that uses them.
#pragma once
#include <stdint.h>

#include "code_levels.h"
#include "isa.h"

namespace {

constexpr int kMostEntry = 42;  // the sum of six entries fits a byte

int nibble_table_bytes(int planes) { return (planes + 3) / 4 * 128; }

// An entry sums, over the channels of a code, the channel's level minus its lowest level, in whole steps.
float nibble_tables(const float* x, int fine, int coded, uint8_t* tables, float* least) {
  float reach[kMaxHeadDim], widest = 0, sum = 0;  // half of what a channel's levels can give
  for (int d = 0; d < fine; d++) reach[d] = __builtin_fabsf(x[d]) * kOuter;
  for (int d = fine; d < coded; d++) reach[d] = __builtin_fabsf(x[d]) * kCoarse;
  auto widen = [&widest](float together) { widest = together > widest ? together : widest; };
  for (int d = 0; d < coded; d++) sum += reach[d];
  for (int d = 0; d < fine; d += 2) widen(reach[d] + reach[d + 1]);
  for (int d = fine; d < coded; d += 4) widen(reach[d] + reach[d + 1] + reach[d + 2] + reach[d + 3]);
  // Rounding up to half a step per channel must not exceed kMostEntry.
  const float step = 2 * widest / (kMostEntry - 2), finer = step > 1e-37f ? 1.f / step : 0.f;
  int32_t whole[kMaxHeadDim], third[kMaxHeadDim], second[kMaxHeadDim];
  constexpr float kInnerShare = kInner / kOuter;
  float lost = 0;  // steps that rounding takes from a token's sum in the mean, the same of every page
  for (int d = 0; d < coded; d++) {
    const float steps = reach[d] * finer;
    whole[d] = (int32_t)(2 * steps + 0.5f);
    third[d] = (int32_t)((1 + kInnerShare) * steps + 0.5f);
    second[d] = (int32_t)((1 - kInnerShare) * steps + 0.5f);
    const float high = 2 * steps - whole[d], inner = 2 * steps - third[d] - second[d];
    lost += d < fine ? kOuterEach * high + (0.5f - kOuterEach) * inner : high / 2;
  }
  auto at = [tables](int code) { return tables + code / 8 * 128 + code % 2 * 64 + code / 2 % 4 * 16; };
  // Its four levels in ascending order: bytes of a word.
  auto levels = [&](int d) {
    const uint32_t rising = (uint32_t)second[d] << 8 | (uint32_t)third[d] << 16 | (uint32_t)whole[d] << 24;
    return x[d] < 0 ? __builtin_bswap32(rising) : rising;
  };
  for (int d = 0; d < fine; d += 2) {
    const uint32_t first = levels(d), second_channel = levels(d + 1);
    uint8_t* table = at(d / 2);
#pragma GCC unroll 4
    for (int n = 0; n < 4; n++) {
      const uint32_t four = first + (second_channel >> 8 * n & 0xff) * 0x01010101u;  // no byte overflows
      __builtin_memcpy(table + 4 * n, &four, 4);
    }
  }
  constexpr uint64_t kBits[3] = {0xff00ff00ff00ff00, 0xffff0000ffff0000, 0xffffffff00000000};
  for (int d = fine; d < coded; d += 4) {
    uint64_t eight = 0;
    for (int i = 0; i < 3; i++)
      eight += (x[d + i] < 0 ? ~kBits[i] : kBits[i]) & (uint64_t)whole[d + i] * 0x0101010101010101u;
    const uint64_t last = (uint64_t)whole[d + 3] * 0x0101010101010101u;
    const uint64_t low = eight + (x[d + 3] < 0 ? last : 0), high = eight + (x[d + 3] < 0 ? 0 : last);
    uint8_t* table = at(fine / 2 + (d - fine) / 4);
    __builtin_memcpy(table, &low, 8);
    __builtin_memcpy(table + 8, &high, 8);
  }
  *least = lost * step - sum;
  return step;
}

int nibble_steps(const uint8_t* tables, const uint8_t* codes, int planes) {
  int sum = 0;
  for (int p = 0; p < planes; p++, codes += 16) {
    const uint8_t* table = tables + p / 4 * 128 + p % 4 * 16;
    sum += table[*codes & 15] + table[64 + (*codes >> 4)];
  }
  return sum;
}

}  // namespace
