#include "measure.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <new>
#include <vector>

#include "attend_job.h"
#include "codes.h"
#include "digest.h"
#include "guard.h"
#include "kv_format.h"
#include "memory.h"
#include "pool.h"

namespace hb {
namespace {

constexpr int kPages = 16, kPromptQueries = 96, kPromptTokens = 256, kDigestHeads = 4;
constexpr int64_t kStreamBytes = 2 << 20;  // K and V that decoding rows read, more than a core's own cache holds
constexpr int kSureRounds =
    2;  // rounds before a slow variant drops out, because another process may disturb its first times
constexpr int64_t kLongEnough = 20'000;  // nanoseconds; the clock and a call cost a thousandth of it

// Memory that begins at a cache line, as pools and tensors do: a load across two lines costs the wider variant more.
template <class T>
struct LineAllocator {
  using value_type = T;
  LineAllocator() = default;
  template <class U>
  LineAllocator(const LineAllocator<U>&) {}
  T* allocate(size_t n) { return (T*)::operator new(n * sizeof(T), std::align_val_t(64)); }
  void deallocate(T* memory, size_t) { ::operator delete(memory, std::align_val_t(64)); }
  template <class U>
  bool operator==(const LineAllocator<U>&) const {
    return true;
  }
  template <class U>
  bool operator!=(const LineAllocator<U>&) const {
    return false;
  }
};
template <class T>
using Lines = std::vector<T, LineAllocator<T>>;

// A small job of one KV head's pages, with everything that one operation reads and writes.
class Bench {
 public:
  Bench(Operation operation, const hb_model& like) : operation_(operation), model_(like) {
    model_.kv_heads = 1;
    row_ = model_.head_dim * element_size(model_.type);
    part_ = part_bytes(model_);
    head_ = head_bytes(model_);
    const bool is_stream = operation == PARTIAL || operation == WEIGHTS;
    count_ = is_stream ? std::max<int>(kPages, (int)(kStreamBytes / head_)) : kPages;
    fill_cache();
    const int queries = std::max(kPromptQueries, kDigestHeads * model_.group);
    fill(q_, (int64_t)queries * model_.head_dim, 11);
    out_.resize(q_.size());
    result_.resize((size_t)queries * model_.head_dim);
    lse_.assign(model_.group, 3.f);
    scores_.resize((size_t)kDigestHeads * model_.group * kPages * model_.page_size);
    averages_.resize((size_t)count_ * model_.page_size);
    job_.configure(model_, cache(count_), best_isa());
    for (int i = 0; i < count_; i++) {
      const int page = (int)((int64_t)i * 37 % count_);  // scattered, as a pool's pages are
      ids_.push_back(page);
      pages_.push_back({cache_.data() + page * head_, model_.page_size, 0});
      page_averages_.push_back(&averages_[(size_t)page * model_.page_size]);
    }
    segment_ = {q_.data(), row_, 0, count_, result_.data(), lse_.data()};
    if (operation == DIGESTS || operation == BYTES || operation == CODES) make_digests();
  }

  const Shape& shape() const { return job_.shape(); }

  // Returns the work of the variant that `kernels` holds.
  std::function<void()> task(const Kernels& kernels) {
    switch (operation_) {
      case PROMPT: return [block = prompt(), kernels] { kernels.prompt.attend(&block); };
      case PARTIAL: return [this, kernels] { kernels.attend(&shape(), &segment_, 1, pages_.data(), count_); };
      case WEIGHTS:
        return
            [this, kernels] { kernels.weigh(&shape(), &segment_, pages_.data(), page_averages_.data(), 0.5f, false); };
      case DIGESTS: return [this, kernels] { score_digests(kernels); };
      case BYTES: return [this, kernels] { score_bytes(kernels); };
      case CODES: return [this, kernels] { score_codes(kernels); };
      default:
        return [this, kernels] { kernels.softmax_add(scores_.data(), (int)averages_.size(), 0.1f, averages_.data()); };
    }
  }

 private:
  // Writes n values in (-2, 2) that are the same at each start.
  void fill(Lines<char>& to, int64_t n, uint32_t seed) {
    std::vector<float> values((size_t)n);
    for (float& value : values) {
      seed = seed * 1664525u + 1013904223u;
      value = (float)(int32_t)seed * (1.f / (1 << 30));
    }
    to.resize((size_t)n * element_size(model_.type));
    base().convert(model_.type, values.data(), to.data(), (int)n);
  }
  // Repeats the first pages: copying is faster than making new values.
  void fill_cache() {
    Lines<char> rows;
    fill(rows, (int64_t)kPages * 2 * model_.page_size * model_.head_dim, 7);
    cache_.resize((size_t)kPages * head_);
    for (int64_t t = 0; t < kPages * model_.page_size; t++)
      for (const Part part : {KEYS_PART, VALUES_PART})
        encode_row(model_, base(), &rows[(2 * t + part) * row_], &cache_[t / model_.page_size * head_], part,
                   t % model_.page_size);
    const size_t first = cache_.size();
    cache_.resize((size_t)count_ * head_);
    for (size_t to = first; to < cache_.size(); to += first)
      std::memcpy(&cache_[to], cache_.data(), std::min(first, cache_.size() - to));
  }
  const Isa& base() const { return base_isa(best_isa()); }
  hb_cache cache(int pages) { return {cache_.data(), pages, head_, head_, part_, kv_row_bytes(model_)}; }

