// Partial attention on AMX tiles, for bf16, straight from token-major pages (nothing is packed):
//
//   logits   A = 16 K rows x 32 channels as stored,  B = q^T in pairs of channels,  C = [16 tokens][GROUP]
//   values   B = 16 V rows x 32 channels as stored: each dword is a pair (even, odd) of channels, and the product wants
//            pairs of tokens. So A gets two rows per head, (P, 0) and (0, P): C row g holds the even channels, C row
//            GROUP + g the odd ones. That is why a group may have 8 heads at most.
//
// A tile operation takes 16 cycles even when the tile is nearly empty; memory is slower than that up to 8 heads.
// The logits of page i + 1 are computed between the values of page i, which hides the latency of both.
#include <math.h>

#include "amx.h"
#include "exp2_avx512.h"
#include "isa.h"
#include "prefetch.h"

#define INLINE ALWAYS_INLINE

namespace {

constexpr float RESCALE_ABOVE = 8.f;
constexpr float LOG2E = 1.44269504f, LN2 = 0.69314718f;

// Roles of the eight tiles.
constexpr int ROWS = 0;  // 16 rows of K, then of V
constexpr int WEIGHTS = 1;  // P
constexpr int QUERY = 2, LOGITS = 3, OUT = 4;  // OUT..OUT+3

// CHANNELS32: head_dim / 32. GROUP: heads, padded to a power of two.
template <int CHANNELS32, int GROUP>
struct Kernel {
  static constexpr int DIM = CHANNELS32 * 32;
  static constexpr int TOKENS_PER_VECTOR = 16 / GROUP;
  static constexpr bool OUT_IN_TILES = CHANNELS32 <= 4;  // else the sums live in memory

  const Shape* shape;
  __m512 scale;  // softmax scale * log2(e)
  __m512i head_major;
  // Lane t * GROUP + g belongs to head g. Maxima are not scaled: a product that is rounded here and fused there would
  // leave a difference, of huge logits a huge one, where there is none.
  __m512 maximum, sum;
  alignas(64) uint32_t query[CHANNELS32][16][GROUP];
  alignas(64) float logits[2][kMaxPageSize * GROUP];  // [token][GROUP], this page's and the next one's
  alignas(64) uint32_t weights[2 * GROUP][16];
  alignas(64) float out[CHANNELS32][2 * GROUP][16];
  alignas(64) char tail[16 * DIM * 2];

  INLINE void configure() {
    TileConfig c;
    c.set(ROWS, 16, 64);
    c.set(WEIGHTS, 2 * GROUP, 64);
    c.set(QUERY, 16, GROUP * 4);
    c.set(LOGITS, 16, GROUP * 4);
    for (int t = OUT; t < OUT + 4; t++) c.set(t, 2 * GROUP, 64);
    c.load();

    scale = _mm512_set1_ps(shape->scale * LOG2E);
    alignas(64) int32_t lanes[16];
    for (int l = 0; l < 16; l++) lanes[l] = (l % TOKENS_PER_VECTOR) * GROUP + l / TOKENS_PER_VECTOR;
    head_major = _mm512_load_si512(lanes);
  }

  INLINE void begin(const Segment& seg) {
    for (int c = 0; c < CHANNELS32; c++)
      for (int k = 0; k < 16; k++)
        for (int g = 0; g < GROUP; g++) {
          uint32_t pair = 0;
          if (g < shape->group) memcpy(&pair, (const char*)seg.q + g * seg.q_head_stride + (c * 16 + k) * 4, 4);
          query[c][k][g] = pair;
        }
    if constexpr (OUT_IN_TILES) {
      tile_zero<OUT>(), tile_zero<OUT + 1>(), tile_zero<OUT + 2>(), tile_zero<OUT + 3>();
    } else {
      memset(out, 0, sizeof out);
    }
    maximum = _mm512_set1_ps(-INFINITY);
    sum = _mm512_setzero_ps();
  }

  // Raw logits of 16 tokens.
  INLINE void token_logits(const char* keys, float* to, Prefetch& ahead) {
    memory_barrier();
    tile_zero<LOGITS>();
#pragma GCC unroll 8
    for (int c = 0; c < CHANNELS32; c++) {
      ahead.lines<16>();
      tile_load<ROWS>(keys + c * 64, shape->token_stride);
      tile_load<QUERY>(query[c], GROUP * 4);
      _tile_dpbf16ps(3, 0, 2);
    }
    tile_store<LOGITS>(to, GROUP * 4);
  }

