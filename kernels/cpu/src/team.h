// Work that the caller shares with the engine's OpenMP threads, for the time of one call.
#pragma once
#include <algorithm>
#include <atomic>
#include <exception>

#include "api_operations.h"

namespace hb {

using GompParallel = void (*)(void (*)(void*), void*, unsigned, unsigned);

constexpr int64_t kTaskBytes = 64 * 1024;  // memory that a task reads; handing over less costs more than it saves

// Calls body(task) once for each task 0..count - 1, and returns when all are done. The caller alone does work of less
// than two tasks of kTaskBytes. If tasks throw, one of the exceptions reaches the caller.
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
  // The team always has its full size, because GNU's runtime ends the threads that a smaller team leaves out.
  ((GompParallel)team.gomp_parallel)(member, &shared, (unsigned)team.threads, 0);
  if (shared.error) std::rethrow_exception(shared.error);
}

}  // namespace hb
