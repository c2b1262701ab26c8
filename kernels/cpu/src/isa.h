// The functions that each instruction set implements, and the plain structs that they work on.
//
// Each isa_*.cpp is compiled with flags of its own, so none of them may use a std header: the linker could keep a copy
// of an inline std function that was compiled there, which then crashes on an older CPU.
#pragma once
#include <stdint.h>

enum ElementType { BF16 = 0, FP16 = 1, FP32 = 2, INT8 = 3 };  // INT8: K and V in pages only (kv_format.h)

constexpr int kMaxHeadDim = 512;
constexpr int kMaxGroup = 16;
constexpr int kMaxPageSize = 128;
constexpr int kScoreTile = 4;  // pages scored together

inline int element_size(int type) { return type == FP32 ? 4 : type == INT8 ? 1 : 2; }

// One KV head of one page: K rows first, V rows `value_offset` bytes later. In 8 bits the fp16 scales of all keys and of
// all values stand behind the rows of V.
struct PageRef {
  const char* keys;
  int32_t tokens;  // valid tokens at the start of the page, 1..page_size
  int32_t skip;    // first tokens that are left out, 0..tokens - 1
};

// The values that all segments of a call share.
struct Shape {
  int type;                // ElementType of q
  int kv_type;             // ElementType of K and V: as `type`, or INT8
  int head_dim;            // multiple of 16
  int group;               // query heads per KV head
  int page_size;           // multiple of 16
  float scale;             // > 0
  int64_t token_stride;    // bytes between two tokens' K (or V) rows
  int64_t value_offset;    // bytes from a page's first K row to its first V row
  const int32_t* prefetch_order;  // byte offsets from `keys` of a page's cache lines, see prefetch.h
  int prefetch_distance;          // pages ahead
};

// One KV head of one sequence, or a part of its pages.
struct Segment {
  const void* q;            // [group, head_dim]
  int64_t q_head_stride;    // bytes
  int first, count;         // its pages in the call's page array
  float* out;               // [group, head_dim] fp32, contiguous
  float* lse;               // [group] natural log
};

typedef void (*AttendFn)(const Shape*, const Segment*, int segments, const PageRef* pages, int page_count);

// Dot products of `kScoreTile` rows with one weight vector, laid out by `prepare_weights`.
typedef void (*DotsFn)(int type, const char* const* rows, const char* const* upcoming, const float* weights, int n,
                       float* out);

// Scores of rows of quantized digests. A row is `segments` segments of `width` bytes, and one fp32 scale per segment:
//   out[r] = sum over segments s of scale[r][s] * step[s] * (bytes[r][s] . weights[s] - bias[s])
struct ByteWeights {
  const int8_t* weights;  // [segments, width]
  const int32_t* bias;    // [segments]: 128 * sum of the segment's weights, because bytes are offset by 128
  const float* step;      // [segments]
  int segments, width;    // width: a multiple of 16
  int scales_at;          // bytes from a row's first segment to its first scale
};
typedef void (*ByteDotsFn)(const ByteWeights*, const uint8_t* const* rows, const uint8_t* const* upcoming, float* out);
// The same for several heads, whose weights stand one after the other, on the same segments of the rows:
// out[head][kScoreTile].
typedef void (*ByteHeadsFn)(const ByteWeights*, int heads, const uint8_t* const* rows, const uint8_t* const* upcoming,
                            float* out);

// The query heads of one KV head, prepared for codes of keys (kernels/codes.py).
struct CodeQuery {
  int group, blocks, planes;  // query heads; blocks of 16 tokens; bytes of codes per token
  const uint8_t* tables;  // tables of each head, `stride` bytes apart (CodeKernels::tables)
  const float *factor, *offset, *variance;  // per head
  int stride;
};
struct CodePage {
  const uint8_t *scales, *planes;
  float unit;
};
// Computes sums[g][i], the sum of 2^x[t] over the tokens t of page i, for kScoreTile pages. With s = unit * scales[t]
// and the tables' sum for token t, x[t] = s * (factor[g] * sum + offset[g] + variance[g] * s). A result may overflow to
// inf or NaN, or underflow to 0.
typedef void (*CodeSumsFn)(const CodeQuery*, const CodePage* pages, float* sums);
constexpr float kLeastSum = 1e-30f, kMostSum = 1e30f;  // a sum beyond these limits is not reliable

// Codes are looked up in tables. Each instruction set has a table layout of its own.
struct CodeKernels {
  int (*table_bytes)(int planes);  // size of one head's tables
  // Fills the tables for a rotated query, whose first `coded` channels have codes, `fine` of them of two bits. Returns
  // the value of one step of the tables, and in `least` the value of zero steps.
  float (*tables)(const float* x, int fine, int coded, uint8_t* tables, float* least);
  // Returns the tables' sum for one token, in steps; the token's bytes of codes stand 16 apart.
  int (*steps)(const uint8_t* tables, const uint8_t* codes, int planes);
  CodeSumsFn sums;
};

struct ByteKernels {
  ByteDotsFn dots;
  ByteHeadsFn heads;  // null: heads are scored one by one with dots
};

// Blends the shares that a segment's tokens have in its attention, whose log-sum-exp is `lse`, into moving averages:
//   averages[p][t] = (1 - alpha) * averages[p][t] + alpha * share, the mean (or the largest) over the group's heads
// for the first `tokens` tokens of each page p of the segment. No page may skip tokens; `out` is not used.
typedef void (*WeighFn)(const Shape*, const Segment*, const PageRef* pages, float* const* averages, float alpha,
                        bool largest);

