// Persistent pinned threads that work on tasks: asynchronous partials, the jobs of mailboxes, and decode layers, which
// their callers share.
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

// Work that several threads can share.
class Task {
 public:
  virtual ~Task() = default;
  // Works until nothing is left to claim; in the background, or until the pool has urgent work. Must not throw.
  virtual void work(int lane) = 0;
  // True if nothing is left to claim after a thread has worked, so that the pool drops the task from its queue.
  virtual bool is_claimed() { return true; }
};

// A thread takes and leaves a task without a lock: it writes the task that it works on to a cache line of its own.
class Pool {
 public:
  // A thread without work polls for `spin` nanoseconds before it sleeps.
  Pool(int threads, const int* cpus, int isa, int64_t spin);
  ~Pool();

  // Queues the task and wakes threads until `wanted` threads are awake without work.
  void push(Task& task, int wanted);
  // Queues a task that threads work on while no other task is queued.
  void push_background(Task& task);
  // True if a thread should leave a background task, as soon as it can.
  bool has_urgent() const { return urgent_.load(std::memory_order_relaxed) || stop_.load(std::memory_order_relaxed); }
  // Takes the task from the queue and waits until no worker is inside it.
  void retire(Task& task);
  bool is_idle(Task& task);
  void pause(bool paused);

  int threads() const { return (int)threads_.size(); }
  int isa() const { return isa_; }

  // Finished tasks are reused, so that their memory is not allocated again.
  std::unique_ptr<class PartialTask> take_spare();
  void give_spare(std::unique_ptr<class PartialTask> task);

 private:
  struct alignas(64) Lane {
    std::atomic<Task*> inside{nullptr};
  };

  void stop();
  void loop(int lane, int cpu);
  Task* enter(std::atomic<Task*>& inside);  // returns null when the pool ends
  void sleep();
  void wake(int threads);
  void wake_idle(int wanted);  // wakes threads until `wanted` are awake without work
  void unlist(Task& task);
  bool is_listed(const Task& task) const;
  void publish();  // to call under the lock, whenever the queue or the pause changed

  const int isa_;
  const int64_t spin_;
  std::mutex mutex_;
  std::deque<Task*> queue_, background_;
  std::vector<std::unique_ptr<PartialTask>> spares_;
  bool paused_ = false;
  // The first task of the queue, else of the background; null without one or in a pause. Threads without work poll it,
  // so it has a cache line of its own.
  alignas(64) std::atomic<Task*> front_{nullptr};
  std::atomic<bool> urgent_{false};  // a task is queued that is not in the background, or a pause
  std::atomic<bool> stop_{false};
  alignas(64) std::atomic<uint32_t> wakes_{0};  // the futex on which threads sleep
  std::atomic<int> sleeping_{0};
  const std::unique_ptr<Lane[]> lanes_;
  std::vector<std::thread> threads_;
};

// One submitted hb_partial_args. The first thread plans the chunks, then all threads compute.
class PartialTask : public Task {
 public:
  PartialTask() = default;
  void reset(const hb_partial_args& args, int isa, int lanes);
  void work(int lane) override;

  // Returns HB_OK, HB_TIMEOUT or HB_ERROR.
  int wait(double seconds, bool help);
  void cancel();
  const std::string& error() const { return error_; }
  double started() const { return started_; }
  double ended() const { return ended_; }

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

// Fills a job with the page lists, inputs and outputs of a partial. Throws what AttendJob throws, and std::out_of_range
// for a page that the cache lacks.
void prepare_partial(AttendJob& job, const hb_partial_args& args, int isa, int lanes);

void pin_to(int cpu);   // pins and names the calling thread
void relax();           // pauses a polling thread for a moment
int64_t nanoseconds();  // reads the steady clock

// For short waits on threads that may have lost their core.
class Backoff {
 public:
  void pause();

 private:
  int spins_ = 0;
};

}  // namespace hb
