// Partial attention in fp32 FMA on GCC/Clang vector extensions. Included once per ISA, which defines
//   LANE_BYTES     bytes of a vector register
//   ACCUMULATORS   registers for one tile of logits (8 or 16)
//   REGISTERS      vector registers of the ISA
// and, where it has better instructions, its own versions of what stands under #ifndef HAVE_* below (then it also
// defines vf and Two, and VECTOR_TYPES_DEFINED).
//
// bf16 is widened by shift and mask, not fed to vdpbf16ps: that instruction measured half the speed of fp32 FMA.
// A "pair" is 2 * LANES elements, loaded as two fp32 vectors. For bf16 they hold the even and the odd elements, else
// the lower and the upper half; queries go through the same load, so that dot products do not care.
#include <math.h>
#include <string.h>

#include "isa.h"
#include "prefetch.h"

#define INLINE static inline __attribute__((always_inline))

// Keeps a loaded vector in a register: otherwise gcc folds the load into every multiplication that uses it, and the load
// ports become the limit (logits of four heads on AVX2: 17 % slower).
#if defined(__AVX512F__)
#define IN_REGISTER(x) asm("" : "+v"(x))
#elif defined(__x86_64__)
#define IN_REGISTER(x) asm("" : "+x"(x))
#else
#define IN_REGISTER(x)
#endif