  void make_digests() {
    digests_.resize((size_t)(kPages * 2 * row_));
    bytes_.resize((size_t)kPages * byte_row());
    codes_.resize((size_t)kPages * 4 * model_.head_dim);
    const hb_digests digests{digests_.data(), 2 * row_, 2 * row_, HB_MINMAX};
    for (int page = 0; page < kPages; page++) {
      for (int t = 0; t < model_.page_size; t++) append_to_digest(model_, digests, base(), cache(kPages), page, t);
      write_byte_digest(model_, digests, byte_digests(), base(), page);
      encode_page(model_, code_store(), cache(kPages), base(), page);
    }
  }
  int64_t byte_row() const { return byte_digest_stride(1, model_.head_dim); }
  hb_byte_digests byte_digests() { return {bytes_.data(), byte_row()}; }
  hb_digests code_store() { return {(char*)codes_.data(), 4 * model_.head_dim, 4 * model_.head_dim, HB_CODES}; }

  // Scores digests in both ways, the heads' sum in one product and head by head. The digests of a few pages serve as
  // one page's digests of as many heads.
  void score_digests(const Kernels& kernels) {
    hb_model model = model_;
    model.kv_heads = kDigestHeads;
    const hb_digests digests{digests_.data(), kDigestHeads * 2 * row_, 2 * row_, HB_MINMAX};
    for (const Aggregate aggregate : {SUM, SOFTMAX}) {
      scorer_.prepare(model, digests, kernels, false, aggregate, q_.data(), row_);
      scorer_.score([](int64_t column) { return column; }, 0, kPages / kDigestHeads, scores_.data(), kPages);
    }
  }
  void score_bytes(const Kernels& kernels) {
    for (const Aggregate aggregate : {SUM, SOFTMAX}) {
      scorer_.prepare_byte_digests(model_, byte_digests(), kernels, aggregate, q_.data(), row_);
      scorer_.score([](int64_t column) { return column; }, 0, kPages, scores_.data(), kPages);
    }
  }
  void score_codes(const Kernels& kernels) {
    code_scorer_.prepare(model_, code_store(), kernels, q_.data(), row_);
    code_scorer_.prepare_codes(q_.data(), row_);
    code_scorer_.estimate([](int64_t column) { return column; }, -1, 0, kPages, scores_.data(), kPages);
  }

  PromptBlock prompt() {
    const int64_t context = std::min(kPages * model_.page_size, kPromptTokens);
    const int64_t tokens = std::min<int64_t>(std::max(kPromptQueries / model_.group, 1), context);
    const int64_t group_row = model_.group * row_;
    float* scratch = grown_lines(scratch_, prompt_floats(tokens * model_.group, model_.head_dim));
    return {model_.type,
            kv_type(model_),
            model_.head_dim,
            model_.group,
            model_.page_size,
            model_.scale,
            (int)tokens,
            context - tokens,
            context,
            q_.data(),
            group_row,
            row_,
            out_.data(),
            group_row,
            row_,
            ids_.data(),
            cache_.data(),
            head_,
            part_,
            nullptr,
            nullptr,
            0,
            0,
            0,
            nullptr,
            scratch};
  }

  Operation operation_;
  hb_model model_;
  int64_t row_, part_, head_;  // bytes of a query, of a page's K, of a page
  int count_;  // pages
  Lines<char> cache_, q_, out_, digests_;
  Lines<uint8_t> bytes_, codes_;
  Lines<float> result_, lse_, scores_, averages_;
  std::vector<float> scratch_;
  std::vector<int32_t> ids_;
  std::vector<PageRef> pages_;
  std::vector<float*> page_averages_;
  AttendJob job_;  // makes the shape, with its prefetch order
  Segment segment_{};
  Scorer scorer_;
  CodeScorer code_scorer_;
};

}  // namespace

void measure_variants(Operation operation, const hb_model& model, int rounds, double* seconds) {
  check_model(model);
  require(operation != CODES || CodeLayout(model.head_dim, model.page_size).planes > 0,
          "digests of this shape have no room for codes");
  Bench bench(operation, model);
  struct Contender {
    double* shortest;
    int repeats;
    std::function<void()> task;
  };
  std::vector<Contender> contenders;
  double best = std::numeric_limits<double>::infinity();
  const auto time = [&best](Contender& contender) {
    const int64_t begin = nanoseconds();
    for (int i = 0; i < contender.repeats; i++) contender.task();
    const int64_t taken = std::max<int64_t>(nanoseconds() - begin, 1);
    *contender.shortest = std::min(*contender.shortest, 1e-9 * (double)taken / contender.repeats);
    best = std::min(best, *contender.shortest);
    return taken;
  };
  for (int i = 0; i < variant_count(operation); i++) {
    Kernels kernels = kernels_of(model, best_isa());
    const bool is_left_out = std::isnan(seconds[i]);
    seconds[i] = std::numeric_limits<double>::quiet_NaN();
    if (is_left_out || !take_variant(operation, i, bench.shape(), kernels)) continue;
    seconds[i] = std::numeric_limits<double>::infinity();
    contenders.push_back({&seconds[i], 1, bench.task(kernels)});
    contenders.back().task();  // brings code and data into the caches
    contenders.back().repeats = (int)std::max<int64_t>(kLongEnough / time(contenders.back()), 1);
  }
  for (int round = 0; round < rounds; round++)
    for (Contender& contender : contenders)
      if (round < kSureRounds || *contender.shortest < 2 * best) time(contender);
}

}  // namespace hb
