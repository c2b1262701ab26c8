// Attention of a prompt's queries over pages in place, causally: two products of matrices around a softmax, in fp32
// FMA, or for bf16 in dot products of pairs or in tiles where the CPU has them. Included after vector.h, once per ISA.
//
// Queries of a group share their keys, so a block of them is a matrix of tokens * group rows. Keys come in blocks that
// stay in a cache: K transposed into panels of PANEL keys, V as it lies. A strip of queries at a time takes a block:
// their logits, the softmax, what they add to their sums.
#pragma once
#include "vector_convert.h"

namespace {

constexpr int VECTORS = REGISTERS == 32 ? 4 : 2;  // of keys or channels at a time, for STRIP queries: most registers
constexpr int PANEL = VECTORS * LANES;
constexpr int STRIP = 6;  // queries whose sums fit the registers
constexpr int KEYS = kPromptKeys;
static_assert(KEYS % PANEL == 0 && STRIP * VECTORS + VECTORS < REGISTERS && STRIP <= kPromptRows, "");

// The arrays of a block in its scratch memory.
struct PromptRoom {
  float *q, *o, *k, *v, *top, *sum;
  PromptRoom(const PromptBlock& b, int rows) {
    q = b.scratch;
    o = q + rows * b.head_dim;
    k = o + rows * b.head_dim;
    v = k + KEYS * b.head_dim;
    top = v + KEYS * b.head_dim;
    sum = top + rows;
  }
};

// to[STRIP][COUNT vectors] = (ADDS: +=) left[STRIP][cells] * right[cells][COUNT vectors]; the cells of `left` are CELL
// floats apart, its rows ROW floats.
template <class Unit, int COUNT, int ROW, int CELL, bool ADDS>
INLINE void multiply(const float* left, const float* right, int right_stride, int cells, float* to, int to_stride) {
  vf acc[STRIP][COUNT];
#pragma GCC unroll 8
  for (int r = 0; r < STRIP; r++)
#pragma GCC unroll 4
    for (int i = 0; i < COUNT; i++) acc[r][i] = ADDS ? *(const vf*)(to + r * to_stride + i * LANES) : vf{};
  for (int c = 0; c < cells; c++, left += CELL, right += right_stride) {
    vf cell[COUNT];
#pragma GCC unroll 4
    for (int i = 0; i < COUNT; i++) cell[i] = *(const vf*)(right + i * LANES);
#pragma GCC unroll 8
    for (int r = 0; r < STRIP; r++) {
      vf w = splat(left[r * ROW]);
      IN_REGISTER(w);
#pragma GCC unroll 4
      for (int i = 0; i < COUNT; i++) acc[r][i] = Unit::add(acc[r][i], cell[i], w);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < STRIP; r++)
#pragma GCC unroll 4
    for (int i = 0; i < COUNT; i++) *(vf*)(to + r * to_stride + i * LANES) = acc[r][i];
}

// How a strip of ROWS queries multiplies. A cell of four bytes holds DEPTH numbers, neighbouring channels in K and
// queries, neighbouring keys in V and weights.
template <class Unit>
struct InRegisters {
  static constexpr int ROWS = STRIP, QUERY_STRIDE = STRIP;
  struct Session {};  // state of a thread while it multiplies

  // Where query r's cells begin; they are QUERY_STRIDE apart.
  static float* query(float* q, int r, int cells) { return q + r / STRIP * STRIP * cells + r % STRIP; }

  // s[ROWS][n] of stride KEYS: products of the strip with n keys, in panels.
  INLINE void logits(const float* q, const float* k, int cells, int n, float* s) {
    for (int t = 0; t < n; t += PANEL)
      multiply<Unit, VECTORS, 1, STRIP, false>(q, k + t * cells, PANEL, cells, s + t, KEYS);
  }
  // o[ROWS][dim] += weights s[ROWS][cells] * v[cells][dim].
  INLINE void add_values(const float* s, const float* v, int cells, int dim, float* o) {
    int d = 0;
    for (; d + PANEL <= dim; d += PANEL) multiply<Unit, VECTORS, KEYS, 1, true>(s, v + d, dim, cells, o + d, dim);
    for (; d + 2 * LANES <= dim; d += 2 * LANES) multiply<Unit, 2, KEYS, 1, true>(s, v + d, dim, cells, o + d, dim);
    for (; d < dim; d += LANES) multiply<Unit, 1, KEYS, 1, true>(s, v + d, dim, cells, o + d, dim);
  }
};

struct Singles : InRegisters<Singles> {
  static constexpr int DEPTH = 1;
  INLINE vf add(vf sum, vf a, vf b) { return sum + a * b; }
};

#ifdef HAVE_PAIRS
// In bf16. Weights are rounded for it.
struct Pairs : InRegisters<Pairs> {
  static constexpr int DEPTH = 2;
  INLINE vf add(vf sum, vf a, vf b) { return add_pairs(sum, a, b); }
};
#endif

// Copies queries to cells in the unit's layout; cells beyond the last query are zero.
template <class Unit>
void pack_queries(const PromptBlock& b, float* q, int rows) {
  const int cells = b.head_dim / Unit::DEPTH;
  alignas(64) float row[kMaxHeadDim];
  for (int r = 0; r < rows; r++) {
    const char* from = b.q + r / b.group * b.q_token_stride + r % b.group * b.q_head_stride;
    if (r >= b.tokens * b.group) memset(row, 0, sizeof row);
    else if (Unit::DEPTH == 1) vector_widen(b.type, from, row, b.head_dim);
    else memcpy(row, from, cells * sizeof(float));
    float* to = Unit::query(q, r, cells);
    for (int c = 0; c < cells; c++) to[c * Unit::QUERY_STRIDE] = row[c];
  }
}

// Reads a token's K (part 0) or V (part 1) from a page in 8 bits; `at` is the token's place in the page.
INLINE void widen_encoded(const PromptBlock& b, const char* head, int part, int64_t at, float* to) {
  const int8_t* from = (const int8_t*)head + part * b.value_offset + at * b.head_dim;
  alignas(64) char half[2 * LANES] = {};
  memcpy(half, head + 2 * b.value_offset + 2 * (part * b.page_size + at), 2);
  const float scale = load_halves(half)[0];
  for (int d = 0; d < b.head_dim; d++) to[d] = scale * (float)from[d];
}

// K and V of a token of the sequence as the unit packs them: in b.type, or in 8 bits widened to fp32 (DEPTH 1), or
// rounded to bf16. `rooms` holds a row of K and one of V.
struct TokenRows {
  const char *key, *value;
  bool is_wide;  // in fp32, whatever b.type is
};
template <class Unit>
INLINE TokenRows token_rows(const PromptBlock& b, int64_t at, float (*rooms)[kMaxHeadDim]) {
  if (b.new_keys && at >= b.new_first)
    return {b.new_keys + (at - b.new_first) * b.new_key_stride, b.new_values + (at - b.new_first) * b.new_value_stride,
            false};
  const char* head = b.keys + b.pages[at / b.page_size] * b.page_stride;
  const int64_t place = at % b.page_size;
  if (b.kv_type != INT8) {
    const char* key = head + place * b.head_dim * element_size(b.type);
    return {key, key + b.value_offset, false};
  }
  alignas(64) float wide[kMaxHeadDim];
  for (int i = 0; i < 2; i++) {
    float* to = Unit::DEPTH == 1 ? rooms[i] : wide;
    widen_encoded(b, head, i, place, to);
    if (Unit::DEPTH > 1) vector_convert(BF16, wide, rooms[i], b.head_dim);
  }
  return {(const char*)rooms[0], (const char*)rooms[1], Unit::DEPTH == 1};
}

// K and V of the keys begin..begin + KEYS of the sequence, in cells: k[panel][cells][PANEL], v[KEYS / DEPTH][head_dim].
// Keys outside of from..to are not read; their cells are zero. Without `v`, V is not read.
template <class Unit>
void pack_keys(const PromptBlock& b, float* k, float* v, int64_t begin, int64_t from, int64_t to) {
  constexpr int MANY = PANEL < 16 ? PANEL : 16;  // at once
  const int dim = b.head_dim, cells = dim / Unit::DEPTH;
  alignas(64) static const char zeros[kMaxHeadDim * sizeof(float)] = {};
  alignas(64) float wide[MANY][kMaxHeadDim], rooms[MANY][2][kMaxHeadDim];
  for (int t = 0; t < KEYS; t += MANY) {
    const float* keys[MANY];
    TokenRows rows[MANY];
    for (int i = 0; i < MANY; i++) {
      const int64_t at = begin + t + i;
      rows[i] = at >= from && at < to ? token_rows<Unit>(b, at, rooms[i]) : TokenRows{zeros, zeros, false};
      keys[i] = (const float*)rows[i].key;
      if (Unit::DEPTH == 1 && b.type != FP32 && !rows[i].is_wide)
        vector_widen(b.type, rows[i].key, wide[i], dim), keys[i] = wide[i];
    }
    float* columns = k + t / PANEL * PANEL * cells + t % PANEL;
    int c = 0;
#ifdef HAVE_TRANSPOSE
    for (; c + MANY <= cells; c += MANY) transpose(keys, c, columns + c * PANEL, PANEL);
#endif
    for (; c < cells; c++)
      for (int i = 0; i < MANY; i++) columns[c * PANEL + i] = keys[i][c];
    for (int i = 0; v && i < MANY; i += Unit::DEPTH) {
      float* to_row = v + (t + i) / Unit::DEPTH * dim;
      if constexpr (Unit::DEPTH == 1) vector_widen(rows[i].is_wide ? FP32 : b.type, rows[i].value, to_row, dim);
#ifdef HAVE_PAIRS
      else pair_rows(rows[i].value, rows[i + 1].value, to_row, dim);
#endif
    }
  }
}

// Products of one query -> cells of weights, relative to the running maximum of products.
template <class Unit>
INLINE void row_weights(float* s, int n, float scale, float* o, int dim, float& maximum, float& sum) {
  const float best = largest_in(s, n);
  if ((best - maximum) * scale > RESCALE_ABOVE) {
    const float factor = exp2f((maximum - best) * scale);
    maximum = best;
    sum *= factor;
    for (int d = 0; d < dim; d += LANES) *(vf*)&o[d] *= factor;
  }
  vf total = {};
  for (int t = 0; t < n; t += Unit::DEPTH * LANES) {
    vf w[Unit::DEPTH];
#pragma GCC unroll 2
    for (int i = 0; i < Unit::DEPTH; i++) {
      w[i] = exp2_of((*(const vf*)&s[t + i * LANES] - maximum) * scale);
      total += w[i];
    }
    if constexpr (Unit::DEPTH == 1) *(vf*)&s[t] = w[0];
#ifdef HAVE_PAIRS
    else *(vf*)&s[t / 2] = pairs_of(w[0], w[1]);
#endif
  }
  sum += sum_of(total);
}

void end_prompt(const PromptBlock& b, const PromptRoom& room) {
  float row[kMaxHeadDim];
  for (int r = 0; r < b.tokens * b.group; r++) {
    const int g = r % b.group;
    float sum = room.sum[r], factor = 1.f;
    if (b.sinks) {
      const float sink = b.sinks[g] * LOG2E, found = room.top[r] * b.scale * LOG2E, top = sink > found ? sink : found;
      factor = exp2f(found - top);
      sum = sum * factor + exp2f(sink - top);
    }
    factor = sum > 0 ? factor / sum : 0.f;
    for (int d = 0; d < b.head_dim; d++) row[d] = room.o[r * b.head_dim + d] * factor;
    vector_convert(b.type, row, b.out + r / b.group * b.out_token_stride + g * b.out_head_stride, b.head_dim);
  }
}

template <class Unit>
void attend_prompt(const PromptBlock* block) {
  const PromptBlock& b = *block;
  const int dim = b.head_dim, cells = dim / Unit::DEPTH;
  constexpr int ROWS = Unit::ROWS;
  const int live = b.tokens * b.group, rows = (live + ROWS - 1) / ROWS * ROWS;
  const float scale = b.scale * LOG2E;
  const PromptRoom room(b, rows);
  alignas(64) float s[ROWS * KEYS];
  [[maybe_unused]] const typename Unit::Session session;
  pack_queries<Unit>(b, room.q, rows);
  memset(room.o, 0, rows * dim * sizeof(float));
  for (int r = 0; r < rows; r++) room.top[r] = -INFINITY, room.sum[r] = 0.f;
  const int64_t end = b.first + b.tokens;
  const int64_t oldest = b.first - b.window + 1 > 0 ? b.first - b.window + 1 : 0;
  for (int64_t begin = oldest / KEYS * KEYS; begin < end; begin += KEYS) {
    pack_keys<Unit>(b, room.k, room.v, begin, oldest, end);
    for (int r = 0; r < rows; r += ROWS) {
      const int strip = r + ROWS <= live ? ROWS : live - r;
      const int64_t first = b.first + r / b.group, last = b.first + (r + strip - 1) / b.group;  // the strip's tokens
      if (begin > last || begin + KEYS <= first - b.window + 1) continue;
      const int64_t seen = last + 1 - begin;
      const int n = seen >= KEYS ? KEYS : (int)(seen + PANEL - 1) / PANEL * PANEL;
      Unit::logits(room.q + r * cells, room.k, cells, n, s);
      const bool is_cut = begin + n > first + 1 || begin < last - b.window + 1;
      for (int i = 0; i < strip; i++) {
        if (is_cut) {
          const int64_t stop = b.first + (r + i) / b.group + 1 - begin, start = stop - b.window;
          for (int64_t t = 0; t < start && t < n; t++) s[i * KEYS + t] = -INFINITY;
          for (int64_t t = stop > 0 ? stop : 0; t < n; t++) s[i * KEYS + t] = -INFINITY;
        }
        row_weights<Unit>(s + i * KEYS, n, scale, room.o + (r + i) * dim, dim, room.top[r + i], room.sum[r + i]);
      }
      Unit::add_values(s, room.v, n / Unit::DEPTH, dim, room.o + r * dim);
    }
  }
  end_prompt(b, room);
}

}  // namespace