namespace {

constexpr int LANES = LANE_BYTES / 4;
constexpr int PAIR = 2 * LANES;
constexpr float RESCALE_ABOVE = 8.f;  // rescale the sums only when the maximum grows by more than 2^8
constexpr float LOG2E = 1.44269504f, LN2 = 0.69314718f;

#ifndef VECTOR_TYPES_DEFINED
typedef float vf __attribute__((vector_size(LANE_BYTES), may_alias));
struct Two {
  vf a, b;
};
#endif
typedef int32_t vi __attribute__((vector_size(LANE_BYTES), may_alias));
typedef float vf_any __attribute__((vector_size(LANE_BYTES), aligned(1), may_alias));
typedef int32_t vi_any __attribute__((vector_size(LANE_BYTES), aligned(1), may_alias));

INLINE vf splat(float x) { return x - vf{}; }  // minus zero is exact and folds away; plus zero would not
// NaN in `a` gives `b`: a masked or overflowed logit never poisons a sum.
INLINE vf larger(vf a, vf b) { return a > b ? a : b; }

#ifndef HAVE_LOADS
#define HAVE_LOADS
typedef uint16_t vh_any __attribute__((vector_size(LANE_BYTES / 2), aligned(1), may_alias));
// fp16 -> fp32 without F16C: move the bits, correct the exponent by a multiplication, restore inf and NaN.
INLINE vf widen_half(const char* p) {
  const vi x = __builtin_convertvector(*(const vh_any*)p, vi);
  const vi magnitude = x & 0x7fff;
  const vf value = (vf)(magnitude << 13) * 5.192296858534828e33f;  // 2^112
  const vi special = magnitude > 0x7bff;
  const vi bits = special ? ((vi)(magnitude << 13) | 0x7f800000) : (vi)value;
  return (vf)(bits | ((x & 0x8000) << 16));
}
INLINE Two load_pair_of(int type, const char* p) {
  if (type == BF16) {
    const vi x = *(const vi_any*)p;
    return {(vf)(x << 16), (vf)(x & (vi{} + (int32_t)0xffff0000))};
  }
  if (type == FP16) return {widen_half(p), widen_half(p + LANE_BYTES / 2)};
  return {*(const vf_any*)p, *(const vf_any*)(p + LANE_BYTES)};
}
// The first half of a pair, zero elsewhere. Only vectors of 16 lanes meet it: dimensions are multiples of 16.
INLINE Two load_half_pair_of(int, const char*) { return {vf{}, vf{}}; }
#endif

#ifndef HAVE_EXP2
// 2^x to 1e-6; 0 below -126 (and for NaN). x <= 126.
INLINE vf exp2_of(vf x) {
  const vi live = x >= splat(-126.f);
  x = live ? x : splat(-126.f);
  const vf shifted = x + splat(12582912.f);  // 1.5 * 2^23: the integer part ends up in the mantissa
  const vf f = x - (shifted - splat(12582912.f));
  vf p = splat(1.3333558e-3f);
  p = p * f + splat(9.6181291e-3f);
  p = p * f + splat(5.5504109e-2f);
  p = p * f + splat(2.4022651e-1f);
  p = p * f + splat(6.9314718e-1f);
  p = p * f + splat(1.f);
  const vi exponent = ((vi)shifted - (vi)splat(12582912.f)) << 23;
  return (vf)(((vi)p + exponent) & live);
}
#endif

typedef float quarter __attribute__((vector_size(16), may_alias));
INLINE float sum_of(vf a) {
  quarter s = *(const quarter*)&a;
  for (int i = 1; i < LANES / 4; i++) s += ((const quarter*)&a)[i];
  return (s[0] + s[1]) + (s[2] + s[3]);
}
INLINE float largest_of(vf a) {
  quarter s = *(const quarter*)&a;
  for (int i = 1; i < LANES / 4; i++) {
    const quarter other = ((const quarter*)&a)[i];
    s = other > s ? other : s;
  }
  const float low = s[0] > s[1] ? s[0] : s[1], high = s[2] > s[3] ? s[2] : s[3];
  return low > high ? low : high;
}

// Of n numbers, whole vectors of them; NaN is nothing.
INLINE float largest_in(const float* s, int n) {
  vf top = splat(-INFINITY);
  for (int t = 0; t < n; t += LANES) top = larger(*(const vf*)&s[t], top);
  return largest_of(top);
}

#ifndef HAVE_REDUCE
// [4 heads][T tokens] accumulators -> T sums per head. Unused heads hold zeros.
template <int HEADS, int TOKENS>
INLINE void reduce(vf (&acc)[HEADS][TOKENS], float* s, int s_stride) {
  for (int g = 0; g < HEADS; g++)
    for (int u = 0; u < TOKENS; u++) s[g * s_stride + u] = sum_of(acc[g][u]);
}
#endif

// Element size by type, as a constant where the type is one.
template <int TYPE> constexpr int kSize = TYPE == FP32 ? 4 : 2;

// The state of one segment: the whole group's queries, logits and sums. Queries and sums stand in blocks of up to four
// heads, each [pair][head][2][LANES], rows padded to whole pairs: a kernel walks one pointer with constant offsets.
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

// Heads of the block that holds head g, and where the head's first pair stands.
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

template <int TYPE>
void begin_segment(State& st, const Segment& seg) {
  const vf scale = splat(st.shape->scale * LOG2E);
  for (int g = 0; g < st.shape->group; g++) {
    const char* row = (const char*)seg.q + g * seg.q_head_stride;
    float* q = &st.q[place_of(st, g)];
    for (int p = 0; p < st.pairs + st.half_pair; p++, q += block_heads(st, g) * PAIR) {
      const Two x = load_row<TYPE>(st, row, p);
      *(vf*)q = x.a * scale;
      *(vf*)(q + LANES) = x.b * scale;
    }
    st.maximum[g] = -INFINITY;
    st.sum[g] = vf{};
  }
  memset(st.o, 0, st.shape->group * st.padded * sizeof(float));
}

// Logits (base 2) of HEADS heads with a page's keys.
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

// Logits -> weights, relative to the running maximum. Positions that do not count get weight 0.
INLINE void page_weights(State& st, int head, const PageRef& page) {
  float* s = &st.s[head * kMaxPageSize];
  const int page_size = st.shape->page_size;
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
    *(vf*)&s[t] = w;
    st.sum[head] += w;
  }
}

// Adds the weighted values of PAIRS pairs of the rows, from pair `first` on. Only tokens that count are read: what
// lies around them may be NaN.
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

// One page for HEADS heads. Groups of more than 4 heads come by several times: the page is in L1 or L2 by then.
template <int TYPE, int HEADS, bool PREFETCH>
void attend_page(State& st, int head, const PageRef& page, const char* upcoming) {
  Prefetch ahead{upcoming, st.shape->prefetch_order};
  page_logits<TYPE, HEADS, PREFETCH>(st, head, page.keys, ahead);
  for (int g = 0; g < HEADS; g++) page_weights(st, head + g, page);
  page_values<TYPE, HEADS, PREFETCH>(st, head, page, ahead);
}

