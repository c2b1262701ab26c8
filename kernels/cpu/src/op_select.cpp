// Operations that select pages: hb_select_pages with its split by residency, and hb_union_pages. Their contract is in
// kernels/operations.py.
#include <algorithm>
#include <limits>
#include <vector>

#include "api_operations.h"
#include "digest.h"
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

HB_API int hb_select_pages(const hb_select_pages_args* args) {
  return guarded([&] {
    const hb_select_pages_args& a = *args;
    const int64_t count = a.rows * a.lists, size = count * a.most;
    const int recent = (int)std::max<int64_t>(a.recent, 1), sinks = (int)std::max<int64_t>(a.sinks, 0);
    auto select = [&](int64_t list) {
      const int64_t row = list / a.lists;
      const int pages = a.num_pages[row];
      int32_t *selected = a.selected + list * a.most, *frames = selected + size, *missing = frames + size;
      int32_t* absent = missing + size;
      int taken = 0, resident = 0, lacking = 0;
      if (pages > 0) {
        require(pages <= a.columns, "a row has more pages than columns");
        const int budget = (int)std::min<int64_t>({std::max(a.budgets[row], 0), pages, a.most});
        const int last = std::min(recent, budget), first = std::min(sinks, budget - last);
        if (hb::reuses(a.reuse, row, a.lists, pages)) {
          taken = a.reuse.listed[list];
          require(taken >= 0 && taken <= a.most, "more pages are listed than a list holds");
          std::copy_n(a.reuse.pages + list * a.most, taken, selected);
          for (int i = 0; i < taken; i++) check_id(selected[i], pages, "logical page");
        } else {
          taken = hb::select_best(a.scores + list * a.columns, pages, budget, first, last, selected);
        }
        const int32_t* host_pages = a.table + row * a.table_stride;
        const int32_t* frame_of =
            a.frame_of ? a.frame_of + check_id(a.requests[row], a.request_count, "request") * a.frame_columns
                       : host_pages;
        const int64_t columns_of_map = a.frame_of ? a.frame_columns : pages;
        for (int i = 0; i < taken; i++) {
          const int page = selected[i];
          const int32_t frame = page < columns_of_map ? frame_of[page] : -1;
          if (frame >= 0) {
            frames[resident++] = frame;
          } else {
            missing[lacking] = host_pages[page];
            absent[lacking++] = page;
          }
        }
      }
      a.listed[list] = taken;
      a.listed[count + list] = resident;
      // The growing page is resident.
      const int64_t unwritten = pages * a.page_size - a.seq_lens[row];
      a.listed[2 * count + list] = resident ? (int32_t)(resident * a.page_size - unwritten) : 0;
      a.listed[3 * count + list] = lacking;
    };
    hb::share(a.team, count * a.columns * sizeof(float), count, select);
    // All lists of a row have read its epoch.
    for (int64_t list = 0; a.reuse.epochs && list < count; list++) {
      std::copy_n(a.selected + list * a.most, a.listed[list], a.reuse.pages + list * a.most);
      a.reuse.listed[list] = a.listed[list];
      a.reuse.list_epochs[list] = a.reuse.epochs[list / a.lists];
    }
    if (!a.counters) return;
    for (int64_t list = 0; list < count; list++) {
      a.counters[HB_RESIDENT_PAGES] += a.listed[count + list];
      a.counters[HB_RESIDENT_TOKENS] += a.listed[2 * count + list];
      a.counters[HB_MISSING_PAGES] += a.listed[3 * count + list];
      a.counters[HB_MISSING_TOKENS] += a.listed[3 * count + list] * a.page_size;
    }
  });
}

HB_API int hb_union_pages(const hb_union_pages_args* args) {
  return guarded([&] {
    const hb_union_pages_args& a = *args;
    auto unite = [&](int64_t row) {
      static thread_local std::vector<char> marks;
      char* marked = grown(marks, a.columns);
      std::fill(marked, marked + a.columns, 0);
      for (int64_t list = row * a.lists; list < (row + 1) * a.lists; list++) {
        require(a.listed[list] <= a.k, "more pages are listed than a list holds");
        for (int i = 0; i < a.listed[list]; i++)
          marked[check_id(a.absent[list * a.k + i], a.columns, "logical page")] = 1;
      }
      int32_t* pages = a.pages + row * a.most;
      int count = 0;
      for (int64_t c = 0; c < a.columns; c++)
        if (marked[c]) pages[count++] = (int32_t)c;
      a.count[row] = count;
      float* best = a.best + row * a.columns;
      std::fill(best, best + a.columns, -kInfinity);
      for (int64_t list = row * a.lists; list < (row + 1) * a.lists; list++) {
        const float* scores = a.scores + list * a.columns;
        for (int64_t c = 0; c < a.columns; c++) best[c] = scores[c] > best[c] ? scores[c] : best[c];
      }
    };
    hb::share(a.team, a.rows * a.lists * a.columns * sizeof(float), a.rows, unite);
  });
}
