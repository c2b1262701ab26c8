// Operations on keys and values: tokens, digests, scores, attention, copies. Their contract is in kernels/operations.py.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "attend_job.h"
#include "codes.h"
#include "digest.h"
#include "guard.h"
#include "memory.h"
#include "team.h"

using hb::check_id;
using hb::grown;
using hb::guarded;
using hb::require;

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int kPromptFloats = 24 * 1024;  // of a block's queries, and as many of its outputs
constexpr int kByteTail = 16;  // bytes after the channels of a digest in bytes (kernels/byte_digests.py)

int64_t row_bytes(const hb_paged& x) { return x.head_dim * element_size((int)x.type); }
int64_t head_bytes(const hb_paged& x) { return 2 * x.page_size * row_bytes(x); }
int64_t page_bytes(const hb_paged& x) { return x.kv_heads * head_bytes(x); }
char* keys_of(const hb_paged& x, int64_t page, int64_t head) {
  return x.base + page * page_bytes(x) + head * head_bytes(x);
}

hb_cache cache_of(const hb_paged& x) {
  return {x.base, x.pages, page_bytes(x), head_bytes(x), x.page_size * row_bytes(x), row_bytes(x)};
}
hb_model model_of(const hb_paged& x, int64_t group, double scale) {
  return {(int32_t)x.type,
          (int32_t)x.kv_heads,
          (int32_t)group,
          (int32_t)x.head_dim,
          (int32_t)x.page_size,
          (float)scale,
          1.f};
}
// Kinds of digests (operations.DIGESTS). Only whole pages have codes or bytes.
enum Digest { MINMAX = 0, CODES = 1, BYTES = 2 };

// Bytes that a KV head has of a page's digest.
int64_t digest_bytes(int64_t kind, const hb_model& model) {
  const int64_t dim = model.head_dim;
  return kind == CODES ? 4 * dim : kind == BYTES ? 2 * dim + kByteTail : 2 * dim * element_size(model.type);
}

// Contiguous ones; of bytes, only where they lie.
hb_digests digests_of(const char* base, const hb_model& model, int64_t kind) {
  require(kind >= MINMAX && kind <= BYTES, "no such kind of digests");
  const int64_t head = digest_bytes(kind, model);
  return {(char*)base, model.kv_heads * head, head, kind == CODES};
}

// Max and min of the first `tokens` keys at `keys`, `row` bytes apart.
void fold_keys(const hb_model& model, const char* keys, int64_t row, int64_t tokens, char* high, char* low) {
  for (int64_t t = 0; t < tokens; t++) hb::fold_key(model.type, keys + t * row, high, low, model.head_dim, t == 0);
}

// What makes digests of whole pages; null where they are of growing pages too.
const Isa* coder(const hb_model& model, int64_t kind) {
  if (kind == MINMAX) return nullptr;
  hb::check_model(model);
  return hb::kernels_of(model, hb::best_isa()).base;
}

// The digest of a whole page, in codes or in bytes.
void digest_page(const hb_model& model, const hb_paged& kv, const hb_digests& digests, const Isa& isa, int64_t page) {
  if (digests.in_codes) return hb::encode_page(model, digests, cache_of(kv), isa, page);
  hb_model one_head = model;  // what each has of a page is a row of a store of one head
  one_head.kv_heads = 1;
  const int64_t row = row_bytes(kv);
  for (int64_t h = 0; h < kv.kv_heads; h++) {
    char ends[2 * kMaxHeadDim * sizeof(float)];
    fold_keys(model, keys_of(kv, page, h), row, kv.page_size, ends, ends + row);
    uint8_t* to = (uint8_t*)digests.base + page * digests.page_stride + h * digests.head_stride;
    std::memset(to, 0, digests.head_stride);
    hb::quantize_digest(one_head, {ends, 0, 2 * row, 0}, {to, 0}, isa, 0);
  }
}

