// Partial attention over pages in 8 bits with AVX-512 VNNI, whose instruction multiplies 64 bytes and adds products of
// four neighbours.
//
// Queries and weights are not rounded to 8 bits: each is a high and a low byte with products of their own, so that the
// result differs from that of fp32 by some 2^-16.
//
//   logits   bytes of K, as unsigned numbers (+ 128), times signed bytes of the query
//   values   unsigned bytes of four tokens' weights, times the bytes of V of these tokens, which are interleaved first
#include "avx512.h"
#include "byte_attend.h"

namespace {

constexpr int CHANNELS = 64;  // of a vector
constexpr int COLUMNS = kMaxHeadDim / CHANNELS;

// Sums stand in the order in which `interleaved` leaves the channels.
struct ByteKernel : Block {
  static constexpr float MOST_QUERY = 32512.f, MOST_WEIGHT = 65535.f;  // 127 * 256, and 255 * 256 + 255
  int columns;
  alignas(64) int8_t q[kMaxGroup][2][COLUMNS][4][CHANNELS];  // high bytes, low bytes; in the order of `transpose_cells`
  int32_t bias[kMaxGroup];  // -128 * the sum of the query's numbers
  alignas(64) uint8_t weights[kMaxGroup][TILES / 2][64];  // of two tiles, as `round_weights` leaves them

  void set_shape(const Shape* of) {
    shape = of;
    columns = (of->head_dim + CHANNELS - 1) / CHANNELS;
    width = columns * CHANNELS;
  }
  int place(int d) const { return d / CHANNELS * CHANNELS + d % 16 / 4 * 16 + d % CHANNELS / 16 * 4 + d % 4; }
  void round_query(int head, const float* wide, float inverse);
  void products(int tile);
  void round_weights(int head, float inverse);
  void add_values();
};

INLINE int channels_of(const ByteKernel& st, int column) {
  const int left = st.shape->head_dim - column * CHANNELS;
  return left < CHANNELS ? left : CHANNELS;
}

INLINE __m512i four_bytes(const void* from) {
  int32_t bytes;
  memcpy(&bytes, from, sizeof bytes);
  return _mm512_set1_epi32(bytes);
}

// Rounds a query to high and low bytes.
void ByteKernel::round_query(int head, const float* wide, float inverse) {
  alignas(64) int8_t high[kMaxHeadDim] = {}, low[kMaxHeadDim] = {};
  __m512i sum = _mm512_setzero_si512();
  for (int d = 0; d < shape->head_dim; d += 16) {
    const __m512i x = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_load_ps(&wide[d]), _mm512_set1_ps(inverse)));
    sum = _mm512_add_epi32(sum, x);
    const __m512i nearest = _mm512_srai_epi32(_mm512_add_epi32(x, _mm512_set1_epi32(128)), 8);  // low bytes are signed
    _mm_store_si128((__m128i*)&high[d], _mm512_cvtepi32_epi8(nearest));
    _mm_store_si128((__m128i*)&low[d], _mm512_cvtepi32_epi8(x));
  }
  bias[head] = -128 * _mm512_reduce_add_epi32(sum);
  const __m512i blocks = _mm512_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12);
  for (int c = 0; c < columns; c++)
    for (int i = 0; i < 4; i++) {
      const __m512i cells = _mm512_add_epi32(blocks, _mm512_set1_epi32(i));
      const __m512i h = _mm512_load_si512(&high[c * CHANNELS]), l = _mm512_load_si512(&low[c * CHANNELS]);
      _mm512_store_si512(q[head][0][c][i], _mm512_permutexvar_epi32(cells, h));
      _mm512_store_si512(q[head][1][c][i], _mm512_permutexvar_epi32(cells, l));
    }
}

