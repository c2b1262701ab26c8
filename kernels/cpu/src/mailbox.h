// Jobs that the device raises by itself: it writes queries and page lists into pinned memory, then a number; a thread here
// sees the number, computes together with the pool, writes the partials and the same number back. Nobody makes a system
// call or takes a lock on the way.
#pragma once
#include <atomic>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "attend_job.h"
#include "pool.h"

namespace hb {

class MailServer {
 public:
  // Throws for a shape that no kernel has.
  MailServer(Pool& pool, const hb_model& model, const hb_mailbox* boxes, int count, int cpu);
  ~MailServer();

  int64_t served() const { return served_.load(std::memory_order_relaxed); }
  std::string error(int box);  // why its last failed job failed

 private:
  struct Round : Task {
    AttendJob job;
    void work(int lane) override { job.run(lane); }
  };

  void loop(int cpu);
  void serve(size_t box, uint32_t number);
  void compute(const hb_mailbox& box);

  Pool& pool_;
  const hb_model model_;
  const std::vector<hb_mailbox> boxes_;
  std::vector<uint32_t> answered_;
  Round round_;
  std::atomic<int64_t> served_{0};
  std::atomic<bool> stop_{false};
  std::mutex error_mutex_;
  std::vector<std::string> errors_;  // by box
  std::thread thread_;
};

}  // namespace hb
