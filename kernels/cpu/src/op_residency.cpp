// Operations that change which pages frames hold: hb_note_scores, hb_plan_recall, hb_copy_pages, hb_commit_pages and
// hb_open_pages. Their contract is in kernels/operations.py.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <vector>

#include "api_operations.h"
#include "digest.h"
#include "guard.h"
#include "team.h"

using hb::check_id;
using hb::guarded;
using hb::require;

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Sorts by score, then by index.
int64_t key_of(float score, int64_t index) { return ((int64_t)hb::ordered_key(score) << 31) + index; }
int64_t index_of(int64_t key) { return key & 0x7fffffff; }

// Maps of one layer.
hb_maps layer_of(const hb_maps& maps, int64_t layer) {
  hb_maps of = maps;
  of.frame_of += layer * maps.requests * maps.columns;
  of.page_of += layer * maps.requests * maps.frames;
  of.importance += layer * maps.requests * maps.frames;
  return of;
}

// The frame holds another page from now on, or none.
void evict(const hb_maps& maps, int64_t request, int64_t frame) {
  const int32_t old = maps.page_of[frame];
  if (old >= 0) maps.frame_of[request * maps.columns + check_id(old, maps.columns, "logical page")] = -1;
}

}  // namespace

HB_API int hb_note_scores(const hb_note_scores_args* args) {
  return guarded([&] {
    const hb_note_scores_args& a = *args;
    const int64_t recent = std::max<int64_t>(a.recent, 1);
    for (int64_t row = 0; row < a.rows; row++) {
      const int64_t pages = a.num_pages[row];
      if (pages <= 0 || a.budgets[row] >= pages) continue;
      require(pages <= a.columns, "a row has more pages than columns");
      const int64_t request = check_id(a.requests[row], a.maps.requests, "request");
      for (int64_t frame = request; frame < a.maps.frames * a.maps.requests; frame += a.maps.requests) {
        const int64_t page = a.maps.page_of[frame];
        // An empty frame of infinite importance is reserved for a page that is on its way.
        float best = page < 0 && a.maps.importance[frame] == kInfinity ? kInfinity : -kInfinity;
        if (page >= 0 && (page < a.sinks || page >= pages - recent)) {
          best = kInfinity;
        } else if (page >= 0) {
          const float* scores = a.scores + row * a.lists * a.columns + page;
          for (int64_t list = 0; list < a.lists; list++, scores += a.columns) best = *scores > best ? *scores : best;
        }
        a.maps.importance[frame] = best;
      }
    }
  });
}

