// The C ABI of the operations of a decode step. kernels/operations.py has their contract.
//
// Each operation takes one structure. Every member of such a structure takes 8 bytes, so that a caller can pack the
// arguments into a string without padding. Tensors are contiguous unless a stride is given; strides of this file are in
// elements. Ids, lists and counts are int32. kernels/cpu/interface.py reads this file.
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Columns of a layer's counters (operations.Counters), as far as these operations count.
enum {
  HB_RESIDENT_PAGES,
  HB_MISSING_PAGES,
  HB_RESIDENT_TOKENS,
  HB_MISSING_TOKENS,
  HB_RECALLED_PAGES,
  HB_LOOKUPS,
  HB_HITS
};

// Who works: the caller, and where gomp_parallel is not null an OpenMP team of that many threads (hb_decode_layer).
typedef struct hb_team {
  void* gomp_parallel;
  int64_t threads;
} hb_team;

// Host pages or frames, [pages, kv_heads, 2, page_size, head_dim]. type: as in hb_model.
typedef struct hb_paged {
  char* base;
  int64_t pages, type, kv_heads, page_size, head_dim, kv_encoding;
} hb_paged;

// `frames` of each request; frame i of request r is number i * requests + r.
typedef struct hb_maps {
  int32_t *frame_of, *page_of;  // [layers, requests, columns], [layers, frames * requests]
  float* importance;  // [layers, frames * requests]
  int64_t layers, requests, columns, frames;
} hb_maps;

typedef struct hb_copies {
  int32_t *frames, *host_pages, *pages;  // [layers, rows, most]
  float* importance;  // [layers, rows, most]
  int32_t* requests;  // [layers, rows]
  int64_t* started;  // [layers, rows]
  int64_t rows, most;
} hb_copies;

typedef struct hb_append_tokens_args {
  hb_paged host;
  const char *k, *v;
  const int32_t* pages;
  const void* positions;
  char* frames;  // null: none, nor the next two
  const int32_t *requests, *frame_of;
  char* digests;  // contiguous, or null
  int64_t digest_format, rows, positions_are_64, frame_count, request_count, columns, k_stride,
      v_stride;  // strides in elements
} hb_append_tokens_args;
int hb_append_tokens(const hb_append_tokens_args* args);

typedef struct hb_build_digests_args {
  hb_paged kv;
  char* digests;
  const int32_t *pages, *tokens;
  int64_t digest_format, n;
  hb_team team;
} hb_build_digests_args;
int hb_build_digests(const hb_build_digests_args* args);

typedef struct hb_extend_digests_args {
  const char* k;  // [tokens, kv_heads, head_dim]
  char* digests;  // contiguous, of maxima and minima
  const int32_t* pages;  // of the chunk, in order
  int64_t type, kv_heads, head_dim, page_count, page_size, tokens, first, n, k_stride;  // stride in elements
  hb_team team;
} hb_extend_digests_args;
int hb_extend_digests(const hb_extend_digests_args* args);

typedef struct hb_reuse {
  const int32_t* epochs;  // [rows], or null: no row reuses a selection
  int32_t* list_epochs;  // [rows, lists]
  int32_t* pages;  // [rows, lists, most]
  int32_t* listed;  // [rows, lists]
} hb_reuse;

typedef struct hb_page_scores_args {
  const char *q, *digests;
  const int32_t *table, *num_pages, *budgets;
  float* out;
  int64_t rows, columns, table_stride, pages, type, kv_heads, group, head_dim, page_size, digest_format, aggregate,
      per_head, isa;
  hb_reuse reuse;
  hb_team team;
  double bound, scale;
} hb_page_scores_args;
int hb_page_scores(const hb_page_scores_args* args);

typedef struct hb_select_pages_args {
  const float* scores;
  const int32_t *num_pages, *seq_lens, *budgets, *requests;
  const int32_t* frame_of;  // null: every page is resident in the frame of its host page's id
  const int32_t* table;
  int64_t* counters;  // or null
  int32_t* selected;  // [4 (pages, frames, missing, absent), rows, lists, most]
  int32_t* listed;  // [4 (pages_listed, frames_listed, tokens, missing_listed), rows, lists]
  int64_t rows, lists, columns, table_stride, request_count, frame_columns, page_size, sinks, recent, most;
  hb_reuse reuse;
  hb_team team;
} hb_select_pages_args;
int hb_select_pages(const hb_select_pages_args* args);

