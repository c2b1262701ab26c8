// Judging in the background of a pool that also computes partials: results against a plain double loop, jobs that are
// given up, and partials that go first.
#include <algorithm>
#include <cmath>
#include <memory>
#include <thread>
#include <vector>

#include "api.h"
#include "check.h"
#include "job.h"

namespace {

constexpr int kDim = 32, kGroup = 3, kHeads = 2, kPage = 16;

// A prompt of two layers. Tokens whose weight is close to the threshold may be judged either way.
struct Prompt {
  hb_judge_args args{};
  std::vector<uint16_t> q, cache, store[2];
  std::vector<hb_judge_layer> layers;
  std::vector<int32_t> pages, counts;
  std::vector<uint8_t> kept;
  std::vector<float> recent;
  std::vector<double> expected;  // [heads, tokens]

  Prompt(Rng& rng, int tokens, int queries, int first, int older) {
    const int count = (tokens + kPage - 1) / kPage;
    const int64_t part = kPage * kDim * 2;
    cache = random_bf16((size_t)count * kHeads * 2 * kPage * kDim, rng);
    q = random_bf16((size_t)queries * kHeads * kGroup * kDim, rng);
    for (int p = 0; p < count; p++) pages.push_back(count - 1 - p);
    for (auto& each : store) {
      each.assign(cache.size(), 0);
      layers.push_back({(const char*)q.data(), queries, (const char*)cache.data(), (char*)each.data()});
    }
    kept.assign(2 * kHeads * (older - first) + 1, 2);
    recent.assign(2 * kHeads * (tokens - older) + 1, NAN);
    counts.assign(2 * kHeads, -1);
    args.model = {0, kHeads, kGroup, kDim, kPage, 0.3f, 1.f};
    args.cache = {nullptr, count, kHeads * 2 * part, 2 * part, part, kDim * 2};
    args.layers = layers.data();
    args.layer_count = 2;
    args.pages = pages.data();
    args.tokens = tokens;
    args.first = first;
    args.older = older;
    args.threshold = 1.f / (float)std::max(older - first, 1);
    args.keep_mask = kept.data();
    args.recent = recent.data();
    args.counts = counts.data();
    weigh(queries);
  }

  const uint16_t* key(const uint16_t* base, int64_t page, int head, int offset) const {
    return base + (((size_t)page * kHeads + head) * 2 * kPage + offset) * kDim;
  }

  void weigh(int queries) {
    const int tokens = (int)args.tokens;
    expected.assign((size_t)kHeads * tokens, 0);
    std::vector<double> logits(tokens), mean(tokens);
    for (int head = 0; head < kHeads * kGroup; head++) {
      std::fill(mean.begin(), mean.end(), 0);
      for (int i = 0; i < queries; i++) {
        const int seen = tokens - queries + i + 1;
        for (int t = 0; t < seen; t++) {
          const uint16_t* k = key(cache.data(), pages[t / kPage], head / kGroup, t % kPage);
          logits[t] = 0;
          for (int d = 0; d < kDim; d++)
            logits[t] += (double)to_float(q[((size_t)i * kHeads * kGroup + head) * kDim + d]) * to_float(k[d]);
        }
        const int64_t edges[] = {args.first, args.older, args.tokens};
        for (int span = 0; span < 2; span++) {
          double sum = 0;
          const int64_t end = std::min<int64_t>(edges[span + 1], seen);
          for (int64_t t = edges[span]; t < end; t++) sum += std::exp(0.3 * logits[t]);
          for (int64_t t = edges[span]; t < end; t++) mean[t] += std::exp(0.3 * logits[t]) / sum / queries;
        }
      }
      for (int t = 0; t < tokens; t++) {
        double& largest = expected[(size_t)(head / kGroup) * tokens + t];
        largest = std::max(largest, mean[t]);
      }
    }
  }

  bool right() const {
    const int64_t judged = args.older - args.first, later = args.tokens - args.older;
    for (int item = 0; item < 2 * kHeads; item++) {
      const int head = item % kHeads;
      const double* weights = &expected[(size_t)head * args.tokens];
      int count = 0;
      for (int64_t t = args.first; t < args.older; t++) {
        const bool is_kept = kept[item * judged + t - args.first];
        if (is_kept != (weights[t] > args.threshold) && std::fabs(weights[t] / args.threshold - 1) > 1e-4) return false;
        if (!is_kept) continue;
        const uint16_t* from = key(cache.data(), pages[t / kPage], head, (int)(t % kPage));
        const uint16_t* to = key(store[item / kHeads].data(), count / kPage, head, count % kPage);
        for (const int value : {0, kPage * kDim})
          if (!std::equal(from + value, from + value + kDim, to + value)) return false;
        count++;
      }
      if (count != counts[item]) return false;
      for (int64_t t = 0; t < later; t++)
        if (!(std::fabs(recent[item * later + t] - weights[args.older + t]) < 1e-5)) return false;
    }
    return true;
  }
};

}  // namespace

void test_judging(int rounds, int64_t spin) {
  hb_pool* pool = hb_pool_new(3, nullptr, HB_CHOSEN, spin);
  std::vector<std::thread> submitters;
  for (int me = 0; me < 3; me++)
    submitters.emplace_back([=] {
      Rng rng(300 + me);
      std::vector<std::unique_ptr<Job>> jobs;
      for (int i = 0; i < 3; i++) jobs.push_back(std::make_unique<Job>(random_job(rng)));
      for (int round = 0; round < rounds; round++) {
        const int tokens = 40 + (int)(rng() % 900), older = (int)(rng() % (tokens / kPage)) * kPage;
        Prompt prompt(rng, tokens, 1 + (int)(rng() % 40), std::min(older, (int)(rng() % 2) * kPage), older);
        if (rng() % 4 == 0) prompt.layers[1].queries = 0;
        hb_judging* judging = hb_judge(pool, &prompt.args);
        EXPECT(judging, "%s", hb_last_error());
        int partials = 0;
        const bool gives_up = rng() % 3 == 0;
        while (!gives_up || partials < (int)(rng() % 5)) {
          const int state = hb_judging_state(judging);
          EXPECT(state != HB_ERROR, "%s", hb_last_error());
          if (state != HB_TIMEOUT) break;
          Job& job = *jobs[rng() % jobs.size()];
          hb_ticket* ticket = hb_submit(pool, &job.args);
          EXPECT(hb_wait(ticket, 60, 0) == HB_OK && job.right(), "a partial beside a judging: %s", hb_last_error());
          hb_ticket_free(ticket);
          partials++;
        }
        if (!gives_up && prompt.layers[1].queries) {
          EXPECT(prompt.right(), "judging of %d tokens", tokens);
          EXPECT(hb_judging_steps(judging) > 0 && hb_judging_seconds(judging) > 0, "a job that took no time");
        }
        hb_judging_free(judging);
      }
    });
  for (std::thread& submitter : submitters) submitter.join();

  Rng rng(5);
  Prompt bad(rng, 100, 4, 16, 48);
  bad.pages[2] = 77;
  EXPECT(!hb_judge(pool, &bad.args) && std::strstr(hb_last_error(), "page id 77"), "%s", hb_last_error());
  Prompt endless(rng, 900, 30, 0, 800);
  hb_pool_pause(pool, 1);
  hb_judging* judging = hb_judge(pool, &endless.args);
  EXPECT(hb_judging_state(judging) == HB_TIMEOUT, "a pool that pauses");
  hb_judging_free(judging);
  hb_pool_free(pool);
}