// In fp64 squares of fp32 numbers neither overflow nor vanish. n: a multiple of 8.
double dot(const float* a, const float* b, int64_t n) {
  constexpr int kLanes = 8;  // sums that do not wait for each other
  double lanes[kLanes] = {}, sum = 0;
  for (int64_t d = 0; d < n; d += kLanes)
    for (int i = 0; i < kLanes; i++) lanes[i] += (double)a[d + i] * b[d + i];
  for (const double lane : lanes) sum += lane;
  return sum;
}

// How the similarities of query heads combine (operations.SIMILARITIES).
enum Similarity { HARMONIC = 0, MIN = 1 };

// NaN if a similarity is.
double combined(Similarity how, const double* similar, const float* weights, int64_t n) {
  const bool are_equal = std::all_of(weights, weights + n, [](float s) { return s <= 0; });
  double lowest = kInfinity, total = 0, inverse = 0;
  for (int64_t i = 0; i < n; i++) {
    if (std::isnan(similar[i])) return similar[i];
    const double s = are_equal ? 1 : weights[i];
    if (s <= 0) continue;
    lowest = std::min(lowest, similar[i]);
    total += s;
    inverse += s / similar[i];
  }
  return how == HARMONIC && lowest > 0 ? total / inverse : lowest;
}

}  // namespace

HB_API int hb_append_tokens(const hb_append_tokens_args* args) {
  return guarded([&] {
    const hb_append_tokens_args& a = *args;
    const hb_model model = model_of(a.host, 1, 1);
    const int64_t row = row_bytes(a.host), part = a.host.page_size * row;
    const hb_digests digests = digests_of(a.digests, model, a.digest_kind);
    const Isa* isa = coder(model, a.digest_kind);
    hb_paged frames = a.host;
    frames.base = a.frames;
    for (int64_t r = 0; r < a.rows; r++) {
      const int64_t page = a.pages[r];
      if (page < 0) continue;
      check_id(page, a.host.pages, "page");
      const int64_t position = a.positions_are_64 ? ((const int64_t*)a.positions)[r] : ((const int32_t*)a.positions)[r];
      require(position >= 0, "a token's position is negative");
      const int64_t offset = position % a.host.page_size;
      const int64_t size = element_size((int)a.host.type);
      const char *k = a.k + r * a.k_stride * size, *v = a.v + r * a.v_stride * size;
      auto write = [&](const hb_paged& x, int64_t to) {
        for (int64_t h = 0; h < x.kv_heads; h++) {
          char* at = keys_of(x, to, h) + offset * row;
          std::memcpy(at, k + h * row, row);
          std::memcpy(at + part, v + h * row, row);
        }
      };
      write(a.host, page);
      if (a.frames) {
        const int64_t column = check_id(position / a.host.page_size, a.columns, "logical page");
        const int32_t frame = a.frame_of[check_id(a.requests[r], a.request_count, "request") * a.columns + column];
        if (frame >= 0) write(frames, check_id(frame, a.frame_count, "frame"));
      }
      if (!a.digests) continue;
      if (a.digest_kind == MINMAX) hb::append_to_digest(model, digests, page, offset, k, row);
      else if (offset == a.host.page_size - 1) digest_page(model, a.host, digests, *isa, page);
    }
  });
}

