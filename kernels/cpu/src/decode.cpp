// The life of a decode step (decode.h): its rows, the tasks that threads share, the tokens that are written, the
// attention that is planned. decode_select.cpp selects the pages.
#include "decode.h"

#include <algorithm>
#include <stdexcept>

#include "paged.h"
#include "team.h"

namespace hb {
namespace {

constexpr int64_t kScoreBytes = 64 * 1024;  // digests that one scoring task reads

}  // namespace

DecodeLayer::DecodeLayer(const hb_model& model, int layers, int isa) : model_(model), isa_(isa), layers_(layers) {
  job_.configure(model, {nullptr, 0, 0, 0, part_bytes(model), kv_row_bytes(model)}, isa);  // an impossible shape throws
  kernels_ = kernels_of(model, isa);
}

void DecodeLayer::set_layer(int layer, const hb_cache& cache, const hb_digests& digests,
                            const hb_byte_digests& byte_digests, const float* sinks) {
  if (layer < 0 || layer >= (int)layers_.size()) throw std::out_of_range("no such layer");
  layers_[layer] = {cache, digests, byte_digests, sinks};
  has_codes_ = has_codes_ || digests.format == HB_CODES;
}

void DecodeLayer::begin(const hb_step& step) {
  if (step.rows < 0) throw std::invalid_argument("a step cannot have a negative number of rows");
  begun_ = false;  // no layer may run if this step is refused
  rows_ = step.rows;
  sinks_ = std::max(step.sinks, 0);
  recent_ = std::max(step.recent, 1);  // the growing page is always attended
  per_head_ = step.per_head;
  if (step.aggregate < SUM || step.aggregate > SOFTMAX) throw std::invalid_argument("no such way to combine scores");
  aggregate_ = (Aggregate)step.aggregate;
  score_lists_ = aggregate_ == SOFTMAX || has_codes_ ? model_.kv_heads * model_.group : model_.kv_heads;
  tokens_.clear();
  if (step.tokens) tokens_.assign(step.tokens, step.tokens + rows_);
  seq_lens_.assign(step.seq_lens, step.seq_lens + rows_);
  skips_.clear();
  if (step.skips) skips_.assign(step.skips, step.skips + rows_);
  budget_stride_ = step.budget_stride ? rows_ : 0;
  budgets_.resize((size_t)rows_ * (budget_stride_ ? layers_.size() : 1));
  for (size_t i = 0; i < budgets_.size(); i++) {
    const int64_t pages = step.budgets[i / rows_ * step.budget_stride + i % rows_];
    budgets_[i] = pages < 0 ? -1 : (int32_t)std::clamp<int64_t>(pages, sinks_ + recent_, INT32_MAX);
  }
  num_pages_.resize(rows_);
  counts_.assign(rows_, 0);
  columns_ = 0;
  for (int r = 0; r < rows_; r++) {
    if (seq_lens_[r] < 1) throw std::invalid_argument("a decoding row has at least its own token");
    num_pages_[r] = (int32_t)((seq_lens_[r] + model_.page_size - 1) / model_.page_size);
    columns_ = std::max(columns_, num_pages_[r]);
    if (step.skips && (step.skips[r] < 0 || step.skips[r] >= std::min<int64_t>(seq_lens_[r], model_.page_size)))
      throw std::invalid_argument("a row cannot leave out its first page, nor its own token");
  }
  candidates_ = std::max(step.candidates, 0);
  interval_ = step.sequences ? std::max(step.interval, 1) : 1;
  row_sequences_.assign(rows_, nullptr);
  for (int r = 0; r < rows_ && step.sequences; r++) {
    Sequence& sequence = sequences_[step.sequences[r]];
    sequence.spans.resize(layers_.size());
    sequence.kept.resize(interval_ > 1 ? layers_.size() : 0);
    row_sequences_[r] = &sequence;
  }
  table_.resize((size_t)rows_ * columns_);
  lowest_page_ = highest_page_ = 0;
  for (int r = 0; r < rows_; r++)
    for (int c = 0; c < num_pages_[r]; c++) {
      const size_t at = (size_t)r * step.table_stride + c;
      table_[(size_t)r * columns_ + c] =
          step.table_is_64 ? ((const int64_t*)step.table)[at] : ((const int32_t*)step.table)[at];
      lowest_page_ = std::min(lowest_page_, page_id(r, c));
      highest_page_ = std::max(highest_page_, page_id(r, c));
    }
  score_stride_ =
      ((columns_ + 15) / 16 | 1) * 16;  // not a power of two, because lists would then share few sets of the cache
  grown(scores_, (size_t)rows_ * score_lists_ * score_stride_);
  if (has_codes_) grown(coarse_scores_, (size_t)rows_ * score_lists_ * score_stride_);
  grown(selected_, (size_t)rows_ * model_.kv_heads * columns_);
  grown(short_counts_, (size_t)rows_ * model_.kv_heads);
  begun_ = true;
}

void DecodeLayer::run(int layer, const hb_layer& args, Pool* pool, void* gomp_parallel, int threads) {
  if (layer < 0 || layer >= (int)layers_.size()) throw std::out_of_range("no such layer");
  layer_ = &layers_[layer];
  args_ = args;
  if (!layer_->cache.base) throw std::invalid_argument("the layer has no cache: call hb_decode_set_layer first");
  if (!begun_) throw std::invalid_argument("no step has begun, or it was refused: call hb_decode_begin first");
  if (!rows_) return;
  runs_++;
  if (lowest_page_ < 0 || highest_page_ >= layer_->cache.pages)
    throw std::out_of_range("the page table holds ids from " + std::to_string(lowest_page_) + " to " +
                            std::to_string(highest_page_) + ", but the cache of layer " + std::to_string(layer) +
                            " has " + std::to_string(layer_->cache.pages) + " pages");
  lanes_ = std::max(threads, 1);
  // Any thread of the pool may work, and each thread needs a state of its own.
  const size_t comers = std::max(lanes_, pool ? pool->threads() + 1 : 1);
  if (lane_state_.size() < comers) lane_state_.resize(comers);
  job_.configure(model_, layer_->cache, isa_);
  job_.lists.reset(rows_, model_.kv_heads, columns_);
  choices_.resize(rows_);
  for (int r = 0; r < rows_; r++) choices_[r] = choice_of(r);
  make_tasks(lanes_);
  if (lanes_ == 1 || (!pool && !gomp_parallel)) {
    work(0);
  } else if (pool) {
    pool->push(*this, lanes_ - 1);
    work(0);
    Backoff backoff;
    while (!failed_ && !job_.finished()) backoff.pause();
    pool->retire(*this);
  } else {
    auto member = [](void* self) { ((DecodeLayer*)self)->work(0); };
    ((GompParallel)gomp_parallel)(member, this, (unsigned)lanes_, 0);
  }
  if (failed_) throw std::runtime_error(error_);
}

void DecodeLayer::make_tasks(int lanes) {
  tasks_.clear();
  row_left_.reset(rows_);
  for (int r = 0; r < rows_; r++) {
    int parts = 1;
    if (choices_[r] == OF_ALL) {
      const int64_t bytes = (int64_t)num_pages_[r] * model_.kv_heads * 2 * model_.head_dim * element_size(model_.type);
      if (lanes > 1 && !searches(r))
        parts = (int)std::min<int64_t>(std::max<int64_t>(1, bytes / kScoreBytes), 4 * lanes);
    }
    for (int p = 0; p < parts; p++)
      tasks_.push_back(
          {r, p == 0, (int)score_edge(num_pages_[r], p, parts), (int)score_edge(num_pages_[r], p + 1, parts)});
    row_left_[r].store(parts, std::memory_order_relaxed);
  }
  next_task_ = next_fine_ = 0;
  tasks_done_ = fine_done_ = 0;
  lane_ = 0;
  failed_ = false;
  fine_planned_.store(false, std::memory_order_relaxed);
  planned_.store(false, std::memory_order_release);
}

// Pool workers and the caller number their lanes independently, so each call takes a new number.
void DecodeLayer::work(int) {
  const int lane = lane_.fetch_add(1, std::memory_order_relaxed);
  const int count = (int)tasks_.size();
  for (int t; (t = next_task_.fetch_add(1, std::memory_order_relaxed)) < count;) {
    try {
      run_task(tasks_[t], lane);
      if (tasks_done_.fetch_add(1, std::memory_order_acq_rel) + 1 == count) plan_fine();
    } catch (const std::exception& failure) {
      fail(failure.what());
    }
  }
  Backoff backoff;
  while (!fine_planned_.load(std::memory_order_acquire)) {
    if (failed_.load(std::memory_order_acquire)) return;
    backoff.pause();
  }
  const int fine = (int)fine_tasks_.size();
  for (int t; (t = next_fine_.fetch_add(1, std::memory_order_relaxed)) < fine;) {
    try {
      run_fine(fine_tasks_[t], lane);
      if (fine_done_.fetch_add(1, std::memory_order_acq_rel) + 1 == fine) plan_attention();
    } catch (const std::exception& failure) {
      fail(failure.what());
    }
  }
  while (!planned_.load(std::memory_order_acquire)) {
    if (failed_.load(std::memory_order_acquire)) return;
    backoff.pause();
  }
  job_.run(lane);
}

void DecodeLayer::fail(const char* what) {
  std::lock_guard<std::mutex> lock(error_mutex_);
  error_ = what;
  failed_.store(true, std::memory_order_release);
}

void DecodeLayer::run_task(const RowTask& task, int lane) {
  const int r = task.row;
  if (task.first && args_.k) write_token(r);
  if (searches(r)) search(r, lane);
  else if (choices_[r] == OF_ALL) score(task, lane);
  if (row_left_[r].fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  if (choices_[r] == NONE) attend_all(r);
  else if (choices_[r] != OF_ALL) recall_kept(r);
  else if (in_codes()) shorten(r, lane);
  else if (!searches(r)) select_row(r, lane);
}

void DecodeLayer::plan_fine() {
  fine_tasks_.clear();
  for (int r = 0; r < rows_; r++) {
    if (!looks_twice(r)) continue;
    int tasks = 0;
    for (int l = 0; l < lists(); l++) {
      const int64_t count = short_counts_[(size_t)r * model_.kv_heads + l] - 1;  // the growing page needs no score
      const int64_t bytes = count * (per_head_ ? 1 : model_.kv_heads) * 4 * model_.head_dim;
      const int64_t parts = lanes_ > 1 ? std::min<int64_t>(std::max<int64_t>(1, bytes / kScoreBytes), 4 * lanes_) : 1;
      for (int64_t p = 0; p < parts; p++, tasks++)
        fine_tasks_.push_back(
            {r, per_head_ ? l : -1, (int)score_edge(count, p, parts), (int)score_edge(count, p + 1, parts)});
    }
    row_left_[r].store(tasks, std::memory_order_relaxed);
  }
  if (fine_tasks_.empty()) plan_attention();
  fine_planned_.store(true, std::memory_order_release);
}

int64_t DecodeLayer::span_bytes() const {
  int64_t total = 0;
  for (const auto& sequence : sequences_) {
    for (const SpanDigests& layer : sequence.second.spans) total += layer.size();
    for (const Kept& layer : sequence.second.kept)
      for (const Shortlist* kept : {&layer.looked, &layer.best})
        for (const auto& list : kept->lists) total += (int64_t)list.capacity() * sizeof(int32_t);
  }
  return total;
}

void DecodeLayer::write_token(int r) {
  const hb_cache& cache = layer_->cache;
  const int64_t position = seq_lens_[r] - 1, offset = position % model_.page_size;
  const int64_t page = page_id(r, (int)(position / model_.page_size));
  const char* k = args_.k + token_row(r) * args_.k_row_stride;
  const char* v = args_.v + token_row(r) * args_.v_row_stride;
  store_token(model_, cache, *kernels_.base, page, offset, k, v);
  if (!layer_->sparse()) return;
  const bool is_whole = offset == model_.page_size - 1;
  if (!in_codes()) append_to_digest(model_, layer_->digests, *kernels_.base, cache, page, offset);
  else if (is_whole) encode_page(model_, layer_->digests, cache, *kernels_.base, page);
  // Only whole pages are scored, so a page gets its byte digest when it is whole.
  if (layer_->byte_digests.base && is_whole)
    write_byte_digest(model_, layer_->digests, layer_->byte_digests, *kernels_.base, page);
}

void DecodeLayer::attend_all(int r) {
  int32_t* chosen = &selected_[(size_t)r * model_.kv_heads * columns_];
  counts_[r] = num_pages_[r];
  for (int c = 0; c < counts_[r]; c++) chosen[c] = c;
  job_.lists.set_row(r, 1);
  list_row(r, 0, chosen, counts_[r]);
}

void DecodeLayer::list_row(int r, int list, const int32_t* pages, int count) {
  const int index = job_.lists.of(r, list);
  ListedPage* to = job_.lists.pages(index);
  for (int i = 0; i < count; i++) to[i] = {page_id(r, pages[i]), model_.page_size};
  if (count && pages[0] == 0 && !skips_.empty()) to[0].skip = (int32_t)skips_[r];
  // Pages are ascending, so only the last one can be the growing page.
  if (count && pages[count - 1] == num_pages_[r] - 1)
    to[count - 1].tokens = (int32_t)(seq_lens_[r] - (int64_t)(num_pages_[r] - 1) * model_.page_size);
  job_.lists.count(index) = count;
}

void DecodeLayer::plan_attention() {
  const int64_t head_stride = (int64_t)model_.head_dim * element_size(model_.type);
  job_.io = {rows_,       tokens_.empty() ? nullptr : tokens_.data(),
             args_.q,     args_.q_row_stride,
             head_stride, args_.out,
             model_.type, args_.out_row_stride,
             head_stride, args_.lse,
             nullptr,     nullptr,
             nullptr,     layer_->sinks};
  job_.plan(lanes_);
  planned_.store(true, std::memory_order_release);
}

int DecodeLayer::selected(int row, int list, const int32_t** pages) const {
  if (row < 0 || row >= rows_ || list < 0 || list >= model_.kv_heads) return 0;
  *pages = &selected_[((size_t)row * model_.kv_heads + list) * columns_];
  return counts_[row];
}

}  // namespace hb
