#include "pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <stdexcept>

namespace hb {

int64_t nanoseconds() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
}

namespace {

double now() { return 1e-9 * nanoseconds(); }

}  // namespace

void pin_to(int cpu) {
  pthread_setname_np(pthread_self(), "hybrid-worker");  // workers/cpus.py recognizes workers by this name
  cpu_set_t* set = CPU_ALLOC(cpu + 1);  // a plain cpu_set_t has room for 1024 CPUs only
  const size_t size = CPU_ALLOC_SIZE(cpu + 1);
  CPU_ZERO_S(size, set);
  CPU_SET_S(cpu, size, set);
  pthread_setaffinity_np(pthread_self(), size,
                         set);  // without effect if the CPU is gone: the thread then runs unpinned
  CPU_FREE(set);
}

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

void Backoff::pause() {
  if (++spins_ > 2000) sched_yield();
  else relax();
}

// --- the pool --------------------------------------------------------------------------------------------------

Pool::Pool(int threads, const int* cpus, int isa, int64_t spin) : isa_(isa), spin_(spin), lanes_(new Lane[threads]) {
  try {
    threads_.reserve(threads);
    for (int i = 0; i < threads; i++) threads_.emplace_back([this, i, cpu = cpus ? cpus[i] : -1] { loop(i, cpu); });
  } catch (...) {  // if no more threads can be made, those that run must end before the pool is destroyed
    stop();
    throw;
  }
}

Pool::~Pool() { stop(); }

void Pool::stop() {
  stop_ = true;
  wake(std::numeric_limits<int>::max());
  for (std::thread& thread : threads_) thread.join();
}

void Pool::push(Task& task, int wanted) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    queue_.push_back(&task);
    publish();
  }
  wake_idle(wanted);
}

// A task that is in the queue already stays where it is.
void Pool::push_background(Task& task) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (std::find(background_.begin(), background_.end(), &task) == background_.end()) background_.push_back(&task);
    publish();
  }
  wake_idle(threads());
}

void Pool::wake_idle(int wanted) {
  const int sleeping = sleeping_.load();
  if (!sleeping) return;
  int idle = threads() - sleeping;
  for (int i = 0; i < threads(); i++) idle -= lanes_[i].inside.load(std::memory_order_relaxed) != nullptr;
  if (wanted > idle) wake(wanted - idle);
}

void Pool::publish() {
  urgent_.store(paused_ || !queue_.empty());
  const std::deque<Task*>& queue = queue_.empty() ? background_ : queue_;
  front_.store(paused_ || queue.empty() ? nullptr : queue.front());
}

void Pool::unlist(Task& task) {
  for (std::deque<Task*>* queue : {&queue_, &background_}) {
    const auto at = std::find(queue->begin(), queue->end(), &task);
    if (at != queue->end()) queue->erase(at);
  }
  publish();
}

void Pool::retire(Task& task) {
  // A thread that was inside may have put a background task back, so the queue is searched again.
  for (bool was_listed = true; was_listed;) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      unlist(task);
    }
    Backoff backoff;
    for (int i = 0; i < threads(); i++)
      while (lanes_[i].inside.load() == &task) backoff.pause();
    std::lock_guard<std::mutex> lock(mutex_);
    was_listed = is_listed(task);
  }
}

bool Pool::is_listed(const Task& task) const {
  for (const std::deque<Task*>* queue : {&queue_, &background_})
    if (std::find(queue->begin(), queue->end(), &task) != queue->end()) return true;
  return false;
}

bool Pool::is_idle(Task& task) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (is_listed(task)) return false;
  for (int i = 0; i < threads(); i++)
    if (lanes_[i].inside.load() == &task) return false;
  return true;
}

void Pool::pause(bool paused) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    paused_ = paused;
    publish();
  }
  wake(std::numeric_limits<int>::max());
}

std::unique_ptr<PartialTask> Pool::take_spare() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (spares_.empty()) return std::make_unique<PartialTask>();
  std::unique_ptr<PartialTask> task = std::move(spares_.back());
  spares_.pop_back();
  return task;
}

void Pool::give_spare(std::unique_ptr<PartialTask> task) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (spares_.size() < 64) spares_.push_back(std::move(task));
}

void Pool::loop(int lane, int cpu) {
  if (cpu >= 0) pin_to(cpu);
  std::atomic<Task*>& inside = lanes_[lane].inside;
  while (Task* task = enter(inside)) {
    task->work(lane);
    // If nothing is left to claim, no other thread needs this task. retire() waits until this thread has left it.
    if (front_.load() == task) {
      std::lock_guard<std::mutex> lock(mutex_);
      if (task->is_claimed()) unlist(*task);
    }
    inside.store(nullptr);
  }
}