typedef struct hb_match_labels_args {
  const char* q;
  char* labels;  // [request_count, kv_heads * group, head_dim]
  const float *weights, *thresholds;
  const int32_t *requests, *num_pages, *budgets;
  int64_t* counters;  // or null
  int32_t* missed;  // [rows, kv_heads]
  int64_t rows, request_count, type, kv_heads, group, head_dim, aggregate, isa;
  hb_team team;
} hb_match_labels_args;
int hb_match_labels(const hb_match_labels_args* args);

typedef struct hb_union_pages_args {
  const int32_t *absent, *listed;
  const float* scores;
  int32_t *pages, *count;
  float* best;
  int64_t rows, lists, k, columns, most;
  hb_team team;
} hb_union_pages_args;
int hb_union_pages(const hb_union_pages_args* args);

typedef struct hb_paged_partial_args {
  hb_paged kv;
  const char* q;
  const int32_t *ids, *tokens;
  float *out, *lse;  // one part
  int64_t rows, lists, n, row_stride, list_stride, group, isa;
  hb_team team;
  double scale;
} hb_paged_partial_args;
int hb_paged_partial(const hb_paged_partial_args* args);

typedef struct hb_merge_partials_args {
  const float *out, *lse, *other_out, *other_lse;  // the latter two or null
  const float* sinks;  // [heads] or null
  char* merged;
  float* merged_lse;
  int64_t rows, heads, parts, head_dim, type, isa;
  hb_team team;
} hb_merge_partials_args;
int hb_merge_partials(const hb_merge_partials_args* args);

typedef struct hb_attend_prompt_args {
  hb_paged kv;
  const char* q;  // [tokens, kv_heads * group, head_dim]
  const char *k, *v;  // [tokens, kv_heads, head_dim] of the new tokens, which are read instead of the pages'; or null
  const int32_t* pages;  // [n] of the sequence
  const float* sinks;  // [kv_heads * group] or null
  char* out;  // as q
  int64_t tokens, seq_len, n, group, window, q_stride, k_stride, v_stride, out_stride,
      isa;  // window: 0: none; strides in elements
  hb_team team;
  double scale;
} hb_attend_prompt_args;
int hb_attend_prompt(const hb_attend_prompt_args* args);

typedef struct hb_prompt_weights_args {
  hb_paged kv;
  const char* q;  // [queries, kv_heads * group, head_dim]
  const int32_t* pages;  // [n] of the sequence
  float* weights;  // [kv_heads, tokens - first]
  int64_t queries, tokens, first, older, n, group, isa;
  hb_team team;
  double scale;
} hb_prompt_weights_args;
int hb_prompt_weights(const hb_prompt_weights_args* args);

typedef struct hb_page_weights_args {
  hb_paged kv;
  const char* q;
  const int32_t *ids, *places, *tokens;
  const float* lse;
  float* average;  // [place_count, kv_heads, page_size]
  int64_t rows, n, row_stride, place_stride, place_count, group, largest, isa;
  hb_team team;
  double scale, alpha;
} hb_page_weights_args;
int hb_page_weights(const hb_page_weights_args* args);

typedef struct hb_note_scores_args {
  hb_maps maps;
  const float* scores;
  const int32_t *num_pages, *budgets, *requests;
  int64_t rows, lists, columns, sinks, recent;
} hb_note_scores_args;
int hb_note_scores(const hb_note_scores_args* args);

typedef struct hb_plan_recall_args {
  hb_maps maps;
  hb_copies copies;
  const float* scores;
  const int32_t *table, *selected, *selected_listed, *absent, *absent_listed, *num_pages, *requests, *generations,
      *ages;
  int32_t* keep;  // [>= rows, frames]
  int64_t* counters;  // or null
  int64_t rows, columns, table_stride, lists, selected_k, absent_n, interval, phase;
} hb_plan_recall_args;
int hb_plan_recall(const hb_plan_recall_args* args);

typedef struct hb_copy_pages_args {
  const char* host;
  char* frames;
  const int32_t *host_pages, *frame_ids;
  int64_t n, page_bytes, page_count, frame_count;
  hb_team team;
} hb_copy_pages_args;
int hb_copy_pages(const hb_copy_pages_args* args);

typedef struct hb_commit_pages_args {
  hb_maps maps;
  hb_copies copies;
  const int64_t* generations;
} hb_commit_pages_args;
int hb_commit_pages(const hb_commit_pages_args* args);

typedef struct hb_open_pages_args {
  hb_maps maps;
  const int32_t *requests, *pages, *positions;
  int64_t rows, page_size, sinks;
} hb_open_pages_args;
int hb_open_pages(const hb_open_pages_args* args);

#ifdef __cplusplus
}
#endif
