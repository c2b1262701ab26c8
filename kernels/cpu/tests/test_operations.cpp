// The operations of a decode step, alone and in an OpenMP team.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "api.h"
#include "api_operations.h"
#include "check.h"

namespace {

// Steps of a batch in operations, bf16: what a step computes and changes must not depend on the team.
struct Operations {
  static constexpr int kRows = 3, kHeads = 3, kGroup = 3, kDim = 64, kPage = 32, kColumns = 200, kFrames = 40;
  static constexpr int kLayers = 2, kBudget = 24, kPool = kRows * kColumns;

  Rng rng{5};
  hb_team team;
  int isa;
  std::vector<uint16_t> host = random_bf16((size_t)kPool * kHeads * 2 * kPage * kDim, rng);
  std::vector<uint16_t> frames = std::vector<uint16_t>((size_t)kRows * kFrames * kHeads * 2 * kPage * kDim);
  std::vector<uint16_t> digests = std::vector<uint16_t>((size_t)kPool * kHeads * 2 * kDim);
  std::vector<int32_t> frame_of = std::vector<int32_t>(kLayers * kRows * kColumns, -1);
  std::vector<int32_t> page_of = std::vector<int32_t>(kLayers * kRows * kFrames, -1);
  std::vector<float> importance = std::vector<float>(kLayers * kRows * kFrames, -INFINITY);
  std::vector<int32_t> to_frames = std::vector<int32_t>(kLayers * kRows * kBudget, -1), to_host = to_frames;
  std::vector<int32_t> to_pages = to_frames, to_requests = std::vector<int32_t>(kLayers * kRows);
  std::vector<float> to_importance = std::vector<float>(to_frames.size());
  std::vector<int64_t> started = std::vector<int64_t>(kLayers * kRows), generations = {1, 2, 3}, counters;
  std::vector<float> average = std::vector<float>((size_t)kRows * kFrames * kHeads * kPage);
  std::vector<uint16_t> labels = std::vector<uint16_t>((size_t)kRows * kHeads * kGroup * kDim);
  std::vector<float> label_weights = std::vector<float>(kHeads * kGroup, 0.5f), thresholds{-1, 0, -INFINITY};
  std::vector<int32_t> table, requests{2, 0, 1}, current{3, 1, 2}, ages{0, 3, 0};
  std::vector<int32_t> lens{kColumns * kPage - 40, 2000, 0};  // the last row is one of padding
  std::vector<float> numbers;                                 // what the steps compute

  Operations(hb_team team, int isa) : team(team), isa(isa), counters(10) {
    for (int i = 0; i < kPool; i++) table.push_back(i);
    std::shuffle(table.begin(), table.end(), rng);
    const std::vector<int32_t> tokens(kPool, kPage);
    const hb_build_digests_args build{paged(host), (char*)digests.data(), table.data(), tokens.data(), 0, kPool, team};
    EXPECT(hb_build_digests(&build) == HB_OK, "%s", hb_last_error());
    std::vector<uint16_t> extended(digests.size());  // by a prompt's chunk, which begins 5 tokens behind a page's start
    hb_extend_digests_args extend{(char*)host.data(),
                                  (char*)extended.data(),
                                  table.data(),
                                  0,
                                  kHeads,
                                  kDim,
                                  kPool,
                                  kPage,
                                  2 * kPage,
                                  5,
                                  3,
                                  kHeads * kDim,
                                  team};
    EXPECT(hb_extend_digests(&extend) == HB_OK, "%s", hb_last_error());
    extend.n = 2;
    EXPECT(hb_extend_digests(&extend) != HB_OK, "a chunk that its pages have no room for is refused");
  }

  hb_paged paged(std::vector<uint16_t>& x) const {
    return {(char*)x.data(), (int64_t)x.size() / (kHeads * 2 * kPage * kDim), 0, kHeads, kPage, kDim};
  }
  hb_maps maps(int layer, int layers = 1) {
    return {&frame_of[layer * kRows * kColumns],
            &page_of[layer * kRows * kFrames],
            &importance[layer * kRows * kFrames],
            layers,
            kRows,
            kColumns,
            kFrames};
  }
  hb_copies copies(int layer) {
    const int at = layer * kRows * kBudget;
    return {&to_frames[at],          &to_host[at], &to_pages[at], &to_importance[at], &to_requests[layer * kRows],
            &started[layer * kRows], kRows,        kBudget};
  }
  template <class Args>
  void call(int (*operation)(const Args*), const Args& args) {
    EXPECT(operation(&args) == HB_OK, "%s", hb_last_error());
  }
  void keep(const std::vector<float>& values) { numbers.insert(numbers.end(), values.begin(), values.end()); }