// Consecutive tokens of a prompt and the query heads of one KV head, whose queries attend the pages of their sequence.
// The pages have the keys and values of these tokens already. In 8 bits these tokens are read from `new_keys` and
// `new_values` instead, as the model left them, so that only earlier chunks are read in 8 bits.
struct PromptBlock {
  int type, kv_type, head_dim, group, page_size;  // type: of q and out; head_dim: a multiple of 16
  float scale;
  int tokens;
  int64_t first;  // the first token's position in the sequence
  int64_t window;  // tokens that each query attends at most, its own included
  const char* q;  // strides in bytes
  int64_t q_token_stride, q_head_stride;
  char* out;
  int64_t out_token_stride, out_head_stride;
  const int32_t* pages;  // pages of the sequence from its beginning; those that no window reaches are not read
  const char* keys;  // page 0's first K row of the KV head
  int64_t page_stride, value_offset;
  const char *new_keys, *new_values;  // of the token `new_first` and those after it; null: the pages' are read
  int64_t new_first, new_key_stride, new_value_stride;
  const float* sinks;  // [group] natural log, or null
  float* scratch;  // prompt_floats, 64-byte aligned
};
constexpr int kPromptRows = 32;  // queries that are multiplied at once, at most
constexpr int kPromptKeys = 128;  // keys that are multiplied at once
inline int64_t prompt_floats(int64_t queries, int64_t head_dim) {
  const int64_t rows = queries + kPromptRows;
  return 2 * (rows + kPromptKeys) * head_dim + 2 * rows;
}
typedef void (*PromptFn)(const PromptBlock*);

// Keys of the pages of a prompt block, and the weights that the block's queries give them. The softmax of each query
// runs over a span of keys, of which this block has up to kPromptKeys. V and `out` are not read or written.
struct WeighBlock {
  PromptBlock prompt;  // `scratch`: weigh_floats, the queries packed by PromptKernels::pack
  int64_t begin, end;  // the keys' positions in the sequence
  float *top, *sum;  // [tokens * group] of each query: its largest product in the span, the sum of its weights
  float*
      weights;  // null: these keys are added to `top` and `sum`; else [end - begin]: mean weight over the tokens, and
  // of the group's heads the largest
};
inline int64_t weigh_floats(int64_t queries, int64_t head_dim) {
  return (queries + kPromptRows + kPromptKeys) * head_dim;
}
typedef void (*WeighPromptFn)(const WeighBlock*);

struct PromptKernels {
  PromptFn attend;
  void (*pack)(const PromptBlock*);  // writes the queries to `scratch`, for `weigh`
  WeighPromptFn weigh;
};

// total[i] += softmax(scale * scores)[i]; overwrites scores.
typedef void (*SoftmaxAddFn)(float* scores, int n, float scale, float* total);

struct Isa {
  const char* name;
  AttendFn (*attend)(const Shape*);  // null for a shape that this ISA leaves to the next one
  DotsFn dots;
  // Reorders n fp32 weights in place for `dots`; n is a multiple of 32. `scratch` holds n floats.
  void (*prepare_weights)(int type, float* weights, int n, float* scratch);
  void (*convert)(int type, const float* from, void* to, int n);  // fp32 -> type, round to nearest even
  void (*widen)(int type, const void* from, float* to, int n);  // type -> fp32
  ByteDotsFn byte_dots;
  SoftmaxAddFn softmax_add;
  uint64_t (*read)(const void* from, int64_t n);  // reads n bytes, for benchmarks
  WeighFn (*weigh)(const Shape*);
  CodeKernels codes;
  // base[i] = (base[i] + log2(sums[i])) * factor. n is a multiple of kScoreTile; both arrays are padded to a multiple
  // of 16. Returns false and changes nothing if a sum, padding included, is not between kLeastSum and kMostSum.
  bool (*log_sums)(float* base, const float* sums, int n, float factor);
  PromptKernels prompt;  // any type
  // Rotates n numbers in place like kernels/codes.py: signs, then Hadamard's transform. n: a multiple of 16.
  void (*rotate)(float* x, int n);
};

#define HB_HIDDEN __attribute__((visibility("hidden")))
extern "C" HB_HIDDEN const Isa hb_isa_generic, hb_isa_avx2, hb_isa_avx512, hb_isa_amx, hb_isa_neon;
extern "C" HB_HIDDEN const ByteKernels hb_avx2_bytes;
extern "C" HB_HIDDEN const ByteKernels hb_vnni_bytes;  // for AVX-512 CPUs that have VNNI
extern "C" HB_HIDDEN AttendFn hb_vnni_attend(const Shape*), hb_avx2_attend(const Shape*);  // pages in 8 bits only
extern "C" HB_HIDDEN const CodeKernels hb_vnni_codes, hb_vbmi_codes;  // for those that have VNNI, or VBMI
// bf16 only; for AVX-512 CPUs that have AVX512_BF16. The latter also needs AMX, and a head_dim that is a multiple of
// 32.
extern "C" HB_HIDDEN const PromptKernels hb_avx512_bf16_prompt, hb_amx_prompt;
// For NEON CPUs: with nothing more, with DotProd, with DotProd and I8MM.
extern "C" HB_HIDDEN const ByteKernels hb_neon_bytes, hb_neon_dotprod_bytes, hb_neon_i8mm_bytes;
extern "C" HB_HIDDEN const PromptKernels hb_neon_bf16_prompt;  // bf16 only; for NEON CPUs that have BF16
