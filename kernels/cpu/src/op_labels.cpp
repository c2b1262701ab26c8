// The operation hb_match_labels: similarity of queries and the labels of cached pages. Its contract is in
// kernels/operations.py.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "api_operations.h"
#include "attend_job.h"
#include "guard.h"
#include "team.h"

using hb::check_id;
using hb::guarded;
using hb::require;

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

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
      const double similarity = combined((Similarity)a.aggregate, similar, a.weights + head * a.group, a.group);
      if (has_label && similarity >= a.thresholds[head]) return;
      std::memcpy(label, q, bytes);
      a.missed[i] = 1;
    });
    for (int64_t i = 0; a.counters && i < items; i++) {
      a.counters[HB_LOOKUPS] += is_looked_up(i);
      a.counters[HB_HITS] += is_looked_up(i) && !a.missed[i];
    }
  });
}
