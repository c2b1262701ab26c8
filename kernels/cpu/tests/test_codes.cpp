// Scores by digests in codes, by every kernel that this CPU runs.
#include <cmath>
#include <random>
#include <vector>

#include "check.h"
#include "code_levels.h"
#include "codes.h"
#include "dispatch.h"

namespace {

// Four pages of random codes, and rotated queries of a kind: what tables and sums should say, in double.
struct Codes {
  enum Kind { NORMAL, EQUAL, KINDS };  // channels: normal, or all of one size, as a rotation makes of a single one
  static constexpr float kVariance = 0.3f;

  hb::CodeLayout layout;
  int group, row;
  float unit;
  std::vector<float> x;
  std::vector<uint8_t> codes, scales;

  Codes(Rng& rng, int dim, int page_size, int group, Kind kind)
      : layout(dim, page_size), group(group), row(layout.planes * page_size), unit(0.5f / std::sqrt((float)dim) / 255) {
    std::normal_distribution<float> normal;
    x.resize((size_t)group * dim);
    for (float& each : x) each = kind == NORMAL ? normal(rng) : 1.f - 2 * (int)(rng() % 2);
    codes.resize(kScoreTile * row);
    for (uint8_t& each : codes) each = (uint8_t)rng();
    scales.resize(kScoreTile * page_size);
    for (uint8_t& each : scales) each = (uint8_t)(64 + rng() % 192);
  }

  CodePage page(int i) const { return {&scales[i * layout.page_size], &codes[i * row], unit}; }
  const uint8_t* token(int i, int t) const { return &codes[i * row + t / 16 * 16 * layout.planes + t % 16]; }

  // Of a head and a token of page i: the sum over its levels.
  double sum(int g, int i, int t) const {
    constexpr float kLevels[4] = {-kOuter, -kInner, kInner, kOuter};
    double sum = 0;
    for (int d = 0; d < layout.coded; d++) {
      const bool fine = d < layout.fine;
      const int at = fine ? d / 2 : layout.fine / 2 + (d - layout.fine) / 4;  // nibbles
      const int code = token(i, t)[at / 2 * 16] >> 4 * (at % 2);
      const bool is_high = code >> ((d - layout.fine) & 3) & 1;
      sum += (double)x[g * layout.dim + d] * (fine ? kLevels[code >> 2 * (d % 2) & 3] : is_high ? kCoarse : -kCoarse);
    }
    return sum;
  }

  double weights(int g, int i) const {
    double all = 0;
    for (int t = 0; t < layout.page_size; t++) {
      const double s = unit * scales[i * layout.page_size + t];
      all += std::exp2(s * (sum(g, i, t) + kVariance * s));
    }
    return all;
  }

  void check(const CodeKernels& kernels, const char* name) const {
    const int stride = kernels.table_bytes(layout.planes), dim = layout.dim;
    std::vector<uint8_t> tables((size_t)group * stride);
    std::vector<float> factor(group), offset(group), variance(group, kVariance), sums(group * kScoreTile);
    // VBMI has half as many steps for an entry where 16 lookups, not 8, share a byte: for more than 48 planes.
    const double bound = dim > 256 ? 0.4 : 0.25;
    for (int g = 0; g < group; g++) {
      uint8_t* own = &tables[g * stride];
      factor[g] = kernels.tables(&x[g * dim], layout.fine, layout.coded, own, &offset[g]);
      const double said = factor[g] * kernels.steps(own, token(1, 3), layout.planes) + offset[g];
      EXPECT(std::fabs(said - sum(g, 1, 3)) < bound * std::sqrt((float)dim),
             "%s, head_dim %d, page size %d: %g, not %g", name, dim, layout.page_size, said, sum(g, 1, 3));
    }
    const CodeQuery query{group,         layout.page_size / 16, layout.planes,   tables.data(),
                          factor.data(), offset.data(),         variance.data(), stride};
    const CodePage pages[kScoreTile] = {page(0), page(1), page(2), page(3)};
    kernels.sums(&query, pages, sums.data());
    for (int g = 0; g < group; g++)
      for (int i = 0; i < kScoreTile; i++) {
        const double found = sums[g * kScoreTile + i], expected = weights(g, i);
        EXPECT(std::fabs(found / expected - 1) < 0.05, "%s, head_dim %d, page size %d, group %d: %g, not %g", name, dim,
               layout.page_size, group, found, expected);
      }
  }
};

}  // namespace

// By every kernel that this CPU runs, not only the best one.
void test_codes() {
  Rng rng(5);
  for (const int dim : {16, 48, 64, 80, 96, 128, 256, 512})
    for (const int page_size : {16, 32, 128})
      for (const int group : {1, 2, 3, 4, 7, 16})
        for (int kind = 0; kind < Codes::KINDS; kind++) {
          if (!hb::CodeLayout(dim, page_size).planes) continue;
          const Codes codes(rng, dim, page_size, group, (Codes::Kind)kind);
          for (int i = 0; i < hb::isa_count(); i++)
            if (hb::isa_runs(i) && hb::isa_at(i).codes.sums) codes.check(hb::isa_at(i).codes, hb::isa_at(i).name);
#if defined(__x86_64__) && defined(HB_HAVE_VNNI)
          if (__builtin_cpu_supports("avx512vnni")) codes.check(hb_vnni_codes, "vnni");
#endif
#if defined(__x86_64__) && defined(HB_HAVE_VBMI)
          if (__builtin_cpu_supports("avx512vbmi")) codes.check(hb_vbmi_codes, "vbmi");
#endif
        }
}
