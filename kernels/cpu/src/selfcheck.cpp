#include "selfcheck.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "dispatch.h"
#include "pool.h"

namespace hb {
namespace {

// Deterministic bf16 values in (-2, 2).
std::vector<uint16_t> values(size_t n, uint32_t seed) {
  std::vector<uint16_t> v(n);
  for (uint16_t& x : v) {
    seed = seed * 1664525u + 1013904223u;
    x = (uint16_t)(((seed >> 16) & 0x8000) | 0x3e00 | ((seed >> 8) & 0x1ff));
  }
  return v;
}

// Attention over two pages and a ragged third one.
std::vector<float> outputs(int isa, int dim, int group) {
  constexpr int kPages = 3, kPageSize = 32;
  const std::vector<uint16_t> cache = values((size_t)kPages * 2 * kPageSize * dim, 7),
                              q = values((size_t)group * dim, 11);
  const int64_t ids[kPages] = {2, 0, 1}, valid[kPages] = {kPageSize, kPageSize, 21};
  std::vector<float> result((size_t)group * (dim + 1));
  hb_partial_args args{};
  args.model = {BF16, 1, group, dim, kPageSize, 0.05f};
  const int64_t part = (int64_t)kPageSize * dim * 2;
  args.cache = {(char*)cache.data(), kPages, 2 * part, 2 * part, part, dim * 2};
  args.q = (const char*)q.data();
  args.q_row_stride = (int64_t)group * dim * 2;
  args.q_head_stride = dim * 2;
  args.rows = args.lists = 1;
  args.capacity = kPages;
  args.ids = ids;
  args.valid = valid;
  args.out = (char*)result.data();
  args.out_type = FP32;
  args.out_head_stride = dim * 4;
  args.out_row_stride = (int64_t)group * dim * 4;
  args.lse = result.data() + (size_t)group * dim;
  AttendJob job;
  prepare_partial(job, args, isa, 1);
  job.run(0);
  return result;
}

bool agree(int isa, int other) {
  for (const int dim : {64, 96, 128, 256})
    for (const int group : {1, 2, 3, 8}) {
      const std::vector<float> a = outputs(isa, dim, group), b = outputs(other, dim, group);
      double error = 0, size = 0;
      for (size_t i = 0; i < a.size(); i++) {
        error += (double)(a[i] - b[i]) * (a[i] - b[i]);
        size += (double)b[i] * b[i];
      }
      if (!(std::sqrt(error) <= 1e-2 * std::sqrt(size))) return false;
    }
  return true;
}

}  // namespace

int best_checked_isa() {
  static const int checked = [] {
    const int best = best_isa();
    if (std::strcmp(isa_at(best).name, "amx") != 0) return best;
    int next = best + 1;
    while (!isa_runs(next)) next++;
    return agree(best, next) ? best : next;
  }();
  return checked;
}

}  // namespace hb
