// Attention of a prompt's queries over pages in place, causally: two products of matrices around a softmax, in fp32 FMA,
// or for bf16 in dot products of pairs where the CPU has them. Included after vector.h, once per ISA.
//
// Queries of a group share their keys, so a block of them is a matrix of tokens * group rows. Keys come in blocks that
// stay in a cache: K transposed into panels of PANEL keys, V as it lies. ROWS queries at a time take a block: their
// logits, the softmax, what they add to their sums.
namespace {

constexpr int VECTORS = REGISTERS == 32 ? 4 : 2;  // of keys or channels at a time, for ROWS queries: most registers
constexpr int PANEL = VECTORS * LANES;
constexpr int ROWS = kPromptRows;
constexpr int KEYS = kPromptKeys;
static_assert(KEYS % PANEL == 0 && ROWS * VECTORS + VECTORS < REGISTERS, "");

// What is multiplied at once: a cell of four bytes holds one fp32 number.
struct Singles {
  static constexpr int DEPTH = 1;
  __attribute__((always_inline)) static vf add(vf sum, vf a, vf b) { return sum + a * b; }
};

#ifdef HAVE_PAIRS
// Two neighbours in bf16: of channels in the logits, of keys in what values add. Weights are rounded for it.
struct Pairs {
  static constexpr int DEPTH = 2;
  __attribute__((always_inline)) static vf add(vf sum, vf a, vf b) { return add_pairs(sum, a, b); }
};
#endif

// Where a block's parts lie in its scratch.
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

// Cells of queries in strips of ROWS: [strip][cells][ROWS]; those beyond the last are zero.
template <class Unit>
void pack_queries(const PromptBlock& b, float* q, int rows) {
  const int cells = b.head_dim / Unit::DEPTH;
  alignas(64) float row[kMaxHeadDim];
  for (int r = 0; r < rows; r++) {
    const char* from = b.q + r / b.group * b.q_token_stride + r % b.group * b.q_head_stride;
    if (r >= b.tokens * b.group) memset(row, 0, sizeof row);
    else if (Unit::DEPTH == 1) vector_widen(b.type, from, row, b.head_dim);
    else memcpy(row, from, cells * sizeof(float));
    float* to = q + r / ROWS * ROWS * cells + r % ROWS;
    for (int c = 0; c < cells; c++) to[c * ROWS] = row[c];
  }
}

// K and V of the keys begin..begin + KEYS of the sequence, in cells: k[panel][cells][PANEL], v[KEYS / DEPTH][head_dim].
// Those outside of from..to are not read, but zero.
template <class Unit>
void pack_keys(const PromptBlock& b, float* k, float* v, int64_t begin, int64_t from, int64_t to) {
  const int dim = b.head_dim, cells = dim / Unit::DEPTH;
  const int64_t row = (int64_t)dim * element_size(b.type);
  alignas(64) static const char zeros[kMaxHeadDim * sizeof(float)] = {};
  alignas(64) float wide[kMaxHeadDim];
  for (int t = 0; t < KEYS; t++) {
    const int64_t at = begin + t;
    const bool lives = at >= from && at < to;
    const char* keys = lives ? b.keys + b.pages[at / b.page_size] * b.page_stride + at % b.page_size * row : zeros;
    const char* values = lives ? keys + b.value_offset : zeros;
    const float* key = (const float*)keys;
    if (Unit::DEPTH == 1 && b.type != FP32) vector_widen(b.type, keys, wide, dim), key = wide;
    float* column = k + t / PANEL * PANEL * cells + t % PANEL;
    for (int c = 0; c < cells; c++) column[c * PANEL] = key[c];
    if constexpr (Unit::DEPTH == 1) {
      vector_widen(b.type, values, v + t * dim, dim);
    } else {
      uint16_t* pair = (uint16_t*)(v + t / 2 * dim) + t % 2;
      for (int d = 0; d < dim; d++) pair[2 * d] = ((const uint16_t*)values)[d];
    }
  }
}

// to[ROWS][COUNT vectors] = (ADDS: +=) left[ROWS][cells] * right[cells][COUNT vectors]; the cells of `left` are CELL floats
// apart, its rows ROW floats.
template <class Unit, int COUNT, int ROW, int CELL, bool ADDS>
INLINE void multiply(const float* left, const float* right, int right_stride, int cells, float* to, int to_stride) {
  vf acc[ROWS][COUNT];
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (int i = 0; i < COUNT; i++) acc[r][i] = ADDS ? *(const vf*)(to + r * to_stride + i * LANES) : vf{};
  for (int c = 0; c < cells; c++, left += CELL, right += right_stride) {
    vf cell[COUNT];
#pragma GCC unroll 4
    for (int i = 0; i < COUNT; i++) cell[i] = *(const vf*)(right + i * LANES);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) {
      vf w = splat(left[r * ROW]);
      IN_REGISTER(w);
#pragma GCC unroll 4
      for (int i = 0; i < COUNT; i++) acc[r][i] = Unit::add(acc[r][i], cell[i], w);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (int i = 0; i < COUNT; i++) *(vf*)(to + r * to_stride + i * LANES) = acc[r][i];
}

// s[ROWS][PANEL]: products of a strip of queries with one panel of keys.
template <class Unit>
INLINE void panel_logits(const float* q, const float* k, int cells, float* s) {
  multiply<Unit, VECTORS, 1, ROWS, false>(q, k, PANEL, cells, s, KEYS);
}

// o[ROWS][COUNT vectors] += weights s[ROWS][cells] * v[cells], of the same channels.
template <class Unit, int COUNT>
INLINE void add_prompt_values(const float* s, const float* v, int cells, int dim, float* o) {
  multiply<Unit, COUNT, KEYS, 1, true>(s, v, dim, cells, o, dim);
}

// Products of one query -> cells of weights, relative to its running maximum.
template <class Unit>
INLINE void row_weights(float* s, int n, float scale, float* o, int dim, float& maximum, float& sum) {
  vf top = *(const vf*)s;
  for (int t = LANES; t < n; t += LANES) top = larger(*(const vf*)&s[t], top);
  float best = top[0];
  for (int i = 1; i < LANES; i++) best = top[i] > best ? top[i] : best;
  best *= scale;
  if (best > maximum + RESCALE_ABOVE) {
    const float factor = exp2f(maximum - best);
    maximum = best;
    sum *= factor;
    for (int d = 0; d < dim; d += LANES) *(vf*)&o[d] *= factor;
  }
  vf total = {};
  for (int t = 0; t < n; t += Unit::DEPTH * LANES) {
    vf w[Unit::DEPTH];
#pragma GCC unroll 2
    for (int i = 0; i < Unit::DEPTH; i++) {
      w[i] = exp2_of(*(const vf*)&s[t + i * LANES] * scale - maximum);
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
      const float sink = b.sinks[g] * LOG2E, top = sink > room.top[r] ? sink : room.top[r];
      factor = exp2f(room.top[r] - top);
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
  const int live = b.tokens * b.group, rows = (live + ROWS - 1) / ROWS * ROWS;
  const float scale = b.scale * LOG2E;
  const PromptRoom room(b, rows);
  alignas(64) float s[ROWS * KEYS];
  pack_queries<Unit>(b, room.q, rows);
  memset(room.o, 0, rows * dim * sizeof(float));
  for (int r = 0; r < rows; r++) room.top[r] = -INFINITY, room.sum[r] = 0.f;
  const int64_t end = b.first + b.tokens;
  const int64_t oldest = b.first - b.window + 1 > 0 ? b.first - b.window + 1 : 0;
  for (int64_t begin = oldest / KEYS * KEYS; begin < end; begin += KEYS) {
    pack_keys<Unit>(b, room.k, room.v, begin, oldest, end);
    for (int r = 0; r < rows; r += ROWS) {
      const int last_row = r + ROWS <= live ? r + ROWS - 1 : live - 1;
      const int64_t first = b.first + r / b.group, last = b.first + last_row / b.group;  // the strip's tokens
      if (begin > last || begin + KEYS <= first - b.window + 1) continue;
      const int64_t seen = last + 1 - begin;
      const int n = seen >= KEYS ? KEYS : (int)(seen + PANEL - 1) / PANEL * PANEL;
      for (int t = 0; t < n; t += PANEL) panel_logits<Unit>(room.q + r * cells, room.k + t * cells, cells, s + t);
      const bool is_cut = begin + n > first + 1 || begin < last - b.window + 1;
      for (int i = 0; i < ROWS; i++) {
        if (is_cut) {
          const int row = r + i < live ? r + i : live - 1;
          const int64_t stop = b.first + row / b.group + 1 - begin, start = stop - b.window;
          for (int64_t t = 0; t < start && t < n; t++) s[i * KEYS + t] = -INFINITY;
          for (int64_t t = stop > 0 ? stop : 0; t < n; t++) s[i * KEYS + t] = -INFINITY;
        }
        row_weights<Unit>(s + i * KEYS, n, scale, room.o + (r + i) * dim, dim, room.top[r + i], room.sum[r + i]);
      }
      int d = 0;
      float* o = room.o + r * dim;
      const int taken = n / Unit::DEPTH;
      for (; d + PANEL <= dim; d += PANEL) add_prompt_values<Unit, VECTORS>(s, room.v + d, taken, dim, o + d);
      for (; d + 2 * LANES <= dim; d += 2 * LANES) add_prompt_values<Unit, 2>(s, room.v + d, taken, dim, o + d);
      for (; d < dim; d += LANES) add_prompt_values<Unit, 1>(s, room.v + d, taken, dim, o + d);
    }
  }
  end_prompt(b, room);
}

}  // namespace
