// Partial attention over pages in 8 bits with AVX-512 VNNI, whose instruction multiplies 64 bytes and adds products of
// four neighbours.
//
// Queries and weights are not rounded to 8 bits: each is a high and a low byte with products of their own, so that the
// result differs from that of fp32 by some 2^-16.
//
//   logits   bytes of K, as unsigned numbers (+ 128), times signed bytes of the query
//   values   unsigned bytes of four tokens' weights, times the bytes of V of these tokens, which are transposed first
#include "avx512.h"
#include "prefetch.h"
#include "vector_convert.h"

namespace {

constexpr int CHANNELS = 64;  // of a vector
constexpr int COLUMNS = kMaxHeadDim / CHANNELS;
constexpr float MOST_QUERY = 32512.f, MOST_WEIGHT = 65535.f;  // as high and low bytes: 127 * 256, and 255 * 256 + 255

// The state of one segment. Sums stand in the order in which `transpose_values` leaves the channels.
struct ByteState {
  const Shape* shape;
  int columns;
  __mmask64 last;  // channels of the last column
  alignas(64) int8_t q[kMaxGroup][2][kMaxHeadDim];  // high bytes, low bytes
  int32_t bias[kMaxGroup][2];  // -128 * the sum of these bytes
  float step[kMaxGroup];  // of a query's numbers, with the softmax's scale in base 2
  alignas(64) float s[kMaxGroup * kMaxPageSize];
  alignas(64) uint8_t weights[kMaxGroup][2][kMaxPageSize];
  float weight_step[kMaxGroup];
  alignas(64) uint8_t keys[COLUMNS][16][CHANNELS];  // of sixteen tokens, transposed
  alignas(64) int8_t values[kMaxPageSize / 4][4][CHANNELS];  // one column of a page, transposed
  alignas(64) float o[kMaxGroup][COLUMNS][4][16];
  float maximum[kMaxGroup];
  vf sum[kMaxGroup];
};

INLINE __mmask64 live_channels(const ByteState& st, int column) {
  return column + 1 < st.columns ? ~(__mmask64)0 : st.last;
}

void begin_bytes(ByteState& st, const Segment& seg) {
  const int dim = st.shape->head_dim;
  alignas(64) float wide[kMaxHeadDim];
  for (int g = 0; g < st.shape->group; g++) {
    vector_widen(st.shape->type, (const char*)seg.q + g * seg.q_head_stride, wide, dim);
    float largest = 0;
    for (int d = 0; d < dim; d++) largest = fmaxf(largest, fabsf(wide[d]));
    const float inverse = largest > 1e-30f ? MOST_QUERY / largest : 0.f;
    st.step[g] = largest / MOST_QUERY * st.shape->scale * LOG2E;
    memset(st.q[g], 0, sizeof st.q[g]);
    for (int d = 0; d < dim; d++) {
      const int x = (int)nearbyintf(wide[d] * inverse), high = (x + 128) >> 8;
      st.q[g][0][d] = (int8_t)high;
      st.q[g][1][d] = (int8_t)(x - 256 * high);
    }
    for (int part = 0; part < 2; part++) {
      int sum = 0;
      for (int d = 0; d < dim; d++) sum += st.q[g][part][d];
      st.bias[g][part] = -128 * sum;
    }
    memset(st.o[g], 0, st.columns * sizeof st.o[g][0]);
    st.maximum[g] = -INFINITY;
    st.sum[g] = vf{};
  }
}

INLINE __m512i four_bytes(const void* from) {
  int32_t bytes;
  memcpy(&bytes, from, sizeof bytes);
  return _mm512_set1_epi32(bytes);
}

// Products of HEADS heads with sixteen keys, in steps of query and key. keys: the transposed columns.
template <int HEADS>
INLINE void key_products(ByteState& st, int head, int t) {
  constexpr int CHAINS =
      8 / (2 * HEADS) > 0 ? 8 / (2 * HEADS) : 1;  // sums side by side, as each one waits for its last
  __m512i sum[HEADS][2][CHAINS];
#pragma GCC unroll 4
  for (int g = 0; g < HEADS; g++)
#pragma GCC unroll 2
    for (int part = 0; part < 2; part++)
#pragma GCC unroll 4
      for (int i = 0; i < CHAINS; i++)
        sum[g][part][i] = i ? _mm512_setzero_si512() : _mm512_set1_epi32(st.bias[head + g][part]);
  for (int c = 0; c < st.columns; c++)
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) {
      const __m512i k = _mm512_load_si512(st.keys[c][i]);
#pragma GCC unroll 4
      for (int g = 0; g < HEADS; g++)
#pragma GCC unroll 2
        for (int part = 0; part < 2; part++) {
          __m512i& to = sum[g][part][i % CHAINS];
          to = _mm512_dpbusd_epi32(to, k, four_bytes(&st.q[head + g][part][c * CHANNELS + 4 * i]));
        }
    }
#pragma GCC unroll 4
  for (int g = 0; g < HEADS; g++) {
    __m512i high = sum[g][0][0], low = sum[g][1][0];
#pragma GCC unroll 4
    for (int i = 1; i < CHAINS; i++) {
      high = _mm512_add_epi32(high, sum[g][0][i]);
      low = _mm512_add_epi32(low, sum[g][1][i]);
    }
    const __m512 product = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(high, 8), low));
    _mm512_store_ps(&st.s[(head + g) * kMaxPageSize + t], product);
  }
}