  template <int C> INLINE void load_out() { tile_load<OUT + C % 4>(out[C], 64); }
  template <int C> INLINE void store_out() { tile_store<OUT + C % 4>(out[C], 64); }
  INLINE void load_four(int c) {
    memory_barrier();
    tile_load<OUT>(out[c], 64);
    if (c + 1 < CHANNELS32) tile_load<OUT + 1>(out[c + 1], 64);
    if (c + 2 < CHANNELS32) tile_load<OUT + 2>(out[c + 2], 64);
    if (c + 3 < CHANNELS32) tile_load<OUT + 3>(out[c + 3], 64);
  }
  INLINE void store_four(int c) {
    tile_store<OUT>(out[c], 64);
    if (c + 1 < CHANNELS32) tile_store<OUT + 1>(out[c + 1], 64);
    if (c + 2 < CHANNELS32) tile_store<OUT + 2>(out[c + 2], 64);
    if (c + 3 < CHANNELS32) tile_store<OUT + 3>(out[c + 3], 64);
    memory_barrier();
  }

  // Heads whose maximum grew a lot: bring their sums to the new one.
  void rescale(__mmask16 grown, __m512 best) {
    const __m512 to = _mm512_mask_mov_ps(maximum, grown, best);
    const __m512 factor = exp2_avx512(_mm512_mul_ps(_mm512_maskz_sub_ps(grown, maximum, to), scale));
    maximum = to;
    sum = _mm512_mul_ps(sum, factor);
    alignas(64) float by_lane[16];
    _mm512_store_ps(by_lane, factor);
    if constexpr (OUT_IN_TILES) store_four(0);
    for (int c = 0; c < CHANNELS32; c++)
      for (int row = 0; row < 2 * GROUP; row++) {
        const __m512 scaled = _mm512_mul_ps(_mm512_load_ps(out[c][row]), _mm512_set1_ps(by_lane[row % GROUP]));
        _mm512_store_ps(out[c][row], scaled);
      }
    if constexpr (OUT_IN_TILES) load_four(0);
  }

  // The largest logit of each head, in all of the head's lanes.
  INLINE __m512 head_maximum(const float* s) {
    __m512 best = _mm512_max_ps(_mm512_load_ps(s), _mm512_set1_ps(-INFINITY));  // the second operand wins over NaN
    for (int i = 16; i < shape->page_size * GROUP; i += 16) best = _mm512_max_ps(_mm512_load_ps(s + i), best);
    auto rotated = [&](auto lanes) __attribute__((always_inline)) {
      const __m512i x = _mm512_castps_si512(best);
      best = _mm512_max_ps(best, _mm512_castsi512_ps(_mm512_alignr_epi32(x, x, decltype(lanes)::value)));
    };
    if constexpr (GROUP <= 1) rotated(Int<1>());
    if constexpr (GROUP <= 2) rotated(Int<2>());
    if constexpr (GROUP <= 4) rotated(Int<4>());
    if constexpr (GROUP <= 8) rotated(Int<8>());
    return best;
  }
  template <int N> struct Int {
    static constexpr int value = N;
  };

