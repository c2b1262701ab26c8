// Memory that grows and is reused, so that the steady state allocates nothing.
#pragma once
#include <stdint.h>

#include <atomic>
#include <memory>
#include <vector>

namespace hb {

// An array of atomics, which std::vector cannot hold.
class AtomicArray {
 public:
  void reset(int n) {
    if (n > capacity_) {
      items_.reset(new std::atomic<int>[n]);
      capacity_ = n;
    }
    for (int i = 0; i < n; i++) items_[i].store(0, std::memory_order_relaxed);
  }
  std::atomic<int>& operator[](int i) { return items_[i]; }

 private:
  std::unique_ptr<std::atomic<int>[]> items_;
  int capacity_ = 0;
};

template <class T>
T* grown(std::vector<T>& v, size_t n) {
  if (v.size() < n) v.resize(n);
  return v.data();
}

// Like grown, but the n floats begin at a cache line.
inline float* grown_lines(std::vector<float>& v, size_t n) {
  return (float*)(((uintptr_t)grown(v, n + 15) + 63) & ~(uintptr_t)63);
}

}  // namespace hb
