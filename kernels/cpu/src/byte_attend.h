// Partial attention over pages in 8 bits with products of integers: what is the same for all instruction sets. Included
// after vector.h.
//
// Pages are cut into tiles of sixteen tokens. Up to eight tiles, of one page or of several, are a block, whose weights
// are rounded together and whose sums of values leave their registers once.
#pragma once
#include <type_traits>

#include "prefetch.h"
#include "segment_end.h"
#include "vector_convert.h"

namespace {

constexpr int TILE = 16, TILES = 8;  // tokens of a tile, most tiles of a block
constexpr int BLOCK_ROW_BYTES = 512;  // of a row of each tile: L1 holds K or V of a block
constexpr float LEAST = 1e-30f;  // a largest number below this one is not divided by

// True if a comparison of vectors holds in any lane.
INLINE bool any(vi lanes) {
#if LANE_BYTES == 64
  return _mm512_test_epi32_mask((__m512i)lanes, (__m512i)lanes);
#else
  return _mm256_movemask_ps((__m256)lanes);
#endif
}

// Calls function(std::integral_constant<int, HEADS>(), head) for all heads of a group: four at a time, then the rest.
template <class Function>
INLINE void for_heads(int group, Function function) {
  int head = 0;
  for (; head + 4 <= group; head += 4) function(std::integral_constant<int, 4>(), head);
  if (group - head == 3) function(std::integral_constant<int, 3>(), head);
  else if (group - head == 2) function(std::integral_constant<int, 2>(), head);
  else if (group - head == 1) function(std::integral_constant<int, 1>(), head);
}

struct Tile {
  const char *keys, *values;  // its first rows
  const char *key_scales, *value_scales;
  uint32_t live;  // a bit of each token: 1 if it is attended
  Prefetch ahead;
};

// The state of one segment, and of the block that is attended. A kernel adds its queries and weights in integers.
struct Block {
  const Shape* shape;
  int width;  // floats of a head's sums
  alignas(64) float o[kMaxGroup][kMaxHeadDim];
  float step[kMaxGroup];  // of a query's numbers, with the softmax's scale in base 2
  float maximum[kMaxGroup];
  vf sum[kMaxGroup];

