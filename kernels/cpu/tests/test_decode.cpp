// Decode layers, alone, in a pool and in an OpenMP team.
#include <algorithm>
#include <cmath>
#include <vector>

#include "api.h"
#include "check.h"

namespace {

// Several steps of a batch on one team; the outputs of all teams must agree.
std::vector<uint16_t> decode(int rounds, hb_pool* pool, void* gomp, int threads) {
  Rng rng(3);
  const int kv_heads = 3, group = 3, dim = 64, page_size = 32, rows = 4, columns = 300, pages = rows * columns;
  std::vector<uint16_t> cache = random_bf16((size_t)pages * kv_heads * 2 * page_size * dim, rng);
  std::vector<uint16_t> digests = random_bf16((size_t)pages * kv_heads * 2 * dim, rng);
  const hb_model model{0, kv_heads, group, dim, page_size, 0.125f, 0.5f};
  const int64_t part = page_size * dim * 2;
  const hb_cache layout{(char*)cache.data(), pages, kv_heads * 2 * part, 2 * part, part, dim * 2};
  const hb_digests store{(char*)digests.data(), kv_heads * 2 * dim * 2, 2 * dim * 2, HB_MINMAX};
  hb_decode* decoder = hb_decode_new(&model, 2, HB_CHOSEN);
  EXPECT(decoder, "%s", hb_last_error());
  std::vector<uint8_t> encoded((size_t)pages * (kv_heads * 2 * dim + kv_heads * 8));
  const hb_byte_digests byte_digests{encoded.data(), kv_heads * 2 * dim + kv_heads * 8};
  std::vector<int64_t> every(pages);
  for (int i = 0; i < pages; i++) every[i] = i;
  EXPECT(hb_write_byte_digests(&model, &store, &byte_digests, pages, pages, every.data()) == HB_OK, "%s",
         hb_last_error());
  hb_decode_set_layer(decoder, 0, &layout, &store, &byte_digests, nullptr);
  const std::vector<float> sinks(kv_heads * group, 3.f);
  hb_decode_set_layer(decoder, 1, &layout, nullptr, nullptr, sinks.data());
  std::vector<int32_t> table(pages);
  for (int i = 0; i < pages; i++) table[i] = i;
  std::shuffle(table.begin(), table.end(), rng);
  std::vector<int64_t> lens{9000, 1, 4000, 33}, budgets{40, 10, -1, 10}, sequences{7, 8, 9, 3};
  std::vector<uint16_t> all;
  for (int round = 0; round < rounds; round++) {
    hb_step step{};
    step.rows = rows;
    step.sinks = 1;
    step.recent = 2;
    step.per_head = round % 2;
    step.aggregate = round % 3;
    step.candidates = 2;
    step.interval = 1 + round % 4;
    step.sequences = sequences.data();
    step.seq_lens = lens.data();
    step.budgets = budgets.data();
    step.table = table.data();
    step.table_stride = columns;
    if (round == 3) hb_decode_forget(decoder, sequences[0]);
    EXPECT(hb_decode_begin(decoder, &step) == HB_OK, "%s", hb_last_error());
    const std::vector<uint16_t> q = random_bf16((size_t)rows * kv_heads * group * dim, rng);
    const std::vector<uint16_t> kv = random_bf16((size_t)rows * kv_heads * dim, rng);
    std::vector<uint16_t> out(q.size());
    hb_layer layer{(const char*)q.data(),      (const char*)kv.data(),
                   (const char*)kv.data(),     nullptr,
                   (char*)out.data(),          nullptr,
                   kv_heads * group * dim * 2, kv_heads * dim * 2,
                   kv_heads * dim * 2,         0,
                   kv_heads * group * dim * 2};
    for (int index = 0; index < 2; index++) {
      EXPECT(hb_decode_layer(decoder, index, &layer, pool, gomp, threads) == HB_OK, "%s", hb_last_error());
      all.insert(all.end(), out.begin(), out.end());
    }
    EXPECT(hb_decode_layer(decoder, 2, &layer, pool, gomp, threads) == HB_ERROR, "layer 2 does not exist");
    for (int64_t& length : lens) length++;
  }
  hb_decode_free(decoder);
  return all;
}

}  // namespace

void test_decode(int rounds, int64_t spin) {
  const std::vector<uint16_t> alone = decode(rounds, nullptr, nullptr, 1);
  hb_pool* pool = hb_pool_new(2, nullptr, HB_CHOSEN, spin);
  const std::vector<uint16_t> pooled = decode(rounds, pool, nullptr, 3);
  hb_pool_free(pool);
  const std::vector<uint16_t> team = decode(rounds, nullptr, (void*)fake_gomp_parallel, 4);
  double pool_error = 0, team_error = 0, size = 0;
  for (size_t i = 0; i < alone.size(); i++) {
    pool_error += std::pow(to_float(alone[i]) - to_float(pooled[i]), 2);
    team_error += std::pow(to_float(alone[i]) - to_float(team[i]), 2);
    size += std::pow(to_float(alone[i]), 2);
  }
  EXPECT(pool_error < 1e-4 * size && team_error < 1e-4 * size, "teams disagree: %g %g of %g", pool_error, team_error,
         size);
}
