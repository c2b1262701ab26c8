// How a decode step (decode.h) selects each row's pages: scores, spans, shortlists, top-k.
#include <algorithm>

#include "decode.h"

namespace hb {
namespace {

constexpr int kShortlist = 4;   // pages per page of budget that a step which scores all pages keeps
constexpr int kBest = 2;        // pages per page of budget that a step which scores such a shortlist by codes keeps
constexpr int kBestSteps = 2;   // every so many tokens the whole shortlist is scored again

}  // namespace

// Selects shortlists of the row's lists by the coarse scores of codes.
void DecodeLayer::shorten(int r, int lane) {
  const int pages = num_pages_[r], num_wanted = (int)std::min<int64_t>((int64_t)kShortlist * budget_of(r), pages);
  const size_t lists_at = (size_t)r * score_lists_ * score_stride_;
  float* scores = &scores_[lists_at];
  std::copy(scores, scores + (size_t)score_lists_ * score_stride_,
            &coarse_scores_[lists_at]);  // the shares overwrite the scores
  for (int l = 0; l < lists(); l++) {
    const float* shares = combined(scores, score_stride_, l, pages - 1, lane_state_[lane].total);
    const size_t index = (size_t)r * model_.kv_heads + l;
    short_counts_[index] = select_best(shares, pages, num_wanted, sinks_, recent_, &selected_[index * columns_]);
  }
}

void DecodeLayer::run_fine(const FineTask& task, int lane) {
  const int r = task.row;
  Lane& state = lane_state_[lane];
  const int64_t* ids = &table_[(size_t)r * columns_];
  const int32_t* columns = &selected_[((size_t)r * model_.kv_heads + std::max(task.list, 0)) * columns_];
  const size_t lists_at = (size_t)r * score_lists_ * score_stride_;
  float* scores = &scores_[lists_at];
  prepare_scorer(state, r, in_codes());
  const auto page_of = [ids, columns](int i) { return ids[columns[i]]; };
  if (in_codes()) {
    const Coarse before{&coarse_scores_[lists_at], columns};
    state.codes.estimate(page_of, task.list, task.begin, task.end, scores, score_stride_,
                         choices_[r] == OF_ALL ? &before : nullptr);
  } else if (scores_byte_digests() || task.list < 0) {
    if (scores_byte_digests()) state.scorer.move_to(layer_->byte_digests, task.list);
    state.scorer.score(page_of, task.begin, task.end, scores, score_stride_);
  } else {  // this scorer scores all lists at once, although each list has pages of its own
    float* all = grown(state.scores, (size_t)score_lists_ * columns_);
    state.scorer.score(page_of, task.begin, task.end, all, columns_);
    const int heads = aggregate_ == SOFTMAX ? model_.group : 1;
    for (int i = task.list * heads; i < (task.list + 1) * heads; i++)
      std::copy(all + (size_t)i * columns_ + task.begin, all + (size_t)i * columns_ + task.end,
                scores + i * score_stride_ + task.begin);
  }
  if (row_left_[r].fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  for (int l = 0; l < lists(); l++) {
    const size_t index = (size_t)r * model_.kv_heads + l;
    const int count = short_counts_[index];
    choose(r, l, combined(scores, score_stride_, l, count - 1, state.total), &selected_[index * columns_], count,
           state);
  }
}

void DecodeLayer::prepare_scorer(Lane& state, int r, bool with_codes) {
  const char* q = args_.score_q ? args_.score_q + token_row(r) * args_.score_q_row_stride
                                : args_.q + token_row(r) * args_.q_row_stride;
  const int64_t head_stride = (int64_t)model_.head_dim * element_size(model_.type);
  Scorer& scorer = state.scorer;
  if (state.run != runs_ || state.row != r) {
    if (in_codes()) state.codes.prepare(model_, layer_->digests, kernels_, q, head_stride);
    else if (scores_byte_digests())
      scorer.prepare_byte_digests(model_, layer_->byte_digests, kernels_, aggregate_, q, head_stride);
    else scorer.prepare(model_, layer_->digests, kernels_, per_head_, aggregate_, q, head_stride);
    state.run = runs_, state.row = r, state.has_codes = false;
  }
  if (with_codes && !state.has_codes) state.codes.prepare_codes(q, head_stride);
  state.has_codes |= with_codes;
}

void DecodeLayer::score(const RowTask& task, int lane) {
  const int r = task.row;
  Lane& state = lane_state_[lane];
  prepare_scorer(state, r);
  // The growing page is always selected, and another thread may be writing its digest.
  const int end = std::min(task.end, num_pages_[r] - 1);
  const int64_t* ids = &table_[(size_t)r * columns_];
  const auto page_of = [ids](int column) { return ids[column]; };
  float* scores = &scores_[(size_t)r * score_lists_ * score_stride_];
  if (in_codes()) state.codes.coarse(page_of, task.begin, end, scores, score_stride_);
  else state.scorer.score(page_of, task.begin, end, scores, score_stride_);
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

// A row is searched by one lane, spans first, if this reads less than scoring the row's pages by its share of the
// lanes.
bool DecodeLayer::searches(int r) const {
  if (choices_[r] != OF_ALL || !row_sequences_[r] || !candidates_ || !scores_byte_digests()) return false;
  const int64_t num_wanted = (int64_t)candidates_ * budget_of(r);
  return num_pages_[r] / kSpan + num_wanted < num_pages_[r] / std::max(1, lanes_ / rows_);
}

void DecodeLayer::search(int r, int lane) {
  Lane& state = lane_state_[lane];
  SpanDigests& spans_of_row = row_sequences_[r]->spans[layer_index()];
  const int pages = num_pages_[r],
            spans = (pages - 1) / kSpan;  // spans of whole pages only; the last page may be growing
  const int64_t* ids = &table_[(size_t)r * columns_];
  spans_of_row.extend(model_, layer_->digests, *kernels_.base, spans, [ids](int column) { return ids[column]; });
  prepare_scorer(state, r);
  state.scorer.move_to(spans_of_row.digests());
  float* of_spans = grown(state.span_scores, (size_t)score_lists_ * (spans + 1));
  state.scorer.score([](int span) { return span; }, 0, spans, of_spans, spans + 1);
  const int64_t num_wanted = std::min<int64_t>(((int64_t)candidates_ * budget_of(r) + kSpan - 1) / kSpan, spans);
  int32_t* best = grown(state.spans, spans + 1);
  int32_t* columns = grown(state.pages, pages);
  float* scores = grown(state.scores, (size_t)score_lists_ * pages);
  for (int list = 0; list < (per_head_ ? model_.kv_heads : 1); list++) {
    const int num_best =
        select_best(combined(of_spans, spans + 1, list, spans, state.total), spans, (int)num_wanted, 0, 0, best);
    best[num_best] = spans;  // pages in no span are candidates, too
    int count = 0;
    for (int c = 0, i = 0; c < pages; c++) {
      const int span = c / kSpan;
      while (best[i] < span && i < num_best) i++;
      if (span == best[i] || span >= spans || c < sinks_ || c >= pages - recent_) columns[count++] = c;
    }
    state.scorer.move_to(layer_->byte_digests, per_head_ ? list : -1);
    state.scorer.score([ids, columns](int i) { return ids[columns[i]]; }, 0, count - 1, scores, pages);
    choose(r, list, combined(scores, pages, list, count - 1, state.total), columns, count, state);
  }
}

void DecodeLayer::select_row(int r, int lane) {
  float* scores = &scores_[(size_t)r * score_lists_ * score_stride_];
  Lane& state = lane_state_[lane];
  for (int l = 0; l < lists(); l++)
    choose(r, l, combined(scores, score_stride_, l, num_pages_[r] - 1, state.total), nullptr, num_pages_[r], state);
}

void DecodeLayer::choose(int r, int list, const float* scores, const int32_t* columns, int count, Lane& state) {
  int32_t *chosen = &selected_[((size_t)r * model_.kv_heads + list) * columns_], *best = grown(state.best, columns_);
  if (interval_ > 1) {
    Kept& shortlist = row_sequences_[r]->kept[layer_index()];
    shortlist.budget = budget_of(r);  // the budget does not change between steps that score all pages
    if (choices_[r] == OF_ALL) keep(shortlist.looked, r, list, kShortlist, scores, columns, count, state);
    if (choices_[r] != OF_BEST && in_codes()) keep(shortlist.best, r, list, kBest, scores, columns, count, state);
  }
  counts_[r] = select_best(scores, count, budget_of(r), sinks_, recent_, best);
  for (int i = 0; i < counts_[r]; i++)
    chosen[i] = columns ? columns[best[i]] : best[i];  // may be in place, because best[i] >= i
  if (list == 0) job_.lists.set_row(r, lists());
  list_row(r, list, chosen, counts_[r]);
}

void DecodeLayer::keep(Shortlist& shortlist, int r, int list, int times, const float* scores, const int32_t* columns,
                       int count, Lane& state) {
  shortlist.lists.resize(lists());
  shortlist.num_pages = num_pages_[r];
  auto& pages = shortlist.lists[list];
  int32_t* best = grown(state.best, columns_);
  const int num_wanted = (int)std::min<int64_t>((int64_t)times * budget_of(r), count);
  pages.resize(select_best(scores, count, num_wanted, sinks_, recent_, best));
  for (size_t i = 0; i < pages.size(); i++) pages[i] = columns ? columns[best[i]] : best[i];
}

DecodeLayer::Choice DecodeLayer::choice_of(int r) const {
  if (!row_is_sparse(r)) return NONE;
  if (interval_ == 1) return OF_ALL;
  const Kept& shortlist = row_sequences_[r]->kept[layer_index()];
  // A shortlist is too old for a row that was dense for long, or that is shorter than it was.
  const int64_t index = seq_lens_[r] + layer_index();
  const bool is_due = !can_go_on(shortlist.looked, r) || shortlist.budget != budget_of(r) ||
                      num_pages_[r] - shortlist.looked.num_pages > interval_ || index % interval_ == 0;
  if (is_due) return OF_ALL;
  return can_go_on(shortlist.best, r) && index % kBestSteps != 0 ? OF_BEST : OF_KEPT;
}

// A shortlist contains the last pages of its step, so the newer pages follow them.
void DecodeLayer::recall_kept(int r) {
  const Kept& all = row_sequences_[r]->kept[layer_index()];
  const Shortlist& shortlist = choices_[r] == OF_BEST ? all.best : all.looked;
  for (int l = 0; l < lists(); l++) {
    const size_t index = (size_t)r * model_.kv_heads + l;
    int32_t* to = std::copy(shortlist.lists[l].begin(), shortlist.lists[l].end(), &selected_[index * columns_]);
    for (int c = shortlist.num_pages; c < num_pages_[r]; c++) *to++ = c;
    short_counts_[index] = (int32_t)(to - &selected_[index * columns_]);
  }
}

}  // namespace hb
