// The operation hb_page_scores: scores of pages by their digests. Its contract is in kernels/operations.py.
#include <algorithm>
#include <limits>
#include <vector>

#include "api_operations.h"
#include "attend_job.h"
#include "codes.h"
#include "digest.h"
#include "digest_formats.h"
#include "guard.h"
#include "memory.h"
#include "reuse.h"
#include "team.h"

using hb::check_id;
using hb::grown;
using hb::guarded;
using hb::require;

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

}  // namespace

HB_API int hb_page_scores(const hb_page_scores_args* args) {
  return guarded([&] {
    const hb_page_scores_args& a = *args;
    // Scores by maxima and minima do not depend on the page's size.
    const int32_t page_size = a.digest_format == HB_CODES ? (int32_t)a.page_size : 16;
    const hb_model model{(int32_t)a.type, (int32_t)a.kv_heads, (int32_t)a.group, (int32_t)a.head_dim,
                         page_size,       (float)a.scale,      (float)a.bound};
    hb::check_model(model);
    require(a.aggregate >= hb::SUM && a.aggregate <= hb::SOFTMAX, "no such way to combine scores");
    const auto aggregate = (hb::Aggregate)a.aggregate;
    const hb::Kernels kernels = hb::kernels_of(model, (int)a.isa);
    const hb_digests digests = hb::digests_of(a.digests, model, a.digest_format);
    const int64_t heads = a.kv_heads * a.group, lists = a.per_head ? a.kv_heads : 1;
    const bool has_shares = aggregate == hb::SOFTMAX;
    // Codes and bytes are scored by query head, whatever becomes of them.
    const bool are_apart = has_shares || a.digest_format != HB_MINMAX;
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
      if (hb::reuses(a.reuse, r, lists, a.num_pages[r])) continue;
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
      if (a.digest_format == HB_CODES) {
        code_scorer.prepare(model, digests, kernels, q, head);
        code_scorer.prepare_codes(q, head);
        code_scorer.estimate(page_of, -1, (int)task.begin, (int)task.end, shares, a.columns);
      } else if (a.digest_format == HB_MINMAX_INT8) {
        for (int64_t h = 0; h < a.kv_heads; h++) {  // what each has of a page is a row of a store of one head
          const hb_byte_digests one_head_bytes{(uint8_t*)digests.base + h * digests.head_stride, digests.page_stride};
          scorer.prepare_byte_digests(one_head, one_head_bytes, kernels, hb::SOFTMAX, q + h * a.group * head, head);
          scorer.score(page_of, (int)task.begin, (int)task.end, shares + h * a.group * a.columns, a.columns);
        }
      } else {
        scorer.prepare(model, digests, kernels, a.per_head, aggregate, q, head);
        scorer.score(page_of, (int)task.begin, (int)task.end, are_apart ? shares : out, a.columns);
      }
      if (!are_apart || rows_left[(int)task.row].fetch_sub(1, std::memory_order_acq_rel) != 1) return;
      const int last = a.num_pages[task.row] - 1;  // the growing page has no share
      const int heads_per_list = (int)(heads / lists);
      for (int64_t list = 0; list < lists; list++, out += a.columns, shares += heads_per_list * a.columns) {
        if (!has_shares) {
          hb::combine_lists(aggregate, shares, a.columns, heads_per_list, (int)a.group, last + 1, out);
          continue;
        }
        hb::add_shares(kernels.softmax_add, shares, a.columns, heads_per_list, last, model.scale, out);
        out[last] = 0;
      }
    };
    hb::share(a.team, bytes, (int64_t)tasks.size(), score);
  });
}