  // Logits of 16 / GROUP tokens -> bf16 weights in the `weights` rows, as (0, P) pairs.
  INLINE void store_weights(const float* s, int j) {
    const __m512 p = exp2_avx512(_mm512_mul_ps(_mm512_sub_ps(_mm512_load_ps(s), maximum), scale));
    sum = _mm512_add_ps(sum, p);  // unrounded, for an exact LSE
    __m512i bits = _mm512_castps_si512(p);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    bits = _mm512_add_epi32(bits, _mm512_add_epi32(_mm512_set1_epi32(0x7fff), odd));
    bits = _mm512_and_si512(bits, _mm512_set1_epi32((int)0xffff0000));
    const __m512i rows = _mm512_permutexvar_epi32(head_major, bits);  // the tokens of head 0, of head 1, ...
    if constexpr (GROUP == 1) {
      _mm512_store_si512(weights[0], rows);
    } else if constexpr (GROUP == 2) {
      _mm256_store_si256((__m256i*)&weights[0][j * 8], _mm512_castsi512_si256(rows));
      _mm256_store_si256((__m256i*)&weights[1][j * 8], _mm512_extracti64x4_epi64(rows, 1));
    } else if constexpr (GROUP == 4) {
      _mm_store_si128((__m128i*)&weights[0][j * 4], _mm512_castsi512_si128(rows));
      _mm_store_si128((__m128i*)&weights[1][j * 4], _mm512_extracti32x4_epi32(rows, 1));
      _mm_store_si128((__m128i*)&weights[2][j * 4], _mm512_extracti32x4_epi32(rows, 2));
      _mm_store_si128((__m128i*)&weights[3][j * 4], _mm512_extracti32x4_epi32(rows, 3));
    } else {
      const __m128i r0 = _mm512_castsi512_si128(rows), r1 = _mm512_extracti32x4_epi32(rows, 1);
      const __m128i r2 = _mm512_extracti32x4_epi32(rows, 2), r3 = _mm512_extracti32x4_epi32(rows, 3);
      _mm_storel_pi((__m64*)&weights[0][j * 2], _mm_castsi128_ps(r0));
      _mm_storeh_pi((__m64*)&weights[1][j * 2], _mm_castsi128_ps(r0));
      _mm_storel_pi((__m64*)&weights[2][j * 2], _mm_castsi128_ps(r1));
      _mm_storeh_pi((__m64*)&weights[3][j * 2], _mm_castsi128_ps(r1));
      _mm_storel_pi((__m64*)&weights[4][j * 2], _mm_castsi128_ps(r2));
      _mm_storeh_pi((__m64*)&weights[5][j * 2], _mm_castsi128_ps(r2));
      _mm_storel_pi((__m64*)&weights[6][j * 2], _mm_castsi128_ps(r3));
      _mm_storeh_pi((__m64*)&weights[7][j * 2], _mm_castsi128_ps(r3));
    }
  }

  // `weights` rows (0, P) -> rows (P, 0) above rows (0, P), as a tile.
  INLINE void load_weights() {
#pragma GCC unroll 8
    for (int g = 0; g < GROUP; g++) {
      const __m512i x = _mm512_load_si512(weights[g]);
      _mm512_store_si512(weights[GROUP + g], x);
      _mm512_store_si512(weights[g], _mm512_srli_epi32(x, 16));
    }
    memory_barrier();
    tile_load<WEIGHTS>(weights, 64);
  }

  // Adds 16 weighted V rows to four tiles of sums.
  INLINE void add_four(const char* values, int64_t stride) {
    tile_load<ROWS>(values, stride);
    _tile_dpbf16ps(4, 1, 0);
    if constexpr (CHANNELS32 > 1) {
      tile_load<ROWS>(values + 64, stride);
      _tile_dpbf16ps(5, 1, 0);
    }
    if constexpr (CHANNELS32 > 2) {
      tile_load<ROWS>(values + 128, stride);
      _tile_dpbf16ps(6, 1, 0);
    }
    if constexpr (CHANNELS32 > 3) {
      tile_load<ROWS>(values + 192, stride);
      _tile_dpbf16ps(7, 1, 0);
    }
  }
  INLINE void add_values(const char* values, int64_t stride) {
    if constexpr (OUT_IN_TILES) {
      add_four(values, stride);
    } else {
      for (int c = 0; c < CHANNELS32; c += 4) {
        load_four(c);
        add_four(values + c * 64, stride);
        store_four(c);
      }
    }
  }

  // Rows that do not count may hold NaN, and 0 * NaN is NaN: give the tile zeros instead.
  INLINE const char* zero_padded(const char* values, int skip, int tokens) {
    memset(tail, 0, sizeof tail);
    for (int t = skip; t < tokens; t++) memcpy(tail + t * DIM * 2, values + t * shape->token_stride, DIM * 2);
    memory_barrier();
    return tail;
  }

  // Softmax and values of one page; between them the logits of the next page, if there is one.
  INLINE void page(const PageRef& current, float* s, const char* next_keys, float* next_s, Prefetch value_ahead,
                   Prefetch key_ahead) {
    constexpr int LINES = CHANNELS32 * 16 / GROUP;  // a store_weights step's share of the lines that values read
    const int page_size = shape->page_size;
    for (int i = 0; i < current.skip * GROUP; i++) s[i] = -INFINITY;
    for (int i = current.tokens * GROUP; i < page_size * GROUP; i++) s[i] = -INFINITY;
    const __m512 best = head_maximum(s);
    const __m512 growth = _mm512_mul_ps(_mm512_sub_ps(best, maximum), scale);
    const __mmask16 grown = _mm512_cmp_ps_mask(growth, _mm512_set1_ps(RESCALE_ABOVE), _CMP_GT_OQ);
    if (__builtin_expect(grown != 0, 0)) rescale(grown, best);
    const char* values = current.keys + shape->value_offset;
    for (int t = 0; t < page_size; t += 16) {
      if (next_keys) token_logits(next_keys + t * shape->token_stride, next_s + t * GROUP, key_ahead);
#pragma GCC unroll 8
      for (int j = 0; j < GROUP; j++) {
        value_ahead.lines<LINES>();
        store_weights(s + t * GROUP + j * 16, j);
      }
      if (t >= current.tokens || t + 16 <= current.skip) continue;
      load_weights();
      const char* rows = values + t * shape->token_stride;
      const int skip = current.skip > t ? current.skip - t : 0, end = current.tokens - t < 16 ? current.tokens - t : 16;
      if (!skip && end == 16) add_values(rows, shape->token_stride);
      else add_values(zero_padded(rows, skip, end), DIM * 2);
    }
  }