  void step(int number) {
    const int lists = number % 2 ? kHeads : 1, heads = kHeads * kGroup;
    std::vector<int32_t> pages(kRows), positions(kRows), num_pages(kRows), budgets(kRows, kBudget);
    for (int r = 0; r < kRows; r++) {
      if (lens[r]) lens[r]++;
      num_pages[r] = (lens[r] + kPage - 1) / kPage;
      positions[r] = lens[r] - 1;
      pages[r] = lens[r] ? table[r * kColumns + num_pages[r] - 1] : -1;
      ages[r]++;
    }
    call(hb_commit_pages, {maps(0, kLayers), copies(0), generations.data()});
    call(hb_open_pages, {maps(0, kLayers), requests.data(), pages.data(), positions.data(), kRows, kPage});
    // The first step finds no page that its predecessor opened.
    for (int layer = 0; layer < kLayers && number == 0; layer++)
      for (int r = 0; r < kRows - 1; r++) {
        const int frame = requests[r], page = num_pages[r] - 1;
        frame_of[(layer * kRows + requests[r]) * kColumns + page] = frame;
        page_of[layer * kRows * kFrames + frame] = page;
        importance[layer * kRows * kFrames + frame] = INFINITY;
      }
    for (int layer = 0; layer < kLayers; layer++) {
      const std::vector<uint16_t> q = random_bf16((size_t)kRows * heads * kDim, rng);
      const std::vector<uint16_t> kv = random_bf16((size_t)kRows * kHeads * kDim, rng);
      const hb_maps held = maps(layer);
      call(hb_append_tokens,
           {paged(host), (const char*)kv.data(), (const char*)kv.data(), pages.data(), positions.data(),
            (char*)frames.data(), requests.data(), held.frame_of, (char*)digests.data(), 0, kRows, 0, kRows * kFrames,
            kRows, kColumns, kHeads * kDim, kHeads * kDim});
      std::vector<float> scores((size_t)kRows * lists * kColumns), best((size_t)kRows * kColumns);
      call(hb_page_scores, {(const char*)q.data(),
                            (const char*)digests.data(),
                            table.data(),
                            num_pages.data(),
                            budgets.data(),
                            scores.data(),
                            kRows,
                            kColumns,
                            kColumns,
                            kPool,
                            0,
                            kHeads,
                            kGroup,
                            kDim,
                            kPage,
                            0,
                            number % 3,
                            lists > 1,
                            isa,
                            {},
                            team,
                            0.5,
                            0.125});
      keep(scores);
      prompt(q, layer % 2 ? 20 : 0);
      std::vector<int32_t> missed(kRows * kHeads);
      call(hb_match_labels, {(const char*)q.data(), (char*)labels.data(), label_weights.data(), thresholds.data(),
                             requests.data(), num_pages.data(), budgets.data(), counters.data(), missed.data(), kRows,
                             kRows, 0, kHeads, kGroup, kDim, number % 2, isa, team});
      keep({missed.begin(), missed.end()});
      std::vector<int32_t> selected((size_t)4 * kRows * lists * kBudget), listed(4 * kRows * lists);
      call(hb_select_pages, {scores.data(),
                             num_pages.data(),
                             lens.data(),
                             budgets.data(),
                             requests.data(),
                             held.frame_of,
                             table.data(),
                             counters.data(),
                             selected.data(),
                             listed.data(),
                             kRows,
                             lists,
                             kColumns,
                             kColumns,
                             kRows,
                             kColumns,
                             kPage,
                             1,
                             2,
                             kBudget,
                             {},
                             team});
      const int32_t *found = &selected[kRows * lists * kBudget], *missing = &selected[2 * kRows * lists * kBudget];
      const int32_t *absent = &selected[3 * kRows * lists * kBudget], *count = &listed[kRows * lists];
      const int32_t *tokens = &listed[2 * kRows * lists], *lacking = &listed[3 * kRows * lists];
      call(hb_note_scores,
           {held, scores.data(), num_pages.data(), budgets.data(), requests.data(), kRows, lists, kColumns, 1, 2});
      const int most = std::min(lists * kBudget, kColumns);
      std::vector<int32_t> united((size_t)kRows * most), how_many(kRows), scratch(kRows * kFrames);
      call(hb_union_pages, {absent, lacking, scores.data(), united.data(), how_many.data(), best.data(), kRows, lists,
                            kBudget, kColumns, most, team});
      attend(q, frames, found, tokens, lists, &average);
      std::vector<int32_t> whole(lacking, lacking + kRows * lists);
      for (int32_t& n : whole) n *= kPage;
      attend(q, host, missing, whole.data(), lists, nullptr);
      call(hb_plan_recall, {held,
                            copies(layer),
                            best.data(),
                            table.data(),
                            found,
                            count,
                            united.data(),
                            how_many.data(),
                            num_pages.data(),
                            requests.data(),
                            current.data(),
                            ages.data(),
                            scratch.data(),
                            counters.data(),
                            kRows,
                            kColumns,
                            kColumns,
                            lists,
                            kBudget,
                            most,
                            2,
                            layer});
      call(hb_copy_pages,
           {(const char*)host.data(), (char*)frames.data(), copies(layer).host_pages, copies(layer).frames,
            kRows * kBudget, kHeads * 2 * kPage * kDim * 2, kPool, kRows * kFrames, team});
    }
  }

