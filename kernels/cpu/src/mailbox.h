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
  bool any_asks() const;
  void serve(size_t box, uint32_t number);
  void compute(const hb_mailbox& box);
  void find_rows(const hb_mailbox& box);
  void write_empty(const hb_mailbox& box, int64_t row) const;

  Pool& pool_;
  const hb_model model_;
  const std::vector<hb_mailbox> boxes_;
  std::vector<uint32_t> answered_;
  Round round_;
  // Of the question that is being computed: rows that attend something, and of each of them the request, its generation,
  // and how many tokens (a box without ids) or pages each list has.
  std::vector<int64_t> rows_, requests_, generations_, counts_;
  std::atomic<int64_t> served_{0};
  std::atomic<bool> stop_{false};
  std::mutex error_mutex_;
  std::vector<std::string> errors_;  // by box
  std::thread thread_;
};

}  // namespace hb