  void attend(const Segment& seg, const PageRef* pages, int page_count) {
    const int value_lines = shape->page_size * CHANNELS32;  // the table lists as many lines for the keys before
    auto ahead_of = [&](int p, int skip) {
      const int next = p + shape->prefetch_distance;
      return Prefetch{pages[next < page_count ? next : page_count - 1].keys, shape->prefetch_order + skip};
    };
    begin(seg);
    const int last = seg.first + seg.count - 1;
    int flip = 0;
    if (seg.count) {
      Prefetch ahead = ahead_of(seg.first, 0);
      for (int t = 0; t < shape->page_size; t += 16)
        token_logits(pages[seg.first].keys + t * shape->token_stride, logits[0] + t * GROUP, ahead);
      memory_barrier();
    }
    for (int p = seg.first; p <= last; p++, flip ^= 1) {
      page(pages[p], logits[flip], p < last ? pages[p + 1].keys : nullptr, logits[flip ^ 1], ahead_of(p, value_lines),
           ahead_of(p + 1, 0));
      memory_barrier();
    }
    end(seg);
  }

  INLINE void end(const Segment& seg) {
    if constexpr (OUT_IN_TILES) store_four(0);
    alignas(64) float sums[16], maxima[16];
    _mm512_store_ps(sums, sum);
    _mm512_store_ps(maxima, _mm512_mul_ps(maximum, scale));
    const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i high = _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    for (int g = 0; g < shape->group; g++) {
      float total = 0;
      for (int lane = g; lane < 16; lane += GROUP) total += sums[lane];
      float* to = seg.out + g * DIM;
      if (!(total > 0)) {
        seg.lse[g] = -INFINITY;
        memset(to, 0, DIM * sizeof(float));
        continue;
      }
      seg.lse[g] = (maxima[g] + log2f(total)) * LN2;
      const __m512 norm = _mm512_set1_ps(1.f / total);
      for (int c = 0; c < CHANNELS32; c++) {
        const __m512 even = _mm512_mul_ps(_mm512_load_ps(out[c][g]), norm);
        const __m512 odd = _mm512_mul_ps(_mm512_load_ps(out[c][GROUP + g]), norm);
        _mm512_storeu_ps(to + c * 32, _mm512_permutex2var_ps(even, low, odd));
        _mm512_storeu_ps(to + c * 32 + 16, _mm512_permutex2var_ps(even, high, odd));
      }
    }
  }
};

template <int CHANNELS32, int GROUP>
void attend(const Shape* shape, const Segment* segs, int segments, const PageRef* pages, int page_count) {
  Kernel<CHANNELS32, GROUP> kernel;
  kernel.shape = shape;
  kernel.configure();
  for (int i = 0; i < segments; i++) kernel.attend(segs[i], pages, page_count);
  _tile_release();  // idle tiles would make every context switch dearer
}

template <int CHANNELS32>
AttendFn for_group(int group) {
  if (group <= 1) return attend<CHANNELS32, 1>;
  if (group <= 2) return attend<CHANNELS32, 2>;
  if (group <= 4) return attend<CHANNELS32, 4>;
  if (group <= 8) return attend<CHANNELS32, 8>;
  return nullptr;
}

AttendFn amx_attend(const Shape* shape) {
  if (shape->type != BF16 || shape->kv_type != BF16) return nullptr;
  switch (shape->head_dim) {
    case 64: return for_group<2>(shape->group);
    case 96: return for_group<3>(shape->group);
    case 128: return for_group<4>(shape->group);
    case 256: return for_group<8>(shape->group);
  }
  return nullptr;
}

}  // namespace

extern "C" const Isa hb_isa_amx = {"amx", amx_attend, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr};
