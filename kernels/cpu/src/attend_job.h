// Partial attention of many items, each one KV head of one row. Threads claim chunks of the work; the parts of an item
// are merged by log-sum-exp.
#pragma once
#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "api.h"
#include "dispatch.h"
#include "memory.h"

namespace hb {

// Throws std::invalid_argument for a shape that no kernel has.
void check_model(const hb_model& model);
// Returns the part of a shape by which kernels are chosen; its strides are 0.
Shape shape_of(const hb_model& model);
// Throws std::invalid_argument for an instruction set that this CPU lacks.
Kernels kernels_of(const hb_model& model, int isa);

// A page of a list: its id, and the tokens to attend, which are skip..tokens - 1.
struct ListedPage {
  int64_t id;
  int32_t tokens;
  int32_t skip = 0;
};

// The lists of all rows. Row r has one list for all KV heads, or one per KV head.
class PageLists {
 public:
  void reset(int rows, int kv_heads, int capacity);
  void set_row(int row, int lists) { per_head_[row] = lists > 1; }
  int of(int row, int head) const { return row * kv_heads_ + (per_head_[row] ? head : 0); }
  ListedPage* pages(int list) { return pages_.data() + (size_t)list * capacity_; }
  int32_t& count(int list) { return counts_[list]; }

 private:
  int kv_heads_ = 0, capacity_ = 0;
  std::vector<ListedPage> pages_;
  std::vector<int32_t> counts_;
  std::vector<char> per_head_;
};

class AttendJob {
 public:
  // Sets model, cache and kernels. Throws std::invalid_argument for a shape that no kernel has.
  void configure(const hb_model& model, const hb_cache& cache, int isa);

  struct Io {
    int rows;
    const int64_t* tokens;  // row of q and out per row, or null
    const char* q;
    int64_t q_row_stride, q_head_stride;
    char* out;
    int out_type;
    int64_t out_row_stride, out_head_stride;
    float* lse;  // [rows, heads] or null
    const int64_t *request, *generation, *current;
    const float* sinks = nullptr;  // [heads] or null: one more key without a value, for rows that have a key
    bool lse_by_token = false;     // lse is indexed by `tokens`, as q and out are
    bool zero_empty = true;  // otherwise out is not written where lse becomes -inf, because it is not read there
    const char* const* bases = nullptr;  // [rows] page 0 of each row, in the layout of the cache; null: the cache's
  };
  Io io{};
  PageLists lists;

  // Returns the largest number of chunks of a job with so many pages in all items.
  static int most_chunks(const hb_model& model, int64_t pages, int lanes);
  // Cuts the work into chunks for up to `lanes` threads. Throws std::out_of_range for a page that the cache lacks.
  void plan(int lanes);
  // Computes chunks until none is left to claim, beginning with those of `lane`. Many threads may run this at once.
  void run(int lane, const std::atomic<bool>* cancelled = nullptr);
  bool finished() const { return done_.load(std::memory_order_acquire) == chunk_count_; }
  int chunks() const { return chunk_count_; }
  const Shape& shape() const { return shape_; }

 private:
  struct Chunk {
    int64_t begin, end;  // units: pages of all items, one after the other
    int first_item;
  };
  struct alignas(64) Cursor {
    std::atomic<int> next{0};
    int end = 0;
  };

  void build_prefetch_order();
  void cut(int lanes);
  void run_chunk(int chunk);
  void finish_split_item(int item);
  void add_sinks(int item, float* out, float* lse) const;
  void write_item(int item, float* out, float* lse);
  void write_empty(int item);
  // The owner of the generations may free a request while its job runs.
  bool is_stale(int row) const {
    return io.current && __atomic_load_n(&io.current[io.request[row]], __ATOMIC_RELAXED) != io.generation[row];
  }
  int list_of(int item) const { return lists.of(item / model_.kv_heads, item % model_.kv_heads); }
  size_t item_floats() const { return (size_t)model_.group * model_.head_dim; }
  bool writes_directly() const {
    return io.out_type == FP32 && io.out_head_stride == 4 * model_.head_dim && io.lse && !io.sinks;
  }
  float* direct_out(int item) const;
  float* direct_lse(int item) const;

  hb_model model_{};
  hb_cache cache_{};
  static constexpr int kUnconfigured = kChosen - 1;
  int isa_ = kUnconfigured;
  Shape shape_{};
  Kernels kernels_{};
  std::vector<int32_t> prefetch_order_;

  int items_ = 0, chunk_count_ = 0, lanes_ = 1;
  std::vector<int64_t> item_begin_;
  std::vector<Chunk> chunks_;
  std::vector<PageRef> refs_;
  std::vector<Segment> segments_;  // slot i + chunk: the segments of a chunk are contiguous
  std::vector<float> part_out_, part_lse_;  // two per chunk: its first and its last item may be split
  std::vector<float> item_out_, item_lse_;  // whole items that need a conversion
  AtomicArray parts_left_;
  std::unique_ptr<Cursor[]> cursors_;  // one per lane
  int cursor_capacity_ = 0;
  std::atomic<int> done_{0};
};

}  // namespace hb
