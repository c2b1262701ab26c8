// The C ABI of the CPU kernels. It has no C++ type, no Python.h and no torch, so that one library serves every torch
// and Python. kernels/cpu/interface.py reads this file, which is the only declaration of the ABI: keep to plain
// structures, enumerations and prototypes.
//
// Strides of this file are in bytes. Element types are numbered: 0 bf16, 1 fp16, 2 fp32 (and 3 int8, K and V only). A
// function that returns int
// returns 0 for success and a negative number for an error, which hb_last_error() of the same thread describes.
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { HB_OK = 0, HB_TIMEOUT = 1, HB_ERROR = -1 };

// Encodings of K and V in pages (kernels/kv_format.py). In 8 bits a page's head is [2 (K|V), page_size, head_dim] int8,
// then [2, page_size] fp16 scales, contiguous.
enum { HB_KV_PLAIN = 0, HB_KV_INT8 = 1 };

// K and V of one layer: [pages, kv_heads, 2 (K|V), page_size, head_dim], with any strides but a contiguous head_dim.
typedef struct hb_cache {
  char* base;
  int64_t pages;
  int64_t page_stride, head_stride, value_offset, token_stride;
} hb_cache;

// Formats of digests (kernels/digest_format.py, `DigestFormat.number`): [pages, kv_heads, 2 (max|min), head_dim] in the
// model's type; codes (kernels/codes.py); maxima and minima in 8 bits (kernels/byte_digests.py).
enum { HB_MINMAX = 0, HB_CODES = 1, HB_MINMAX_INT8 = 2 };

// Digests of one layer, in one of the formats. One KV head's digest of one page is contiguous.
typedef struct hb_digests {
  char* base;
  int64_t page_stride, head_stride, format;
} hb_digests;

// Maxima and minima in 8 bits as the decoder scores them, in half of the bytes of bf16. A page's row is [kv_heads, 2,
// head_dim] bytes (value / scale + 128, rounded), then [kv_heads, 2] fp32 scales. Rows start at multiples of 4 bytes.
typedef struct hb_byte_digests {
  uint8_t* base;
  int64_t page_stride;
} hb_byte_digests;

typedef struct hb_model {
  int32_t type;  // element type of q, new K and V, out and digests; of K and V in pages too if kv_encoding is plain
  int32_t kv_heads, group, head_dim, page_size;
  float scale;
  float bound;  // a page's score: 0 is the middle of the range that the digest allows, 1 its upper end (Quest)
  int32_t kv_encoding;
} hb_model;

// Partial attention of one query per row. ids and valid are [rows, lists, capacity] int64, where lists is 1 or
// kv_heads: page ids, and the tokens to attend at each page's beginning. An entry with id < 0 or valid <= 0 is skipped.
// out is [rows, kv_heads * group, head_dim]; lse is fp32 [rows, kv_heads * group], in natural log.
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
  // If not null: row r gets the empty partial unless current[request[r]] == generation[r].
  const int64_t *request, *generation, *current;
} hb_partial_args;

const char* hb_last_error(void);
// Hash of api.h and api_operations.h as the library was built from them (interface_hash in build.py). A caller that
// reads the headers compares it with theirs.
const char* hb_interface_hash(void);

// Instruction sets, best first. An instruction set that the compiler could not build is absent.
int hb_isa_count(void);
const char* hb_isa_name(int isa);
int hb_isa_runs(int isa);  // 1 if this CPU has it
// HB_CHOSEN instead of an instruction set's number takes the variants below, in the order that was set.
enum { HB_CHOSEN = -1 };

// --- variants: kernels that compute the same operation ---------------------------------------------------------

// Operations and their variants are numbered from 0. Variants stand in the default order, newest instructions first.
int hb_operation_count(void);
const char* hb_operation_name(int operation);
int hb_variant_count(int operation);
const char* hb_variant_name(int operation, int variant);
// 1 if this CPU runs the variant, and the variant has the model's shape.
int hb_variant_runs(int operation, int variant, const hb_model* model);
// Sets the order in which HB_CHOSEN tries variants for the model's class of shapes: its element type and encoding of K
// and V, head_dim up to 64, 128 or 512, and group 1, 2, up to 4 or more. order: [hb_variant_count] variant numbers. Call it before any other
// thread uses the library.
int hb_set_variant_order(int operation, const hb_model* model, const int* order);
// Times each variant up to `rounds` times on a small job of the model's shape, in this thread. seconds:
// [hb_variant_count] shortest time of each variant; NaN where the variant does not run here or lacks the shape. A NaN
// before the call leaves a variant out. Variants take turns, and a variant that takes twice as long as another one soon
// drops out.
int hb_measure_variants(int operation, const hb_model* model, int rounds, double* seconds);