HB_API int hb_build_digests(const hb_build_digests_args* args) {
  return guarded([&] {
    const hb_build_digests_args& a = *args;
    const hb_model model = model_of(a.kv, 1, 1);
    require(model.head_dim <= kMaxHeadDim, "head_dim must be a multiple of 16 up to 256");
    const hb_digests digests = digests_of(a.digests, model, a.digest_kind);
    const int64_t row = row_bytes(a.kv);
    const Isa* isa = coder(model, a.digest_kind);
    auto build = [&](int64_t i) {
      const int64_t page = a.pages[i], tokens = a.tokens[i];
      if (page < 0 || tokens <= 0) return;
      check_id(page, a.kv.pages, "page");
      require(tokens <= a.kv.page_size, "a page to digest has 1 to page_size tokens");
      if (a.digest_kind != MINMAX) {
        if (tokens == a.kv.page_size) digest_page(model, a.kv, digests, *isa, page);
        return;
      }
      for (int64_t h = 0; h < a.kv.kv_heads; h++) {
        // Written at once, so that a page which is listed twice is right whoever builds it.
        char high[kMaxHeadDim * sizeof(float)], low[kMaxHeadDim * sizeof(float)];
        fold_keys(model, keys_of(a.kv, page, h), row, tokens, high, low);
        char* to = digests.base + page * digests.page_stride + h * digests.head_stride;
        std::memcpy(to, high, row);
        std::memcpy(to + row, low, row);
      }
    };
    hb::share(a.team, a.n * page_bytes(a.kv) / 2, a.n, build);
  });
}

HB_API int hb_extend_digests(const hb_extend_digests_args* args) {
  return guarded([&] {
    const hb_extend_digests_args& a = *args;
    const int64_t size = element_size((int)a.type), row = a.head_dim * size;
    require(a.page_size > 0 && a.first >= 0 && a.first < a.page_size, "a chunk begins inside its first page");
    require(a.first + a.tokens <= a.n * a.page_size, "a chunk has more tokens than room in its pages");
    auto extend = [&](int64_t i) {
      const int64_t page = check_id(a.pages[i], a.page_count, "page");
      const int64_t begin = std::max(i * a.page_size - a.first, (int64_t)0);
      const int64_t end = std::min((i + 1) * a.page_size - a.first, a.tokens);
      for (int64_t h = 0; h < a.kv_heads; h++) {
        char* high = a.digests + (page * a.kv_heads + h) * 2 * row;
        for (int64_t t = begin; t < end; t++) {
          const bool is_new = t == begin && (i > 0 || a.first == 0);
          hb::fold_key((int)a.type, a.k + t * a.k_stride * size + h * row, high, high + row, (int)a.head_dim, is_new);
        }
      }
    };
    hb::share(a.team, a.tokens * a.kv_heads * row, a.n, extend);
  });
}

