// A test of the native code alone, for sanitizers: every ISA against a plain double loop, the pool under 8 submitting
// threads with aborts and frees, decode layers and operations on several kinds of team. Exit status 0: all well.
//
//   driver [rounds]
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "api.h"
#include "code_levels.h"
#include "codes.h"
#include "dispatch.h"

namespace {

std::atomic<int> failures{0};

#define EXPECT(condition, ...)                            \
  do {                                                    \
    if (!(condition)) {                                   \
      failures++;                                         \
      std::fprintf(stderr, "FAILED %s: ", #condition);    \
      std::fprintf(stderr, __VA_ARGS__);                  \
      std::fprintf(stderr, "\n");                         \
    }                                                     \
  } while (0)

using Rng = std::mt19937;

float to_float(uint16_t bits) {
  const uint32_t u = (uint32_t)bits << 16;
  float x;
  std::memcpy(&x, &u, 4);
  return x;
}
uint16_t to_bf16(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  return (uint16_t)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
std::vector<uint16_t> random_bf16(size_t n, Rng& rng) {
  std::normal_distribution<float> normal;
  std::vector<uint16_t> v(n);
  for (uint16_t& x : v) x = to_bf16(normal(rng));
  return v;
}

// A cache [pages, kv_heads, 2, page_size, head_dim] and one job on it, bf16.
struct Job {
  hb_partial_args args{};
  std::vector<uint16_t> cache, q;
  std::vector<int64_t> ids, valid;
  std::vector<float> out, lse, expected_out, expected_lse;

  Job(Rng& rng, int dim, int group, int page_size, int kv_heads, int rows, int lists, int capacity) {
    const int pages = 24;
    cache = random_bf16((size_t)pages * kv_heads * 2 * page_size * dim, rng);
    q = random_bf16((size_t)rows * kv_heads * group * dim, rng);
    ids.resize((size_t)rows * lists * capacity);
    valid.resize(ids.size());
    for (int list = 0; list < rows * lists; list++) {
      const int length = (int)(rng() % (capacity + 1));
      for (int k = 0; k < capacity; k++) {
        ids[(size_t)list * capacity + k] = k < length ? (int)(rng() % pages) : -1;
        valid[(size_t)list * capacity + k] = k < length ? (k == length - 1 ? 1 + rng() % page_size : page_size) : 0;
      }
    }
    out.assign(q.size(), NAN);
    lse.assign((size_t)rows * kv_heads * group, NAN);
    args.model = {0, kv_heads, group, dim, page_size, 1.f / std::sqrt((float)dim)};
    const int64_t part = (int64_t)page_size * dim * 2;
    args.cache = {(char*)cache.data(), pages, kv_heads * 2 * part, 2 * part, part, dim * 2};
    args.q = (const char*)q.data();
    args.q_head_stride = dim * 2;
    args.q_row_stride = (int64_t)kv_heads * group * dim * 2;
    args.rows = rows;
    args.lists = lists;
    args.capacity = capacity;
    args.ids = ids.data();
    args.valid = valid.data();
    args.out = (char*)out.data();
    args.out_type = 2;
    args.out_head_stride = dim * 4;
    args.out_row_stride = (int64_t)kv_heads * group * dim * 4;
    args.lse = lse.data();
    reference();
  }

  void reference() {
    const hb_model& m = args.model;
    expected_out.assign(out.size(), 0);
    expected_lse.assign(lse.size(), -INFINITY);
    for (int r = 0; r < args.rows; r++)
      for (int head = 0; head < m.kv_heads * m.group; head++) {
        const int kv_head = head / m.group, list = r * args.lists + (args.lists > 1 ? kv_head : 0);
        const size_t item = (size_t)r * m.kv_heads * m.group + head;
        double sum = 0, maximum = -INFINITY;
        std::vector<double> acc(m.head_dim);
        for (int k = 0; k < args.capacity; k++)
          for (int t = 0; t < valid[(size_t)list * args.capacity + k]; t++) {
            const int64_t page = ids[(size_t)list * args.capacity + k];
            const uint16_t* key =
                cache.data() +
                (page * args.cache.page_stride + kv_head * args.cache.head_stride + t * args.cache.token_stride) / 2;
            const uint16_t* value = key + args.cache.value_offset / 2;
            double logit = 0;
            for (int d = 0; d < m.head_dim; d++) logit += (double)to_float(q[item * m.head_dim + d]) * to_float(key[d]);
            logit *= m.scale;
            const double top = std::max(maximum, logit), shrink = std::exp(maximum - top),
                         weight = std::exp(logit - top);
            sum = sum * shrink + weight;
            for (int d = 0; d < m.head_dim; d++) acc[d] = acc[d] * shrink + weight * to_float(value[d]);
            maximum = top;
          }
        if (sum == 0) continue;
        expected_lse[item] = (float)(maximum + std::log(sum));
        for (int d = 0; d < m.head_dim; d++) expected_out[item * m.head_dim + d] = (float)(acc[d] / sum);
      }
  }

  bool right() const {
    for (size_t i = 0; i < lse.size(); i++)
      if (!(lse[i] == expected_lse[i] || std::fabs(lse[i] - expected_lse[i]) < 1e-3)) return false;
    double error = 0, size = 1e-9;
    for (size_t i = 0; i < out.size(); i++) {
      if (std::isnan(out[i])) return false;
      error += (out[i] - expected_out[i]) * (out[i] - expected_out[i]);
      size += expected_out[i] * expected_out[i];
    }
    return std::sqrt(error / size) < 1e-2;
  }
};

int pick(Rng& rng, std::initializer_list<int> from) { return *(from.begin() + rng() % from.size()); }

Job random_job(Rng& rng) {
  const int kv_heads = pick(rng, {1, 2, 3});
  return Job(rng, pick(rng, {16, 64, 80, 96, 128, 256}), 1 + rng() % 16, pick(rng, {16, 32, 64, 128}), kv_heads,
             1 + rng() % 4, pick(rng, {1, kv_heads}), 1 + rng() % 20);
}

void test_kernels(int rounds) {
  Rng rng(1);
  for (int round = 0; round < rounds; round++) {
    Job job = random_job(rng);
    for (int isa = 0; isa < hb_isa_count(); isa++) {
      if (!hb_isa_runs(isa)) continue;
      std::fill(job.out.begin(), job.out.end(), NAN);
      EXPECT(hb_partial(&job.args, isa) == HB_OK, "%s", hb_last_error());
      EXPECT(job.right(), "%s dim %d group %d page %d", hb_isa_name(isa), job.args.model.head_dim, job.args.model.group,
             job.args.model.page_size);
    }
  }
}

// Every submitter owns its jobs; some are cancelled, some freed before they are done, some helped.
void test_pool(int rounds, int64_t spin) {
  hb_pool* pool = hb_pool_new(3, nullptr, hb_isa_best(), spin);
  std::vector<std::thread> submitters;
  for (int me = 0; me < 8; me++)
    submitters.emplace_back([=] {
      Rng rng(100 + me);
      std::vector<std::unique_ptr<Job>> jobs;
      for (int i = 0; i < 4; i++) jobs.push_back(std::make_unique<Job>(random_job(rng)));
      std::vector<int64_t> current{0, 1}, requests(8, 1), generations(8, 1);
      for (int round = 0; round < rounds; round++) {
        Job& job = *jobs[rng() % jobs.size()];
        std::fill(job.out.begin(), job.out.end(), NAN);
        job.args.request = requests.data();
        job.args.generation = generations.data();
        job.args.current = current.data();
        hb_ticket* ticket = hb_submit(pool, &job.args);
        EXPECT(ticket, "%s", hb_last_error());
        switch (rng() % 5) {
          case 0: hb_cancel(ticket); break;
          case 1:  // the owner frees the request while the job runs
            __atomic_store_n(&current[1], 2, __ATOMIC_RELAXED);
            EXPECT(hb_wait(ticket, 60, 0) == HB_OK, "stale job");
            __atomic_store_n(&current[1], 1, __ATOMIC_RELAXED);
            break;
          case 2:
            while (hb_wait(ticket, 0.0001, 0) == HB_TIMEOUT) {
            }
            break;
          default: EXPECT(hb_wait(ticket, 60, rng() % 2) == HB_OK, "%s", hb_last_error()); EXPECT(job.right(), "pool");
        }
        hb_ticket_free(ticket);
      }
    });
  for (std::thread& submitter : submitters) submitter.join();

  Rng rng(7);
  Job bad(rng, 64, 2, 32, 2, 2, 1, 4);
  bad.ids[0] = 1000;
  bad.valid[0] = 1;
  hb_ticket* ticket = hb_submit(pool, &bad.args);
  EXPECT(hb_wait(ticket, 60, 0) == HB_ERROR && std::strstr(hb_last_error(), "page id 1000"), "%s", hb_last_error());
  hb_ticket_free(ticket);
  hb_pool_free(pool);
}

// Like an OpenMP runtime's entry, with plain threads.
void fake_gomp_parallel(void (*body)(void*), void* data, unsigned threads, unsigned) {
  std::vector<std::thread> team;
  for (unsigned i = 1; i < threads; i++) team.emplace_back(body, data);
  body(data);
  for (std::thread& thread : team) thread.join();
}

// Several steps of a batch on one team; the outputs of all teams must agree.
std::vector<uint16_t> decode(int rounds, hb_pool* pool, void* gomp, int threads) {
  Rng rng(3);
  const int kv_heads = 3, group = 3, dim = 64, page_size = 32, rows = 4, columns = 300, pages = rows * columns;
  std::vector<uint16_t> cache = random_bf16((size_t)pages * kv_heads * 2 * page_size * dim, rng);
  std::vector<uint16_t> digests = random_bf16((size_t)pages * kv_heads * 2 * dim, rng);
  const hb_model model{0, kv_heads, group, dim, page_size, 0.125f, 0.5f};
  const int64_t part = page_size * dim * 2;
  const hb_cache layout{(char*)cache.data(), pages, kv_heads * 2 * part, 2 * part, part, dim * 2};
  const hb_digests store{(char*)digests.data(), kv_heads * 2 * dim * 2, 2 * dim * 2, 0};
  hb_decode* decoder = hb_decode_new(&model, 2, hb_isa_best());
  EXPECT(decoder, "%s", hb_last_error());
  std::vector<uint8_t> quantized((size_t)pages * (kv_heads * 2 * dim + kv_heads * 8));
  const hb_bytes bytes{quantized.data(), kv_heads * 2 * dim + kv_heads * 8};
  std::vector<int64_t> every(pages);
  for (int i = 0; i < pages; i++) every[i] = i;
  EXPECT(hb_quantize(&model, &store, &bytes, pages, pages, every.data()) == HB_OK, "%s", hb_last_error());
  hb_decode_set_layer(decoder, 0, &layout, &store, &bytes, nullptr);
  const std::vector<float> sinks(kv_heads * group, 3.f);
  hb_decode_set_layer(decoder, 1, &layout, nullptr, nullptr, sinks.data());
  std::vector<int32_t> table(pages);
  for (int i = 0; i < pages; i++) table[i] = i;
  std::shuffle(table.begin(), table.end(), rng);
  std::vector<int64_t> lens{9000, 1, 4000, 33}, budgets{40, 10, -1, 10}, sequences{7, 8, 9, 3};
  std::vector<uint16_t> all;
  for (int round = 0; round < rounds; round++) {
    hb_step step{};
    step.rows = rows;
    step.sinks = 1;
    step.recent = 2;
    step.per_head = round % 2;
    step.aggregate = round % 3;
    step.candidates = 2;
    step.interval = 1 + round % 4;
    step.sequences = sequences.data();
    step.seq_lens = lens.data();
    step.budgets = budgets.data();
    step.table = table.data();
    step.table_stride = columns;
    if (round == 3) hb_decode_forget(decoder, sequences[0]);
    EXPECT(hb_decode_begin(decoder, &step) == HB_OK, "%s", hb_last_error());
    const std::vector<uint16_t> q = random_bf16((size_t)rows * kv_heads * group * dim, rng);
    const std::vector<uint16_t> kv = random_bf16((size_t)rows * kv_heads * dim, rng);
    std::vector<uint16_t> out(q.size());
    hb_layer layer{(const char*)q.data(),      (const char*)kv.data(),
                   (const char*)kv.data(),     nullptr,
                   (char*)out.data(),          nullptr,
                   kv_heads * group * dim * 2, kv_heads * dim * 2,
                   kv_heads * dim * 2,         0,
                   kv_heads * group * dim * 2};
    for (int index = 0; index < 2; index++) {
      EXPECT(hb_decode_layer(decoder, index, &layer, pool, gomp, threads) == HB_OK, "%s", hb_last_error());
      all.insert(all.end(), out.begin(), out.end());
    }
    EXPECT(hb_decode_layer(decoder, 2, &layer, pool, gomp, threads) == HB_ERROR, "layer 2 does not exist");
    for (int64_t& length : lens) length++;
  }
  hb_decode_free(decoder);
  return all;
}

void test_decode(int rounds, int64_t spin) {
  const std::vector<uint16_t> alone = decode(rounds, nullptr, nullptr, 1);
  hb_pool* pool = hb_pool_new(2, nullptr, hb_isa_best(), spin);
  const std::vector<uint16_t> pooled = decode(rounds, pool, nullptr, 3);
  hb_pool_free(pool);
  const std::vector<uint16_t> team = decode(rounds, nullptr, (void*)fake_gomp_parallel, 4);
  double pool_error = 0, team_error = 0, size = 0;
  for (size_t i = 0; i < alone.size(); i++) {
    pool_error += std::pow(to_float(alone[i]) - to_float(pooled[i]), 2);
    team_error += std::pow(to_float(alone[i]) - to_float(team[i]), 2);
    size += std::pow(to_float(alone[i]), 2);
  }
  EXPECT(pool_error < 1e-4 * size && team_error < 1e-4 * size, "teams disagree: %g %g of %g", pool_error, team_error,
         size);
}

// Steps of a batch in operations, bf16: what a step computes and changes must not depend on the team.
struct Operations {
  static constexpr int kRows = 3, kHeads = 3, kGroup = 3, kDim = 64, kPage = 32, kColumns = 200, kFrames = 40;
  static constexpr int kLayers = 2, kBudget = 24, kPool = kRows * kColumns;

  Rng rng{5};
  hb_team team;
  int isa;
  std::vector<uint16_t> host = random_bf16((size_t)kPool * kHeads * 2 * kPage * kDim, rng);
  std::vector<uint16_t> frames = std::vector<uint16_t>((size_t)kRows * kFrames * kHeads * 2 * kPage * kDim);
  std::vector<uint16_t> digests = std::vector<uint16_t>((size_t)kPool * kHeads * 2 * kDim);
  std::vector<int32_t> frame_of = std::vector<int32_t>(kLayers * kRows * kColumns, -1);
  std::vector<int32_t> page_of = std::vector<int32_t>(kLayers * kRows * kFrames, -1);
  std::vector<float> importance = std::vector<float>(kLayers * kRows * kFrames, -INFINITY);
  std::vector<int32_t> to_frames = std::vector<int32_t>(kLayers * kRows * kBudget, -1), to_host = to_frames;
  std::vector<int32_t> to_pages = to_frames, to_requests = std::vector<int32_t>(kLayers * kRows);
  std::vector<float> to_importance = std::vector<float>(to_frames.size());
  std::vector<int64_t> started = std::vector<int64_t>(kLayers * kRows), generations = {1, 2, 3}, counters;
  std::vector<float> average = std::vector<float>((size_t)kRows * kFrames * kHeads * kPage);
  std::vector<uint16_t> labels = std::vector<uint16_t>((size_t)kRows * kHeads * kGroup * kDim);
  std::vector<float> label_weights = std::vector<float>(kHeads * kGroup, 0.5f), thresholds{-1, 0, -INFINITY};
  std::vector<int32_t> table, requests{2, 0, 1}, current{3, 1, 2}, ages{0, 3, 0};
  std::vector<int32_t> lens{kColumns * kPage - 40, 2000, 0};  // the last row is one of padding
  std::vector<float> numbers;                                 // what the steps compute

  Operations(hb_team team, int isa) : team(team), isa(isa), counters(10) {
    for (int i = 0; i < kPool; i++) table.push_back(i);
    std::shuffle(table.begin(), table.end(), rng);
    const std::vector<int32_t> tokens(kPool, kPage);
    const hb_build_digests_args build{paged(host), (char*)digests.data(), table.data(), tokens.data(), 0, kPool, team};
    EXPECT(hb_build_digests(&build) == HB_OK, "%s", hb_last_error());
    std::vector<uint16_t> extended(digests.size());  // by a prompt's chunk, which begins 5 tokens behind a page's start
    hb_extend_digests_args extend{(char*)host.data(),
                                  (char*)extended.data(),
                                  table.data(),
                                  0,
                                  kHeads,
                                  kDim,
                                  kPool,
                                  kPage,
                                  2 * kPage,
                                  5,
                                  3,
                                  kHeads * kDim,
                                  team};
    EXPECT(hb_extend_digests(&extend) == HB_OK, "%s", hb_last_error());
    extend.n = 2;
    EXPECT(hb_extend_digests(&extend) != HB_OK, "a chunk that its pages have no room for is refused");
  }

  hb_paged paged(std::vector<uint16_t>& x) const {
    return {(char*)x.data(), (int64_t)x.size() / (kHeads * 2 * kPage * kDim), 0, kHeads, kPage, kDim};
  }
  hb_maps maps(int layer, int layers = 1) {
    return {&frame_of[layer * kRows * kColumns],
            &page_of[layer * kRows * kFrames],
            &importance[layer * kRows * kFrames],
            layers,
            kRows,
            kColumns,
            kFrames};
  }
  hb_copies copies(int layer) {
    const int at = layer * kRows * kBudget;
    return {&to_frames[at],          &to_host[at], &to_pages[at], &to_importance[at], &to_requests[layer * kRows],
            &started[layer * kRows], kRows,        kBudget};
  }
  template <class Args>
  void call(int (*operation)(const Args*), const Args& args) {
    EXPECT(operation(&args) == HB_OK, "%s", hb_last_error());
  }
  void keep(const std::vector<float>& values) { numbers.insert(numbers.end(), values.begin(), values.end()); }

  void step(int number) {
    const int lists = number % 2 ? kHeads : 1, heads = kHeads * kGroup;
    std::vector<int32_t> pages(kRows), positions(kRows), num_pages(kRows), budgets(kRows, kBudget);
    for (int r = 0; r < kRows; r++) {
      if (lens[r]) lens[r]++;
      num_pages[r] = (lens[r] + kPage - 1) / kPage;
      positions[r] = lens[r] - 1;
      pages[r] = lens[r] ? table[r * kColumns + num_pages[r] - 1] : -1;
      ages[r]++;
    }
    call(hb_commit_pages, {maps(0, kLayers), copies(0), generations.data()});
    call(hb_open_pages, {maps(0, kLayers), requests.data(), pages.data(), positions.data(), kRows, kPage});
    // The first step finds no page that its predecessor opened.
    for (int layer = 0; layer < kLayers && number == 0; layer++)
      for (int r = 0; r < kRows - 1; r++) {
        const int frame = requests[r], page = num_pages[r] - 1;
        frame_of[(layer * kRows + requests[r]) * kColumns + page] = frame;
        page_of[layer * kRows * kFrames + frame] = page;
        importance[layer * kRows * kFrames + frame] = INFINITY;
      }
    for (int layer = 0; layer < kLayers; layer++) {
      const std::vector<uint16_t> q = random_bf16((size_t)kRows * heads * kDim, rng);
      const std::vector<uint16_t> kv = random_bf16((size_t)kRows * kHeads * kDim, rng);
      const hb_maps held = maps(layer);
      call(hb_append_tokens,
           {paged(host), (const char*)kv.data(), (const char*)kv.data(), pages.data(), positions.data(),
            (char*)frames.data(), requests.data(), held.frame_of, (char*)digests.data(), 0, kRows, 0, kRows * kFrames,
            kRows, kColumns, kHeads * kDim, kHeads * kDim});
      std::vector<float> scores((size_t)kRows * lists * kColumns), best((size_t)kRows * kColumns);
      call(hb_page_scores, {(const char*)q.data(),
                            (const char*)digests.data(),
                            table.data(),
                            num_pages.data(),
                            budgets.data(),
                            scores.data(),
                            kRows,
                            kColumns,
                            kColumns,
                            kPool,
                            0,
                            kHeads,
                            kGroup,
                            kDim,
                            kPage,
                            0,
                            number % 3,
                            lists > 1,
                            isa,
                            team,
                            0.5,
                            0.125});
      keep(scores);
      prompt(q, layer % 2 ? 20 : 0);
      std::vector<int32_t> missed(kRows * kHeads);
      call(hb_match_labels, {(const char*)q.data(), (char*)labels.data(), label_weights.data(), thresholds.data(),
                             requests.data(), num_pages.data(), budgets.data(), counters.data(), missed.data(), kRows,
                             kRows, 0, kHeads, kGroup, kDim, number % 2, isa, team});
      keep({missed.begin(), missed.end()});
      std::vector<int32_t> selected((size_t)4 * kRows * lists * kBudget), listed(4 * kRows * lists);
      call(hb_select_pages, {scores.data(),
                             num_pages.data(),
                             lens.data(),
                             budgets.data(),
                             requests.data(),
                             held.frame_of,
                             table.data(),
                             counters.data(),
                             selected.data(),
                             listed.data(),
                             kRows,
                             lists,
                             kColumns,
                             kColumns,
                             kRows,
                             kColumns,
                             kPage,
                             1,
                             2,
                             kBudget,
                             team});
      const int32_t *found = &selected[kRows * lists * kBudget], *missing = &selected[2 * kRows * lists * kBudget];
      const int32_t *absent = &selected[3 * kRows * lists * kBudget], *count = &listed[kRows * lists];
      const int32_t *tokens = &listed[2 * kRows * lists], *lacking = &listed[3 * kRows * lists];
      call(hb_note_scores,
           {held, scores.data(), num_pages.data(), budgets.data(), requests.data(), kRows, lists, kColumns, 1, 2});
      const int most = std::min(lists * kBudget, kColumns);
      std::vector<int32_t> united((size_t)kRows * most), how_many(kRows), scratch(kRows * kFrames);
      call(hb_union_pages, {absent, lacking, scores.data(), united.data(), how_many.data(), best.data(), kRows, lists,
                            kBudget, kColumns, most, team});
      attend(q, frames, found, tokens, lists, &average);
      std::vector<int32_t> whole(lacking, lacking + kRows * lists);
      for (int32_t& n : whole) n *= kPage;
      attend(q, host, missing, whole.data(), lists, nullptr);
      call(hb_plan_recall, {held,
                            copies(layer),
                            best.data(),
                            table.data(),
                            found,
                            count,
                            united.data(),
                            how_many.data(),
                            num_pages.data(),
                            requests.data(),
                            current.data(),
                            ages.data(),
                            scratch.data(),
                            counters.data(),
                            kRows,
                            kColumns,
                            kColumns,
                            lists,
                            kBudget,
                            most,
                            2,
                            layer});
      call(hb_copy_pages,
           {(const char*)host.data(), (char*)frames.data(), copies(layer).host_pages, copies(layer).frames,
            kRows * kBudget, kHeads * 2 * kPage * kDim * 2, kPool, kRows * kFrames, team});
    }
  }

  // The rows' queries as the newest tokens of the first row's sequence, which is as good as any other.
  void prompt(const std::vector<uint16_t>& q, int window) {
    std::vector<uint16_t> out(q.size());
    std::vector<float> sinks(kHeads * kGroup, 0.5f);
    call(hb_attend_prompt,
         {paged(host), (const char*)q.data(), table.data(), sinks.data(), (char*)out.data(), kRows, lens[0], kColumns,
          kGroup, window, kHeads * kGroup * kDim, kHeads * kGroup * kDim, isa, team, 0.125});
    for (const uint16_t x : out) {
      const uint32_t bits = (uint32_t)x << 16;
      float wide;
      std::memcpy(&wide, &bits, sizeof wide);
      numbers.push_back(wide);
    }
  }

  void attend(const std::vector<uint16_t>& q, std::vector<uint16_t>& kv, const int32_t* ids, const int32_t* tokens,
              int lists, std::vector<float>* average) {
    const size_t items = (size_t)kRows * kHeads * kGroup;
    std::vector<float> out(items * kDim, NAN), lse(items, NAN), merged(items * kDim, NAN), merged_lse(items, NAN);
    call(hb_paged_partial, {paged(kv), (const char*)q.data(), ids, tokens, out.data(), lse.data(), kRows, lists,
                            kBudget, lists * kBudget, kBudget, kGroup, isa, team, 0.125});
    call(hb_merge_partials, {out.data(), lse.data(), out.data(), lse.data(), nullptr, (char*)merged.data(),
                             merged_lse.data(), kRows, kHeads * kGroup, 1, kDim, 2, isa, team});
    for (size_t i = 0; i < items; i++)  // the same twice: twice the weight, the same mean
      EXPECT(lse[i] == merged_lse[i] || std::fabs(merged_lse[i] - lse[i] - std::log(2.f)) < 1e-5, "%g", lse[i]);
    keep(merged);
    if (average && lists == 1)
      call(hb_page_weights, {paged(kv), (const char*)q.data(), ids, ids, tokens, lse.data(), average->data(), kRows,
                             kBudget, kBudget, kBudget, kRows * kFrames, kGroup, 0, isa, team, 0.125, 1.0});
    if (!average || lists > 1) return;
    for (int r = 0; r < kRows; r++) {  // with alpha 1 the averages are this step's shares, which add up to 1
      float sum = 0;
      for (int t = 0; t < tokens[r]; t++)
        sum += (*average)[(size_t)ids[r * kBudget + t / kPage] * kHeads * kPage + t % kPage];
      EXPECT(tokens[r] ? std::fabs(sum - 1) < 1e-3 : sum == 0, "%d tokens weigh %g", tokens[r], sum);
    }
  }
};

void test_operations(int rounds) {
  const hb_team alone{nullptr, 1}, four{(void*)fake_gomp_parallel, 4};
  for (int isa = 0; isa < hb_isa_count(); isa++) {
    if (!hb_isa_runs(isa)) continue;
    Operations one(alone, isa), other(four, isa);
    for (int i = 0; i < rounds; i++) one.step(i), other.step(i);
    EXPECT(one.frame_of == other.frame_of && one.page_of == other.page_of && one.counters == other.counters &&
               one.frames == other.frames && one.host == other.host && one.digests == other.digests &&
               one.labels == other.labels,
           "teams disagree on %s", hb_isa_name(isa));
    EXPECT(one.counters[HB_RECALLED_PAGES] > 0, "nothing was recalled");
    EXPECT(one.counters[HB_HITS] > 0 && one.counters[HB_HITS] < one.counters[HB_LOOKUPS], "%lld of %lld",
           (long long)one.counters[HB_HITS], (long long)one.counters[HB_LOOKUPS]);
    double error = 0, size = 0;
    for (size_t i = 0; i < one.numbers.size(); i++) {
      if (std::isinf(one.numbers[i])) continue;
      error += std::pow(one.numbers[i] - other.numbers[i], 2);
      size += std::pow(one.numbers[i], 2);
    }
    EXPECT(error <= 1e-6 * size && one.numbers.size() == other.numbers.size(), "%g of %g", error, size);
  }
  Operations bad(four, hb_isa_best());
  std::fill(bad.table.begin(), bad.table.begin() + 100, 1 << 20);
  std::vector<float> scores((size_t)Operations::kRows * Operations::kColumns);
  const std::vector<int32_t> pages(Operations::kRows, Operations::kColumns), budgets(Operations::kRows, 2);
  const hb_page_scores_args args{(const char*)bad.host.data(),
                                 (const char*)bad.digests.data(),
                                 bad.table.data(),
                                 pages.data(),
                                 budgets.data(),
                                 scores.data(),
                                 Operations::kRows,
                                 Operations::kColumns,
                                 Operations::kColumns,
                                 Operations::kPool,
                                 0,
                                 Operations::kHeads,
                                 Operations::kGroup,
                                 Operations::kDim,
                                 Operations::kPage,
                                 0,
                                 0,
                                 0,
                                 hb_isa_best(),
                                 four,
                                 0.5,
                                 0.125};
  EXPECT(hb_page_scores(&args) == HB_ERROR && std::strstr(hb_last_error(), "page id 1048576"), "%s", hb_last_error());
}

// A device thread per box asks and waits; what it gets is what hb_partial computes, or the empty partial of a stale row.
void test_mailbox(int rounds, int64_t spin) {
  hb_pool* pool = hb_pool_new(2, nullptr, hb_isa_best(), spin);
  constexpr int kBoxes = 3, kRows = 4, kCapacity = 12;
  struct Device {
    std::unique_ptr<Job> job;
    std::vector<int32_t> ids, counts;
    std::vector<uint16_t> out;
    std::vector<float> lse;
    alignas(64) uint32_t asked = 0;
    alignas(64) uint32_t answered = 0;
    alignas(64) uint32_t failed[HB_MAIL_STEPS] = {};
  };
  Rng rng(11);
  std::vector<std::unique_ptr<Device>> devices;
  std::vector<int64_t> current(kRows, 0), requests(kRows), generations(kRows, 0);
  for (int r = 0; r < kRows; r++) requests[r] = r;
  std::vector<hb_mailbox> boxes;
  for (int b = 0; b < kBoxes; b++) {
    devices.push_back(std::make_unique<Device>());
    Device& device = *devices.back();
    device.job = std::make_unique<Job>(rng, 64, 3, 16, 2, kRows, 1, kCapacity);
    Job& job = *device.job;
    for (size_t i = 0; i < job.ids.size(); i++) job.valid[i] = job.ids[i] < 0 ? 0 : 16;
    job.reference();
    device.counts.assign(kRows, 0);
    for (size_t i = 0; i < job.ids.size(); i++) {
      device.ids.push_back((int32_t)job.ids[i]);
      device.counts[i / kCapacity] += job.ids[i] >= 0;
    }
    device.out.assign(job.out.size(), to_bf16(NAN));
    device.lse.assign(job.lse.size(), NAN);
    boxes.push_back({job.args.cache, kRows, 1, kCapacity, job.args.q, device.ids.data(), device.counts.data(),
                     requests.data(), generations.data(), current.data(), (char*)device.out.data(), device.lse.data(),
                     &device.asked, &device.answered, device.failed});
  }
  hb_mail* mail = hb_mail_new(pool, &devices[0]->job->args.model, boxes.data(), kBoxes, -1);
  EXPECT(mail, "%s", hb_last_error());
  std::vector<std::thread> threads;
  for (int b = 0; b < kBoxes; b++)
    threads.emplace_back([&, b] {
      Device& device = *devices[b];
      Job& job = *device.job;
      for (int round = 1; round <= 20 * rounds; round++) {
        if (b == 0 && round % 7 == 0)
          __atomic_fetch_add(&current[3], 1, __ATOMIC_RELAXED);  // row 3 is gone from now on
        const bool is_bad = b == 1 && round % 50 == 0;
        if (is_bad) device.counts[0] = kCapacity + 1;
        __atomic_store_n(&device.asked, (uint32_t)round, __ATOMIC_RELEASE);
        while (__atomic_load_n(&device.answered, __ATOMIC_ACQUIRE) != (uint32_t)round) std::this_thread::yield();
        if (is_bad) {
          EXPECT(device.failed[round % HB_MAIL_STEPS] == (uint32_t)round &&
                     std::strstr(hb_mail_error(mail, b), "room for"),
                 "%s", hb_mail_error(mail, b));
          device.counts[0] = 0;
          for (int k = 0; k < kCapacity; k++) device.counts[0] += job.ids[k] >= 0;
          continue;
        }
        const size_t row = job.lse.size() / kRows, kept = job.lse.size() - row;  // of the rows before the last one
        for (size_t i = 0; i < kept; i++)
          EXPECT(device.lse[i] == job.expected_lse[i] || std::fabs(device.lse[i] - job.expected_lse[i]) < 1e-3,
                 "box %d", b);
        for (size_t i = 0; i < kept * 64; i++)
          EXPECT(device.lse[i / 64] == -INFINITY || std::fabs(to_float(device.out[i]) - job.expected_out[i]) < 0.03,
                 "box %d", b);
      }
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT(hb_mail_served(mail) == (int64_t)kBoxes * 20 * rounds, "%lld", (long long)hb_mail_served(mail));
  hb_mail_free(mail);
  hb_pool_free(pool);
}

// A device thread per request asks about one layer after the other, in an order of its own; what it gets is what hb_partial
// computes of that layer and row. A layer that is not there fails that question and no other.
void test_questions(int rounds, int64_t spin) {
  hb_pool* pool = hb_pool_new(2, nullptr, hb_isa_best(), spin);
  constexpr int kLayers = 3, kRequests = 4, kCapacity = 12;
  constexpr size_t kHeads = 6, kDim = 64;
  struct Device {
    std::vector<uint16_t> q = std::vector<uint16_t>(kHeads * kDim);
    std::vector<int32_t> ids = std::vector<int32_t>(kCapacity);
    std::vector<uint16_t> out = std::vector<uint16_t>(kHeads * kDim, to_bf16(NAN));
    std::vector<float> lse = std::vector<float>(kHeads, NAN);
    int32_t count = 0, layer = 0;
    alignas(64) uint32_t asked = 0;
    alignas(64) uint32_t answered = 0;
    alignas(64) uint32_t failed[HB_MAIL_STEPS] = {};
  };
  Rng rng(12);
  std::vector<std::unique_ptr<Job>> layers;
  std::vector<hb_cache> caches;
  for (int l = 0; l < kLayers; l++) {
    layers.push_back(std::make_unique<Job>(rng, (int)kDim, 3, 16, 2, kRequests, 1, kCapacity));
    Job& job = *layers.back();
    for (size_t i = 0; i < job.ids.size(); i++) job.valid[i] = job.ids[i] < 0 ? 0 : 16;
    job.reference();
    caches.push_back(job.args.cache);
  }
  std::vector<Device> devices(kRequests);
  std::vector<hb_mailbox> boxes;
  for (Device& device : devices)
    boxes.push_back({{},
                     1,
                     1,
                     kCapacity,
                     (char*)device.q.data(),
                     device.ids.data(),
                     &device.count,
                     nullptr,
                     nullptr,
                     nullptr,
                     (char*)device.out.data(),
                     device.lse.data(),
                     &device.asked,
                     &device.answered,
                     device.failed,
                     &device.layer,
                     caches.data(),
                     kLayers});
  hb_mail* mail = hb_mail_new(pool, &layers[0]->args.model, boxes.data(), kRequests, -1);
  EXPECT(mail, "%s", hb_last_error());
  std::vector<std::thread> threads;
  for (int r = 0; r < kRequests; r++)
    threads.emplace_back([&, r] {
      Device& device = devices[r];
      Rng order(r);
      for (int round = 1; round <= 20 * rounds; round++) {
        const int layer = (int)(order() % kLayers);
        const Job& job = *layers[layer];
        std::copy_n(job.q.data() + r * device.q.size(), device.q.size(), device.q.data());
        device.count = 0;
        for (int k = 0; k < kCapacity; k++) {
          device.ids[k] = (int32_t)job.ids[r * kCapacity + k];
          device.count += device.ids[k] >= 0;
        }
        const bool is_bad = r == 1 && round % 50 == 0;
        device.layer = is_bad ? kLayers : layer;
        __atomic_store_n(&device.asked, (uint32_t)round, __ATOMIC_RELEASE);
        while (__atomic_load_n(&device.answered, __ATOMIC_ACQUIRE) != (uint32_t)round) std::this_thread::yield();
        EXPECT((device.failed[round % HB_MAIL_STEPS] == (uint32_t)round) == is_bad, "request %d", r);
        if (is_bad) EXPECT(std::strstr(hb_mail_error(mail, r), "layer id 3"), "%s", hb_mail_error(mail, r));
        for (size_t i = 0; i < kHeads; i++) {
          const float expected = is_bad ? -INFINITY : job.expected_lse[r * kHeads + i];
          EXPECT(device.lse[i] == expected || std::fabs(device.lse[i] - expected) < 1e-3, "request %d", r);
          for (size_t d = i * kDim; d < (i + 1) * kDim; d++)
            EXPECT(std::fabs(to_float(device.out[d]) - (is_bad ? 0 : job.expected_out[r * kHeads * kDim + d])) < 0.03,
                   "%g", to_float(device.out[d]));
        }
      }
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT(hb_mail_served(mail) == (int64_t)kRequests * 20 * rounds, "%lld", (long long)hb_mail_served(mail));
  hb_mail_free(mail);
  hb_pool_free(pool);
}

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
    for (int g = 0; g < group; g++) {
      uint8_t* own = &tables[g * stride];
      factor[g] = kernels.tables(&x[g * dim], layout.fine, layout.coded, own, &offset[g]);
      const double said = factor[g] * kernels.steps(own, token(1, 3), layout.planes) + offset[g];
      EXPECT(std::fabs(said - sum(g, 1, 3)) < 0.25 * std::sqrt((float)dim), "%s, head_dim %d, page size %d: %g, not %g",
             name, dim, layout.page_size, said, sum(g, 1, 3));
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

// By every kernel that this CPU runs, not only the best one.
void test_codes() {
  Rng rng(5);
  for (const int dim : {16, 48, 64, 80, 96, 128, 256})
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

// Every variant is timed where it runs, and the chosen kernels follow the order that is set.
void test_variants() {
  Rng rng(13);
  struct {
    int dim, group, page_size;
  } const shapes[] = {{64, 1, 32}, {128, 4, 16}, {256, 8, 128}, {80, 3, 16}, {16, 16, 16}};
  for (const auto& shape : shapes)
    for (int type = 0; type < 3; type++)
      for (int operation = 0; operation < hb_operation_count(); operation++) {
        const hb_model model{type, 1, shape.group, shape.dim, shape.page_size, 0.1f, 1.f};
        const int count = hb_variant_count(operation);
        std::vector<double> seconds(count);
        EXPECT(hb_measure_variants(operation, &model, 1, seconds.data()) == HB_OK, "%s", hb_last_error());
        std::vector<int> order(count);
        for (int i = 0; i < count; i++) {
          EXPECT(std::isnan(seconds[i]) != (bool)hb_variant_runs(operation, i, &model), "%s %s, %g s",
                 hb_operation_name(operation), hb_variant_name(operation, i), seconds[i]);
          order[i] = count - 1 - i;
        }
        EXPECT(hb_set_variant_order(operation, &model, order.data()) == HB_OK, "%s", hb_last_error());
      }
  Job job(rng, 64, 1, 32, 2, 2, 1, 4), expected = job;
  job.args.out = (char*)job.out.data(), job.args.lse = job.lse.data();
  expected.args.out = (char*)expected.out.data(), expected.args.lse = expected.lse.data();
  const int slowest = hb_isa_count() - 1;  // the last variant of the default order, which is first now
  EXPECT(hb_partial(&job.args, HB_CHOSEN) == HB_OK && hb_partial(&expected.args, slowest) == HB_OK, "%s",
         hb_last_error());
  EXPECT(job.right() && job.out == expected.out, "the order that was set is not followed");
  const int wrong[] = {99};
  const hb_model model{0, 1, 1, 64, 32, 0.1f, 1.f};
  EXPECT(hb_set_variant_order(0, &model, wrong) == HB_ERROR, "no such variant");
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 40;
  test_kernels(rounds);
  for (const int64_t spin : {INT64_C(0), INT64_C(1'000'000)}) {  // nanoseconds
    test_pool(rounds, spin);
    test_decode(rounds, spin);
    test_mailbox(rounds, spin);
    test_questions(rounds, spin);
  }
  test_operations(std::min(rounds, 12));
  test_codes();
  test_variants();
  std::printf("%s, %d failures\n", hb_isa_name(hb_isa_best()), failures.load());
  return failures ? 1 : 0;
}
