// Judging a prompt: the mean weights that its last queries give to earlier tokens, and the tokens that each KV head
// keeps by them (HGCA, arXiv 2507.03153, section 3.2.2).
#pragma once
#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "attend_job.h"
#include "pool.h"

namespace hb {

// The queries and keys of one KV head of one layer.
struct WeighedHead {
  const char* q;  // the sequence's last queries, of the head's group
  int64_t queries, q_token_stride, q_head_stride;
  const char* keys;  // page 0's first K row
};

// The mean weights of one KV head, by steps of at most kPromptKeys keys. The softmax runs over the tokens first..older
// - 1 and over older..tokens - 1, each span alone.
class PromptWeigher {
 public:
  struct Sequence {
    const int32_t* pages;
    int64_t tokens, first, older;
    int64_t page_stride, value_offset;
  };
  // Throws std::invalid_argument for a sequence that is shorter than its queries or its spans.
  void begin(const hb_model& model, const Kernels& kernels, const WeighedHead& head, const Sequence& sequence);
  // Does one step. Returns true if it found weights: those of the tokens begin()..end() - 1.
  bool step();
  bool finished() const { return span_ == 2; }
  int64_t begin_of_step() const { return block_.begin; }
  int64_t end_of_step() const { return block_.end; }
  const float* weights() const { return weights_; }

 private:
  void start_span();

  WeighPromptFn weigh_ = nullptr;
  WeighBlock block_{};
  int64_t edges_[3] = {};  // first, older, tokens
  int span_ = 2;
  bool is_summed_ = false;  // top and sum are those of the whole span
  int64_t position_ = 0;
  std::vector<float> scratch_, top_, sum_;
  float weights_[kPromptKeys];
};

// One submitted hb_judge_args. Threads take items, each one KV head of one layer, and leave them for urgent work.
class JudgeTask : public Task {
 public:
  // Throws std::invalid_argument or std::out_of_range for arguments that no kernel can work on.
  JudgeTask(const hb_judge_args& args, Pool& pool);
  void work(int lane) override;
  bool is_claimed() override;

  int state();  // HB_OK, HB_TIMEOUT or HB_ERROR
  void cancel() { cancelled_ = true; }
  int64_t steps() const { return steps_.load(std::memory_order_relaxed); }
  double seconds() const { return 1e-9 * nanoseconds_.load(std::memory_order_relaxed); }
  std::string error();

 private:
  struct Item {
    int64_t number;
    PromptWeigher weigher;
    int64_t kept = 0, position = 0;  // position: of a head without queries, the next token to keep
  };

  std::unique_ptr<Item> claim();
  void suspend(std::unique_ptr<Item> item);
  bool advance(Item& item);  // returns false after the last step
  void keep(Item& item, int64_t begin, int64_t end, const float* weights);  // weights null: keeps all

  Pool& pool_;
  const hb_judge_args args_;
  const std::vector<hb_judge_layer> layers_;
  const std::vector<int32_t> pages_;
  Kernels kernels_{};
  const int64_t items_;
  std::atomic<bool> cancelled_{false};
  std::atomic<int64_t> steps_{0}, nanoseconds_{0}, done_{0};
  std::mutex mutex_;  // guards the rest
  std::vector<std::unique_ptr<Item>> suspended_;
  int64_t next_ = 0;
  std::string error_;
};

}  // namespace hb