HB_API int hb_page_scores(const hb_page_scores_args* args) {
  return guarded([&] {
    const hb_page_scores_args& a = *args;
    // Scores by maxima and minima do not depend on the page's size.
    const int32_t page_size = a.digest_kind == CODES ? (int32_t)a.page_size : 16;
    const hb_model model{(int32_t)a.type, (int32_t)a.kv_heads, (int32_t)a.group, (int32_t)a.head_dim,
                         page_size,       (float)a.scale,      (float)a.bound};
    hb::check_model(model);
    require(a.aggregate >= hb::SUM && a.aggregate <= hb::SOFTMAX, "no such way to combine scores");
    const auto aggregate = (hb::Aggregate)a.aggregate;
    const hb::Kernels kernels = hb::kernels_of(model, (int)a.isa);
    const hb_digests digests = digests_of(a.digests, model, a.digest_kind);
    const int64_t heads = a.kv_heads * a.group, lists = a.per_head ? a.kv_heads : 1;
    const bool has_shares = aggregate == hb::SOFTMAX;
    // Codes and bytes are scored by query head, whatever becomes of them.
    const bool are_apart = has_shares || a.digest_kind != MINMAX;
    hb_model one_head = model;
    one_head.kv_heads = 1;

    struct Task {
      int64_t row, begin, end;
    };
    static thread_local std::vector<Task> tasks;
    static thread_local std::vector<float> heads_apart;  // [rows, heads, columns]
    static thread_local hb::AtomicArray left;
    tasks.clear();
    left.reset((int)a.rows);
    float* apart = are_apart ? grown(heads_apart, a.rows * heads * a.columns) : nullptr;
    int64_t bytes = 0;
    for (int64_t r = 0; r < a.rows; r++) {
      const int64_t pages = std::max(a.num_pages[r], 0);
      require(pages <= a.columns, "a row has more pages than columns");
      const bool is_scored = a.budgets[r] < pages;
      for (int64_t list = 0; list < lists; list++) {
        float* out = a.out + (r * lists + list) * a.columns;
        if (!is_scored) std::fill(out, out + pages, 0.f);
        std::fill(out + pages, out + a.columns, -kInfinity);
      }
      if (!is_scored) continue;
      const int64_t read = pages * digests.page_stride;
      bytes += read;
      const int64_t parts = std::clamp<int64_t>(read / hb::kTaskBytes, 1, 4 * std::max<int64_t>(a.team.threads, 1));
      for (int64_t i = 0; i < parts; i++)
        tasks.push_back({r, hb::score_edge(pages, i, parts), hb::score_edge(pages, i + 1, parts)});
      left[(int)r].store((int)parts, std::memory_order_relaxed);
    }
    // Other threads have variables of their own by these names.
    const Task* all = tasks.data();
    hb::AtomicArray& rows_left = left;
    auto score = [&, all, apart](int64_t i) {
      static thread_local hb::Scorer scorer;
      static thread_local hb::CodeScorer code_scorer;
      const Task& task = all[i];
      const int32_t* ids = a.table + task.row * a.table_stride;
      for (int64_t c = task.begin; c < task.end; c++) check_id(ids[c], a.pages, "page");
      const int64_t head = a.head_dim * element_size(model.type);
      float* out = a.out + task.row * lists * a.columns;
      float* shares = apart + task.row * heads * a.columns;
      const char* q = a.q + task.row * heads * head;
      const auto page_of = [ids](int64_t column) { return ids[column]; };
      if (a.digest_kind == CODES) {
        code_scorer.prepare(model, digests, kernels, q, head);
        code_scorer.prepare_codes(q, head);
        code_scorer.estimate(page_of, -1, (int)task.begin, (int)task.end, shares, a.columns);
      } else if (a.digest_kind == BYTES) {
        for (int64_t h = 0; h < a.kv_heads; h++) {  // what each has of a page is a row of a store of one head
          const hb_bytes mine{(uint8_t*)digests.base + h * digests.head_stride, digests.page_stride};
          scorer.prepare_bytes(one_head, mine, kernels, hb::SOFTMAX, q + h * a.group * head, head);
          scorer.score(page_of, (int)task.begin, (int)task.end, shares + h * a.group * a.columns, a.columns);
        }
      } else {
        scorer.prepare(model, digests, kernels, a.per_head, aggregate, q, head);
        scorer.score(page_of, (int)task.begin, (int)task.end, are_apart ? shares : out, a.columns);
      }
      if (!are_apart || rows_left[(int)task.row].fetch_sub(1, std::memory_order_acq_rel) != 1) return;
      const int last = a.num_pages[task.row] - 1;  // the growing page has no share
      const int each = (int)(heads / lists);
      for (int64_t list = 0; list < lists; list++, out += a.columns, shares += each * a.columns) {
        if (!has_shares) {
          hb::combine_lists(aggregate, shares, a.columns, each, (int)a.group, last + 1, out);
          continue;
        }
        hb::add_shares(kernels.softmax_add, shares, a.columns, each, last, model.scale, out);
        out[last] = 0;
      }
    };
    hb::share(a.team, bytes, (int64_t)tasks.size(), score);
  });
}

