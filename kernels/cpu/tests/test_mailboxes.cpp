// Mailboxes: jobs that threads in place of a device ask for, by layer and by request.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "api.h"
#include "check.h"
#include "job.h"

// A device thread per box asks and waits; what it gets is what hb_partial computes, or the empty partial of a stale row.
void test_mailbox(int rounds, int64_t spin) {
  hb_pool* pool = hb_pool_new(2, nullptr, HB_CHOSEN, spin);
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
  hb_pool* pool = hb_pool_new(2, nullptr, HB_CHOSEN, spin);
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