Task* Pool::enter(std::atomic<Task*>& inside) {
  int64_t until = 0;
  for (unsigned looks = 0; !stop_.load(std::memory_order_relaxed);) {
    if (Task* task = front_.load()) {
      inside.store(task);
      if (front_.load() == task) return task;  // from here on retire() sees that this thread is inside
      inside.store(nullptr);
    } else if (spin_ > 0 && ++looks % 64) {
      relax();
    } else if (const int64_t at = spin_ > 0 ? nanoseconds() : 0; spin_ > 0 && (!until || at < until)) {
      if (!until) until = at + spin_;
    } else {
      sleep();
      until = 0;
    }
  }
  return nullptr;
}

// No wake-up is lost: either this thread sees the task, or push() sees this thread's mark and changes the number that
// the thread is about to sleep on.
void Pool::sleep() {
  sleeping_.fetch_add(1);
  const uint32_t seen = wakes_.load();
  if (!front_.load() && !stop_) syscall(SYS_futex, &wakes_, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
  sleeping_.fetch_sub(1);
}

void Pool::wake(int threads) {
  wakes_.fetch_add(1);
  syscall(SYS_futex, &wakes_, FUTEX_WAKE_PRIVATE, threads, nullptr, nullptr, 0);
}

// --- partials --------------------------------------------------------------------------------------------------

void prepare_partial(AttendJob& job, const hb_partial_args& args, int isa, int lanes) {
  const hb_model& model = args.model;
  job.configure(model, args.cache, isa);
  if (args.lists != 1 && args.lists != model.kv_heads) throw std::invalid_argument("lists must be 1 or kv_heads");
  job.io = {args.rows,
            nullptr,
            args.q,
            args.q_row_stride,
            args.q_head_stride,
            args.out,
            args.out_type,
            args.out_row_stride,
            args.out_head_stride,
            args.lse,
            args.request,
            args.generation,
            args.current};
  job.lists.reset(args.rows, model.kv_heads, args.capacity);
  for (int r = 0; r < args.rows; r++) {
    job.lists.set_row(r, args.lists);
    for (int l = 0; l < args.lists; l++) {
      const int64_t* ids = args.ids + ((int64_t)r * args.lists + l) * args.capacity;
      const int64_t* valid = args.valid + ((int64_t)r * args.lists + l) * args.capacity;
      const int list = job.lists.of(r, l);
      ListedPage* to = job.lists.pages(list);
      int count = 0;
      for (int k = 0; k < args.capacity; k++) {
        if (ids[k] < 0 || valid[k] <= 0) continue;
        if (ids[k] >= args.cache.pages)
          throw std::out_of_range("page id " + std::to_string(ids[k]) + " of row " + std::to_string(r) +
                                  " is beyond the cache's " + std::to_string(args.cache.pages) + " pages");
        to[count++] = {ids[k], (int32_t)std::min<int64_t>(valid[k], model.page_size)};
      }
      job.lists.count(list) = count;
    }
  }
  job.plan(lanes);
}

void PartialTask::reset(const hb_partial_args& args, int isa, int lanes) {
  args_ = args;
  isa_ = isa;
  lanes_ = lanes;
  error_.clear();
  cancelled_ = false;
  finished_ = false;
  started_ = ended_ = 0;
  state_ = NEW;
}

void PartialTask::work(int lane) {
  int state = NEW;
  if (state_.compare_exchange_strong(state, PLANNING)) {
    started_ = now();
    try {
      prepare_partial(job_, args_, isa_, lanes_);
      state_.store(PLANNED, std::memory_order_release);
    } catch (const std::exception& failure) {
      error_ = failure.what();
      state_.store(FAILED, std::memory_order_release);
      finish();
    }
  }
  Backoff backoff;
  while ((state = state_.load(std::memory_order_acquire)) == PLANNING) backoff.pause();
  if (state == FAILED) return;
  job_.run(lane, &cancelled_);
  if (job_.finished()) finish();
}

void PartialTask::finish() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (finished_.load(std::memory_order_relaxed)) return;
  ended_ = now();
  finished_.store(true, std::memory_order_release);
  done_.notify_all();
}

int PartialTask::wait(double seconds, bool help) {
  const double until = now() + seconds;
  if (help && !ended_state()) work(lanes_ - 1);
  std::unique_lock<std::mutex> lock(mutex_);
  for (double left; !finished_.load(std::memory_order_acquire);) {
    if ((left = until - now()) <= 0) return HB_TIMEOUT;
    // The system clock may jump. So a wait takes a second at most, and the steady clock decides about the deadline.
    done_.wait_until(lock, std::chrono::system_clock::now() + std::chrono::duration<double>(std::min(left, 1.0)));
  }
  return error_.empty() ? HB_OK : HB_ERROR;
}

void PartialTask::cancel() { cancelled_ = true; }

}  // namespace hb
