// The C ABI of the CPU kernels. No C++ type, no Python.h, no torch: one library serves every torch and Python.
//
// All strides are in bytes. Element types: 0 bf16, 1 fp16, 2 fp32. Functions that return int: 0 is success, negative an
// error; hb_last_error() in the same thread says which.
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { HB_OK = 0, HB_TIMEOUT = 1, HB_ERROR = -1 };

// Of this interface: one more whenever what a field means changes and its structure keeps its size.
enum { HB_VERSION = 3 };

// K and V of one layer: [pages, kv_heads, 2 (K|V), page_size, head_dim] or any other strides.
typedef struct hb_cache {
  char* base;
  int64_t pages;
  int64_t page_stride, head_stride, value_offset, token_stride;
} hb_cache;

// Digests of one layer: [pages, kv_heads, 2 (max|min), head_dim] of the model's type, or in codes (kernels/codes.py)
// [pages, kv_heads, 4 * head_dim] bytes; what a KV head has of a page is contiguous.
typedef struct hb_digests {
  char* base;
  int64_t page_stride, head_stride, in_codes;
} hb_digests;

// The same digests in bytes, for scoring at half the traffic. A page's row: [kv_heads, 2, head_dim] bytes (value / scale
// + 128, rounded), then [kv_heads, 2] fp32 scales. Rows start at multiples of 4 bytes.
typedef struct hb_bytes {
  uint8_t* base;
  int64_t page_stride;
} hb_bytes;

typedef struct hb_model {
  int32_t type;  // of q, K, V and digests
  int32_t kv_heads, group, head_dim, page_size;
  float scale;
  float bound;  // of a page's logits: 0 the middle of what the digest allows, 1 its upper end (Quest)
} hb_model;

// Partial attention of one query per row. ids, valid: [rows, lists, capacity] int64, lists 1 or kv_heads; an entry with
// id < 0 or valid <= 0 is skipped. out: [rows, kv_heads * group, head_dim]; lse: fp32 [rows, kv_heads * group].
typedef struct hb_partial_args {
  hb_model model;
  hb_cache cache;
  const char* q;
  int64_t q_row_stride, q_head_stride;
  int32_t rows, lists, capacity;
  const int64_t *ids, *valid;
  char* out;
  int32_t out_type;
  int64_t out_row_stride, out_head_stride;
  float* lse;
  // Optional: row r is dropped (empty partial) unless current[request[r]] == generation[r].
  const int64_t *request, *generation, *current;
} hb_partial_args;

const char* hb_last_error(void);
// Bytes of the structs of this file, in their order, then HB_VERSION, then 0: a caller that declares them anew compares.
int64_t hb_struct_size(int which);

// Instruction sets, best first; those that the compiler could not build are absent.
int hb_isa_count(void);
const char* hb_isa_name(int isa);
int hb_isa_runs(int isa);  // 1 if this CPU has it
int hb_isa_best(void);
// This number instead of an instruction set's stands for the variants below, in the order that was set.
enum { HB_CHOSEN = -1 };

// --- variants: kernels that compute the same operation ---------------------------------------------------------

// Operations and their variants are counted from 0. Variants stand in the default order, newest instructions first.
int hb_operation_count(void);
const char* hb_operation_name(int operation);
int hb_variant_count(int operation);
const char* hb_variant_name(int operation, int variant);
// 1 if this CPU runs the variant, and the variant has the model's shape.
int hb_variant_runs(int operation, int variant, const hb_model* model);
// Sets the order in which HB_CHOSEN tries variants for shapes like the model's: of its type, with head_dim up to 64, 128 or
// 256, and group 1, 2, up to 4 or more. order: [hb_variant_count] their numbers. For use before any other thread uses the
// library.
int hb_set_variant_order(int operation, const hb_model* model, const int* order);
// seconds: [hb_variant_count] the shortest of up to `rounds` times of each variant, for a small job of the model's shape in
// this thread; NaN where the variant does not run here or lacks the shape. NaN before the call leaves a variant out.
// Variants take turns; one that takes twice as long as another soon drops out.
int hb_measure_variants(int operation, const hb_model* model, int rounds, double* seconds);

int hb_partial(const hb_partial_args* args, int isa);

// Reads n bytes (from a multiple of 64) in order, with the widest loads: the roofline that benchmarks compare with.
uint64_t hb_read(const void* from, int64_t n);

// --- digests ---------------------------------------------------------------------------------------------------

// Quest scores, not scaled. per_head: 0 one list per row, 1 one per KV head. aggregate: 0 sum, 1 max over the group.
// table: [rows, >= columns] int64, row stride in elements; out: [rows, lists, columns] fp32.
int hb_scores(const hb_model* model, const hb_digests* digests, int64_t pages_total, const char* q,
              int64_t q_row_stride, int64_t q_head_stride, int32_t rows, int32_t columns, const int64_t* table,
              int64_t table_stride, int32_t per_head, int32_t aggregate, float* out, int isa);
