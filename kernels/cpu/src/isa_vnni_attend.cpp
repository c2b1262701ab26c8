// Partial attention over pages in 8 bits with AVX-512 VNNI, whose instruction multiplies 64 bytes and adds products of
// four neighbours.
//
// Queries and weights are not rounded to 8 bits: each is a high and a low byte with products of their own, so that the
// result differs from that of fp32 by some 2^-16.
//
//   logits   bytes of K, as unsigned numbers (+ 128), times signed bytes of the query
//   values   unsigned bytes of four tokens' weights, times the bytes of V of these tokens, which are interleaved first
//
// Pages are cut into tiles of sixteen tokens, and up to four tiles, of one page or of several, are attended at a time:
// the sums of values leave their registers once per block.
#include "avx512.h"
#include "prefetch.h"
#include "segment_end.h"
#include "vector_convert.h"

namespace {

constexpr int CHANNELS = 64;  // of a vector
constexpr int COLUMNS = kMaxHeadDim / CHANNELS;
constexpr int TILE = 16, TILES = 8;  // tokens of a tile, most tiles of a block
constexpr float MOST_QUERY = 32512.f, MOST_WEIGHT = 65535.f;  // as high and low bytes: 127 * 256, and 255 * 256 + 255
constexpr float LEAST = 1e-30f;  // a largest number below this one is not divided by

struct Tile {
  const char *keys, *values;  // its first rows
  const char *key_scales, *value_scales;
  __mmask16 live;  // tokens that are attended
  Prefetch ahead;
};

// The state of one segment, and of the block that is attended. Sums stand in the order in which `interleaved` leaves
// the channels.
struct ByteState {
  const Shape* shape;
  int columns;
  alignas(64) int8_t q[kMaxGroup][2][COLUMNS][4][CHANNELS];  // high bytes, low bytes; in the order of `transpose_cells`
  int32_t bias[kMaxGroup];  // -128 * the sum of the query's numbers
  float step[kMaxGroup];  // of a query's numbers, with the softmax's scale in base 2
  alignas(64) float o[kMaxGroup][COLUMNS][4][16];
  float maximum[kMaxGroup];
  vf sum[kMaxGroup];

  Tile tiles[TILES];
  int count, most;  // tiles, and as many as they may be
  alignas(64) float s[kMaxGroup][TILES][TILE];  // products, then weights times the values' scales
  alignas(64) uint8_t weights[kMaxGroup][TILES / 2][64];  // of two tiles, as `pack_weights` leaves them
  float weight_step[kMaxGroup];
};

INLINE int channels_of(const ByteState& st, int column) {
  const int left = st.shape->head_dim - column * CHANNELS;
  return left < CHANNELS ? left : CHANNELS;
}

// Rounds a query to high and low bytes.
void split_query(ByteState& st, int head, const float* wide, float inverse) {
  alignas(64) int8_t high[kMaxHeadDim] = {}, low[kMaxHeadDim] = {};
  __m512i sum = _mm512_setzero_si512();
  for (int d = 0; d < st.shape->head_dim; d += 16) {
    const __m512i x = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_load_ps(&wide[d]), _mm512_set1_ps(inverse)));
    sum = _mm512_add_epi32(sum, x);
    const __m512i nearest = _mm512_srai_epi32(_mm512_add_epi32(x, _mm512_set1_epi32(128)), 8);  // low bytes are signed
    _mm_store_si128((__m128i*)&high[d], _mm512_cvtepi32_epi8(nearest));
    _mm_store_si128((__m128i*)&low[d], _mm512_cvtepi32_epi8(x));
  }
  st.bias[head] = -128 * _mm512_reduce_add_epi32(sum);
  const __m512i blocks = _mm512_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12);
  for (int c = 0; c < st.columns; c++)
    for (int i = 0; i < 4; i++) {
      const __m512i cells = _mm512_add_epi32(blocks, _mm512_set1_epi32(i));
      const __m512i h = _mm512_load_si512(&high[c * CHANNELS]), l = _mm512_load_si512(&low[c * CHANNELS]);
      _mm512_store_si512(st.q[head][0][c][i], _mm512_permutexvar_epi32(cells, h));
      _mm512_store_si512(st.q[head][1][c][i], _mm512_permutexvar_epi32(cells, l));
    }
}