  Tile tiles[TILES];
  int count, most;  // tiles, and as many as they may be
  alignas(64) float s[kMaxGroup][TILES][TILE];  // products with keys' scales, then weights times the values' scales
  float weight_step[kMaxGroup];
};

// A kernel is a Block with
//   MOST_QUERY, MOST_WEIGHT            the largest numbers of a query and of a weight
//   round_query(head, wide, inverse)   stores a query times `inverse` in integers
//   products(tile)                     writes the tile's numbers in `s`: products times the keys' scales
//   round_weights(head, inverse)       stores the block's weights times `inverse` in integers
//   add_values()                       adds the block's values to `o`
//   place(channel)                     the channel's number in `o`
template <class Kernel>
void begin_query(Kernel& kernel, const Segment& seg) {
  const Shape& shape = *kernel.shape;
  alignas(64) float wide[kMaxHeadDim];
  for (int g = 0; g < shape.group; g++) {
    vector_widen(shape.type, (const char*)seg.q + g * seg.q_head_stride, wide, shape.head_dim);
    vf top = {};
    for (int d = 0; d < shape.head_dim; d += LANES) {
      const vf x = *(const vf*)&wide[d];
      top = larger(larger(x, -x), top);
    }
    const float largest = largest_of(top);
    kernel.round_query(g, wide, largest > LEAST ? Kernel::MOST_QUERY / largest : 0.f);
    kernel.step[g] = largest / Kernel::MOST_QUERY * shape.scale * LOG2E;
    memset(kernel.o[g], 0, kernel.width * sizeof(float));
    kernel.maximum[g] = -INFINITY;
    kernel.sum[g] = vf{};
  }
}

INLINE void replace_dead(const Tile& tile, float* numbers, float value) {
  if (tile.live == 0xffff) return;
  for (int t = 0; t < TILE; t++)
    if (!(tile.live >> t & 1)) numbers[t] = value;
}

// Raises the running maximum of a head.
inline void raise_maximum(Block& block, int head, float best) {
  const float factor = exp2f(block.maximum[head] - best);
  block.maximum[head] = best;
  block.sum[head] *= factor;
  for (int i = 0; i < block.width; i += LANES) *(vf*)&block.o[head][i] *= factor;
}

// Turns a head's products into weights relative to the running maximum, times the values' scales. Returns the largest.
INLINE float scaled_weights(Block& block, int head, const float* scales) {
  float* s = block.s[head][0];
  const int tokens = block.count * TILE;
  const vf step = splat(block.step[head]), bound = splat(block.maximum[head] + RESCALE_ABOVE);
  vf top = splat(-INFINITY);
  for (int t = 0; t < tokens; t += LANES) top = larger(*(const vf*)&s[t], top);
  top *= step;
  if (any((vi)(top > bound))) raise_maximum(block, head, largest_of(top));
  const vf maximum = splat(block.maximum[head]);
  vf largest = {}, sum = block.sum[head];
  for (int t = 0; t < tokens; t += LANES) {
    const vf weight = exp2_of(*(const vf*)&s[t] * step - maximum);
    sum += weight;
    const vf scaled = weight * *(const vf*)&scales[t];
    largest = larger(scaled, largest);  // which stays where a scale is NaN
    *(vf*)&s[t] = scaled;
  }
  block.sum[head] = sum;
  return largest_of(largest);
}

template <class Kernel>
INLINE void weights(Kernel& kernel) {
  alignas(64) float scales[TILES][TILE];
  vf all = {};
  for (int i = 0; i < kernel.count; i++) {
    for (int t = 0; t < TILE; t += LANES) *(vf*)&scales[i][t] = load_halves(kernel.tiles[i].value_scales + 2 * t);
    replace_dead(kernel.tiles[i], scales[i], 0.f);  // a token that is left out may have any scale
    for (int t = 0; t < TILE; t += LANES) all += *(const vf*)&scales[i][t];
  }
  const float not_a_number = sum_of(all) * 0.f;  // where a scale is NaN; scales are finite else
  for (int g = 0; g < kernel.shape->group; g++) {
    const float top = scaled_weights(kernel, g, scales[0]), largest = top > LEAST ? top : LEAST;
    kernel.weight_step[g] = largest * (1.f / Kernel::MOST_WEIGHT) + not_a_number;
    kernel.round_weights(g, Kernel::MOST_WEIGHT / largest);
  }
}

template <class Kernel>
void attend_block(Kernel& kernel) {
  for (int i = 0; i < kernel.count; i++) {
    kernel.products(i);
    if (kernel.tiles[i].live != 0xffff)
      for (int g = 0; g < kernel.shape->group; g++) replace_dead(kernel.tiles[i], kernel.s[g][i], -INFINITY);
  }
  weights(kernel);
  kernel.add_values();
  for (int i = 0; i < kernel.count; i++) kernel.tiles[i].ahead.template lines<1>();  // of scales
  kernel.count = 0;
}

// Adds the tiles of a page to the block, and attends the block whenever it is full.
template <class Kernel>
INLINE void add_page(Kernel& kernel, const PageRef& page, const char* upcoming) {
  const Shape& shape = *kernel.shape;
  const char* scales = page.keys + 2 * shape.value_offset;
  for (int t = page.skip / TILE * TILE; t < page.tokens; t += TILE) {
    const int skip = page.skip > t ? page.skip - t : 0, left = page.tokens - t;
    const uint32_t live = (left < TILE ? (1u << left) - 1 : 0xffffu) & (0xffffu << skip);
    const char* keys = page.keys + t * shape.token_stride;
    const int32_t* order = shape.prefetch_order + t / TILE * (shape.head_dim / 2 + 1);
    kernel.tiles[kernel.count++] = {keys, keys + shape.value_offset, scales + 2 * t, scales + 2 * (shape.page_size + t),
                                    live, {upcoming, order}};
    if (kernel.count == kernel.most) attend_block(kernel);
  }
}

template <class Kernel>
void attend_bytes(const Shape* shape, const Segment* segs, int segments, const PageRef* pages, int page_count) {
  Kernel kernel;
  kernel.set_shape(shape);
  const int fit = BLOCK_ROW_BYTES / shape->head_dim;
  kernel.most = fit > TILES ? TILES : fit;
  kernel.count = 0;
  const int block_pages = kernel.most * TILE / shape->page_size;
  const int distance = block_pages > 0 ? block_pages : 1;  // a nearer page is being read already
  for (int i = 0; i < segments; i++) {
    const Segment& seg = segs[i];
    begin_query(kernel, seg);
    for (int p = seg.first; p < seg.first + seg.count; p++) {
      const int next = p + distance;
      add_page(kernel, pages[p], pages[next < page_count ? next : p].keys);
    }
    if (kernel.count) attend_block(kernel);
    write_segment(*shape, seg, kernel.maximum, kernel.sum, [&](int g, int d) { return kernel.o[g][kernel.place(d)]; });
  }
}

}  // namespace
