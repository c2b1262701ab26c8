#include "decode.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "team.h"

namespace hb {
namespace {

constexpr int64_t kScoreBytes = 64 * 1024;  // digests that one scoring task reads
constexpr int kShortlist = 4;  // pages that a look at all of them leaves to choose from, per page of budget
constexpr int kBest = 2;  // and that a look at these by codes leaves,
constexpr int kBestSteps = 2;  // for so many tokens

}  // namespace

DecodeLayer::DecodeLayer(const hb_model& model, int layers, int isa) : model_(model), isa_(isa), layers_(layers) {
  const int64_t row = (int64_t)model.head_dim * element_size(model.type);
  job_.configure(model, {nullptr, 0, 0, 0, row * model.page_size, row}, isa);  // throws for an impossible shape
  kernels_ = kernels_of(model, isa);
}

void DecodeLayer::set_layer(int layer, const hb_cache& cache, const hb_digests& digests, const hb_bytes& bytes,
                            const float* sinks) {
  if (layer < 0 || layer >= (int)layers_.size()) throw std::out_of_range("no such layer");
  layers_[layer] = {cache, digests, bytes, sinks};
  has_codes_ = has_codes_ || digests.in_codes;
}

void DecodeLayer::begin(const hb_step& step) {
  if (step.rows < 0) throw std::invalid_argument("a step cannot have a negative number of rows");
  begun_ = false;  // until all of it is right: no layer runs of a step that was refused
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
  score_stride_ = ((columns_ + 15) / 16 | 1) * 16;  // no power of two: lists would share few sets of a cache
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
  // Any thread of the pool may come, and each that does needs a state of its own.
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

// Pool workers and the caller number their lanes independently, so each entrance takes a number of its own.
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

// The best pages of the row's lists by what is quick to read of their digests.
void DecodeLayer::shorten(int r, int lane) {
  const int pages = num_pages_[r], wanted = (int)std::min<int64_t>((int64_t)kShortlist * budget_of(r), pages);
  const size_t lists_at = (size_t)r * score_lists_ * score_stride_;
  float* scores = &scores_[lists_at];
  std::copy(scores, scores + (size_t)score_lists_ * score_stride_, &coarse_scores_[lists_at]);  // shares overwrite them
  for (int l = 0; l < lists(); l++) {
    const float* shares = combined(scores, score_stride_, l, pages - 1, lane_state_[lane].total);
    const size_t at = (size_t)r * model_.kv_heads + l;
    short_counts_[at] = select_best(shares, pages, wanted, sinks_, recent_, &selected_[at * columns_]);
  }
}

void DecodeLayer::plan_fine() {
  fine_tasks_.clear();
  for (int r = 0; r < rows_; r++) {
    if (!looks_twice(r)) continue;
    int tasks = 0;
    for (int l = 0; l < lists(); l++) {
      const int64_t count = short_counts_[(size_t)r * model_.kv_heads + l] - 1;  // the tail page needs no score
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

void DecodeLayer::run_fine(const FineTask& task, int lane) {
  const int r = task.row;
  Lane& mine = lane_state_[lane];
  const int64_t* ids = &table_[(size_t)r * columns_];
  const int32_t* columns = &selected_[((size_t)r * model_.kv_heads + std::max(task.list, 0)) * columns_];
  const size_t lists_at = (size_t)r * score_lists_ * score_stride_;
  float* scores = &scores_[lists_at];
  prepare_scorer(mine, r, in_codes());
  const auto page_of = [ids, columns](int i) { return ids[columns[i]]; };
  if (in_codes()) {
    const Coarse before{&coarse_scores_[lists_at], columns};
    mine.codes.estimate(page_of, task.list, task.begin, task.end, scores, score_stride_,
                        choices_[r] == OF_ALL ? &before : nullptr);
  } else if (scores_bytes() || task.list < 0) {
    if (scores_bytes()) mine.scorer.move_to(layer_->bytes, task.list);
    mine.scorer.score(page_of, task.begin, task.end, scores, score_stride_);
  } else {  // such a scorer knows all lists only, and each has pages of its own
    float* all = grown(mine.scores, (size_t)score_lists_ * columns_);
    mine.scorer.score(page_of, task.begin, task.end, all, columns_);
    const int heads = aggregate_ == SOFTMAX ? model_.group : 1;
    for (int i = task.list * heads; i < (task.list + 1) * heads; i++)
      std::copy(all + (size_t)i * columns_ + task.begin, all + (size_t)i * columns_ + task.end,
                scores + i * score_stride_ + task.begin);
  }
  if (row_left_[r].fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  for (int l = 0; l < lists(); l++) {
    const size_t at = (size_t)r * model_.kv_heads + l;
    const int count = short_counts_[at];
    choose(r, l, combined(scores, score_stride_, l, count - 1, mine.total), &selected_[at * columns_], count, mine);
  }
}

void DecodeLayer::prepare_scorer(Lane& mine, int r, bool with_codes) {
  const char* q = args_.score_q ? args_.score_q + token_row(r) * args_.score_q_row_stride
                                : args_.q + token_row(r) * args_.q_row_stride;
  const int64_t head_stride = (int64_t)model_.head_dim * element_size(model_.type);
  Scorer& scorer = mine.scorer;
  if (mine.run != runs_ || mine.row != r) {
    if (in_codes()) mine.codes.prepare(model_, layer_->digests, kernels_, q, head_stride);
    else if (scores_bytes()) scorer.prepare_bytes(model_, layer_->bytes, kernels_, aggregate_, q, head_stride);
    else scorer.prepare(model_, layer_->digests, kernels_, per_head_, aggregate_, q, head_stride);
    mine.run = runs_, mine.row = r, mine.has_codes = false;
  }
  if (with_codes && !mine.has_codes) mine.codes.prepare_codes(q, head_stride);
  mine.has_codes |= with_codes;
}

void DecodeLayer::score(const RowTask& task, int lane) {
  const int r = task.row;
  Lane& mine = lane_state_[lane];
  prepare_scorer(mine, r);
  // The tail page is selected whatever its score, and its digest may be in the writing right now.
  const int end = std::min(task.end, num_pages_[r] - 1);
  const int64_t* ids = &table_[(size_t)r * columns_];
  const auto page_of = [ids](int column) { return ids[column]; };
  float* scores = &scores_[(size_t)r * score_lists_ * score_stride_];
  if (in_codes()) mine.codes.coarse(page_of, task.begin, end, scores, score_stride_);
  else mine.scorer.score(page_of, task.begin, end, scores, score_stride_);
}

const float* DecodeLayer::combined(float* scores, int64_t stride, int list, int n, std::vector<float>& total) const {
  if (aggregate_ != SOFTMAX && !in_codes()) return scores + list * stride;
  const int heads = per_head_ ? model_.group : score_lists_;
  float* shares = grown(total, n + 1);
  if (aggregate_ != SOFTMAX) {
    combine_lists(aggregate_, scores + list * heads * stride, stride, heads, model_.group, n, shares);
    return shares;
  }
  add_shares(kernels_.softmax_add, scores + list * heads * stride, stride, heads, n, model_.scale, shares);
  return shares;
}

// Spans first, and by one lane, where that reads less than this row's share of the lanes would, page by page.
bool DecodeLayer::searches(int r) const {
  if (choices_[r] != OF_ALL || !row_sequences_[r] || !candidates_ || !scores_bytes()) return false;
  const int64_t wanted = (int64_t)candidates_ * budget_of(r);
  return num_pages_[r] / kSpan + wanted < num_pages_[r] / std::max(1, lanes_ / rows_);
}

void DecodeLayer::search(int r, int lane) {
  Lane& mine = lane_state_[lane];
  SpanDigests& digests = row_sequences_[r]->spans[layer_index()];
  const int pages = num_pages_[r], spans = (pages - 1) / kSpan;  // of whole pages: the last page may be growing
  const int64_t* ids = &table_[(size_t)r * columns_];
  digests.extend(model_, layer_->digests, *kernels_.base, spans, [ids](int column) { return ids[column]; });
  prepare_scorer(mine, r);
  mine.scorer.move_to(digests.bytes());
  float* of_spans = grown(mine.span_scores, (size_t)score_lists_ * (spans + 1));
  mine.scorer.score([](int span) { return span; }, 0, spans, of_spans, spans + 1);
  const int64_t wanted = std::min<int64_t>(((int64_t)candidates_ * budget_of(r) + kSpan - 1) / kSpan, spans);
  int32_t* best = grown(mine.spans, spans + 1);
  int32_t* columns = grown(mine.pages, pages);
  float* scores = grown(mine.scores, (size_t)score_lists_ * pages);
  for (int list = 0; list < (per_head_ ? model_.kv_heads : 1); list++) {
    const int found =
        select_best(combined(of_spans, spans + 1, list, spans, mine.total), spans, (int)wanted, 0, 0, best);
    best[found] = spans;  // what is in no span is a candidate too
    int count = 0;
    for (int c = 0, i = 0; c < pages; c++) {
      const int span = c / kSpan;
      while (best[i] < span && i < found) i++;
      if (span == best[i] || span >= spans || c < sinks_ || c >= pages - recent_) columns[count++] = c;
    }
    mine.scorer.move_to(layer_->bytes, per_head_ ? list : -1);
    mine.scorer.score([ids, columns](int i) { return ids[columns[i]]; }, 0, count - 1, scores, pages);
    choose(r, list, combined(scores, pages, list, count - 1, mine.total), columns, count, mine);
  }
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
  const int64_t row = (int64_t)model_.head_dim * element_size(model_.type);
  const char* k = args_.k + token_row(r) * args_.k_row_stride;
  const char* v = args_.v + token_row(r) * args_.v_row_stride;
  char* to = cache.base + page * cache.page_stride + offset * cache.token_stride;
  for (int h = 0; h < model_.kv_heads; h++, to += cache.head_stride) {
    std::memcpy(to, k + h * row, row);
    std::memcpy(to + cache.value_offset, v + h * row, row);
  }
  if (!layer_->sparse()) return;
  const bool is_whole = offset == model_.page_size - 1;
  if (!in_codes()) append_to_digest(model_, layer_->digests, page, offset, k, row);
  else if (is_whole) encode_page(model_, layer_->digests, cache, *kernels_.base, page);
  // Only whole pages are ever scored, so bytes can wait until the page is one.
  if (layer_->bytes.base && is_whole) quantize_digest(model_, layer_->digests, layer_->bytes, *kernels_.base, page);
}

void DecodeLayer::attend_all(int r) {
  int32_t* chosen = &selected_[(size_t)r * model_.kv_heads * columns_];
  counts_[r] = num_pages_[r];
  for (int c = 0; c < counts_[r]; c++) chosen[c] = c;
  job_.lists.set_row(r, 1);
  list_row(r, 0, chosen, counts_[r]);
}

void DecodeLayer::select_row(int r, int lane) {
  float* scores = &scores_[(size_t)r * score_lists_ * score_stride_];
  Lane& mine = lane_state_[lane];
  for (int l = 0; l < lists(); l++)
    choose(r, l, combined(scores, score_stride_, l, num_pages_[r] - 1, mine.total), nullptr, num_pages_[r], mine);
}

void DecodeLayer::choose(int r, int list, const float* scores, const int32_t* columns, int count, Lane& mine) {
  int32_t *chosen = &selected_[((size_t)r * model_.kv_heads + list) * columns_], *best = grown(mine.best, columns_);
  if (interval_ > 1) {
    Kept& kept = row_sequences_[r]->kept[layer_index()];
    kept.budget = budget_of(r);  // between looks it is the same
    if (choices_[r] == OF_ALL) keep(kept.looked, r, list, kShortlist, scores, columns, count, mine);
    if (choices_[r] != OF_BEST && in_codes()) keep(kept.best, r, list, kBest, scores, columns, count, mine);
  }
  counts_[r] = select_best(scores, count, budget_of(r), sinks_, recent_, best);
  for (int i = 0; i < counts_[r]; i++) chosen[i] = columns ? columns[best[i]] : best[i];  // in place: best[i] >= i
  if (list == 0) job_.lists.set_row(r, lists());
  list_row(r, list, chosen, counts_[r]);
}

void DecodeLayer::keep(Shortlist& kept, int r, int list, int times, const float* scores, const int32_t* columns,
                       int count, Lane& mine) {
  kept.lists.resize(lists());
  kept.num_pages = num_pages_[r];
  auto& pages = kept.lists[list];
  int32_t* best = grown(mine.best, columns_);
  const int wanted = (int)std::min<int64_t>((int64_t)times * budget_of(r), count);
  pages.resize(select_best(scores, count, wanted, sinks_, recent_, best));
  for (size_t i = 0; i < pages.size(); i++) pages[i] = columns ? columns[best[i]] : best[i];
}

DecodeLayer::Choice DecodeLayer::choice_of(int r) const {
  if (!row_is_sparse(r)) return NONE;
  if (interval_ == 1) return OF_ALL;
  const Kept& kept = row_sequences_[r]->kept[layer_index()];
  // A row that was dense for long meanwhile, or came back shorter, has nothing to go on with.
  const int64_t at = seq_lens_[r] + layer_index();
  const bool is_due = !can_go_on(kept.looked, r) || kept.budget != budget_of(r) ||
                      num_pages_[r] - kept.looked.num_pages > interval_ || at % interval_ == 0;
  if (is_due) return OF_ALL;
  return can_go_on(kept.best, r) && at % kBestSteps != 0 ? OF_BEST : OF_KEPT;
}

// The last pages were among those that were kept, so what came since follows them.
void DecodeLayer::recall_kept(int r) {
  const Kept& all = row_sequences_[r]->kept[layer_index()];
  const Shortlist& kept = choices_[r] == OF_BEST ? all.best : all.looked;
  for (int l = 0; l < lists(); l++) {
    const size_t at = (size_t)r * model_.kv_heads + l;
    int32_t* to = std::copy(kept.lists[l].begin(), kept.lists[l].end(), &selected_[at * columns_]);
    for (int c = kept.num_pages; c < num_pages_[r]; c++) *to++ = c;
    short_counts_[at] = (int32_t)(to - &selected_[at * columns_]);
  }
}

void DecodeLayer::list_row(int r, int list, const int32_t* pages, int count) {
  const int index = job_.lists.of(r, list);
  ListedPage* to = job_.lists.pages(index);
  for (int i = 0; i < count; i++) to[i] = {page_id(r, pages[i]), model_.page_size};
  if (count && pages[0] == 0 && !skips_.empty()) to[0].skip = (int32_t)skips_[r];
  // Ascending pages: only the last one can be the tail.
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
