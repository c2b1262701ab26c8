#include "measure.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>

#include "attend_job.h"
#include "codes.h"
#include "digest.h"
#include "memory.h"
#include "pool.h"

namespace hb {
namespace {

constexpr int kPages = 16, kPromptQueries = 96, kPromptTokens = 256;
constexpr int kSureRounds = 2;  // before a slow variant is left out: its first time may be another process's
constexpr int64_t kLongEnough = 20'000;  // nanoseconds: the clock and a call cost a thousandth of that

// A small job of one KV head's pages, with everything that the operations read and write.
struct Bench {
  hb_model model;
  int64_t row, part;                 // bytes of a token's K, of a page's K
  std::vector<char> cache, q, out;
  std::vector<float> result, lse, scores, averages, scratch;
  std::vector<char> digests;
  std::vector<uint8_t> bytes, codes;
  std::vector<int32_t> ids;
  std::vector<PageRef> pages;
  std::vector<float*> page_averages;
  AttendJob job;  // makes the shape, with its prefetch order
  Segment segment{};

  explicit Bench(const hb_model& like) : model(like) {
    model.kv_heads = 1;
    row = model.head_dim * element_size(model.type);
    part = model.page_size * row;
    const int queries = std::max(kPromptQueries, model.group);
    fill(cache, kPages * 2 * part / element_size(model.type), 7);
    fill(q, (int64_t)queries * model.head_dim, 11);
    out.resize(q.size());
    result.resize((size_t)queries * model.head_dim);
    lse.assign(model.group, 3.f);
    scores.resize((size_t)model.group * kPages * model.page_size);
    averages.resize((size_t)kPages * model.page_size);
    job.configure(model, {cache.data(), kPages, 2 * part, 2 * part, part, row}, best_isa());
    for (int page = 0; page < kPages; page++) {
      ids.push_back(page);
      pages.push_back({cache.data() + page * 2 * part, model.page_size, 0});
      page_averages.push_back(&averages[(size_t)page * model.page_size]);
    }
    segment = {q.data(), row, 0, kPages, result.data(), lse.data()};
  }

  // Values in (-2, 2), the same at each start.
  void fill(std::vector<char>& to, int64_t n, uint32_t seed) {
    std::vector<float> values((size_t)n);
    for (float& value : values) {
      seed = seed * 1664525u + 1013904223u;
      value = (float)(int32_t)seed * (1.f / (1 << 30));
    }
    to.resize((size_t)n * element_size(model.type));
    base().convert(model.type, values.data(), to.data(), (int)n);
  }

  const Isa& base() const { return *kernels_of(model, best_isa()).base; }

  void make_digests() {
    digests.resize((size_t)(kPages * 2 * row));
    bytes.resize((size_t)kPages * byte_row());
    codes.resize((size_t)kPages * 4 * model.head_dim);
    for (int page = 0; page < kPages; page++) {
      for (int t = 0; t < model.page_size; t++)
        append_to_digest(model, digest_store(), page, t, pages[page].keys + t * row, 0);
      quantize_digest(model, digest_store(), byte_store(), base(), page);
      encode_page(model, code_store(), {cache.data(), kPages, 2 * part, 2 * part, part, row}, base(), page);
    }
  }
  int64_t byte_row() const { return (2 * (model.head_dim + 4) + 63) / 64 * 64; }
  hb_digests digest_store() { return {digests.data(), 2 * row, 2 * row, 0}; }
  hb_bytes byte_store() { return {bytes.data(), byte_row()}; }
  hb_digests code_store() { return {(char*)codes.data(), 4 * model.head_dim, 4 * model.head_dim, 1}; }

  PromptBlock prompt() {
    const int tokens = std::max(kPromptQueries / model.group, 1);
    const int64_t held = (int64_t)kPages * model.page_size, context = std::min<int64_t>(held, kPromptTokens);
    const int64_t group_row = model.group * row;
    return {model.type,
            model.head_dim,
            model.group,
            model.page_size,
            model.scale,
            (int)std::min<int64_t>(tokens, context),
            context - std::min<int64_t>(tokens, context),
            context,
            q.data(),
            group_row,
            row,
            out.data(),
            group_row,
            row,
            ids.data(),
            cache.data(),
            2 * part,
            part,
            nullptr,
            grown_lines(scratch, prompt_floats((int64_t)tokens * model.group, model.head_dim))};
  }

  // What a variant does; `kernels` holds it.
  std::function<void()> task(Operation operation, const Kernels& kernels) {
    if ((operation == DIGESTS || operation == BYTES || operation == CODES) && codes.empty()) make_digests();
    const auto page_of = [](int64_t column) { return column; };
    switch (operation) {
      case PROMPT: return [block = prompt(), kernels] { kernels.prompt(&block); };
      case PARTIAL: return [this, kernels] { kernels.attend(&job.shape(), &segment, 1, pages.data(), kPages); };
      case WEIGHTS:
        return
            [this, kernels] { kernels.weigh(&job.shape(), &segment, pages.data(), page_averages.data(), 0.5f, false); };
      case DIGESTS:
        return [this, kernels, page_of] {
          scorer.prepare(model, digest_store(), kernels, false, SOFTMAX, q.data(), row);
          scorer.score(page_of, 0, kPages, scores.data(), kPages);
        };
      case BYTES:
        return [this, kernels, page_of] {
          for (const Aggregate aggregate : {SUM, SOFTMAX}) {
            scorer.prepare_bytes(model, byte_store(), kernels, aggregate, q.data(), row);
            scorer.score(page_of, 0, kPages, scores.data(), kPages);
          }
        };
      case CODES:
        return [this, kernels, page_of] {
          code_scorer.prepare(model, code_store(), kernels, q.data(), row);
          code_scorer.prepare_codes(q.data(), row);
          code_scorer.estimate(page_of, -1, 0, kPages, scores.data(), kPages);
        };
      default:
        return [this, kernels] { kernels.softmax_add(scores.data(), (int)averages.size(), 0.1f, averages.data()); };
    }
  }
  Scorer scorer;
  CodeScorer code_scorer;
};

}  // namespace

std::vector<double> measure_variants(Operation operation, const hb_model& model, int rounds) {
  check_model(model);
  Bench bench(model);
  struct Contender {
    int variant, repeats;
    std::function<void()> task;
  };
  std::vector<Contender> contenders;
  std::vector<double> seconds(variant_count(operation), std::numeric_limits<double>::quiet_NaN());
  double best = std::numeric_limits<double>::infinity();
  const auto time = [&](Contender& contender) {
    const int64_t begin = nanoseconds();
    for (int i = 0; i < contender.repeats; i++) contender.task();
    const int64_t taken = nanoseconds() - begin;
    const double each = 1e-9 * (double)taken / contender.repeats;
    double& shortest = seconds[contender.variant];
    if (!(shortest < each)) shortest = each;
    best = std::min(best, shortest);
    return taken;
  };
  for (int i = 0; i < (int)seconds.size(); i++) {
    Kernels kernels = kernels_of(model, best_isa());
    if (!take_variant(operation, i, bench.job.shape(), kernels)) continue;
    contenders.push_back({i, 1, bench.task(operation, kernels)});
    contenders.back().task();  // brings code and data into the caches
    const int64_t taken = std::max<int64_t>(time(contenders.back()), 1);
    contenders.back().repeats = (int)std::max<int64_t>(kLongEnough / taken, 1);
  }
  for (int round = 0; round < rounds; round++)
    for (Contender& contender : contenders)
      if (round < kSureRounds || seconds[contender.variant] < 2 * best) time(contender);
  return seconds;
}

}  // namespace hb