void begin_bytes(ByteState& st, const Segment& seg) {
  const int dim = st.shape->head_dim;
  alignas(64) float wide[kMaxHeadDim];
  for (int g = 0; g < st.shape->group; g++) {
    vector_widen(st.shape->type, (const char*)seg.q + g * seg.q_head_stride, wide, dim);
    __m512 top = _mm512_setzero_ps();
    for (int d = 0; d < dim; d += 16) top = _mm512_max_ps(_mm512_abs_ps(_mm512_load_ps(&wide[d])), top);
    const float largest = largest_of((vf)top);
    split_query(st, g, wide, largest > LEAST ? MOST_QUERY / largest : 0.f);
    st.step[g] = largest / MOST_QUERY * st.shape->scale * LOG2E;
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

// Four tokens' bytes of 64 channels -> vectors of cells of four channels: vector c has cells c, 4 + c, 8 + c and 12 + c
// of the first token, of the second one, and so on, each cell beside that of the next token.
INLINE void transpose_cells(const char* row, int64_t stride, __m512i* to) {
  __m512 rows[4];
#pragma GCC unroll 4
  for (int u = 0; u < 4; u++)  // The last row may read on into V; beyond the last channel the query is 0.
    rows[u] = _mm512_castsi512_ps(
        _mm512_xor_si512(_mm512_loadu_si512(row + u * stride), _mm512_set1_epi8((char)128)));
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
INLINE void eight_keys(const ByteState& st, int head, const char* keys, Prefetch* ahead, __m512i* products) {
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
INLINE void key_products(ByteState& st, int head, int i, Prefetch* ahead) {
  const Tile& tile = st.tiles[i];
  __m512i first[HEADS], second[HEADS];
  eight_keys<HEADS>(st, head, tile.keys, ahead, first);
  eight_keys<HEADS>(st, head, tile.keys + 8 * st.shape->token_stride, ahead, second);
  const __m512 scales = (__m512)load_halves(tile.key_scales), none = _mm512_set1_ps(-INFINITY);
#pragma GCC unroll 4
  for (int g = 0; g < HEADS; g++) {
    const __m512i sum = _mm512_add_epi32(sum_blocks(first[g], second[g]), _mm512_set1_epi32(st.bias[head + g]));
    _mm512_store_ps(st.s[head + g][i], _mm512_mask_mul_ps(none, tile.live, _mm512_cvtepi32_ps(sum), scales));
  }
}

INLINE void tile_products(ByteState& st, int i) {
  const int group = st.shape->group;
  Prefetch* ahead = &st.tiles[i].ahead;
  int g = 0;
  for (; g + 4 <= group; g += 4, ahead = nullptr) key_products<4>(st, g, i, ahead);
  if (group - g == 3) key_products<3>(st, g, i, ahead);
  else if (group - g == 2) key_products<2>(st, g, i, ahead);
  else if (group - g == 1) key_products<1>(st, g, i, ahead);
}

// Largest number of each of four vectors; the number of vector i stands in lane i.
INLINE __m512 largest_of_four(const __m512* x) {
  const __m512 a = _mm512_max_ps(_mm512_unpacklo_ps(x[0], x[1]), _mm512_unpackhi_ps(x[0], x[1]));
  const __m512 b = _mm512_max_ps(_mm512_unpacklo_ps(x[2], x[3]), _mm512_unpackhi_ps(x[2], x[3]));
  const __m512d c = _mm512_castps_pd(a), d = _mm512_castps_pd(b);
  const __m512 e =
      _mm512_max_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(c, d)), _mm512_castpd_ps(_mm512_unpackhi_pd(c, d)));
  const __m512 f = _mm512_max_ps(e, _mm512_shuffle_f32x4(e, e, 0x4e));
  return _mm512_max_ps(f, _mm512_shuffle_f32x4(f, f, 0xb1));
}

// Raises the running maximum of a head.
void raise(ByteState& st, int head, float best) {
  const float factor = exp2f(st.maximum[head] - best);
  st.maximum[head] = best;
  st.sum[head] *= factor;
  for (int c = 0; c < st.columns; c++)
    for (int j = 0; j < 4; j++) *(vf*)st.o[head][c][j] *= factor;
}

// Turns a head's products into weights relative to the running maximum, times the values' scales. Returns a vector that
// has the largest of them.
INLINE __m512 scaled_weights(ByteState& st, int head, const __m512* scales) {
  __m512 top = _mm512_set1_ps(-INFINITY), largest = _mm512_setzero_ps();
  const __m512 step = _mm512_set1_ps(st.step[head]);
  for (int i = 0; i < st.count; i++) top = _mm512_max_ps(_mm512_load_ps(st.s[head][i]), top);
  top = _mm512_mul_ps(top, step);
  if (_mm512_cmp_ps_mask(top, _mm512_set1_ps(st.maximum[head] + RESCALE_ABOVE), _CMP_GT_OQ))
    raise(st, head, largest_of((vf)top));
  const __m512 maximum = _mm512_set1_ps(st.maximum[head]);
  __m512 sum = (__m512)st.sum[head];
  for (int i = 0; i < st.count; i++) {
    const __m512 weight = (__m512)exp2_of((vf)_mm512_fmsub_ps(_mm512_load_ps(st.s[head][i]), step, maximum));
    sum = _mm512_add_ps(sum, weight);
    const __m512 scaled = _mm512_mul_ps(weight, scales[i]);
    largest = _mm512_max_ps(scaled, largest);  // which stays where a scale is NaN
    _mm512_store_ps(st.s[head][i], scaled);
  }
  st.sum[head] = (vf)sum;
  return largest;
}

// Rounds the weights of a head to high and low bytes, of two tiles in a vector, as bytes of four tokens: cell
// 4 * i of those has the high bytes of tokens 4 * i to 4 * i + 3 of the first tile, the next cell those of the second
// tile, and two cells the low bytes.
INLINE void pack_weights(ByteState& st, int head, __m512 inverse) {
  for (int i = 0; i < st.count; i += 2) {
    const __m512i a = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_load_ps(st.s[head][i]), inverse));
    __m512i b = _mm512_setzero_si512();
    if (i + 1 < st.count) b = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_load_ps(st.s[head][i + 1]), inverse));
    const __m512i both = _mm512_packus_epi32(a, b);
    const __m512i high = _mm512_srli_epi16(both, 8), low = _mm512_and_si512(both, _mm512_set1_epi16(0xff));
    _mm512_store_si512(st.weights[head][i / 2], _mm512_packus_epi16(high, low));
  }
}