// Four tokens' bytes of 64 channels -> vectors of cells of four channels: vector c has cells c, 4 + c, 8 + c and 12 + c
// of the first token, of the second one, and so on, each cell beside that of the next token.
INLINE void transpose_cells(const char* row, int64_t stride, __m512i* to) {
  __m512 rows[4];
#pragma GCC unroll 4
  for (int u = 0; u < 4; u++)  // The last row may read on into V; beyond the last channel the query is 0.
    rows[u] = _mm512_castsi512_ps(_mm512_xor_si512(_mm512_loadu_si512(row + u * stride), _mm512_set1_epi8((char)128)));
  const __m512d low01 = _mm512_castps_pd(_mm512_unpacklo_ps(rows[0], rows[1]));
  const __m512d low23 = _mm512_castps_pd(_mm512_unpacklo_ps(rows[2], rows[3]));
  const __m512d high01 = _mm512_castps_pd(_mm512_unpackhi_ps(rows[0], rows[1]));
  const __m512d high23 = _mm512_castps_pd(_mm512_unpackhi_ps(rows[2], rows[3]));
  to[0] = _mm512_castpd_si512(_mm512_unpacklo_pd(low01, low23));
  to[1] = _mm512_castpd_si512(_mm512_unpackhi_pd(low01, low23));
  to[2] = _mm512_castpd_si512(_mm512_unpacklo_pd(high01, high23));
  to[3] = _mm512_castpd_si512(_mm512_unpackhi_pd(high01, high23));
}

// Blocks of four lanes of two vectors -> sums of neighbouring blocks, those of `a` first.
INLINE __m512i sum_blocks(__m512i a, __m512i b) {
  return _mm512_add_epi32(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xdd));
}

// Products of HEADS heads with eight keys: sums of two blocks of lanes each give a key's product, without the bias.
template <int HEADS>
INLINE void eight_keys(const ByteKernel& st, int head, const char* keys, Prefetch* ahead, __m512i* products) {
  const int64_t stride = st.shape->token_stride;
  __m512i sum[HEADS][2][2];
#pragma GCC unroll 4
  for (int g = 0; g < HEADS; g++)
#pragma GCC unroll 2
    for (int u = 0; u < 2; u++) sum[g][u][0] = sum[g][u][1] = _mm512_setzero_si512();
  for (int c = 0; c < st.columns; c++) {
    if (ahead)
      for (int i = 0; i < channels_of(st, c); i += 16) ahead->lines<2>();
    __m512i k[2][4];
    transpose_cells(keys + c * CHANNELS, stride, k[0]);
    transpose_cells(keys + c * CHANNELS + 4 * stride, stride, k[1]);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++)
#pragma GCC unroll 4
      for (int g = 0; g < HEADS; g++)
#pragma GCC unroll 2
        for (int part = 0; part < 2; part++) {
          __m512i q = _mm512_load_si512(&st.q[head + g][part][c][i]);
          IN_REGISTER(q);
#pragma GCC unroll 2
          for (int u = 0; u < 2; u++) sum[g][u][part] = _mm512_dpbusd_epi32(sum[g][u][part], k[u][i], q);
        }
  }
#pragma GCC unroll 4
  for (int g = 0; g < HEADS; g++) {
    __m512i both[2];
#pragma GCC unroll 2
    for (int u = 0; u < 2; u++) both[u] = _mm512_add_epi32(_mm512_slli_epi32(sum[g][u][0], 8), sum[g][u][1]);
    products[g] = sum_blocks(both[0], both[1]);
  }
}

// Products of HEADS heads with the keys of a tile, in steps of the query. Keys have their scales.
template <int HEADS>
INLINE void key_products(ByteKernel& st, int head, int i, Prefetch* ahead) {
  const Tile& tile = st.tiles[i];
  __m512i first[HEADS], second[HEADS];
  eight_keys<HEADS>(st, head, tile.keys, ahead, first);
  eight_keys<HEADS>(st, head, tile.keys + 8 * st.shape->token_stride, ahead, second);
  const __m512 scales = (__m512)load_halves(tile.key_scales);
#pragma GCC unroll 4
  for (int g = 0; g < HEADS; g++) {
    const __m512i sum = _mm512_add_epi32(sum_blocks(first[g], second[g]), _mm512_set1_epi32(st.bias[head + g]));
    _mm512_store_ps(st.s[head + g][i], _mm512_mul_ps(_mm512_cvtepi32_ps(sum), scales));
  }
}

void ByteKernel::products(int tile) {
  for_heads(shape->group,
            [&](auto heads, int g) { key_products<heads.value>(*this, g, tile, g ? nullptr : &tiles[tile].ahead); });
}

// A vector has the weights of two tiles as bytes of four tokens: cell 4 * i has the high bytes of tokens 4 * i to
// 4 * i + 3 of the first tile, the next cell those of the second tile, and two cells the low bytes.
void ByteKernel::round_weights(int head, float inverse) {
  const __m512 factor = _mm512_set1_ps(inverse);
  for (int i = 0; i < count; i += 2) {
    const __m512i a = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_load_ps(s[head][i]), factor));
    __m512i b = _mm512_setzero_si512();
    if (i + 1 < count) b = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_load_ps(s[head][i + 1]), factor));
    const __m512i both = _mm512_packus_epi32(a, b);
    const __m512i high = _mm512_srli_epi16(both, 8), low = _mm512_and_si512(both, _mm512_set1_epi16(0xff));
    _mm512_store_si512(weights[head][i / 2], _mm512_packus_epi16(high, low));
  }
}

