#include "judge.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "api_operations.h"
#include "guard.h"
#include "kv_format.h"
#include "memory.h"
#include "paged.h"
#include "team.h"

namespace hb {

// --- weights ---------------------------------------------------------------------------------------------------

void PromptWeigher::begin(const hb_model& model, const Kernels& kernels, const WeighedHead& head,
                          const Sequence& sequence) {
  require(head.queries >= 1 && head.queries <= sequence.tokens, "a sequence has fewer tokens than queries");
  require(0 <= sequence.first && sequence.first <= sequence.older && sequence.older <= sequence.tokens,
          "the spans of a sequence are not in order");
  const int64_t rows = head.queries * model.group;
  PromptBlock& b = block_.prompt;
  b = PromptBlock{};
  b.type = model.type;
  b.kv_type = kv_type(model);
  b.head_dim = model.head_dim;
  b.group = model.group;
  b.page_size = model.page_size;
  b.scale = model.scale;
  b.tokens = (int)head.queries;
  b.first = sequence.tokens - head.queries;
  b.window = sequence.tokens;
  b.q = head.q;
  b.q_token_stride = head.q_token_stride;
  b.q_head_stride = head.q_head_stride;
  b.pages = sequence.pages;
  b.keys = head.keys;
  b.page_stride = sequence.page_stride;
  b.value_offset = sequence.value_offset;
  b.scratch = grown_lines(scratch_, weigh_floats(rows, model.head_dim));
  block_.top = grown(top_, rows);
  block_.sum = grown(sum_, rows);
  kernels.prompt.pack(&b);
  weigh_ = kernels.prompt.weigh;
  edges_[0] = sequence.first;
  edges_[1] = sequence.older;
  edges_[2] = sequence.tokens;
  span_ = 0;
  start_span();
}

void PromptWeigher::start_span() {
  while (span_ < 2 && edges_[span_] == edges_[span_ + 1]) span_++;
  if (span_ == 2) return;
  const int64_t rows = (int64_t)block_.prompt.tokens * block_.prompt.group;
  std::fill_n(block_.top, rows, -std::numeric_limits<float>::infinity());
  std::fill_n(block_.sum, rows, 0.f);
  is_summed_ = false;
  position_ = edges_[span_];
}

bool PromptWeigher::step() {
  const int64_t end = edges_[span_ + 1];
  block_.begin = position_;
  block_.end = position_ = std::min<int64_t>(position_ + kPromptKeys, end);
  block_.weights = is_summed_ ? weights_ : nullptr;
  weigh_(&block_);
  const bool has_weights = is_summed_;
  if (position_ < end) return has_weights;
  if (is_summed_) {
    span_++;
    start_span();
  } else {
    is_summed_ = true;
    position_ = edges_[span_];
  }
  return has_weights;
}

// --- judging ---------------------------------------------------------------------------------------------------

JudgeTask::JudgeTask(const hb_judge_args& args, Pool& pool)
    : pool_(pool),
      args_(args),
      layers_(args.layers, args.layers + args.layer_count),
      pages_(args.pages, args.pages + (args.tokens + args.model.page_size - 1) / args.model.page_size),
      items_(args.layer_count * args.model.kv_heads) {
  check_model(args.model);
  kernels_ = kernels_of(args.model, pool.isa());
  require(args.first >= 0 && args.first <= args.older && args.older <= args.tokens,
          "the spans of a sequence are not in order");
  require(args.first % args.model.page_size == 0 && args.older % args.model.page_size == 0,
          "the spans of a sequence begin with a page");
  for (const int32_t page : pages_) check_id(page, args.cache.pages, "page");
  for (const hb_judge_layer& layer : layers_)
    require(layer.queries >= 0 && layer.queries <= args.tokens, "a sequence has fewer tokens than queries");
}

std::unique_ptr<JudgeTask::Item> JudgeTask::claim() {
  std::unique_ptr<Item> item;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (cancelled_) return nullptr;
    if (!suspended_.empty()) {
      item = std::move(suspended_.back());
      suspended_.pop_back();
      return item;
    }
    if (next_ == items_) return nullptr;
    item = std::make_unique<Item>();
    item->number = next_++;
  }
  const hb_model& model = args_.model;
  const int64_t head = item->number % model.kv_heads;
  const hb_judge_layer& layer = layers_[item->number / model.kv_heads];
  item->position = args_.first;
  if (!layer.queries) return item;
  const int64_t row = (int64_t)model.head_dim * element_size(model.type), heads = (int64_t)model.kv_heads * model.group;
  item->weigher.begin(
      model, kernels_,
      {layer.q + head * model.group * row, layer.queries, heads * row, row,
       layer.keys + head * args_.cache.head_stride},
      {pages_.data(), args_.tokens, args_.first, args_.older, args_.cache.page_stride, args_.cache.value_offset});
  return item;
}

void JudgeTask::suspend(std::unique_ptr<Item> item) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    suspended_.push_back(std::move(item));
  }
  pool_.push_background(*this);
}

bool JudgeTask::is_claimed() {
  std::lock_guard<std::mutex> lock(mutex_);
  return cancelled_ || (suspended_.empty() && next_ == items_);
}

int JudgeTask::state() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!error_.empty()) return HB_ERROR;
  return done_.load(std::memory_order_acquire) == items_ ? HB_OK : HB_TIMEOUT;
}

std::string JudgeTask::error() {
  std::lock_guard<std::mutex> lock(mutex_);
  return error_;
}

