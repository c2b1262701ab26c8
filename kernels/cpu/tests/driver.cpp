// A test of the native code alone, for sanitizers: every ISA against a plain double loop, the pool under 8 submitting
// threads with aborts and frees, decode layers on several kinds of team. Exit status 0: all well.
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
            const uint16_t* key = cache.data() + (page * args.cache.page_stride + kv_head * args.cache.head_stride +
                                                  t * args.cache.token_stride) / 2;
            const uint16_t* value = key + args.cache.value_offset / 2;
            double logit = 0;
            for (int d = 0; d < m.head_dim; d++)
              logit += (double)to_float(q[item * m.head_dim + d]) * to_float(key[d]);
            logit *= m.scale;
            const double top = std::max(maximum, logit), shrink = std::exp(maximum - top), weight = std::exp(logit - top);
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
      EXPECT(job.right(), "%s dim %d group %d page %d", hb_isa_name(isa), job.args.model.head_dim,
             job.args.model.group, job.args.model.page_size);
    }
  }
}

// Every submitter owns its jobs; some are cancelled, some freed before they are done, some helped.
void test_pool(int rounds) {
  hb_pool* pool = hb_pool_new(3, nullptr, hb_isa_best());
  std::vector<std::thread> submitters;
  for (int me = 0; me < 8; me++)
    submitters.emplace_back([=] {
      Rng rng(100 + me);
      std::vector<std::unique_ptr<Job>> jobs;
      for (int i = 0; i < 4; i++) jobs.push_back(std::make_unique<Job>(random_job(rng)));
      std::vector<int64_t> current{0, 1}, regions(8, 1), generations(8, 1);
      for (int round = 0; round < rounds; round++) {
        Job& job = *jobs[rng() % jobs.size()];
        std::fill(job.out.begin(), job.out.end(), NAN);
        job.args.region = regions.data();
        job.args.generation = generations.data();
        job.args.current = current.data();
        hb_ticket* ticket = hb_submit(pool, &job.args);
        EXPECT(ticket, "%s", hb_last_error());
        switch (rng() % 5) {
          case 0:
            hb_cancel(ticket);
            break;
          case 1:  // the owner frees the region while the job runs
            __atomic_store_n(&current[1], 2, __ATOMIC_RELAXED);
            EXPECT(hb_wait(ticket, 60, 0) == HB_OK, "stale job");
            __atomic_store_n(&current[1], 1, __ATOMIC_RELAXED);
            break;
          case 2:
            while (hb_wait(ticket, 0.0001, 0) == HB_TIMEOUT) {
            }
            break;
          default:
            EXPECT(hb_wait(ticket, 60, rng() % 2) == HB_OK, "%s", hb_last_error());
            EXPECT(job.right(), "pool");
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
  const hb_digests store{(char*)digests.data(), kv_heads * 2 * dim * 2, 2 * dim * 2};
  hb_decode* decoder = hb_decode_new(&model, 2, hb_isa_best());
  EXPECT(decoder, "%s", hb_last_error());
  std::vector<uint8_t> quantized((size_t)pages * (kv_heads * 2 * dim + kv_heads * 8));
  const hb_bytes bytes{quantized.data(), kv_heads * 2 * dim + kv_heads * 8};
  std::vector<int64_t> every(pages);
  for (int i = 0; i < pages; i++) every[i] = i;
  EXPECT(hb_quantize(&model, &store, &bytes, pages, pages, every.data()) == HB_OK, "%s", hb_last_error());
  hb_decode_set_layer(decoder, 0, &layout, &store, &bytes);
  hb_decode_set_layer(decoder, 1, &layout, nullptr, nullptr);
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
    hb_layer layer{(const char*)q.data(), (const char*)kv.data(), (const char*)kv.data(), nullptr, (char*)out.data(),
                   nullptr, kv_heads * group * dim * 2, kv_heads * dim * 2, kv_heads * dim * 2, 0,
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

void test_decode(int rounds) {
  const std::vector<uint16_t> alone = decode(rounds, nullptr, nullptr, 1);
  hb_pool* pool = hb_pool_new(2, nullptr, hb_isa_best());
  const std::vector<uint16_t> pooled = decode(rounds, pool, nullptr, 3);
  hb_pool_free(pool);
  const std::vector<uint16_t> team = decode(rounds, nullptr, (void*)fake_gomp_parallel, 4);
  double pool_error = 0, team_error = 0, size = 0;
  for (size_t i = 0; i < alone.size(); i++) {
    pool_error += std::pow(to_float(alone[i]) - to_float(pooled[i]), 2);
    team_error += std::pow(to_float(alone[i]) - to_float(team[i]), 2);
    size += std::pow(to_float(alone[i]), 2);
  }
  EXPECT(pool_error < 1e-4 * size && team_error < 1e-4 * size, "teams disagree: %g %g of %g", pool_error, team_error, size);
}

// A device thread per box asks and waits; what it gets is what hb_partial computes, or the empty partial of a stale row.
void test_mailbox(int rounds) {
  hb_pool* pool = hb_pool_new(2, nullptr, hb_isa_best());
  constexpr int kBoxes = 3, kRows = 4, kCapacity = 12;
  struct Device {
    std::unique_ptr<Job> job;
    std::vector<int32_t> ids, counts;
    std::vector<float> out, lse;
    alignas(64) uint32_t asked = 0;
    alignas(64) uint32_t answered = 0;
    alignas(64) uint32_t failed = 0;
  };
  Rng rng(11);
  std::vector<std::unique_ptr<Device>> devices;
  std::vector<int64_t> current(kRows, 0), regions(kRows), generations(kRows, 0);
  for (int r = 0; r < kRows; r++) regions[r] = r;
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
    device.out.assign(job.out.size(), NAN);
    device.lse.assign(job.lse.size(), NAN);
    boxes.push_back({job.args.cache, kRows, 1, kCapacity, job.args.q, device.ids.data(), device.counts.data(),
                     regions.data(), generations.data(), current.data(), device.out.data(), device.lse.data(),
                     &device.asked, &device.answered, &device.failed});
  }
  hb_mail* mail = hb_mail_new(pool, &devices[0]->job->args.model, boxes.data(), kBoxes, -1);
  EXPECT(mail, "%s", hb_last_error());
  std::vector<std::thread> threads;
  for (int b = 0; b < kBoxes; b++)
    threads.emplace_back([&, b] {
      Device& device = *devices[b];
      Job& job = *device.job;
      for (int round = 1; round <= 20 * rounds; round++) {
        if (b == 0 && round % 7 == 0) __atomic_fetch_add(&current[3], 1, __ATOMIC_RELAXED);  // row 3 is gone from now on
        const bool is_bad = b == 1 && round % 50 == 0;
        if (is_bad) device.counts[0] = kCapacity + 1;
        __atomic_store_n(&device.asked, (uint32_t)round, __ATOMIC_RELEASE);
        while (__atomic_load_n(&device.answered, __ATOMIC_ACQUIRE) != (uint32_t)round) std::this_thread::yield();
        if (is_bad) {
          EXPECT(device.failed == (uint32_t)round && std::strstr(hb_mail_error(mail), "room for"), "%s", hb_mail_error(mail));
          device.counts[0] = 0;
          for (int k = 0; k < kCapacity; k++) device.counts[0] += job.ids[k] >= 0;
          continue;
        }
        const size_t row = job.lse.size() / kRows, kept = job.lse.size() - row;  // of the rows before the last one
        for (size_t i = 0; i < kept; i++)
          EXPECT(device.lse[i] == job.expected_lse[i] || std::fabs(device.lse[i] - job.expected_lse[i]) < 1e-3, "box %d", b);
      }
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT(hb_mail_served(mail) == (int64_t)kBoxes * 20 * rounds, "%lld", (long long)hb_mail_served(mail));
  hb_mail_free(mail);
  hb_pool_free(pool);
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 40;
  test_kernels(rounds);
  test_pool(rounds);
  test_decode(rounds);
  test_mailbox(rounds);
  std::printf("%s, %d failures\n", hb_isa_name(hb_isa_best()), failures.load());
  return failures ? 1 : 0;
}