// Products of all heads with a page's keys. Sixteen keys at a time are transposed, in cells of four channels, so that a
// lane of the sums is a key.
INLINE void byte_logits(ByteState& st, const char* keys, Prefetch& ahead) {
  const int64_t stride = st.shape->token_stride;
  const int group = st.shape->group;
  for (int t = 0; t < st.shape->page_size; t += 16) {
    for (int c = 0; c < st.columns; c++) {
      ahead.lines<16>();
      const float* rows[16];
      for (int i = 0; i < 16; i++) rows[i] = (const float*)(keys + (t + i) * stride + c * CHANNELS);
      transpose(rows, 0, (float*)st.keys[c], 16);  // Beyond the last channel the query is 0.
      for (int i = 0; i < 16; i++)
        _mm512_store_si512(st.keys[c][i],
                           _mm512_xor_si512(_mm512_load_si512(st.keys[c][i]), _mm512_set1_epi8((char)128)));
    }
    int g = 0;
    for (; g + 4 <= group; g += 4) key_products<4>(st, g, t);
    if (group - g == 3) key_products<3>(st, g, t);
    else if (group - g == 2) key_products<2>(st, g, t);
    else if (group - g == 1) key_products<1>(st, g, t);
  }
}

// Turns a head's products into weights relative to the running maximum, in bytes. Tokens that are left out get 0.
INLINE void byte_weights(ByteState& st, int head, const PageRef& page) {
  float* s = &st.s[head * kMaxPageSize];
  const int page_size = st.shape->page_size;
  const char* key_scales = page.keys + 2 * st.shape->value_offset;
  const char* value_scales = key_scales + 2 * page_size;
  for (int t = 0; t < page_size; t += LANES) *(vf*)&s[t] *= load_halves(key_scales + 2 * t) * splat(st.step[head]);
  for (int t = 0; t < page.skip; t++) s[t] = -INFINITY;
  for (int t = page.tokens; t < page_size; t++) s[t] = -INFINITY;
  const float best = largest_in(s, page_size);
  if (best > st.maximum[head] + RESCALE_ABOVE) {
    const float factor = exp2f(st.maximum[head] - best);
    st.maximum[head] = best;
    st.sum[head] *= factor;
    for (int c = 0; c < st.columns; c++)
      for (int j = 0; j < 4; j++) *(vf*)st.o[head][c][j] *= factor;
  }
  __mmask16 is_nan = 0;
  for (int t = 0; t < page_size; t += LANES) {
    const vf w = exp2_of(*(vf*)&s[t] - st.maximum[head]);
    st.sum[head] += w;
    // A token that is left out may have any scale.
    const __mmask16 live = _mm512_cmp_ps_mask((__m512)w, _mm512_setzero_ps(), _CMP_NEQ_OQ);
    const __m512 of_value = _mm512_maskz_mul_ps(live, (__m512)w, (__m512)load_halves(value_scales + 2 * t));
    is_nan |= _mm512_cmp_ps_mask(of_value, of_value, _CMP_UNORD_Q);
    _mm512_store_ps(&s[t], of_value);
  }
  const float largest = largest_in(s, page_size);
  const __m512 inverse = _mm512_set1_ps(largest > 1e-30f ? MOST_WEIGHT / largest : 0.f);
  st.weight_step[head] = is_nan ? NAN : largest / MOST_WEIGHT;
  for (int t = 0; t < page_size; t += LANES) {
    const __m512i x = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_load_ps(&s[t]), inverse));
    _mm_store_si128((__m128i*)&st.weights[head][0][t], _mm512_cvtepi32_epi8(_mm512_srli_epi32(x, 8)));
    _mm_store_si128((__m128i*)&st.weights[head][1][t], _mm512_cvtepi32_epi8(x));
  }
}

// Four tokens' bytes of 64 channels -> the four bytes of a channel side by side. Vector j has the channels 16 * i + 4 * j
// to 16 * i + 4 * j + 3, for i from 0 to 3.
INLINE void transpose_values(const __m512i* rows, int8_t (*to)[CHANNELS]) {
  const __m512i low01 = _mm512_unpacklo_epi8(rows[0], rows[1]), high01 = _mm512_unpackhi_epi8(rows[0], rows[1]);
  const __m512i low23 = _mm512_unpacklo_epi8(rows[2], rows[3]), high23 = _mm512_unpackhi_epi8(rows[2], rows[3]);
  _mm512_store_si512(to[0], _mm512_unpacklo_epi16(low01, low23));
  _mm512_store_si512(to[1], _mm512_unpackhi_epi16(low01, low23));
  _mm512_store_si512(to[2], _mm512_unpacklo_epi16(high01, high23));
  _mm512_store_si512(to[3], _mm512_unpackhi_epi16(high01, high23));
}