// Weights of all heads, in bytes.
INLINE void byte_weights(ByteState& st) {
  const int group = st.shape->group;
  __m512 scales[TILES];
  __mmask16 is_nan = 0;
  for (int i = 0; i < st.count; i++) {
    // A token that is left out may have any scale.
    scales[i] = _mm512_maskz_mov_ps(st.tiles[i].live, (__m512)load_halves(st.tiles[i].value_scales));
    is_nan |= _mm512_cmp_ps_mask(scales[i], scales[i], _CMP_UNORD_Q);
  }
  for (int g = 0; g < group; g += 4) {
    const int heads = group - g < 4 ? group - g : 4;
    __m512 of_head[4] = {};
    for (int i = 0; i < heads; i++) of_head[i] = scaled_weights(st, g + i, scales);
    const __m512 largest = _mm512_max_ps(largest_of_four(of_head), _mm512_set1_ps(LEAST));
    alignas(64) float inverse[16], step[16];
    _mm512_store_ps(inverse, _mm512_div_ps(_mm512_set1_ps(MOST_WEIGHT), largest));
    _mm512_store_ps(step, _mm512_mul_ps(largest, _mm512_set1_ps(1.f / MOST_WEIGHT)));
    for (int i = 0; i < heads; i++) {
      st.weight_step[g + i] = is_nan ? NAN : step[i];
      pack_weights(st, g + i, _mm512_set1_ps(inverse[i]));
    }
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
INLINE void add_values(ByteState& st, int head, int column, int doses) {
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
      vf& to = *(vf*)st.o[head + g][column][FIRST + j];
      to += (vf)_mm512_cvtepi32_ps(sum) * splat(st.weight_step[head + g]);
    }
}

template <int HEADS>
INLINE void add_column(ByteState& st, int head, int column, int doses) {
  if constexpr (HEADS <= 2) {
    add_values<HEADS, 0, 4>(st, head, column, doses);
  } else {
    add_values<HEADS, 0, 2>(st, head, column, doses);
    add_values<HEADS, 2, 2>(st, head, column, doses);
  }
}

INLINE void byte_values(ByteState& st) {
  const int group = st.shape->group;
  for (int c = 0; c < st.columns; c++) {
    const int doses = channels_of(st, c) / 16;
    int g = 0;
    for (; g + 4 <= group; g += 4) add_column<4>(st, g, c, g ? 0 : doses);
    if (group - g == 3) add_column<3>(st, g, c, g ? 0 : doses);
    else if (group - g == 2) add_column<2>(st, g, c, g ? 0 : doses);
    else if (group - g == 1) add_column<1>(st, g, c, g ? 0 : doses);
  }
}

void attend_block(ByteState& st) {
  for (int i = 0; i < st.count; i++) tile_products(st, i);
  byte_weights(st);
  byte_values(st);
  for (int i = 0; i < st.count; i++) st.tiles[i].ahead.lines<1>();  // of scales
  st.count = 0;
}

// Adds the tiles of a page to the block, and attends the block whenever it is full.
INLINE void add_page(ByteState& st, const PageRef& page, const char* upcoming) {
  const Shape& shape = *st.shape;
  const char* scales = page.keys + 2 * shape.value_offset;
  for (int t = page.skip / TILE * TILE; t < page.tokens; t += TILE) {
    const int skip = page.skip > t ? page.skip - t : 0, left = page.tokens - t;
    const __mmask16 live = (left < TILE ? (1u << left) - 1 : 0xffffu) & (0xffffu << skip);
    const char* keys = page.keys + t * shape.token_stride;
    const int32_t* order = shape.prefetch_order + t / TILE * (shape.head_dim / 2 + 1);
    st.tiles[st.count++] = {keys, keys + shape.value_offset, scales + 2 * t, scales + 2 * (shape.page_size + t),
                            live, {upcoming, order}};
    if (st.count == st.most) attend_block(st);
  }
}

void attend_bytes(const Shape* shape, const Segment* segs, int segments, const PageRef* pages, int page_count) {
  ByteState st;
  st.shape = shape;
  st.columns = (shape->head_dim + CHANNELS - 1) / CHANNELS;
  st.count = 0;
  st.most = TILES / st.columns > 0 ? TILES / st.columns : 1;  // 16 KB: L1 holds K or V of a block
  const int block_pages = st.most * TILE / shape->page_size;
  const int distance = block_pages > 0 ? block_pages : 1;  // a nearer page is being read already
  for (int i = 0; i < segments; i++) {
    const Segment& seg = segs[i];
    begin_bytes(st, seg);
    for (int p = seg.first; p < seg.first + seg.count; p++) {
      const int next = p + distance;
      add_page(st, pages[p], pages[next < page_count ? next : p].keys);
    }
    if (st.count) attend_block(st);
    write_segment(*shape, seg, st.maximum, st.sum, [&](int g, int d) {
      return st.o[g][d / CHANNELS][d % 16 / 4][d % CHANNELS / 16 * 4 + d % 4];
    });
  }
}

}  // namespace

extern "C" HB_HIDDEN AttendFn hb_vnni_attend(const Shape* shape) {
  return shape->kv_type == INT8 ? attend_bytes : nullptr;
}
