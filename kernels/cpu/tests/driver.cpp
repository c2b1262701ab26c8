// Tests of the native code alone, for sanitizers and for other architectures under qemu. Prints the variants that were
// tested. Exit status 0: every check passed.
//
//   driver [rounds]
#include <algorithm>
#include <cstdio>
#include <cstdlib>
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
  test_kernels(rounds);
  for (const int64_t spin : {INT64_C(0), INT64_C(1'000'000)}) {  // nanoseconds
    test_pool(rounds, spin);
    test_decode(rounds, spin);
    test_mailbox(rounds, spin);
    test_questions(rounds, spin);
  }
  test_operations(std::min(rounds, 12));
  test_codes();
  test_every_variant();
  test_variants();
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
