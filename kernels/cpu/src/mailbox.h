// Mailboxes: the device writes queries and page lists into pinned memory, then a number. The server thread polls the
// number, computes together with the pool, and writes the partials and the same number back. No step of this takes a
// lock or makes a system call.
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
  // Throws std::invalid_argument for a shape that no kernel has.
  MailServer(Pool& pool, const hb_model& model, const hb_mailbox* boxes, int count, int cpu);
  ~MailServer();

  int64_t served() const { return served_.load(std::memory_order_relaxed); }
  std::string error(int box);  // error of the box's last failed job

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
  // The current question: rows with pages; the request and generation of each such row; whether it attends whole host
  // pages; and the tokens (in a box without ids) or pages of each list, of which a whole row has one.
  std::vector<int64_t> rows_, requests_, generations_, counts_;
  std::vector<char> whole_;
  std::vector<const char*> bases_;
  std::atomic<int64_t> served_{0};
  std::atomic<bool> stop_{false};
  std::mutex error_mutex_;
  std::vector<std::string> errors_;  // by box
  std::thread thread_;
};

}  // namespace hb
