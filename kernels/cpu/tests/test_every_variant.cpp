// Every variant that this CPU runs against sums in double, and every instruction set's conversions.
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "check.h"
#include "dispatch.h"
#include "memory.h"

namespace {

const Isa& generic() { return hb::isa_at(hb::isa_count() - 1); }

std::vector<float> normal_values(size_t n, Rng& rng) {
  std::normal_distribution<float> normal;
  std::vector<float> values(n);
  for (float& value : values) value = normal(rng);
  return values;
}

// Numbers of an element type: as memory, and as floats.
struct Numbers {
  std::vector<char> memory;
  std::vector<float> values;

  Numbers(int type, size_t n, Rng& rng) : memory(n * element_size(type)), values(normal_values(n, rng)) {
    generic().convert(type, values.data(), memory.data(), (int)n);
    generic().widen(type, memory.data(), values.data(), (int)n);
  }
};

// Calls check(kernels, variant's name) for the variants of an operation that have the shape.
template <class Check>
void each_variant(hb::Operation operation, const Shape& shape, const Check& check) {
  int checked = 0;
  for (int i = 0; i < hb::variant_count(operation); i++) {
    hb::Kernels kernels{};
    if (hb::take_variant(operation, i, shape, kernels)) checked++, check(kernels, hb::variant_name(operation, i));
  }
  EXPECT(checked, "no variant of %s", hb::operation_name(operation));
}

bool near(const float* found, const std::vector<double>& expected, double tolerance) {
  double error = 0, size = 1e-30;
  for (size_t i = 0; i < expected.size(); i++) {
    if (!std::isfinite(found[i])) return false;
    error += std::pow(found[i] - expected[i], 2);
    size += std::pow(expected[i], 2);
  }
  return std::sqrt(error) <= tolerance * std::sqrt(size);
}

// --- scores of digests in bytes ---

void check_bytes(Rng& rng, int heads, int segments, int width, bool extreme) {
  const int scales_at = segments * width, row = scales_at + 4 * segments, all = heads * segments;
  std::vector<int8_t> weights((size_t)all * width);
  for (int8_t& weight : weights) weight = (int8_t)(extreme ? (rng() % 2 ? 127 : -127) : (int)(rng() % 255) - 127);
  std::vector<uint8_t> bytes((size_t)kScoreTile * row);
  for (uint8_t& byte : bytes) byte = (uint8_t)(extreme ? (rng() % 2 ? 255 : 0) : rng() % 256);
  std::vector<int32_t> bias(all);
  std::vector<float> step = normal_values(all, rng);
  const uint8_t* rows[kScoreTile];
  for (int r = 0; r < kScoreTile; r++) {
    rows[r] = &bytes[(size_t)r * row];
    const std::vector<float> scales = normal_values(segments, rng);
    std::memcpy(&bytes[(size_t)r * row + scales_at], scales.data(), 4 * segments);
  }
  std::vector<double> expected((size_t)heads * kScoreTile);
  for (int i = 0; i < all; i++) {
    int sum = 0;
    for (int b = 0; b < width; b++) sum += weights[(size_t)i * width + b];
    bias[i] = 128 * sum;
    for (int r = 0; r < kScoreTile; r++) {
      int64_t dot = -bias[i];
      for (int b = 0; b < width; b++) dot += rows[r][i % segments * width + b] * weights[(size_t)i * width + b];
      float scale;
      std::memcpy(&scale, rows[r] + scales_at + 4 * (i % segments), 4);
      expected[(size_t)i / segments * kScoreTile + r] += (double)scale * step[i] * (double)dot;
    }
  }
  each_variant(hb::BYTES, Shape{BF16, BF16, 64, 1, 16, 1.f}, [&](const hb::Kernels& kernels, const char* name) {
    std::vector<float> out(expected.size(), NAN);
    for (int h = 0; h < heads; h++) {
      const int first = h * segments;
      const ByteWeights one{&weights[(size_t)first * width], &bias[first], &step[first], segments, width, scales_at};
      kernels.bytes.dots(&one, rows, rows, &out[h * kScoreTile]);
    }
    EXPECT(near(out.data(), expected, 1e-5), "bytes by %s, %d segments of %d", name, segments, width);
    if (!kernels.bytes.heads) return;
    std::fill(out.begin(), out.end(), NAN);
    const ByteWeights many{weights.data(), bias.data(), step.data(), segments, width, scales_at};
    kernels.bytes.heads(&many, heads, rows, rows, out.data());
    EXPECT(near(out.data(), expected, 1e-5), "bytes of %d heads by %s, %d segments of %d", heads, name, segments,
           width);
  });
}

// --- scores of digests in the model's type, and shares ---

void check_digests(Rng& rng, int type, int n) {
  const Numbers rows(type, (size_t)kScoreTile * n, rng);
  const std::vector<float> weights = normal_values(n, rng);
  const char* at[kScoreTile];
  std::vector<double> expected(kScoreTile);
  for (int r = 0; r < kScoreTile; r++) {
    at[r] = &rows.memory[(size_t)r * n * element_size(type)];
    for (int i = 0; i < n; i++) expected[r] += (double)rows.values[(size_t)r * n + i] * weights[i];
  }
  each_variant(hb::DIGESTS, Shape{type, type, 64, 1, 16, 1.f}, [&](const hb::Kernels& kernels, const char* name) {
    std::vector<float> prepared = weights, scratch(n), out(kScoreTile, NAN);
    kernels.digests->prepare_weights(type, prepared.data(), n, scratch.data());
    kernels.digests->dots(type, at, at, prepared.data(), n, out.data());
    EXPECT(near(out.data(), expected, 1e-5), "digests by %s, type %d, %d numbers", name, type, n);
  });
}

void check_shares(Rng& rng, int n) {
  const std::vector<float> scores = normal_values(n, rng);
  std::vector<double> expected(n);
  double sum = 0;
  for (int i = 0; i < n; i++) sum += expected[i] = std::exp(0.7 * scores[i]);
  for (double& share : expected) share = share / sum + 1;
  each_variant(hb::SHARES, Shape{BF16, BF16, 64, 1, 16, 1.f}, [&](const hb::Kernels& kernels, const char* name) {
    std::vector<float> mine = scores, total(n, 1.f);
    kernels.softmax_add(mine.data(), n, 0.7f, total.data());
    EXPECT(near(total.data(), expected, 1e-5), "shares of %d by %s", n, name);
  });
}

// --- prompts ---

void check_prompt(Rng& rng, int type, int dim, int group, int tokens, int before, int window, bool has_sinks) {
  const int page_size = 32, context = before + tokens, pages = (context + page_size - 1) / page_size;
  const int size = element_size(type);
  const int64_t row = (int64_t)dim * size, part = page_size * row;
  const Numbers cache(type, (size_t)pages * 2 * page_size * dim, rng), q(type, (size_t)tokens * group * dim, rng);
  std::vector<int32_t> ids(pages);
  for (int p = 0; p < pages; p++) ids[p] = pages - 1 - p;
  const std::vector<float> sinks = normal_values(group, rng);
  const float scale = 1.f / std::sqrt((float)dim);
  std::vector<double> expected(q.values.size());
  for (int t = 0; t < tokens; t++)
    for (int g = 0; g < group; g++) {
      const float* query = &q.values[((size_t)t * group + g) * dim];
      const int last = before + t;
      double sum = has_sinks ? std::exp((double)sinks[g]) : 0;
      std::vector<double> out(dim);
      for (int k = std::max(last - window + 1, 0); k <= last; k++) {
        const float* key = &cache.values[((size_t)ids[k / page_size] * 2 * page_size + k % page_size) * dim];
        double logit = 0;
        for (int d = 0; d < dim; d++) logit += (double)query[d] * key[d];
        const double weight = std::exp(scale * logit);
        sum += weight;
        for (int d = 0; d < dim; d++) out[d] += weight * key[page_size * dim + d];
      }
      for (int d = 0; d < dim; d++) expected[((size_t)t * group + g) * dim + d] = out[d] / sum;
    }
  each_variant(hb::PROMPT, Shape{type, type, dim, group, page_size, scale},
               [&](const hb::Kernels& kernels, const char* name) {
                 std::vector<char> out(q.memory.size(), (char)0xff);
                 std::vector<float> scratch, found(q.values.size());
                 const PromptBlock block{type,
                                         type,
                                         dim,
                                         group,
                                         page_size,
                                         scale,
                                         tokens,
                                         before,
                                         window,
                                         q.memory.data(),
                                         group * row,
                                         row,
                                         out.data(),
                                         group * row,
                                         row,
                                         ids.data(),
                                         cache.memory.data(),
                                         2 * part,
                                         part,
                                         nullptr,
                                         nullptr,
                                         0,
                                         0,
                                         0,
                                         has_sinks ? sinks.data() : nullptr,
                                         hb::grown_lines(scratch, prompt_floats((int64_t)tokens * group, dim))};
                 kernels.prompt.attend(&block);
                 generic().widen(type, out.data(), found.data(), (int)found.size());
                 EXPECT(near(found.data(), expected,
                             type == FP32   ? 1e-5
                             : type == FP16 ? 1e-3
                                            : 1e-2),
                        "prompt by %s: type %d, head_dim %d, group %d, %d tokens after %d, window %d", name, type, dim,
                        group, tokens, before, window);
               });
}

// --- conversions ---

void check_conversions(const Isa& isa, Rng& rng) {
  std::vector<uint16_t> halves(1 << 16);
  for (int i = 0; i < 1 << 16; i++) halves[i] = (uint16_t)i;
  std::vector<float> found(halves.size()), expected(halves.size());
  for (const int type : {BF16, FP16}) {
    isa.widen(type, halves.data(), found.data(), (int)halves.size());
    generic().widen(type, halves.data(), expected.data(), (int)halves.size());
    for (size_t i = 0; i < halves.size(); i++)
      EXPECT(found[i] == expected[i] || (std::isnan(found[i]) && std::isnan(expected[i])), "%s widens %zx of type %d",
             isa.name, i, type);
    // All exponents, and halfway between two numbers of the type.
    std::vector<float> numbers = expected;
    for (float& number : numbers) {
      uint32_t bits;
      std::memcpy(&bits, &number, 4);
      const uint32_t half = type == BF16 ? 0x8000 : 0x1000;
      bits += rng() % 2 ? half : (uint32_t)rng() % (2 * half);
      std::memcpy(&number, &bits, 4);
    }
    const int n = (int)numbers.size() - 3;  // no multiple of a vector
    std::vector<uint16_t> to(halves.size(), 7), expected_to(halves.size(), 7);
    isa.convert(type, numbers.data(), to.data(), n);
    generic().convert(type, numbers.data(), expected_to.data(), n);
    for (size_t i = 0; i < to.size(); i++)
      EXPECT(to[i] == expected_to[i] || std::isnan(numbers[i]), "%s converts %a to type %d: %x, not %x", isa.name,
             (double)numbers[i], type, to[i], expected_to[i]);
  }
}

}  // namespace

void test_every_variant() {
  Rng rng(17);
  for (const int width : {16, 48, 64, 80, 128, 256})
    for (const int heads : {1, 2, 3, 4, 7, 16})
      for (const bool extreme : {false, true}) check_bytes(rng, heads, 1 + (int)(rng() % 5), width, extreme);
  for (int type = 0; type < 3; type++) {
    for (const int n : {32, 96, 160, 1024}) check_digests(rng, type, n);
    for (const int dim : {16, 64, 80, 256, 512})
      for (const int group : {1, 3, 4}) {
        check_prompt(rng, type, dim, group, 41, 0, 1 << 20, false);
        check_prompt(rng, type, dim, group, 5, 150, 1 << 20, true);
        check_prompt(rng, type, dim, group, 37, 170, 50, true);
      }
  }
  for (const int n : {1, 3, 4, 16, 33, 100}) check_shares(rng, n);
  for (int i = 0; i < hb::isa_count(); i++)
    if (hb::isa_runs(i) && hb::isa_at(i).convert) check_conversions(hb::isa_at(i), rng);
}
