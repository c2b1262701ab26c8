#include "kv_format.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace hb {
namespace {

constexpr uint16_t kHalfNan = 0x7e00;
constexpr float kRound = 12582912.f;  // 1.5 * 2^23: adding it leaves the rounded value in the lowest bits

uint16_t* scale_at(const hb_model& model, const char* head, Part part, int64_t token) {
  return (uint16_t*)(head + 2 * part_bytes(model)) + part * model.page_size + token;
}

// fp16 that is not negative, and not inf.
float widened(uint16_t half) {
  const uint32_t bits = (uint32_t)half << 13;
  float x;
  std::memcpy(&x, &bits, 4);
  return half > 0x7c00 ? NAN : x * 5.192296858534828e33f;  // 2^112
}

// The least fp16 that is not below x, which is not negative; NaN where there is none.
uint16_t rounded_up(float x) {
  if (!(x <= 65504.f)) return kHalfNan;
  const float small = x * 1.925929944387236e-34f;  // 2^-112: the exponents of fp16; subnormal where fp16 is
  uint32_t bits;
  std::memcpy(&bits, &small, 4);
  uint16_t half = (uint16_t)(bits >> 13);
  while (widened(half) < x) half++;
  return half;
}

// Integer arithmetic lets the compiler vectorize the loops. A value that is not finite makes the scale NaN.
uint16_t quantize(const float* from, int8_t* to, int n) {
  int32_t largest_bits = 0;
  for (int d = 0; d < n; d++) {
    int32_t bits;
    std::memcpy(&bits, &from[d], 4);
    largest_bits = std::max(largest_bits, bits & 0x7fffffff);
  }
  float largest;
  std::memcpy(&largest, &largest_bits, 4);
  const uint16_t scale = rounded_up(largest / 127.f);
  if (!scale || scale == kHalfNan) {
    std::memset(to, 0, n);
    return scale;
  }
  const float inverse = 1.f / widened(scale);
  for (int d = 0; d < n; d++) {
    const float x = from[d] * inverse + kRound;
    int32_t bits;
    std::memcpy(&bits, &x, 4);
    to[d] = (int8_t)bits;
  }
  return scale;
}

}  // namespace

void encode_row(const hb_model& model, const Isa& isa, const char* from, char* head, Part part, int64_t token) {
  const int64_t row = kv_row_bytes(model);
  char* to = head + part * part_bytes(model) + token * row;
  if (kv_type(model) != INT8) {
    std::memcpy(to, from, row);
    return;
  }
  float wide[kMaxHeadDim];
  isa.widen(model.type, from, wide, model.head_dim);
  *scale_at(model, head, part, token) = quantize(wide, (int8_t*)to, model.head_dim);
}

void decode_row(const hb_model& model, const Isa& isa, const char* head, Part part, int64_t token, float* to) {
  const char* from = head + part * part_bytes(model) + token * kv_row_bytes(model);
  if (kv_type(model) != INT8) {
    isa.widen(model.type, from, to, model.head_dim);
    return;
  }
  const float scale = widened(*scale_at(model, head, part, token));
  for (int d = 0; d < model.head_dim; d++) to[d] = scale * (float)((const int8_t*)from)[d];
}

const char* key_of(const hb_model& model, const Isa& isa, const char* head, int64_t token, float* room) {
  if (kv_type(model) != INT8) return head + token * kv_row_bytes(model);
  float wide[kMaxHeadDim];
  decode_row(model, isa, head, KEYS_PART, token, wide);
  isa.convert(model.type, wide, room, model.head_dim);
  return (const char*)room;
}

void copy_token(const hb_model& model, const hb_cache& cache, const char* from_head, int64_t from, char* to_head,
                int64_t to) {
  for (const Part part : {KEYS_PART, VALUES_PART}) {
    const int64_t rows = part * cache.value_offset;
    std::memcpy(to_head + rows + to * cache.token_stride, from_head + rows + from * cache.token_stride,
                kv_row_bytes(model));
    if (kv_type(model) == INT8) *scale_at(model, to_head, part, to) = *scale_at(model, from_head, part, from);
  }
}

}  // namespace hb