// Brings the rows of n pages up to date with their digests.
int hb_quantize(const hb_model* model, const hb_digests* digests, const hb_bytes* bytes, int64_t pages_total, int32_t n,
                const int64_t* pages);
// hb_scores from bytes; one list per row, summed over all heads: [rows, columns].
int hb_byte_scores(const hb_model* model, const hb_bytes* bytes, int64_t pages_total, const char* q,
                   int64_t q_row_stride, int64_t q_head_stride, int32_t rows, int32_t columns, const int64_t* table,
                   int64_t table_stride, float* out, int isa);
// The best `budget` of `columns` scores, ascending; first `sinks` and last `recent` always among them. Returns how many.
int hb_select(const float* scores, int32_t columns, int32_t budget, int32_t sinks, int32_t recent, int32_t* out);

// --- asynchronous jobs -----------------------------------------------------------------------------------------

typedef struct hb_pool hb_pool;
typedef struct hb_ticket hb_ticket;

// cpus: one per thread, or null for no pinning. spin: nanoseconds that a thread without work looks for some before it
// sleeps; 0: it sleeps at once.
hb_pool* hb_pool_new(int threads, const int* cpus, int isa, int64_t spin);
void hb_pool_free(hb_pool* pool);
void hb_pool_pause(hb_pool* pool, int paused);  // paused workers take no new job

// Returns at once; what args points to must live until hb_ticket_idle() says so.
hb_ticket* hb_submit(hb_pool* pool, const hb_partial_args* args);
// HB_TIMEOUT after `seconds`. help != 0: the calling thread works too.
int hb_wait(hb_ticket* ticket, double seconds, int help);
void hb_cancel(hb_ticket* ticket);  // what has not begun is dropped
int hb_ticket_idle(hb_ticket* ticket);  // 1 if no thread will touch its memory any more
void hb_ticket_span(hb_ticket* ticket, double* started, double* ended);  // CLOCK_MONOTONIC, seconds
void hb_ticket_free(hb_ticket* ticket);  // waits for threads inside

// --- mailboxes: jobs that the device raises by itself ---------------------------------------------------------

// One per layer, or one per request with questions about any layer, in memory that the device reads and writes (pinned).
// The device writes what it asks, then a new number to `asked` (release, system scope); a thread here computes, writes the
// partial, then the same number to `answered`. Boxes are served in turn: one waits for at most one question of each other
// box.
#define HB_MAIL_STEPS 16
typedef struct hb_mailbox {
  hb_cache cache;
  int32_t rows, lists, capacity;
  const char* q;  // [rows, heads, head_dim] in the model's type
  const int32_t* ids;  // [rows, lists, capacity] pages, all of them whole; or null
  const int32_t* counts;  // [rows, lists] how many of them; 0: nothing to do, the empty partial
  // Without ids the host keeps the lists between steps: the row whose request is g attends, in list l, the first counts[g,
  // l] tokens of the pages g * capacity, g * capacity + 1... Then there are as many requests as rows.
  const int64_t *request, *generation, *current;  // as in hb_partial_args, or null
  // [rows, heads, head_dim] in the model's type, [rows, heads]. Where lse is -inf (the empty partial), out is 0 in a box
  // that names a layer, and in all others whatever it was: many rows may be empty there, and whoever merges must not read
  // it.
  char* out;
  float* lse;
  const uint32_t* asked;
  uint32_t* answered;
  uint32_t* failed;  // [HB_MAIL_STEPS]: of a job that could not be computed (its answer is empty) its number
  const int32_t* layer;  // which of `caches` the question is about, instead of `cache`; or null
  const hb_cache* caches;  // [caches_count], as long as the server lives; boxes may share them
  int32_t caches_count;
} hb_mailbox;

typedef struct hb_mail hb_mail;

// A thread that serves the boxes with the pool's help, pinned to `cpu` unless it is negative. Copies the boxes.
hb_mail* hb_mail_new(hb_pool* pool, const hb_model* model, const hb_mailbox* boxes, int count, int cpu);
void hb_mail_free(hb_mail* mail);  // before the pool
int64_t hb_mail_served(hb_mail* mail);
// Why the box's last failed job failed; valid until this thread's next call.
const char* hb_mail_error(hb_mail* mail, int box);

// --- one decode layer in one call ------------------------------------------------------------------------------

typedef struct hb_decode hb_decode;

