// Partial attention on every instruction set, in pools, and by every variant.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "api.h"
#include "check.h"
#include "job.h"

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

// Pages in 8 bits, whose numbers bf16 holds as well, so that the job's expected result is theirs.
struct BytePages {
  std::vector<char> memory;

  BytePages(Job& job, Rng& rng) {
    hb_model& m = job.args.model;
    const int64_t part = (int64_t)m.page_size * m.head_dim, head = 2 * part + 4 * m.page_size;
    const int64_t heads = job.args.cache.pages * m.kv_heads;
    memory.resize(heads * head);
    for (int64_t i = 0; i < heads; i++)
      for (int64_t row = 0; row < 2 * m.page_size; row++) {
        const int exponent = 5 + (int)(rng() % 3);
        const uint16_t scale = (uint16_t)((15 - exponent) << 10);  // 2^-exponent in fp16
        std::memcpy(&memory[i * head + 2 * part + 2 * row], &scale, sizeof scale);
        for (int64_t d = row * m.head_dim; d < (row + 1) * m.head_dim; d++) {
          const int number = (int)(rng() % 255) - 127;
          memory[i * head + d] = (char)number;
          const float value = std::ldexp((float)number, -exponent);
          uint32_t bits;
          std::memcpy(&bits, &value, sizeof bits);
          job.cache[i * 2 * part + d] = (uint16_t)(bits >> 16);
        }
      }
    job.reference();
    m.kv_encoding = HB_KV_INT8;
    job.args.cache = {memory.data(), job.args.cache.pages, m.kv_heads * head, head, part, m.head_dim};
  }
};

void test_byte_pages(int rounds) {
  Rng rng(5);
  for (int round = 0; round < rounds; round++) {
    Job job = random_job(rng);
    const BytePages pages(job, rng);
    for (int isa = 0; isa < hb_isa_count(); isa++) {
      if (!hb_isa_runs(isa)) continue;
      std::fill(job.out.begin(), job.out.end(), NAN);
      EXPECT(hb_partial(&job.args, isa) == HB_OK, "%s", hb_last_error());
      EXPECT(job.right(), "8 bits by %s: dim %d group %d page %d", hb_isa_name(isa), job.args.model.head_dim,
             job.args.model.group, job.args.model.page_size);
    }
  }
}

// Every submitter owns its jobs; some are cancelled, some freed before they are done, some helped.
void test_pool(int rounds, int64_t spin) {
  hb_pool* pool = hb_pool_new(3, nullptr, HB_CHOSEN, spin);
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

// Every variant is timed where it runs, and the chosen kernels follow the order that is set.
void test_variants() {
  Rng rng(13);
  struct {
    int dim, group, page_size;
  } const shapes[] = {{64, 1, 32}, {128, 4, 16}, {256, 8, 128}, {512, 8, 16}, {80, 3, 16}, {16, 16, 16}};
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