  // The rows' queries as the newest tokens of the first row's sequence, which is as good as any other.
  void prompt(const std::vector<uint16_t>& q, int window) {
    std::vector<uint16_t> out(q.size());
    std::vector<float> sinks(kHeads * kGroup, 0.5f);
    call(hb_attend_prompt,
         {paged(host), (const char*)q.data(), nullptr, nullptr, table.data(), sinks.data(), (char*)out.data(), kRows,
          lens[0], kColumns, kGroup, window, kHeads * kGroup * kDim, 0, 0, kHeads * kGroup * kDim, isa, team, 0.125});
    for (const uint16_t x : out) numbers.push_back(to_float(x));
  }

  void attend(const std::vector<uint16_t>& q, std::vector<uint16_t>& kv, const int32_t* ids, const int32_t* tokens,
              int lists, std::vector<float>* average) {
    const size_t items = (size_t)kRows * kHeads * kGroup;
    std::vector<float> out(items * kDim, NAN), lse(items, NAN), merged(items * kDim, NAN), merged_lse(items, NAN);
    call(hb_paged_partial, {paged(kv), (const char*)q.data(), ids, tokens, out.data(), lse.data(), kRows, lists,
                            kBudget, lists * kBudget, kBudget, kGroup, isa, team, 0.125});
    call(hb_merge_partials, {out.data(), lse.data(), out.data(), lse.data(), nullptr, (char*)merged.data(),
                             merged_lse.data(), kRows, kHeads * kGroup, 1, kDim, 2, isa, team});
    for (size_t i = 0; i < items; i++)  // the same twice: twice the weight, the same mean
      EXPECT(lse[i] == merged_lse[i] || std::fabs(merged_lse[i] - lse[i] - std::log(2.f)) < 1e-5, "%g", lse[i]);
    keep(merged);
    if (average && lists == 1)
      call(hb_page_weights, {paged(kv), (const char*)q.data(), ids, ids, tokens, lse.data(), average->data(), kRows,
                             kBudget, kBudget, kBudget, kRows * kFrames, kGroup, 0, isa, team, 0.125, 1.0});
    if (!average || lists > 1) return;
    for (int r = 0; r < kRows; r++) {  // with alpha 1 the averages are this step's shares, which add up to 1
      float sum = 0;
      for (int t = 0; t < tokens[r]; t++)
        sum += (*average)[(size_t)ids[r * kBudget + t / kPage] * kHeads * kPage + t % kPage];
      EXPECT(tokens[r] ? std::fabs(sum - 1) < 1e-3 : sum == 0, "%d tokens weigh %g", tokens[r], sum);
    }
  }
};

}  // namespace

void test_operations(int rounds) {
  const hb_team alone{nullptr, 1}, four{(void*)fake_gomp_parallel, 4};
  for (int isa = 0; isa < hb_isa_count(); isa++) {
    if (!hb_isa_runs(isa)) continue;
    Operations one(alone, isa), other(four, isa);
    for (int i = 0; i < rounds; i++) one.step(i), other.step(i);
    EXPECT(one.frame_of == other.frame_of && one.page_of == other.page_of && one.counters == other.counters &&
               one.frames == other.frames && one.host == other.host && one.digests == other.digests &&
               one.labels == other.labels,
           "teams disagree on %s", hb_isa_name(isa));
    EXPECT(one.counters[HB_RECALLED_PAGES] > 0, "nothing was recalled");
    EXPECT(one.counters[HB_HITS] > 0 && one.counters[HB_HITS] < one.counters[HB_LOOKUPS], "%lld of %lld",
           (long long)one.counters[HB_HITS], (long long)one.counters[HB_LOOKUPS]);
    double error = 0, size = 0;
    for (size_t i = 0; i < one.numbers.size(); i++) {
      if (std::isinf(one.numbers[i])) continue;
      error += std::pow(one.numbers[i] - other.numbers[i], 2);
      size += std::pow(one.numbers[i], 2);
    }
    EXPECT(error <= 1e-6 * size && one.numbers.size() == other.numbers.size(), "%g of %g", error, size);
  }
  Operations bad(four, HB_CHOSEN);
  std::fill(bad.table.begin(), bad.table.begin() + 100, 1 << 20);
  std::vector<float> scores((size_t)Operations::kRows * Operations::kColumns);
  const std::vector<int32_t> pages(Operations::kRows, Operations::kColumns), budgets(Operations::kRows, 2);
  const hb_page_scores_args args{(const char*)bad.host.data(),
                                 (const char*)bad.digests.data(),
                                 bad.table.data(),
                                 pages.data(),
                                 budgets.data(),
                                 scores.data(),
                                 Operations::kRows,
                                 Operations::kColumns,
                                 Operations::kColumns,
                                 Operations::kPool,
                                 0,
                                 Operations::kHeads,
                                 Operations::kGroup,
                                 Operations::kDim,
                                 Operations::kPage,
                                 0,
                                 0,
                                 0,
                                 HB_CHOSEN,
                                 {},
                                 four,
                                 0.5,
                                 0.125};
  EXPECT(hb_page_scores(&args) == HB_ERROR && std::strstr(hb_last_error(), "page id 1048576"), "%s", hb_last_error());
}
