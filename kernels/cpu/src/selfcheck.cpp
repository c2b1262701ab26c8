#include "selfcheck.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "dispatch.h"
#include "memory.h"
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

// The last 40 of 85 tokens as a prompt over the same pages.
std::vector<float> prompt_outputs(int isa, int dim, int group) {
  constexpr int kPages = 3, kPageSize = 32, kTokens = 40, kBefore = 45;
  const std::vector<uint16_t> cache = values((size_t)kPages * 2 * kPageSize * dim, 7),
                              q = values((size_t)kTokens * group * dim, 11);
  const int32_t ids[kPages] = {2, 0, 1};
  const int64_t row = dim * 2, part = kPageSize * row;
  std::vector<uint16_t> out(q.size());
  std::vector<float> scratch, result(q.size());
  const Shape shape{BF16, BF16, dim, group, kPageSize, 0.05f, row, part, nullptr, 1};
  const PromptBlock block{BF16,
                          BF16,
                          dim,
                          group,
                          kPageSize,
                          shape.scale,
                          kTokens,
                          kBefore,
                          kBefore + kTokens,
                          (const char*)q.data(),
                          group * row,
                          row,
                          (char*)out.data(),
                          group * row,
                          row,
                          ids,
                          (const char*)cache.data(),
                          2 * part,
                          part,
                          nullptr,
                          nullptr,
                          0,
                          0,
                          0,
                          nullptr,
                          grown_lines(scratch, prompt_floats((int64_t)kTokens * group, dim))};
  const Kernels kernels = kernels_for(isa, shape);
  kernels.prompt.attend(&block);
  kernels.base->widen(BF16, out.data(), result.data(), (int)result.size());
  return result;
}

bool agree(const std::vector<float>& a, const std::vector<float>& b) {
  double error = 0, size = 0;
  for (size_t i = 0; i < a.size(); i++) {
    error += (double)(a[i] - b[i]) * (a[i] - b[i]);
    size += (double)b[i] * b[i];
  }
  return std::sqrt(error) <= 1e-2 * std::sqrt(size);
}

bool agree(int isa, int reference) {
  for (const int dim : {64, 96, 128, 256})
    for (const int group : {1, 2, 3, 8}) {
      if (!agree(outputs(isa, dim, group), outputs(reference, dim, group))) return false;
      if (!agree(prompt_outputs(isa, dim, group), prompt_outputs(reference, dim, group))) return false;
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