HB_API int hb_plan_recall(const hb_plan_recall_args* args) {
  return guarded([&] {
    const hb_plan_recall_args& a = *args;
    const int64_t most = a.copies.most;
    require(a.interval > 0, "the interval of recalls must be positive");
    std::fill(a.copies.frames, a.copies.frames + a.rows * most, -1);
    static thread_local std::vector<int64_t> victims, wanted;
    for (int64_t row = 0; row < a.rows; row++) {
      const int64_t count = a.absent_listed[row];
      const bool is_due = a.ages[row] == 0 || (a.ages[row] + a.phase) % a.interval == 0;
      if (!is_due || a.num_pages[row] <= 0 || count <= 0) continue;
      require(count <= a.absent_n, "more pages are absent than a list holds");
      const int64_t request = check_id(a.requests[row], a.maps.requests, "request"), every = a.maps.requests;
      int32_t* keep = a.keep + row * a.maps.frames;
      std::fill(keep, keep + a.maps.frames, 0);
      for (int64_t list = row * a.lists; list < (row + 1) * a.lists; list++) {
        require(a.selected_listed[list] <= a.selected_k, "more frames are selected than a list holds");
        for (int i = 0; i < a.selected_listed[list]; i++) {
          const int32_t frame = (int32_t)check_id(a.selected[list * a.selected_k + i], a.maps.frames * every, "frame");
          require(frame % (int32_t)every == request, "a selected frame belongs to another request");
          keep[frame / (int32_t)every] = 1;
        }
      }
      // Least important frames first, most important absent pages first: pairs of them are copies.
      victims.clear();
      for (int64_t i = 0; i < a.maps.frames; i++) {
        const float importance = a.maps.importance[i * every + request];
        if (!keep[i] && importance != kInfinity) victims.push_back(key_of(importance, i));
      }
      wanted.clear();
      const int32_t* absent = a.absent + row * a.absent_n;
      const float* scores = a.scores + row * a.columns;
      for (int64_t i = 0; i < count; i++)
        wanted.push_back(key_of(scores[check_id(absent[i], std::min(a.columns, a.maps.columns), "logical page")], i));
      const int64_t pairs = std::min<int64_t>({(int64_t)victims.size(), count, most});
      std::partial_sort(victims.begin(), victims.begin() + pairs, victims.end());
      std::partial_sort(wanted.begin(), wanted.begin() + pairs, wanted.end(), std::greater<int64_t>());
      const int64_t to = row * most;
      for (int64_t i = 0; i < pairs; i++) {
        const int64_t frame = index_of(victims[i]) * every + request;
        const int32_t page = absent[index_of(wanted[i])];
        evict(a.maps, request, frame);
        a.maps.page_of[frame] = -1;
        a.maps.importance[frame] = -kInfinity;
        a.copies.frames[to + i] = (int32_t)frame;
        a.copies.host_pages[to + i] = a.table[row * a.table_stride + page];
        a.copies.pages[to + i] = page;
        a.copies.importance[to + i] = std::isnan(scores[page]) ? -kInfinity : scores[page];
      }
      a.copies.requests[row] = (int32_t)request;
      a.copies.started[row] = a.generations[row];
      if (a.counters) a.counters[HB_RECALLED_PAGES] += pairs;
    }
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

HB_API int hb_commit_pages(const hb_commit_pages_args* args) {
  return guarded([&] {
    const hb_copies& copies = args->copies;
    for (int64_t layer = 0; layer < args->maps.layers; layer++) {
      const hb_maps maps = layer_of(args->maps, layer);
      for (int64_t row = layer * copies.rows; row < (layer + 1) * copies.rows; row++) {
        int32_t* frames = copies.frames + row * copies.most;
        for (int64_t i = 0; i < copies.most; i++) {
          const int32_t frame = frames[i];
          if (frame < 0) continue;
          frames[i] = -1;  // once
          const int64_t request = check_id(copies.requests[row], maps.requests, "request");
          if (copies.started[row] != args->generations[request]) continue;
          const int64_t entry = row * copies.most + i;
          const int32_t page = copies.pages[entry];
          maps.page_of[check_id(frame, maps.requests * maps.frames, "frame")] = page;
          maps.importance[frame] = copies.importance[entry];
          maps.frame_of[request * maps.columns + check_id(page, maps.columns, "logical page")] = frame;
        }
      }
    }
  });
}

HB_API int hb_open_pages(const hb_open_pages_args* args) {
  return guarded([&] {
    const hb_open_pages_args& a = *args;
    for (int64_t row = 0; row < a.rows; row++) {
      if (a.pages[row] < 0 || a.positions[row] % a.page_size) continue;
      const int64_t request = check_id(a.requests[row], a.maps.requests, "request"), every = a.maps.requests;
      const int64_t page = check_id(a.positions[row] / a.page_size, a.maps.columns, "logical page");
      for (int64_t layer = 0; layer < a.maps.layers; layer++) {
        const hb_maps maps = layer_of(a.maps, layer);
        int32_t& frame_of = maps.frame_of[request * maps.columns + page];
        if (frame_of >= 0) continue;  // a step that failed half-way opened it
        int64_t least = std::numeric_limits<int64_t>::max();
        for (int64_t i = 0; i < maps.frames; i++)
          least = std::min(least, key_of(maps.importance[i * every + request], i));
        const int64_t frame = index_of(least) * every + request;
        evict(maps, request, frame);
        maps.page_of[frame] = (int32_t)page;
        // Where importance is age, the youngest page outranks the others.
        maps.importance[frame] = page < a.sinks ? std::numeric_limits<float>::infinity() : (float)page;
        frame_of = (int32_t)frame;
      }
    }
  });
}
