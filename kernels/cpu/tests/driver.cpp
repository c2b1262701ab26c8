// Tests of the native code alone, for sanitizers and for other architectures under qemu. Prints the variants that were
// tested. Exit status 0: every check passed.
//
//   driver [rounds [test...]]
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

#include "api.h"
#include "check.h"
#include "dispatch.h"

void fake_gomp_parallel(void (*body)(void*), void* data, unsigned threads, unsigned) {
  std::vector<std::thread> team;
  for (unsigned i = 1; i < threads; i++) team.emplace_back(body, data);
  body(data);
  for (std::thread& thread : team) thread.join();
}

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 40;
  struct Test {
    const char* name;
    std::function<void()> run;
  };
  const auto spinning = [rounds](void (*test)(int, int64_t)) {
    return [=] {
      for (const int64_t spin : {INT64_C(0), INT64_C(1'000'000)}) test(rounds, spin);  // nanoseconds
    };
  };
  const Test tests[] = {
      {"kernels", [rounds] { test_kernels(rounds); }},
      {"byte_pages", [rounds] { test_byte_pages(rounds); }},
      {"codes", test_codes},
      {"every_variant", test_every_variant},
      {"variants", test_variants},
      {"operations", [rounds] { test_operations(std::min(rounds, 12)); }},
      {"pool", spinning(test_pool)},
      {"judging", spinning(test_judging)},
      {"decode", spinning(test_decode)},
      {"mailbox", spinning(test_mailbox)},
      {"questions", spinning(test_questions)},
  };
  for (const Test& test : tests) {
    const auto is_named = [&test](const char* name) { return !std::strcmp(name, test.name); };
    if (argc > 2 && std::none_of(argv + 2, argv + argc, is_named)) continue;
    const auto begin = std::chrono::steady_clock::now();
    test.run();
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begin;
    std::printf("%s: %.1f s\n", test.name, taken.count());
    std::fflush(stdout);
  }
  for (int operation = 0; operation < hb::kOperations; operation++) {
    std::printf("%s:", hb::operation_name(operation));
    for (int i = 0; i < hb::variant_count(operation); i++) {
      const hb_model model{BF16, 1, 1, 64, 32, 0.1f, 1.f};
      if (hb_variant_runs(operation, i, &model)) std::printf(" %s", hb::variant_name(operation, i));
    }
    std::printf("\n");
  }
  std::printf("%s, %d failures\n", hb_isa_name(hb::best_isa()), failures.load());
  return failures ? 1 : 0;
}
