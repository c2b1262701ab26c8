// Work that the caller shares with the engine's OpenMP threads, for the time of one call.
#pragma once
#include <algorithm>
#include <atomic>
#include <exception>

#include "api.h"

namespace hb {

using GompParallel = void (*)(void (*)(void*), void*, unsigned, unsigned);

constexpr int64_t kTaskBytes = 64 * 1024;  // of memory that a task reads: handing less over costs more than it gives

// Calls body(task) for the tasks 0..count - 1, each once, and returns when all are done. Less work than two tasks of
// kTaskBytes is the caller's alone. Of what tasks throw, one exception reaches the caller.
template <class Body>
void share(const hb_team& team, int64_t bytes, int64_t count, const Body& body) {
  if (count < 2 || bytes < 2 * kTaskBytes || team.threads < 2 || !team.gomp_parallel) {
    for (int64_t task = 0; task < count; task++) body(task);
    return;
  }
  struct Shared {
    const Body& body;
    const int64_t count;
    std::atomic<int64_t> next{0};
    std::atomic<bool> failed{false};
    std::exception_ptr error;
  } shared{body, count};
  auto member = [](void* data) {
    Shared& s = *(Shared*)data;
    for (int64_t task; (task = s.next.fetch_add(1, std::memory_order_relaxed)) < s.count;) {
      try {
        s.body(task);
      } catch (...) {
        if (!s.failed.exchange(true)) s.error = std::current_exception();
      }
    }
  };
  // Always the whole team: GNU's runtime ends the threads that a smaller one leaves out.
  ((GompParallel)team.gomp_parallel)(member, &shared, (unsigned)team.threads, 0);
  if (shared.error) std::rethrow_exception(shared.error);
}

}  // namespace hb
