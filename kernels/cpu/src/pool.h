// Persistent pinned threads that work on tasks: asynchronous partials, and decode layers together with their caller.
#pragma once
#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "attend_job.h"

namespace hb {

// Something that several threads can work on at once.
class Task {
 public:
  virtual ~Task() = default;
  // Works until nothing is left to claim. Must not throw.
  virtual void work(int lane) = 0;

 private:
  friend class Pool;
  int inside_ = 0;  // threads in work(); guarded by the pool's mutex
};

class Pool {
 public:
  Pool(int threads, const int* cpus, int isa);
  ~Pool();

  void push(Task& task);
  // Takes the task from the queue and waits until no worker is inside it.
  void retire(Task& task);
  bool is_idle(Task& task);
  void pause(bool paused);

  int threads() const { return (int)threads_.size(); }
  int isa() const { return isa_; }

  // Finished jobs keep their memory and come back from here.
  std::unique_ptr<class PartialTask> take_spare();
  void give_spare(std::unique_ptr<class PartialTask> task);

 private:
  void stop();
  void loop(int lane, int cpu);
  void unlist(Task& task);

  std::mutex mutex_;
  std::condition_variable wake_, left_;
  std::deque<Task*> queue_;
  std::vector<std::unique_ptr<PartialTask>> spares_;
  std::vector<std::thread> threads_;
  int sleeping_ = 0, isa_;
  bool stop_ = false, paused_ = false;
};

// One submitted hb_partial_args. The first thread inside plans, then all compute.
class PartialTask : public Task {
 public:
  PartialTask() = default;
  void reset(const hb_partial_args& args, int isa, int lanes);
  void work(int lane) override;

  // HB_OK, HB_TIMEOUT or HB_ERROR.
  int wait(double seconds, bool help);
  void cancel();
  const std::string& error() const { return error_; }
  double started() const { return started_; }
  double ended() const { return ended_; }

  Pool* pool = nullptr;

 private:
  enum State { NEW, PLANNING, PLANNED, FAILED };
  bool ended_state() const { return finished_.load(std::memory_order_acquire); }
  void finish();

  hb_partial_args args_{};
  int isa_ = -1, lanes_ = 1;
  AttendJob job_;
  std::atomic<int> state_{NEW};
  std::atomic<bool> cancelled_{false}, finished_{false};
  std::mutex mutex_;
  std::condition_variable done_;
  std::string error_;
  double started_ = 0, ended_ = 0;
};

// Fills the job of a partial: page lists, inputs and outputs. Throws what AttendJob throws, and for bad page ids.
void prepare_partial(AttendJob& job, const hb_partial_args& args, int isa, int lanes);

void pin_to(int cpu);  // the calling thread, and names it
void relax();          // a moment's rest of a thread that polls

// For short waits on threads that may have lost their core.
class Backoff {
 public:
  void pause();

 private:
  int spins_ = 0;
};

}  // namespace hb
