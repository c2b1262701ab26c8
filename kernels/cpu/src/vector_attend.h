// Partial attention of decoding queries over pages, and the moving averages of its weights, in fp32 FMA on vectors.
// Included once per instruction set, after vector.h.
#pragma once
#include "prefetch.h"
#include "segment_end.h"
#include "vector_convert.h"

namespace {

// The state of one segment: queries, logits and sums of the whole group. Queries and sums stand in blocks of up to four
// heads, each [pair][head][2][LANES], with rows padded to whole pairs, so that a kernel walks one pointer with constant
// offsets.
struct State {
  const Shape* shape;
  int pairs;      // whole pairs of a row
  int half_pair;  // 1 if a half pair follows
  int padded;     // floats per row
  alignas(64) float q[kMaxGroup * (kMaxHeadDim + PAIR)];
  alignas(64) float o[kMaxGroup * (kMaxHeadDim + PAIR)];
  alignas(64) float s[kMaxGroup * kMaxPageSize];
  float maximum[kMaxGroup];
  vf sum[kMaxGroup];
};

// block_heads: heads in the block of head g. place_of: position of the head's first pair.
INLINE int block_heads(const State& st, int g) {
  const int left = st.shape->group - g / 4 * 4;
  return left < 4 ? left : 4;
}
INLINE int place_of(const State& st, int g) { return g / 4 * 4 * st.padded + g % 4 * PAIR; }

template <int TYPE>
INLINE Two load_row(const State& st, const char* row, int pair) {
  const char* p = row + (int64_t)pair * PAIR * kSize<TYPE>;
  return pair < st.pairs ? load_pair_of(TYPE, p) : load_half_pair_of(TYPE, p);
}

// TYPE: that of K and V. Pages in 8 bits hold a row in order, so the query is brought into order as well.
template <int TYPE>
void begin_segment(State& st, const Segment& seg) {
  constexpr int QUERY = TYPE == INT8 ? FP32 : TYPE;
  alignas(64) float wide[kMaxHeadDim];
  const vf scale = splat(st.shape->scale * LOG2E);
  for (int g = 0; g < st.shape->group; g++) {
    const char* row = (const char*)seg.q + g * seg.q_head_stride;
    if (TYPE == INT8) {
      vector_widen(st.shape->type, row, wide, st.shape->head_dim);
      row = (const char*)wide;
    }
    float* q = &st.q[place_of(st, g)];
    for (int p = 0; p < st.pairs + st.half_pair; p++, q += block_heads(st, g) * PAIR) {
      const Two x = load_row<QUERY>(st, row, p);
      *(vf*)q = x.a * scale;
      *(vf*)(q + LANES) = x.b * scale;
    }
    st.maximum[g] = -INFINITY;
    st.sum[g] = vf{};
  }
  memset(st.o, 0, st.shape->group * st.padded * sizeof(float));
}

// The scales of a page's tokens from token t on.
INLINE vf key_scales(const State& st, const char* keys, int t) {
  return load_halves(keys + 2 * st.shape->value_offset + 2 * t);
}
INLINE vf value_scales(const State& st, const char* keys, int t) {
  return load_halves(keys + 2 * st.shape->value_offset + 2 * (st.shape->page_size + t));
}

// Logits (base 2) of HEADS heads with a page's keys; in 8 bits without the keys' scales.
template <int TYPE, int HEADS, bool PREFETCH>
INLINE void page_logits(State& st, int head, const char* keys, Prefetch& ahead) {
  constexpr int TOKENS = ACCUMULATORS / (HEADS == 3 ? 4 : HEADS);
  constexpr int BYTES = PAIR * kSize<TYPE>;
  const int64_t stride = st.shape->token_stride;
  const float* q0 = &st.q[head * st.padded];
  for (int t = 0; t < st.shape->page_size; t += TOKENS) {
    const char* rows = keys + t * stride;
    vf acc[HEADS][TOKENS] = {};
    auto add = [&](int p, bool half) __attribute__((always_inline)) {
      const float* q = q0 + p * HEADS * PAIR;
      auto load = [&](int u) __attribute__((always_inline)) {
        const char* at = rows + u * stride + (int64_t)p * BYTES;
        return half ? load_half_pair_of(TYPE, at) : load_pair_of(TYPE, at);
      };
      // The smaller side stays in registers, the other one streams by: each vector is loaded once.
      if constexpr (TOKENS <= HEADS) {
        Two k[TOKENS];
#pragma GCC unroll 16
        for (int u = 0; u < TOKENS; u++) k[u] = load(u);
#pragma GCC unroll 4
        for (int g = 0; g < HEADS; g++) {
          vf a = *(const vf*)&q[g * PAIR], b = *(const vf*)&q[g * PAIR + LANES];
          IN_REGISTER(a);
#pragma GCC unroll 16
          for (int u = 0; u < TOKENS; u++) acc[g][u] += k[u].a * a;
          IN_REGISTER(b);
#pragma GCC unroll 16
          for (int u = 0; u < TOKENS; u++) acc[g][u] += k[u].b * b;
        }
      } else {
#pragma GCC unroll 16
        for (int u = 0; u < TOKENS; u++) {
          const Two k = load(u);
#pragma GCC unroll 4
          for (int g = 0; g < HEADS; g++) {
            acc[g][u] += k.a * *(const vf*)&q[g * PAIR];
            acc[g][u] += k.b * *(const vf*)&q[g * PAIR + LANES];
          }
        }
      }
    };
    for (int p = 0; p < st.pairs; p++) {
      if constexpr (PREFETCH) ahead.step<TOKENS * BYTES>(p);
      add(p, false);
    }
    if (st.half_pair) {
      if constexpr (PREFETCH) ahead.step<TOKENS * BYTES>(0);
      add(st.pairs, true);
    }
    reduce<HEADS, TOKENS>(acc, &st.s[head * kMaxPageSize + t], kMaxPageSize);
  }
}

// Turns logits into weights relative to the running maximum. Skipped tokens get weight 0. In 8 bits a key's scale is a
// factor of its logit, and a value's scale one of its weight.
template <int TYPE>
INLINE void page_weights(State& st, int head, const PageRef& page) {
  float* s = &st.s[head * kMaxPageSize];
  const int page_size = st.shape->page_size;
  if (TYPE == INT8)
    for (int t = 0; t < page_size; t += LANES) *(vf*)&s[t] *= key_scales(st, page.keys, t);
  for (int t = 0; t < page.skip; t++) s[t] = -INFINITY;
  for (int t = page.tokens; t < page_size; t++) s[t] = -INFINITY;
  const float best = largest_in(s, page_size);
  if (best > st.maximum[head] + RESCALE_ABOVE) {
    const float factor = exp2f(st.maximum[head] - best);
    st.maximum[head] = best;
    st.sum[head] *= factor;
    float* o = &st.o[place_of(st, head)];
    for (int p = 0; p < st.pairs + st.half_pair; p++, o += block_heads(st, head) * PAIR) {
      *(vf*)o *= factor;
      *(vf*)(o + LANES) *= factor;
    }
  }
  for (int t = 0; t < page_size; t += LANES) {
    const vf w = exp2_of(*(vf*)&s[t] - st.maximum[head]);
    st.sum[head] += w;
    if (TYPE == INT8) *(vf*)&s[t] = w * value_scales(st, page.keys, t);
    else *(vf*)&s[t] = w;
  }
}

// Adds the weighted values of PAIRS pairs of the rows, from pair `first` on. Only attended tokens are read, because
// others may be NaN.
template <int TYPE, int HEADS, int PAIRS, bool PREFETCH, bool HALF>
INLINE void add_values(State& st, int head, const PageRef& page, int first, Prefetch& ahead) {
  constexpr int BYTES = PAIR * kSize<TYPE>;
  const int64_t stride = st.shape->token_stride;
  float* o = &st.o[head * st.padded + first * HEADS * PAIR];
  const float* s = &st.s[head * kMaxPageSize];
  vf acc[HEADS][2 * PAIRS];
#pragma GCC unroll 4
  for (int g = 0; g < HEADS; g++)
#pragma GCC unroll 16
    for (int k = 0; k < 2 * PAIRS; k++) acc[g][k] = *(vf*)&o[(k / 2 * HEADS + g) * PAIR + k % 2 * LANES];
  const char* at = page.keys + st.shape->value_offset + page.skip * stride + (int64_t)first * BYTES;
  for (int t = page.skip; t < page.tokens; t++, at += stride) {
    if constexpr (PREFETCH) ahead.step<PAIRS * BYTES>(t);
#pragma GCC unroll 8
    for (int k = 0; k < PAIRS; k++) {
      const Two v = HALF ? load_half_pair_of(TYPE, at) : load_pair_of(TYPE, at + k * BYTES);
#pragma GCC unroll 4
      for (int g = 0; g < HEADS; g++) {
        const vf w = splat(s[g * kMaxPageSize + t]);
        acc[g][2 * k] += v.a * w;
        acc[g][2 * k + 1] += v.b * w;
      }
    }
  }
#pragma GCC unroll 4
  for (int g = 0; g < HEADS; g++)
#pragma GCC unroll 16
    for (int k = 0; k < 2 * PAIRS; k++) *(vf*)&o[(k / 2 * HEADS + g) * PAIR + k % 2 * LANES] = acc[g][k];
}

template <int TYPE, int HEADS, bool PREFETCH>
INLINE void page_values(State& st, int head, const PageRef& page, Prefetch& ahead) {
  // As many pairs at once as registers hold: accumulators, two loaded vectors, one weight, some slack.
  constexpr int FIT = (REGISTERS - 6) / (2 * HEADS);
  constexpr int PAIRS = FIT >= 4 ? 4 : FIT >= 2 ? 2 : 1;
  int p = 0;
  for (; p + PAIRS <= st.pairs; p += PAIRS) add_values<TYPE, HEADS, PAIRS, PREFETCH, false>(st, head, page, p, ahead);
  for (; p < st.pairs; p++) add_values<TYPE, HEADS, 1, PREFETCH, false>(st, head, page, p, ahead);
  if (st.half_pair) add_values<TYPE, HEADS, 1, PREFETCH, true>(st, head, page, p, ahead);
}

// Attends one page with HEADS heads. A group of more than 4 heads reads the page several times, from L1 or L2.
template <int TYPE, int HEADS, bool PREFETCH>
void attend_page(State& st, int head, const PageRef& page, const char* upcoming) {
  Prefetch ahead{upcoming, st.shape->prefetch_order};
  page_logits<TYPE, HEADS, PREFETCH>(st, head, page.keys, ahead);
  for (int g = 0; g < HEADS; g++) page_weights<TYPE>(st, head + g, page);
  page_values<TYPE, HEADS, PREFETCH>(st, head, page, ahead);
  if (TYPE == INT8 && PREFETCH) ahead.scales(4 * st.shape->page_size);
}

template <int TYPE, bool PREFETCH>
INLINE void attend_heads(State& st, int head, int heads, const PageRef& page, const char* upcoming) {
  if (heads >= 4) attend_page<TYPE, 4, PREFETCH>(st, head, page, upcoming);
  else if (heads == 3) attend_page<TYPE, 3, PREFETCH>(st, head, page, upcoming);
  else if (heads == 2) attend_page<TYPE, 2, PREFETCH>(st, head, page, upcoming);
  else attend_page<TYPE, 1, PREFETCH>(st, head, page, upcoming);
}

template <int TYPE>
void end_segment(const State& st, const Segment& seg) {
  write_segment(*st.shape, seg, st.maximum, st.sum, [&](int g, int d) {
    const int pair = d / PAIR, i = d % PAIR;
    const int lane = TYPE == BF16 ? i / 2 + (i % 2) * LANES : i;
    return st.o[place_of(st, g) + pair * block_heads(st, g) * PAIR + lane];
  });
}

INLINE void set_shape(State& st, const Shape* shape) {
  st.shape = shape;
  st.pairs = shape->head_dim / PAIR;
  st.half_pair = shape->head_dim % PAIR != 0;
  st.padded = (st.pairs + st.half_pair) * PAIR;
}

template <int TYPE>
void attend_segments(const Shape* shape, const Segment* segs, int segments, const PageRef* pages, int page_count) {
  State st;
  set_shape(st, shape);
  for (int i = 0; i < segments; i++) {
    const Segment& seg = segs[i];
    begin_segment<TYPE>(st, seg);
    for (int p = seg.first; p < seg.first + seg.count; p++) {
      // The last pages of a call prefetch themselves, which costs nothing.
      const int next = p + shape->prefetch_distance;
      const char* upcoming = pages[next < page_count ? next : p].keys;
      attend_heads<TYPE, true>(st, 0, shape->group, pages[p], upcoming);
      for (int g = 4; g < shape->group; g += 4) attend_heads<TYPE, false>(st, g, shape->group - g, pages[p], upcoming);
    }
    end_segment<TYPE>(st, seg);
  }
}

AttendFn vector_attend(const Shape* shape) {
  if (shape->kv_type == INT8) return attend_segments<INT8>;
  if (shape->type == BF16) return attend_segments<BF16>;
  if (shape->type == FP16) return attend_segments<FP16>;
  return attend_segments<FP32>;
}

// --- weights ---------------------------------------------------------------------------------------------------

template <int TYPE>
INLINE void logits_of_heads(State& st, int head, int heads, const char* keys) {
  Prefetch none{};
  if (heads >= 4) page_logits<TYPE, 4, false>(st, head, keys, none);
  else if (heads == 3) page_logits<TYPE, 3, false>(st, head, keys, none);
  else if (heads == 2) page_logits<TYPE, 2, false>(st, head, keys, none);
  else page_logits<TYPE, 1, false>(st, head, keys, none);
}

template <int TYPE>
void weigh_segment(const Shape* shape, const Segment* seg, const PageRef* pages, float* const* averages, float alpha,
                   bool largest) {
  State st;
  set_shape(st, shape);
  begin_segment<TYPE>(st, *seg);
  const int group = shape->group;
  float base[kMaxGroup];
  for (int g = 0; g < group; g++) base[g] = seg->lse[g] > -INFINITY ? seg->lse[g] * LOG2E : 0.f;  // all logits are -inf
  for (int p = seg->first; p < seg->first + seg->count; p++) {
    const int tokens = pages[p].tokens;
    for (int g = 0; g < group; g += 4) logits_of_heads<TYPE>(st, g, group - g, pages[p].keys);
    for (int t = 0; t < tokens; t += LANES) {
      vf share = {};
      for (int g = 0; g < group; g++) {
        vf logit = *(const vf*)&st.s[g * kMaxPageSize + t];
        if (TYPE == INT8) logit *= key_scales(st, pages[p].keys, t);
        const vf of_head = exp2_of(logit - base[g]);
        share = largest ? larger(of_head, share) : share + of_head;
      }
      if (!largest) share /= splat((float)group);
      float* average = averages[p] + t;
      const vf blended = *(const vf_any*)average * (1.f - alpha) + share * alpha;
      if (tokens - t >= LANES) {
        *(vf_any*)average = blended;
      } else {
        for (int i = 0; i < tokens - t; i++) average[i] = blended[i];
      }
    }
  }
}

WeighFn vector_weigh(const Shape* shape) {
  if (shape->kv_type == INT8) return weigh_segment<INT8>;
  if (shape->type == BF16) return weigh_segment<BF16>;
  if (shape->type == FP16) return weigh_segment<FP16>;
  return weigh_segment<FP32>;
}

}  // namespace