int hb_partial(const hb_partial_args* args, int isa);

// Reads n bytes in order with the widest loads, from an address that is a multiple of 64. Benchmarks take its bandwidth
// as their roofline.
uint64_t hb_read(const void* from, int64_t n);

// --- digests ---------------------------------------------------------------------------------------------------

// Writes the byte digests of n pages from their digests of maxima and minima.
int hb_write_byte_digests(const hb_model* model, const hb_digests* digests, const hb_byte_digests* byte_digests,
                          int64_t pages_total, int32_t n, const int64_t* pages);

// --- asynchronous jobs -----------------------------------------------------------------------------------------

typedef struct hb_pool hb_pool;
typedef struct hb_ticket hb_ticket;

// cpus: the CPU of each thread, or null for no pinning. spin: nanoseconds for which a thread without work polls before
// it sleeps.
hb_pool* hb_pool_new(int threads, const int* cpus, int isa, int64_t spin);
void hb_pool_free(hb_pool* pool);
void hb_pool_pause(hb_pool* pool, int paused);  // paused workers take no new job

// Returns at once. The memory that args points to must live until hb_ticket_idle() returns 1.
hb_ticket* hb_submit(hb_pool* pool, const hb_partial_args* args);
// Returns HB_TIMEOUT if the job is not done after `seconds`. With help != 0 the calling thread works too.
int hb_wait(hb_ticket* ticket, double seconds, int help);
void hb_cancel(hb_ticket* ticket);  // drops the tasks that have not begun
int hb_ticket_idle(hb_ticket* ticket);  // 1 if no thread will touch the job's memory any more
void hb_ticket_span(hb_ticket* ticket, double* started, double* ended);  // CLOCK_MONOTONIC, seconds
void hb_ticket_free(hb_ticket* ticket);  // waits for the threads that work on the job

// --- judging: which tokens of a prompt each KV head keeps ------------------------------------------------------

// One layer: the sequence's last `queries` queries [queries, kv_heads * group, head_dim], contiguous; the layer's host
// pages; and the pages that take the tokens that are kept, in the layout of the host pages. queries 0: all are kept.
typedef struct hb_judge_layer {
  const char* q;
  int64_t queries;
  const char* keys;  // page 0
  char* store;
} hb_judge_layer;

// Each KV head keeps the tokens first..older - 1 of a sequence whose mean weight (hb_prompt_weights) is above
// `threshold`, and copies their K and V to its pages of the store, without gaps. `first` and `older` are multiples of
// the page size.
typedef struct hb_judge_args {
  hb_model model;
  hb_cache cache;  // strides and number of the host pages; base is not used
  const hb_judge_layer* layers;  // [layer_count]
  const int32_t* pages;  // host pages of the sequence
  int64_t layer_count, tokens, first, older;
  float threshold;
  uint8_t* keep_mask;  // [layer_count, kv_heads, older - first] 1: the token is kept
  float* recent;  // [layer_count, kv_heads, tokens - older] mean weights of the later tokens
  int32_t* counts;  // [layer_count, kv_heads] tokens that are kept
} hb_judge_args;

typedef struct hb_judging hb_judging;

// Returns at once. Threads of the pool judge while it has no other work. The memory that args points to must live until
// hb_judging_free, but for `layers` and `pages`, which are copied.
hb_judging* hb_judge(hb_pool* pool, const hb_judge_args* args);
int hb_judging_state(hb_judging* judging);  // HB_OK: done; HB_TIMEOUT: not yet; HB_ERROR
int64_t hb_judging_steps(hb_judging* judging);  // grows while threads work
double hb_judging_seconds(hb_judging* judging);  // time that threads worked, summed over threads
// Gives up what is not done. Waits for the threads that work on it, each of which ends after at most 128 keys.
void hb_judging_free(hb_judging* judging);

// --- mailboxes: jobs that the device raises by itself ---------------------------------------------------------