typedef struct hb_step {
  int32_t rows;
  int32_t sinks, recent;  // pages always selected; the tail page always is
  int32_t per_head, aggregate;  // as in hb_scores; aggregate 2: each head's softmax over the pages, then their sum
  // Pages to score per page of budget, where a row is so long that looking at spans of pages first reads less; 0: score
  // all. That needs digests in bytes and the rows' sequences.
  int32_t candidates;
  // Tokens of a sequence between two looks of a layer at all pages, by their positions, layers in turn; between them it
  // selects among the best of the last look, four times the budget, and newer pages; with digests in codes, at every
  // second one, among twice the budget, the best of the step before. 1: every step looks. More needs the rows' sequences.
  int32_t interval;
  const int64_t* sequences;  // [rows] ids, all different, of the sequences; or null. See hb_decode_forget
  const int64_t* tokens;  // [rows] row of q, k, v and out, or null for 0, 1, 2...
  const int64_t* seq_lens;  // [rows] tokens, with this step's
  const int64_t* budgets;  // [rows] pages to attend; negative or >= the row's pages: all of them
  int64_t budget_stride;  // elements between two layers' budgets; 0: all layers have the same
  const int64_t* skips;  // [rows] tokens of the row's first page that do not count, or null for none
  const void* table;  // [rows, columns] page ids
  int64_t table_stride;  // elements
  int32_t table_is_64;  // int64, else int32
} hb_step;

typedef struct hb_layer {
  const char *q, *k, *v;  // [tokens, heads, head_dim], [tokens, kv_heads, head_dim]; k null: nothing to write
  const char* score_q;  // the query that selects, null for q
  char* out;  // [tokens, heads, head_dim] in the model's type
  float* lse;  // [rows, heads] or null
  int64_t q_row_stride, k_row_stride, v_row_stride, score_q_row_stride, out_row_stride;  // heads are contiguous
} hb_layer;

hb_decode* hb_decode_new(const hb_model* model, int layers, int isa);
void hb_decode_free(hb_decode* decode);
// digests null (or base null): the layer is exact, all its rows are dense. bytes null (or base null): score the digests
// themselves, as happens anyway per head and with maxima. Whole pages must be up to date in bytes; a page that a decode
// step fills is brought up to date here. sinks: [heads] logits of one more key without a value, kept by address; or null.
int hb_decode_set_layer(hb_decode* decode, int layer, const hb_cache* cache, const hb_digests* digests,
                        const hb_bytes* bytes, const float* sinks);
// Copies everything.
int hb_decode_begin(hb_decode* decode, const hb_step* step);
// What the decoder keeps of a sequence is dropped: it is gone, or its pages are others.
void hb_decode_forget(hb_decode* decode, int64_t sequence);
int64_t hb_decode_span_bytes(hb_decode* decode);  // memory kept of all sequences
// threads: 1 the caller alone; else the caller and `pool`, or, where pool is null, an OpenMP team of that many threads
// made with `gomp_parallel`, the address of the engine's own GOMP_parallel.
int hb_decode_layer(hb_decode* decode, int layer, const hb_layer* args, hb_pool* pool, void* gomp_parallel,
                    int threads);
// Of the last layer: pages selected per row (per list), [rows].
const int32_t* hb_decode_counts(hb_decode* decode);
// Selected logical pages of a row's list, ascending; returns how many.
int hb_decode_selected(hb_decode* decode, int row, int list, const int32_t** pages);

// --- the operations of a decode step ---------------------------------------------------------------------------
//
// kernels/operations.py has their contract. Tensors are contiguous unless a stride (in elements) is given; ids, lists and
// counts are int32. Every member of an argument takes 8 bytes, so that whoever packs them needs no padding.

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

// Host pages or frames, [pages, kv_heads, 2, page_size, head_dim].
typedef struct hb_paged {
  char* base;
  int64_t pages, type, kv_heads, page_size, head_dim;
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
  int64_t digest_kind, rows, positions_are_64, frame_count, request_count, columns, k_stride,
      v_stride;  // strides in elements
} hb_append_tokens_args;
int hb_append_tokens(const hb_append_tokens_args* args);

typedef struct hb_build_digests_args {
  hb_paged kv;
  char* digests;
  const int32_t *pages, *tokens;
  int64_t digest_kind, n;
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

typedef struct hb_page_scores_args {
  const char *q, *digests;
  const int32_t *table, *num_pages, *budgets;
  float* out;
  int64_t rows, columns, table_stride, pages, type, kv_heads, group, head_dim, page_size, digest_kind, aggregate,
      per_head, isa;
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
  const int32_t* pages;  // [n] of the sequence
  const float* sinks;  // [kv_heads * group] or null
  char* out;  // as q
  int64_t tokens, seq_len, n, group, window, q_stride, out_stride, isa;  // window: 0: none; strides in elements
  hb_team team;
  double scale;
} hb_attend_prompt_args;
int hb_attend_prompt(const hb_attend_prompt_args* args);

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
