// Operations on partial attention: hb_paged_partial, hb_merge_partials and hb_page_weights. Their contract is in
// kernels/operations.py.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "api_operations.h"
#include "attend_job.h"
#include "guard.h"
#include "memory.h"
#include "paged.h"
#include "team.h"

using hb::check_id;
using hb::grown;
using hb::guarded;
using hb::require;

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

}  // namespace

HB_API int hb_paged_partial(const hb_paged_partial_args* args) {
  return guarded([&] {
    const hb_paged_partial_args& a = *args;
    static thread_local hb::AttendJob attention;
    hb::AttendJob& job = attention;  // also for other threads
    const hb_model model = hb::model_of(a.kv, a.group, a.scale);
    job.configure(model, hb::cache_of(a.kv), (int)a.isa);
    const int64_t head = hb::row_bytes(a.kv), heads = a.kv.kv_heads * a.group;
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
      for (int64_t item = row * a.heads; item < (row + 1) * a.heads; item++) {
        const float *out = a.out + item * a.parts * dim, *lse = a.lse + item * a.parts;
        float top = a.other_lse ? a.other_lse[item] : -kInfinity;
        for (int64_t p = 0; p < a.parts; p++) top = std::max(top, lse[p]);
        const float sink = a.sinks ? a.sinks[item - row * a.heads] : -kInfinity;
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
        if (a.other_lse) add(a.other_out + item * dim, a.other_lse[item]);
        if (total != 0)
          for (int64_t d = 0; d < dim; d++) sum[d] /= total;
        a.merged_lse[item] = total != 0 ? top + std::log(total) : -kInfinity;
        isa.convert((int)a.type, sum, a.merged + item * dim * size, (int)dim);
      }
    };
    hb::share(a.team, a.rows * a.heads * a.parts * dim * (int64_t)sizeof(float), a.rows, merge);
  });
}

HB_API int hb_page_weights(const hb_page_weights_args* args) {
  return guarded([&] {
    const hb_page_weights_args& a = *args;
    const hb_model model = hb::model_of(a.kv, a.group, a.scale);
    hb::check_model(model);
    const hb_cache cache = hb::cache_of(a.kv);
    const Shape shape{model.type,  hb::kv_type(model), model.head_dim,     model.group, model.page_size,
                      model.scale, cache.token_stride, cache.value_offset, nullptr,     1};
    const WeighFn weigh = hb::kernels_of(model, (int)a.isa).weigh;
    const int64_t head_size = hb::row_bytes(a.kv), group_size = a.group * head_size;
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
        refs.push_back({hb::keys_of(a.kv, page, head), (int32_t)std::min(left, a.kv.page_size), 0});
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
