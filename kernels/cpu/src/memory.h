// Memory that grows once and is then used again: the steady state allocates nothing.
#pragma once
#include <stdint.h>

#include <atomic>
#include <memory>
#include <vector>

namespace hb {

// std::vector cannot hold atomics.
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

// The same, n floats from a cache line's beginning on.
inline float* grown_lines(std::vector<float>& v, size_t n) {
  return (float*)(((uintptr_t)grown(v, n + 15) + 63) & ~(uintptr_t)63);
}

}  // namespace hb