// Four tokens' bytes of 64 channels -> vectors FIRST.. of four, in which the four bytes of a channel stand side by side.
// Vector j has the channels 16 * i + 4 * j to 16 * i + 4 * j + 3, for i from 0 to 3.
template <int FIRST, int VECTORS>
INLINE void interleaved(const __m512i* rows, __m512i* to) {
  if constexpr (FIRST == 0) {
    const __m512i low01 = _mm512_unpacklo_epi8(rows[0], rows[1]), low23 = _mm512_unpacklo_epi8(rows[2], rows[3]);
    to[0] = _mm512_unpacklo_epi16(low01, low23);
    to[1] = _mm512_unpackhi_epi16(low01, low23);
  }
  if constexpr (FIRST + VECTORS == 4) {
    const __m512i high01 = _mm512_unpackhi_epi8(rows[0], rows[1]), high23 = _mm512_unpackhi_epi8(rows[2], rows[3]);
    to[2 - FIRST] = _mm512_unpacklo_epi16(high01, high23);
    to[3 - FIRST] = _mm512_unpackhi_epi16(high01, high23);
  }
}

// Adds the weighted values of one column to the sums of HEADS heads: those of VECTORS vectors from FIRST on.
template <int HEADS, int FIRST, int VECTORS>
INLINE void add_half(ByteKernel& st, int head, int column, int doses) {
  __m512i high[HEADS][VECTORS], low[HEADS][VECTORS];
#pragma GCC unroll 4
  for (int g = 0; g < HEADS; g++)
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; j++) high[g][j] = low[g][j] = _mm512_setzero_si512();
  const int64_t stride = st.shape->token_stride;
  for (int t = 0; t < st.count; t++) {
    const char* at = st.tiles[t].values + column * CHANNELS;
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++, at += 4 * stride) {
      if (i < doses) st.tiles[t].ahead.lines<VECTORS>();
      // The last row reads on into the scales, whose products no channel has.
      __m512i rows[4], v[VECTORS];
#pragma GCC unroll 4
      for (int u = 0; u < 4; u++) rows[u] = _mm512_loadu_si512(at + u * stride);
      interleaved<FIRST, VECTORS>(rows, v);
#pragma GCC unroll 4
      for (int g = 0; g < HEADS; g++) {
        const uint8_t* weights = &st.weights[head + g][t / 2][16 * i + t % 2 * 4];
        const __m512i w_high = four_bytes(weights), w_low = four_bytes(weights + 8);
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++) {
          high[g][j] = _mm512_dpbusd_epi32(high[g][j], w_high, v[j]);
          low[g][j] = _mm512_dpbusd_epi32(low[g][j], w_low, v[j]);
        }
      }
    }
  }
#pragma GCC unroll 4
  for (int g = 0; g < HEADS; g++)
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; j++) {
      const __m512i sum = _mm512_add_epi32(_mm512_slli_epi32(high[g][j], 8), low[g][j]);
      vf& to = *(vf*)&st.o[head + g][column * CHANNELS + (FIRST + j) * 16];
      to += (vf)_mm512_cvtepi32_ps(sum) * splat(st.weight_step[head + g]);
    }
}

template <int HEADS>
INLINE void add_column(ByteKernel& st, int head, int column, int doses) {
  if constexpr (HEADS <= 2) {
    add_half<HEADS, 0, 4>(st, head, column, doses);
  } else {
    add_half<HEADS, 0, 2>(st, head, column, doses);
    add_half<HEADS, 2, 2>(st, head, column, doses);
  }
}

void ByteKernel::add_values() {
  for (int c = 0; c < columns; c++) {
    const int doses = channels_of(*this, c) / 16;
    for_heads(shape->group, [&](auto heads, int g) { add_column<heads.value>(*this, g, c, g ? 0 : doses); });
  }
}

}  // namespace

extern "C" HB_HIDDEN AttendFn hb_vnni_attend(const Shape* shape) {
  return shape->kv_type == INT8 ? attend_bytes<ByteKernel> : nullptr;
}
