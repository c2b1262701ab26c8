// One decode layer of a batch in one call: it writes K and V, updates digests, scores, selects and attends pages, and
// writes the output.
//
// Threads share the layer in three phases. A task of the first phase belongs to a row: it writes the row's token, and
// scores a range of the row's pages. The thread that ends a row's last task selects the row's pages. The second phase
// scores a shortlist again: with digests in codes the first phase selects a few times the budget by a part of each
// digest; and a sequence that scores all pages in every n-th step only selects from the pages that the last such step
// kept. The third phase computes the attention in chunks. The thread that ends a phase's last task plans the next one.
// No thread waits for a thread that has not claimed a task, so a worker that wakes late, or never, delays no other.
#pragma once
#include <atomic>
#include <string>
#include <unordered_map>
#include <vector>

#include "attend_job.h"
#include "codes.h"
#include "digest.h"
#include "memory.h"
#include "pool.h"

namespace hb {

class DecodeLayer : public Task {
 public:
  DecodeLayer(const hb_model& model, int layers, int isa);

  void set_layer(int layer, const hb_cache& cache, const hb_digests& digests, const hb_byte_digests& byte_digests,
                 const float* sinks);
  void begin(const hb_step& step);
  // Drops the state of a sequence that ended; its id may be used again.
  void forget(int64_t sequence) { sequences_.erase(sequence); }
  int64_t span_bytes() const;
  // Throws std::invalid_argument and std::out_of_range.
  void run(int layer, const hb_layer& args, Pool* pool, void* gomp_parallel, int threads);

  void work(int lane) override;

  int selected(int row, int list, const int32_t** pages) const;

 private:
  struct Layer {
    hb_cache cache{};
    hb_digests digests{};
    hb_byte_digests byte_digests{};
    const float* sinks = nullptr;
    bool sparse() const { return digests.base != nullptr; }
  };
  // The candidates of a row's selection. NONE: the row attends all pages. OF_ALL: all pages. OF_KEPT: the shortlist of
  // the last step that scored all pages. OF_BEST: the best pages of that shortlist by codes, as of the step before.
  enum Choice : uint8_t { NONE, OF_ALL, OF_KEPT, OF_BEST };
  struct Shortlist {
    std::vector<std::vector<int32_t>> lists;
    int32_t num_pages = 0;  // pages of the row when the shortlist was made
  };
  struct Kept {
    Shortlist looked, best;
    int32_t budget = 0;
  };
  struct Sequence {
    std::vector<SpanDigests> spans;  // per layer
    std::vector<Kept> kept;
  };
  struct RowTask {
    int row;
    bool first;  // also writes the row's new token
    int begin, end;  // pages to score
  };
  struct FineTask {
    int row, list;  // -1: all heads have one
    int begin, end;  // of the shortlist
  };

  struct Lane {
    Scorer scorer;
    CodeScorer codes;
    std::vector<float> scores, span_scores, total;
    std::vector<int32_t> spans, pages, best;
    int64_t run = 0;  // run and row whose query is prepared, and if its tables are
    int row = 0;
    bool has_codes = false;
  };

  void make_tasks(int lanes);
  void prepare_scorer(Lane& lane, int row, bool with_codes = false);
  void run_task(const RowTask& task, int lane);
  // Returns the scores of one list that select its pages: the scorer's, or combined ones, which are written to `total`.
  const float* combined(float* scores, int64_t stride, int list, int n, std::vector<float>& total) const;
  void write_token(int row);
  void score(const RowTask& task, int lane);
  void shorten(int row, int lane);
  void plan_fine();
  void run_fine(const FineTask& task, int lane);
  bool in_codes() const { return layer_->digests.format == HB_CODES; }
  int lists() const { return per_head_ ? model_.kv_heads : 1; }
  void search(int row, int lane);
  bool searches(int row) const;
  bool scores_byte_digests() const {
    return layer_->byte_digests.base && (aggregate_ == SOFTMAX || (aggregate_ == SUM && !per_head_));
  }
  void attend_all(int row);
  void select_row(int row, int lane);
  // Selects the pages of a list among `count` pages at these columns (null: all pages of the row), and keeps shortlists
  // for later steps.
  void choose(int row, int list, const float* scores, const int32_t* columns, int count, Lane& lane);
  // Keeps the columns of the best pages, `times` budgets of them, as a shortlist.
  void keep(Shortlist& kept, int row, int list, int times, const float* scores, const int32_t* columns, int count,
            Lane& lane);
  bool can_go_on(const Shortlist& kept, int row) const {
    return (int)kept.lists.size() == lists() && kept.num_pages <= num_pages_[row];
  }
  Choice choice_of(int row) const;
  void recall_kept(int row);
  // Tells if the second phase scores pages of the row.
  bool looks_twice(int row) const { return choices_[row] >= OF_KEPT || (choices_[row] == OF_ALL && in_codes()); }
  void list_row(int row, int list, const int32_t* pages, int count);
  void plan_attention();
  void fail(const char* what);

  int64_t token_row(int row) const { return tokens_.empty() ? row : tokens_[row]; }
  int64_t page_id(int row, int column) const { return table_[(size_t)row * columns_ + column]; }
  int32_t budget_of(int row) const { return budgets_[layer_index() * budget_stride_ + row]; }
  int layer_index() const { return (int)(layer_ - layers_.data()); }
  bool row_is_sparse(int row) const {
    return layer_->sparse() && budget_of(row) >= 0 && budget_of(row) < num_pages_[row];
  }

  hb_model model_;
  int isa_;
  Kernels kernels_;
  std::vector<Layer> layers_;
  bool has_codes_ = false;  // in any layer

  // The step.
  bool begun_ = false;
  int rows_ = 0, columns_ = 0, sinks_ = 0, recent_ = 0;
  int64_t lowest_page_ = 0, highest_page_ = 0;
  bool per_head_ = false;
  Aggregate aggregate_ = SUM;
  int score_lists_ = 1;  // per row: query heads with SOFTMAX or codes, else KV heads
  std::vector<int64_t> tokens_, seq_lens_, skips_, table_;
  std::vector<int32_t> budgets_, num_pages_;  // budgets: [rows], or [layers, rows] where budget_stride_ is not 0
  int64_t budget_stride_ = 0;
  int candidates_ = 0;
  int interval_ = 1;
  std::unordered_map<int64_t, Sequence> sequences_;
  std::vector<Sequence*> row_sequences_;

  // The layer.
  const Layer* layer_ = nullptr;
  std::vector<Choice> choices_;  // [rows]
  hb_layer args_{};
  AttendJob job_;
  std::vector<RowTask> tasks_;
  std::vector<FineTask> fine_tasks_;
  std::vector<int32_t> short_counts_;  // [rows, kv_heads]: how many pages of selected_ are a shortlist
  AtomicArray row_left_;
  int64_t score_stride_ = 0;
  std::vector<float> scores_, coarse_scores_;  // [rows, score_lists_, score_stride_]; the first look at codes
  std::vector<int32_t> selected_;  // [rows, kv_heads, columns]
  std::vector<int32_t> counts_;
  std::vector<Lane> lane_state_;
  int lanes_ = 1;
  int64_t runs_ = 0;
  std::atomic<int> next_task_{0}, tasks_done_{0}, next_fine_{0}, fine_done_{0}, lane_{0};
  std::atomic<bool> fine_planned_{false}, planned_{false}, failed_{false};
  std::mutex error_mutex_;
  std::string error_;
};

}  // namespace hb