template <int TYPE, bool PREFETCH>
INLINE void attend_heads(State& st, int head, int heads, const PageRef& page, const char* upcoming) {
  if (heads >= 4) attend_page<TYPE, 4, PREFETCH>(st, head, page, upcoming);
  else if (heads == 3) attend_page<TYPE, 3, PREFETCH>(st, head, page, upcoming);
  else if (heads == 2) attend_page<TYPE, 2, PREFETCH>(st, head, page, upcoming);
  else attend_page<TYPE, 1, PREFETCH>(st, head, page, upcoming);
}

template <int TYPE>
void end_segment(State& st, const Segment& seg) {
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
    const float* o = &st.o[place_of(st, g)];
    const int pair_stride = block_heads(st, g) * PAIR;
    for (int d = 0; d < dim; d++) {
      const int pair = d / PAIR, i = d % PAIR;
      const int at = TYPE == BF16 ? i / 2 + (i % 2) * LANES : i;
      out[d] = o[pair * pair_stride + at] * norm;
    }
  }
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
        const vf of_head = exp2_of(*(const vf*)&st.s[g * kMaxPageSize + t] - base[g]);
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
  if (shape->type == BF16) return weigh_segment<BF16>;
  if (shape->type == FP16) return weigh_segment<FP16>;
  return weigh_segment<FP32>;
}

// --- digests ---------------------------------------------------------------------------------------------------

template <int TYPE>
INLINE void dots_of(const char* const* rows, const char* const* upcoming, const float* weights, int n, float* out) {
  constexpr int BYTES = PAIR * kSize<TYPE>;
  constexpr int CALLS_PER_LINE = BYTES < 64 ? 64 / BYTES : 1;
  vf acc[kScoreTile][2] = {};
  for (int p = 0; p * PAIR < n; p++) {
    if (p % CALLS_PER_LINE == 0) {
#pragma GCC unroll 4
      for (int r = 0; r < kScoreTile; r++)
#pragma GCC unroll 2
        for (int b = 0; b < BYTES; b += 64) __builtin_prefetch(upcoming[r] + (int64_t)p * BYTES + b, 0, 2);
    }
    const vf wa = *(const vf_any*)&weights[p * PAIR], wb = *(const vf_any*)&weights[p * PAIR + LANES];
#pragma GCC unroll 4
    for (int r = 0; r < kScoreTile; r++) {
      const Two x = load_pair_of(TYPE, rows[r] + (int64_t)p * BYTES);
      acc[r][0] += x.a * wa;
      acc[r][1] += x.b * wb;
    }
  }
  for (int r = 0; r < kScoreTile; r++) out[r] = sum_of(acc[r][0] + acc[r][1]);
}

void vector_dots(int type, const char* const* rows, const char* const* upcoming, const float* weights, int n,
                 float* out) {
  if (type == BF16) dots_of<BF16>(rows, upcoming, weights, n, out);
  else if (type == FP16) dots_of<FP16>(rows, upcoming, weights, n, out);
  else dots_of<FP32>(rows, upcoming, weights, n, out);
}

// bf16 pairs load as even and odd elements: put the weights in the same order.
void vector_prepare_weights(int type, float* weights, int n, float* scratch) {
  if (type != BF16) return;
  memcpy(scratch, weights, n * sizeof(float));
  for (int d = 0; d < n; d++) {
    const int pair = d / PAIR, i = d % PAIR;
    weights[pair * PAIR + i / 2 + (i % 2) * LANES] = scratch[d];
  }
}

// Plain loops, which compilers turn into widening multiplications.
void vector_byte_dots(const ByteWeights* w, const uint8_t* const* rows, const uint8_t* const* upcoming, float* out) {
  for (int r = 0; r < kScoreTile; r++) {
    const float* scales = (const float*)(rows[r] + w->scales_at);
    float total = 0;
    for (int s = 0; s < w->segments; s++) {
      const uint8_t* bytes = rows[r] + s * w->width;
      const int8_t* weights = w->weights + s * w->width;
      for (int b = 0; b < w->width; b += 64) __builtin_prefetch(upcoming[r] + s * w->width + b, 0, 2);
      int32_t sum = 0;
      for (int i = 0; i < w->width; i++) sum += (int16_t)bytes[i] * (int16_t)weights[i];
      total += scales[s] * w->step[s] * (float)(sum - w->bias[s]);
    }
    out[r] = total;
  }
}