HB_API int hb_match_labels(const hb_match_labels_args* args) {
  return guarded([&] {
    const hb_match_labels_args& a = *args;
    const hb_model model{(int32_t)a.type, (int32_t)a.kv_heads, (int32_t)a.group, (int32_t)a.head_dim, 16, 1.f, 1.f};
    hb::check_model(model);
    require(a.aggregate == HARMONIC || a.aggregate == MIN, "no such way to combine similarities");
    const Isa& isa = *hb::kernels_of(model, (int)a.isa).base;
    const int64_t row = a.head_dim * element_size(model.type), bytes = a.group * row;  // of a KV head's queries
    auto is_looked_up = [&](int64_t item) {
      const int64_t r = item / a.kv_heads;
      return a.budgets[r] < a.num_pages[r] && a.thresholds[item % a.kv_heads] != -kInfinity;
    };
    const int64_t items = a.rows * a.kv_heads;
    for (int64_t i = 0; i < items; i++)
      if (is_looked_up(i)) check_id(a.requests[i / a.kv_heads], a.request_count, "request");
    hb::share(a.team, 2 * items * bytes, items, [&](int64_t i) {
      a.missed[i] = 0;
      if (!is_looked_up(i)) return;
      const int64_t head = i % a.kv_heads;
      const char* q = a.q + i * bytes;
      char* label = a.labels + (a.requests[i / a.kv_heads] * a.kv_heads + head) * bytes;
      float query[kMaxHeadDim], known[kMaxHeadDim];
      double similar[kMaxGroup];
      bool has_label = false;
      for (int64_t g = 0; g < a.group; g++) {
        isa.widen(model.type, q + g * row, query, (int)a.head_dim);
        isa.widen(model.type, label + g * row, known, (int)a.head_dim);
        const double of_label = dot(known, known, a.head_dim);
        const double lengths = std::sqrt(dot(query, query, a.head_dim) * of_label);
        similar[g] = lengths == 0 ? 0 : dot(query, known, a.head_dim) / lengths;
        has_label |= of_label != 0;
      }
      const double found = combined((Similarity)a.aggregate, similar, a.weights + head * a.group, a.group);
      if (has_label && found >= a.thresholds[head]) return;
      std::memcpy(label, q, bytes);
      a.missed[i] = 1;
    });
    for (int64_t i = 0; a.counters && i < items; i++) {
      a.counters[HB_LOOKUPS] += is_looked_up(i);
      a.counters[HB_HITS] += is_looked_up(i) && !a.missed[i];
    }
  });
}

HB_API int hb_paged_partial(const hb_paged_partial_args* args) {
  return guarded([&] {
    const hb_paged_partial_args& a = *args;
    static thread_local hb::AttendJob attention;
    hb::AttendJob& job = attention;  // also for other threads
    const hb_model model = model_of(a.kv, a.group, a.scale);
    job.configure(model, cache_of(a.kv), (int)a.isa);
    const int64_t head = row_bytes(a.kv), heads = a.kv.kv_heads * a.group;
    const int64_t out_head = a.kv.head_dim * (int64_t)sizeof(float);
    job.io = {(int)a.rows,      nullptr,  a.q,   heads * head, head,    (char*)a.out, FP32,
              heads * out_head, out_head, a.lse, nullptr,      nullptr, nullptr};
    job.lists.reset((int)a.rows, model.kv_heads, (int)a.n);
    for (int64_t r = 0; r < a.rows; r++) {
      job.lists.set_row((int)r, (int)a.lists);
      for (int64_t l = 0; l < a.lists; l++) {
        const int64_t tokens = std::max(a.tokens[r * a.lists + l], 0);
        const int64_t pages = (tokens + a.kv.page_size - 1) / a.kv.page_size;
        require(pages <= a.n, "a list has more tokens than its pages hold");
        const int list = job.lists.of((int)r, (int)l);
        const int32_t* ids = a.ids + r * a.row_stride + l * a.list_stride;
        hb::ListedPage* to = job.lists.pages(list);
        for (int64_t i = 0; i < pages; i++) to[i] = {check_id(ids[i], a.kv.pages, "page"), model.page_size};
        if (pages) to[pages - 1].tokens = (int32_t)(tokens - (pages - 1) * a.kv.page_size);
        job.lists.count(list) = (int32_t)pages;
      }
    }
    const int lanes = a.team.gomp_parallel ? (int)std::max<int64_t>(a.team.threads, 1) : 1;
    job.plan(lanes);
    // More than one chunk is worth sharing.
    hb::share(a.team, job.chunks() > 1 ? 2 * hb::kTaskBytes : 0, lanes, [&](int64_t lane) { job.run((int)lane); });
  });
}

