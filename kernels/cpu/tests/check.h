// The native tests' checks, random numbers and bf16 conversions.
#pragma once
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

inline std::atomic<int> failures{0};

#define EXPECT(condition, ...)                            \
  do {                                                    \
    if (!(condition)) {                                   \
      failures++;                                         \
      std::fprintf(stderr, "FAILED %s: ", #condition);    \
      std::fprintf(stderr, __VA_ARGS__);                  \
      std::fprintf(stderr, "\n");                         \
    }                                                     \
  } while (0)

using Rng = std::mt19937;

inline float to_float(uint16_t bits) {
  const uint32_t u = (uint32_t)bits << 16;
  float x;
  std::memcpy(&x, &u, 4);
  return x;
}
inline uint16_t to_bf16(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  return (uint16_t)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
inline std::vector<uint16_t> random_bf16(size_t n, Rng& rng) {
  std::normal_distribution<float> normal;
  std::vector<uint16_t> v(n);
  for (uint16_t& x : v) x = to_bf16(normal(rng));
  return v;
}

// Runs the body in plain threads. It has the signature of an OpenMP runtime's GOMP_parallel.
void fake_gomp_parallel(void (*body)(void*), void* data, unsigned threads, unsigned);

// The tests. `spin`: nanoseconds for which a pool's thread polls before it sleeps.
void test_kernels(int rounds);
void test_byte_pages(int rounds);
void test_pool(int rounds, int64_t spin);
void test_judging(int rounds, int64_t spin);
void test_decode(int rounds, int64_t spin);
void test_operations(int rounds);
void test_mailbox(int rounds, int64_t spin);
void test_questions(int rounds, int64_t spin);
void test_codes();
void test_variants();
void test_every_variant();