void JudgeTask::work(int) {
  const int64_t began = nanoseconds();
  try {
    while (std::unique_ptr<Item> item = claim()) {
      for (bool goes_on = true; goes_on && !cancelled_;) {
        if (pool_.has_urgent()) {
          suspend(std::move(item));
          break;
        }
        goes_on = advance(*item);
        steps_.fetch_add(1, std::memory_order_relaxed);
        if (!goes_on) done_.fetch_add(1, std::memory_order_acq_rel);
      }
      if (!item) break;
    }
  } catch (const std::exception& failure) {
    std::lock_guard<std::mutex> lock(mutex_);
    error_ = failure.what();
    cancelled_ = true;
  }
  nanoseconds_.fetch_add(nanoseconds() - began, std::memory_order_relaxed);
}

bool JudgeTask::advance(Item& item) {
  const int64_t recent = args_.tokens - args_.older;
  float* later = args_.recent + item.number * recent;
  const hb_judge_layer& layer = layers_[item.number / args_.model.kv_heads];
  bool goes_on;
  if (layer.queries) {
    if (item.weigher.finished()) {
      goes_on = false;  // a sequence without tokens
    } else {
      const bool has_weights = item.weigher.step();
      const int64_t begin = item.weigher.begin_of_step(), end = item.weigher.end_of_step();
      if (has_weights && begin < args_.older) keep(item, begin, end, item.weigher.weights());
      else if (has_weights) std::copy_n(item.weigher.weights(), end - begin, later + begin - args_.older);
      goes_on = !item.weigher.finished();
    }
  } else {
    const int64_t end = std::min<int64_t>(item.position + kPromptKeys, args_.older);
    keep(item, item.position, end, nullptr);
    item.position = end;
    goes_on = end < args_.older;
    if (!goes_on) std::fill_n(later, recent, 0.f);
  }
  if (!goes_on) args_.counts[item.number] = (int32_t)item.kept;
  return goes_on;
}

void JudgeTask::keep(Item& item, int64_t begin, int64_t end, const float* weights) {
  const hb_model& model = args_.model;
  const hb_cache& cache = args_.cache;
  const hb_judge_layer& layer = layers_[item.number / model.kv_heads];
  const int64_t head = item.number % model.kv_heads * cache.head_stride;
  uint8_t* keep_mask = args_.keep_mask + item.number * (args_.older - args_.first);
  for (int64_t token = begin; token < end; token++) {
    const bool is_kept = !weights || weights[token - begin] > args_.threshold;
    keep_mask[token - args_.first] = is_kept;
    if (!is_kept) continue;
    const char* from = layer.keys + pages_[token / model.page_size] * cache.page_stride + head;
    char* to = layer.store + item.kept / model.page_size * cache.page_stride + head;
    copy_token(model, cache, from, token % model.page_size, to, item.kept % model.page_size);
    item.kept++;
  }
}

}  // namespace hb

struct hb_judging : hb::JudgeTask {
  hb_judging(const hb_judge_args& args, hb::Pool& pool) : JudgeTask(args, pool), pool(pool) {}
  hb::Pool& pool;
};

HB_API hb_judging* hb_judge(hb_pool* pool, const hb_judge_args* args) {
  hb_judging* judging = nullptr;
  hb::guarded([&] {
    judging = new hb_judging(*args, *hb::pool_of(pool));
    judging->pool.push_background(*judging);
  });
  return judging;
}
HB_API int hb_judging_state(hb_judging* judging) {
  const int state = judging->state();
  if (state == HB_ERROR) hb::last_error() = judging->error();
  return state;
}
HB_API int64_t hb_judging_steps(hb_judging* judging) { return judging->steps(); }
HB_API double hb_judging_seconds(hb_judging* judging) { return judging->seconds(); }
HB_API void hb_judging_free(hb_judging* judging) {
  judging->cancel();
  judging->pool.retire(*judging);
  delete judging;
}

HB_API int hb_prompt_weights(const hb_prompt_weights_args* args) {
  return hb::guarded([&] {
    const hb_prompt_weights_args& a = *args;
    const hb_model model = hb::model_of(a.kv, a.group, a.scale);
    hb::check_model(model);
    const hb::Kernels kernels = hb::kernels_of(model, (int)a.isa);
    hb::require(a.tokens <= a.n * a.kv.page_size, "a sequence has more tokens than its pages hold");
    for (int64_t i = 0; i * a.kv.page_size < a.tokens; i++) hb::check_id(a.pages[i], a.kv.pages, "page");
    const int64_t row = hb::row_bytes(a.kv), heads = a.kv.kv_heads * a.group;
    const hb::PromptWeigher::Sequence sequence{
        a.pages, a.tokens, a.first, a.older, hb::page_bytes(a.kv), hb::part_bytes(model)};
    auto weigh = [&](int64_t head) {
      static thread_local hb::PromptWeigher weigher;
      weigher.begin(model, kernels,
                    {a.q + head * a.group * row, a.queries, heads * row, row, hb::keys_of(a.kv, 0, head)}, sequence);
      while (!weigher.finished()) {
        if (!weigher.step()) continue;
        float* to = a.weights + head * (a.tokens - a.first) + weigher.begin_of_step() - a.first;
        std::copy(weigher.weights(), weigher.weights() + weigher.end_of_step() - weigher.begin_of_step(), to);
      }
    };
    hb::share(a.team, a.tokens * a.kv.kv_heads * row * a.queries, a.kv.kv_heads, weigh);
  });
}