HB_API int hb_merge_partials(const hb_merge_partials_args* args) {
  return guarded([&] {
    const hb_merge_partials_args& a = *args;
    require(a.type >= BF16 && a.type <= FP32, "element type must be bf16, fp16 or fp32");
    require(hb::isa_runs((int)a.isa), "this instruction set is not available on this CPU");
    const Isa& isa = hb::base_isa((int)a.isa);
    const int64_t dim = a.head_dim, size = element_size((int)a.type);
    auto merge = [&](int64_t row) {
      static thread_local std::vector<float> room;
      float* sum = grown(room, dim);
      for (int64_t at = row * a.heads; at < (row + 1) * a.heads; at++) {
        const float *out = a.out + at * a.parts * dim, *lse = a.lse + at * a.parts;
        float top = a.other_lse ? a.other_lse[at] : -kInfinity;
        for (int64_t p = 0; p < a.parts; p++) top = std::max(top, lse[p]);
        const float sink = a.sinks ? a.sinks[at - row * a.heads] : -kInfinity;
        top = std::max(top, sink);
        float total = sink == -kInfinity ? 0.f : std::exp(sink - top);
        std::fill(sum, sum + dim, 0.f);
        auto add = [&](const float* from, float of) {
          if (of == -kInfinity) return;
          const float weight = std::exp(of - top);
          total += weight;
          for (int64_t d = 0; d < dim; d++) sum[d] += weight * from[d];
        };
        for (int64_t p = 0; p < a.parts; p++) add(out + p * dim, lse[p]);
        if (a.other_lse) add(a.other_out + at * dim, a.other_lse[at]);
        if (total != 0)
          for (int64_t d = 0; d < dim; d++) sum[d] /= total;
        a.merged_lse[at] = total != 0 ? top + std::log(total) : -kInfinity;
        isa.convert((int)a.type, sum, a.merged + at * dim * size, (int)dim);
      }
    };
    hb::share(a.team, a.rows * a.heads * a.parts * dim * (int64_t)sizeof(float), a.rows, merge);
  });
}

HB_API int hb_attend_prompt(const hb_attend_prompt_args* args) {
  return guarded([&] {
    const hb_attend_prompt_args& a = *args;
    const hb_model model = model_of(a.kv, a.group, a.scale);
    hb::check_model(model);
    const PromptFn attend = hb::kernels_of(model, (int)a.isa).prompt;
    const int64_t row = row_bytes(a.kv), size = element_size(model.type), dim = a.kv.head_dim, lanes = a.team.threads;
    const int64_t before = a.seq_len - a.tokens;
    require(before >= 0, "a prompt has more new tokens than tokens");
    require(a.seq_len <= a.n * a.kv.page_size, "a prompt has more tokens than its pages hold");
    const int64_t window = a.window ? a.window : a.seq_len;
    for (int64_t i = std::max<int64_t>(before - window + 1, 0) / a.kv.page_size; i * a.kv.page_size < a.seq_len; i++)
      check_id(a.pages[i], a.kv.pages, "page");
    // As many queries as stay in a cache, or fewer where threads would have no work.
    const int64_t most = std::max<int64_t>(kPromptFloats / (dim * a.group), 1);
    const int64_t shared = (a.tokens * a.kv.kv_heads + 4 * lanes - 1) / (4 * lanes);
    const int64_t least = std::max<int64_t>(kPromptRows / a.group, 1);
    const int64_t step = std::min(most, std::max(shared, least));
    const int64_t blocks = (a.tokens + step - 1) / step;
    auto attend_block = [&](int64_t item) {
      static thread_local std::vector<float> room;
      const int64_t head = item % a.kv.kv_heads, begin = (blocks - 1 - item / a.kv.kv_heads) * step;  // longest first
      const int64_t first_head = head * a.group, tokens = std::min(step, a.tokens - begin);
      const PromptBlock block{model.type,
                              model.head_dim,
                              model.group,
                              model.page_size,
                              model.scale,
                              (int)tokens,
                              before + begin,
                              window,
                              a.q + (begin * a.q_stride + first_head * dim) * size,
                              a.q_stride * size,
                              row,
                              a.out + (begin * a.out_stride + first_head * dim) * size,
                              a.out_stride * size,
                              row,
                              a.pages,
                              keys_of(a.kv, 0, head),
                              page_bytes(a.kv),
                              a.kv.page_size * row,
                              a.sinks ? a.sinks + first_head : nullptr,
                              hb::grown_lines(room, prompt_floats(tokens * a.group, dim))};
      attend(&block);
    };
    const int64_t read = std::min(a.seq_len, window + a.tokens) * a.kv.kv_heads * 2 * row;
    hb::share(a.team, read * std::min<int64_t>(a.tokens, 64), blocks * a.kv.kv_heads, attend_block);
  });
}