// A mailbox belongs to one layer, or to one request with questions about any layer. It lies in pinned memory, which the
// device reads and writes. The device writes its question, then a new number to `asked_flag` (release, system scope). The
// server thread computes and writes the partial, then the same number to `answered`. Boxes are served in turn, so a box
// waits for at most one question of each other box.
enum { HB_MAIL_STEPS = 16 };
typedef struct hb_mailbox {
  hb_cache cache;
  int32_t rows, lists, capacity;
  const char* q;  // [rows, heads, head_dim] in the model's type
  const int32_t* ids;  // [rows, lists, capacity] pages, all of them whole; or null
  const int32_t* counts;  // [rows, lists] pages of each list; 0: the empty partial
  // Without ids the host keeps the lists between steps, and there are as many requests as rows: the row of request g
  // attends, in list l, the first counts[g, l] tokens of the pages g * capacity, g * capacity + 1...
  const int64_t *request, *generation, *current;  // as in hb_partial_args, or null
  // out: [rows, heads, head_dim] in the model's type; lse: [rows, heads]. Where lse is -inf (the empty partial), out is
  // 0 in a box that has `layer`. In all other boxes, where many rows may be empty, out keeps its old content there.
  char* out;
  float* lse;
  const uint32_t* asked_flag;
  uint32_t* answered;
  uint32_t* failed;  // [HB_MAIL_STEPS] numbers of failed jobs, whose answers are the empty partial
  const int32_t* layer;  // index into `caches` of the question's layer, which replaces `cache`; or null
  const hb_cache* caches;  // [caches_count], must live as long as the server; boxes may share them
  int32_t caches_count;
  // Without ids: a request g with whole[g] > 0 attends, with all heads, the first whole[g] of the host pages
  // whole_ids[g * whole_stride + k] instead of its lists. null: no request ever does.
  const int32_t *whole, *whole_ids;
  int64_t whole_stride;  // elements
  hb_cache host;  // in the layout of `cache`
} hb_mailbox;

typedef struct hb_mail hb_mail;

// Starts a thread that serves the boxes with the pool's help, pinned to `cpu` unless that is negative. Copies the
// boxes.
hb_mail* hb_mail_new(hb_pool* pool, const hb_model* model, const hb_mailbox* boxes, int count, int cpu);
void hb_mail_free(hb_mail* mail);  // to be called before the pool is freed
int64_t hb_mail_served(hb_mail* mail);
// Error of the box's last failed job; valid until this thread's next call.
const char* hb_mail_error(hb_mail* mail, int box);

// --- one decode layer in one call ------------------------------------------------------------------------------

typedef struct hb_decode hb_decode;

typedef struct hb_step {
  int32_t rows;
  int32_t sinks, recent;  // first and last pages that are always selected; the growing page always is
  int32_t per_head;  // 0: one list per row, 1: one list per KV head
  int32_t
      aggregate;  // 0: sum of the query heads' scores, 1: maximum, 2: sum of each query head's softmax over the pages
  // Pages to score per page of budget in rows that are so long that scoring spans of pages first reads less. 0: score
  // all pages. Needs byte digests and `sequences`.
  int32_t candidates;
  // Tokens of a sequence between two steps in which a layer scores all pages; layers take turns by position. In the
  // steps between, a layer selects among the best pages of the last such step (four times the budget) and newer pages.
  // With digests in codes, every second of these steps selects among the best pages of the step before (twice the
  // budget). 1: every step scores all pages. More than 1 needs `sequences`.
  int32_t interval;
  const int64_t* sequences;  // [rows] distinct ids of the sequences, or null; see hb_decode_forget
  const int64_t* tokens;  // [rows] row of q, k, v and out, or null for 0, 1, 2...
  const int64_t* seq_lens;  // [rows] tokens, this step's included
  const int64_t* budgets;  // [rows] pages to attend; negative, or at least the row's pages: all pages
  int64_t budget_stride;  // elements between the budgets of two layers; 0: all layers share them
  const int64_t* skips;  // [rows] tokens at the beginning of the row's first page that are not attended, or null
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
// Without digests (null, or base null) the layer is exact: all its rows are dense. Without byte digests (null, or
// base null) the digests themselves are scored; they are in any case for sums per head and for maxima. The caller
// writes the byte digests of whole pages; the decoder writes those of pages that it fills. sinks: [heads] logits of one
// more key without a value, kept by address; or null.
int hb_decode_set_layer(hb_decode* decode, int layer, const hb_cache* cache, const hb_digests* digests,
                        const hb_byte_digests* byte_digests, const float* sinks);
// Begins a step. Copies everything that `step` points to.
int hb_decode_begin(hb_decode* decode, const hb_step* step);
// Drops the state of a sequence that ended, or whose pages changed.
void hb_decode_forget(hb_decode* decode, int64_t sequence);
int64_t hb_decode_span_bytes(hb_decode* decode);  // memory of all sequences' spans and shortlists
// Decodes a layer of the step that has begun. With threads 1 the caller works alone, else with `pool`, or, where pool
// is null, in an OpenMP team of that many threads, made with `gomp_parallel`, the address of the engine's own
// GOMP_parallel.
int hb_decode_layer(hb_decode* decode, int layer, const hb_layer* args, hb_pool* pool, void* gomp_parallel,
                    int threads);
// Logical pages that the last layer selected for a row's list, ascending; returns their number.
int hb_decode_selected(hb_decode* decode, int row, int list, const int32_t** pages);

#ifdef __cplusplus
}
#endif