// Adds the weighted values of one column, of tokens in groups of four from `first` to `end`.
template <int HEADS>
INLINE void add_column(ByteState& st, int head, int column, int first, int end) {
  __m512i high[HEADS][4], low[HEADS][4];
#pragma GCC unroll 2
  for (int g = 0; g < HEADS; g++)
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) high[g][j] = low[g][j] = _mm512_setzero_si512();
  for (int i = first; i < end; i++) {
    __m512i w_high[HEADS], w_low[HEADS];
#pragma GCC unroll 2
    for (int g = 0; g < HEADS; g++) {
      w_high[g] = four_bytes(&st.weights[head + g][0][4 * i]);
      w_low[g] = four_bytes(&st.weights[head + g][1][4 * i]);
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
      const __m512i v = _mm512_load_si512(st.values[i][j]);
#pragma GCC unroll 2
      for (int g = 0; g < HEADS; g++) {
        high[g][j] = _mm512_dpbusd_epi32(high[g][j], w_high[g], v);
        low[g][j] = _mm512_dpbusd_epi32(low[g][j], w_low[g], v);
      }
    }
  }
#pragma GCC unroll 2
  for (int g = 0; g < HEADS; g++)
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
      const __m512i sum = _mm512_add_epi32(_mm512_slli_epi32(high[g][j], 8), low[g][j]);
      *(vf*)st.o[head + g][column][j] += (vf)_mm512_cvtepi32_ps(sum) * splat(st.weight_step[head + g]);
    }
}

INLINE void byte_values(ByteState& st, const PageRef& page, Prefetch& ahead) {
  const int64_t stride = st.shape->token_stride;
  const int first = page.skip / 4, end = (page.tokens + 3) / 4, group = st.shape->group;
  for (int c = 0; c < st.columns; c++) {
    const char* at = page.keys + st.shape->value_offset + c * CHANNELS;
    const __mmask64 live = live_channels(st, c);
    for (int i = first; i < end; i++) {
      ahead.lines<4>();
      __m512i rows[4];
#pragma GCC unroll 4
      for (int u = 0; u < 4; u++) rows[u] = _mm512_maskz_loadu_epi8(live, at + (4 * i + u) * stride);
      transpose_values(rows, st.values[i]);
    }
    int g = 0;
    for (; g + 2 <= group; g += 2) add_column<2>(st, g, c, first, end);
    if (g < group) add_column<1>(st, g, c, first, end);
  }
  ahead.scales(4 * st.shape->page_size);
}

void end_bytes(const ByteState& st, const Segment& seg) {
  const int dim = st.shape->head_dim;
  for (int g = 0; g < st.shape->group; g++) {
    const float sum = sum_of(st.sum[g]);
    float* out = seg.out + g * dim;
    if (!(sum > 0)) {  // no page, or every logit was -inf
      memset(out, 0, dim * sizeof(float));
      seg.lse[g] = -INFINITY;
      continue;
    }
    seg.lse[g] = (st.maximum[g] + log2f(sum)) * LN2;
    const float norm = 1.f / sum;
    for (int d = 0; d < dim; d++) out[d] = st.o[g][d / CHANNELS][d % 16 / 4][d % CHANNELS / 16 * 4 + d % 4] * norm;
  }
}

void attend_bytes(const Shape* shape, const Segment* segs, int segments, const PageRef* pages, int page_count) {
  ByteState st;
  st.shape = shape;
  st.columns = (shape->head_dim + CHANNELS - 1) / CHANNELS;
  st.last = ~(__mmask64)0 >> (st.columns * CHANNELS - shape->head_dim);
  for (int i = 0; i < segments; i++) {
    const Segment& seg = segs[i];
    begin_bytes(st, seg);
    for (int p = seg.first; p < seg.first + seg.count; p++) {
      const int next = p + shape->prefetch_distance;
      Prefetch ahead{pages[next < page_count ? next : p].keys, shape->prefetch_order};
      byte_logits(st, pages[p].keys, ahead);
      for (int g = 0; g < shape->group; g++) byte_weights(st, g, pages[p]);
      byte_values(st, pages[p], ahead);
    }
    end_bytes(st, seg);
  }
}

}  // namespace

extern "C" HB_HIDDEN AttendFn hb_vnni_attend(const Shape* shape) {
  return shape->kv_type == INT8 ? attend_bytes : nullptr;
}