HB_API int hb_page_weights(const hb_page_weights_args* args) {
  return guarded([&] {
    const hb_page_weights_args& a = *args;
    const hb_model model = model_of(a.kv, a.group, a.scale);
    hb::check_model(model);
    const hb_cache cache = cache_of(a.kv);
    const Shape shape{model.type,         model.head_dim, model.group,
                      model.page_size,    model.scale,    cache.token_stride,
                      cache.value_offset, nullptr,        1};
    const WeighFn weigh = hb::kernels_of(model, (int)a.isa).weigh;
    const int64_t head_size = row_bytes(a.kv), group_size = a.group * head_size;
    int64_t bytes = 0;
    for (int64_t r = 0; r < a.rows; r++) {
      bytes += std::max(a.tokens[r], 0) * a.kv.kv_heads * head_size;
      require(a.tokens[r] <= a.n * a.kv.page_size, "a list has more tokens than its pages hold");
    }
    auto weigh_list = [&](int64_t item) {
      static thread_local std::vector<PageRef> refs;
      static thread_local std::vector<float*> averages;
      const int64_t row = item / a.kv.kv_heads, head = item % a.kv.kv_heads;
      const int32_t *ids = a.ids + row * a.row_stride, *places = a.places + row * a.place_stride;
      refs.clear();
      averages.clear();
      for (int64_t left = a.tokens[row], i = 0; left > 0; left -= a.kv.page_size, i++) {
        const int64_t page = check_id(ids[i], a.kv.pages, "page");
        refs.push_back({keys_of(a.kv, page, head), (int32_t)std::min(left, a.kv.page_size), 0});
        const int64_t place = check_id(places[i], a.place_count, "place");
        averages.push_back(a.average + (place * a.kv.kv_heads + head) * a.kv.page_size);
      }
      if (refs.empty()) return;
      const Segment segment{a.q + item * group_size, head_size, 0,
                            (int)refs.size(),        nullptr,   (float*)a.lse + item * a.group};
      weigh(&shape, &segment, refs.data(), averages.data(), (float)a.alpha, a.largest);
    };
    hb::share(a.team, bytes, a.rows * a.kv.kv_heads, weigh_list);
  });
}

HB_API int hb_copy_pages(const hb_copy_pages_args* args) {
  return guarded([&] {
    const hb_copy_pages_args& a = *args;
    int64_t bytes = 0;
    for (int64_t i = 0; i < a.n; i++) {
      if (a.frame_ids[i] < 0) continue;
      check_id(a.frame_ids[i], a.frame_count, "frame");
      check_id(a.host_pages[i], a.page_count, "page");
      bytes += a.page_bytes;
    }
    hb::share(a.team, bytes, a.n, [&](int64_t i) {
      if (a.frame_ids[i] >= 0)
        std::memcpy(a.frames + a.frame_ids[i] * a.page_bytes, a.host + a.host_pages[i] * a.page_bytes, a.page_bytes);
    });
  });
}