#ifndef HAVE_CODES
// What the tables say of sixteen tokens: to[head][token].
template <int HEADS>
INLINE void add_codes(const CodeQuery* q, int head, const uint8_t* planes, float* to, int to_stride) {
  for (int g = 0; g < HEADS; g++) {
    const uint8_t* tables = q->tables + (int64_t)(head + g) * q->stride;
    uint16_t sums[16] = {};
    for (int p = 0; p < q->planes; p++) {
      const uint8_t* table = tables + p / 4 * 128 + p % 4 * 16;
      for (int t = 0; t < 16; t++) {
        const uint8_t codes = planes[p * 16 + t];
        sums[t] += table[codes & 15] + table[64 + (codes >> 4)];
      }
    }
    for (int t = 0; t < 16; t++) to[g * to_stride + t] = sums[t];
  }
}
#endif

template <int HEADS>
INLINE void code_sums_of(const CodeQuery* q, int head, const CodePage& page, const float* s, float* sums) {
  alignas(64) float x[HEADS * kMaxPageSize];
  for (int b = 0; b < q->blocks; b++)
    add_codes<HEADS>(q, head, page.planes + (int64_t)b * 16 * q->planes, x + b * 16, kMaxPageSize);
#pragma GCC unroll 4
  for (int g = 0; g < HEADS; g++) {
    const float* own = x + g * kMaxPageSize;
    const vf factor = splat(q->factor[head + g]), offset = splat(q->offset[head + g]);
    const vf variance = splat(q->variance[head + g]);
    vf sum = {};
    for (int t = 0; t < q->blocks * 16; t += LANES) {
      const vf scale = *(const vf*)&s[t], most = splat(126.f);
      const vf x = scale * (factor * *(const vf*)&own[t] + offset + variance * scale);
      sum += exp2_of(x < most ? x : most);  // larger ones, and NaN: beyond kMostSum
    }
    sums[(head + g) * kScoreTile] = sum_of(sum);
  }
}

void vector_code_sums(const CodeQuery* q, const CodePage* pages, float* sums) {
  alignas(64) float s[kMaxPageSize];
  for (int i = 0; i < kScoreTile; i++) {
    for (int t = 0; t < q->blocks * 16; t++) s[t] = pages[i].unit * pages[i].scales[t];
    int g = 0;
    for (; g + 4 <= q->group; g += 4) code_sums_of<4>(q, g, pages[i], s, sums + i);
    for (; g + 2 <= q->group; g += 2) code_sums_of<2>(q, g, pages[i], s, sums + i);
    for (; g < q->group; g++) code_sums_of<1>(q, g, pages[i], s, sums + i);
  }
}

bool vector_log_sums(float* base, const float* sums, int n, float factor) {
  vi usual = ~vi{};
  for (int i = 0; i < n; i += LANES) {
    const vf sum = *(const vf_any*)&sums[i];
    usual &= (sum > splat(kLeastSum)) & (sum < splat(kMostSum));
  }
  if (largest_of((vf)(~usual & (vi)splat(1.f))) > 0) return false;
  for (int i = 0; i < n; i += LANES) {
    // log2 of 2^e * m with m in [sqrt(1/2), sqrt(2)), by the series of the inverse hyperbolic tangent.
    const vi bits = *(const vi_any*)&sums[i], exponent = (bits - 0x3f3504f3) >> 23;
    const vf m = (vf)(bits - (exponent << 23)), z = (m - splat(1.f)) / (m + splat(1.f)), zz = z * z;
    const vf series = splat(2.f) + zz * (splat(2.f / 3) + zz * (splat(2.f / 5) + zz * splat(2.f / 7)));
    const vf log = __builtin_convertvector(exponent, vf) + z * series * splat(LOG2E);
    *(vf_any*)&base[i] = (*(const vf_any*)&base[i] + log) * splat(factor);
  }
  return true;
}

void vector_softmax_add(float* scores, int n, float scale, float* total) {
  const int whole = n / LANES * LANES;
  float rest[LANES];  // what is left over, padded
  for (int i = 0; i < LANES; i++) rest[i] = whole + i < n ? scores[whole + i] : -INFINITY;
  vf top = larger(*(const vf_any*)rest, splat(-INFINITY));  // NaN is nothing
  for (int i = 0; i < whole; i += LANES) top = larger(*(const vf_any*)&scores[i], top);
  const float highest = largest_of(top);
  if (!(highest > -INFINITY && highest < INFINITY)) return;
  const vf factor = splat(scale * LOG2E), offset = splat(highest);
  vf sum = {};
  for (int i = 0; i < whole; i += LANES) {
    const vf e = exp2_of((*(const vf_any*)&scores[i] - offset) * factor);
    *(vf_any*)&scores[i] = e;
    sum += e;
  }
  const vf e = exp2_of((*(const vf_any*)rest - offset) * factor);
  *(vf_any*)rest = e;
  const float weight = 1.f / sum_of(sum + e);
  for (int i = 0; i < whole; i += LANES)
    *(vf_any*)&total[i] = *(const vf_any*)&total[i] + *(const vf_any*)&scores[i] * splat(weight);
  for (int i = whole; i < n; i++) total[i] += rest[i - whole] * weight;
}

uint64_t vector_read(const void* from, int64_t n) {
  const vi* at = (const vi*)from;
  vi seen[8] = {};
  for (int64_t i = 0; i + 8 <= n / LANE_BYTES; i += 8)
#pragma GCC unroll 8
    for (int k = 0; k < 8; k++) seen[k] |= at[i + k];
  for (int k = 1; k < 8; k++) seen[0] |= seen[k];
  uint64_t result = 0;
  for (int i = 0; i < LANES; i++) result |= (uint32_t)seen[0][i];
  return result;
}

// --- conversions -----------------------------------------------------------------------------------------------

#ifndef HAVE_FP16_CONVERSION
INLINE uint16_t fp16_of(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  const uint16_t sign = (u >> 16) & 0x8000;
  u &= 0x7fffffff;
  if (u > 0x7f800000) return sign | 0x7e00;
  if (u >= 0x477ff000) return sign | 0x7c00;
  if (u < 0x38800000) {  // subnormal: let fp32 addition do the rounding
    float magnitude;
    memcpy(&magnitude, &u, 4);
    magnitude += 0.5f;
    memcpy(&u, &magnitude, 4);
    return sign | (uint16_t)(u - 0x3f000000);
  }
  return sign | (uint16_t)((u + 0xc8000fff + ((u >> 13) & 1)) >> 13);
}
void to_fp16(const float* from, uint16_t* to, int n) {
  for (int i = 0; i < n; i++) to[i] = fp16_of(from[i]);
}
#endif

void vector_convert(int type, const float* from, void* to, int n) {
  if (type == FP32) {
    memcpy(to, from, n * sizeof(float));
  } else if (type == FP16) {
    to_fp16(from, (uint16_t*)to, n);
  } else {
    uint16_t* out = (uint16_t*)to;
    for (int i = 0; i < n; i++) {
      uint32_t u;
      memcpy(&u, &from[i], 4);
      const uint32_t rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
      out[i] = (u & 0x7fffffff) > 0x7f800000 ? (uint16_t)((u >> 16) | 0x40) : (uint16_t)rounded;
    }
  }
}

void vector_widen(int type, const void* from, float* to, int n) {
  if (type == FP32) {
    memcpy(to, from, n * sizeof(float));
  } else if (type == BF16) {
    for (int i = 0; i < n; i++) {
      const uint32_t bits = (uint32_t)((const uint16_t*)from)[i] << 16;
      memcpy(&to[i], &bits, 4);
    }
  } else {
    for (int i = 0; i < n; i += PAIR) {
      const char* at = (const char*)from + i * 2;
      const bool whole = i + PAIR <= n;  // fp16 pairs load in order
      const Two x = whole ? load_pair_of(FP16, at) : load_half_pair_of(FP16, at);
      *(vf_any*)&to[i] = x.a;
      if (whole) *(vf_any*)&to[i + LANES] = x.b;
    }
  }
}

}  // namespace
