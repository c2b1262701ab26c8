#include "attend_job.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>

#include "guard.h"
#include "kv_format.h"

namespace hb {
namespace {

constexpr int64_t kChunkBytes = 64 * 1024;  // handing over less work costs more than it saves
constexpr int kChunksPerLane = 4;
constexpr int64_t kMemoryPage = 4096, kLine = 64;
constexpr float kEmpty = -std::numeric_limits<float>::infinity();

}  // namespace

void check_model(const hb_model& m) {
  require(m.type >= BF16 && m.type <= FP32, "element type must be bf16, fp16 or fp32");
  require(m.head_dim >= 16 && m.head_dim <= kMaxHeadDim && m.head_dim % 16 == 0,
          "head_dim must be a multiple of 16 up to 512");
  require(m.group >= 1 && m.group <= kMaxGroup, "a KV head must serve 1 to 16 query heads");
  require(m.page_size >= 16 && m.page_size <= kMaxPageSize && m.page_size % 16 == 0,
          "page_size must be a multiple of 16 up to 128");
  require(m.kv_heads >= 1, "there must be a KV head");
  require(m.scale > 0 && std::isfinite(m.scale), "the softmax scale must be positive");
  require(m.kv_encoding == HB_KV_PLAIN || m.kv_encoding == HB_KV_INT8, "no such encoding of K and V");
}

Shape shape_of(const hb_model& model) {
  Shape shape{};
  shape.type = model.type;
  shape.kv_type = kv_type(model);
  shape.head_dim = model.head_dim;
  shape.group = model.group;
  return shape;
}

Kernels kernels_of(const hb_model& model, int isa) {
  require(isa_runs(isa), "this instruction set is not available on this CPU");
  require(model.type >= BF16 && model.type <= FP32, "element type must be bf16, fp16 or fp32");
  require(model.group >= 1, "a KV head must serve a query head");
  return kernels_for(isa, shape_of(model));
}

void PageLists::reset(int rows, int kv_heads, int capacity) {
  kv_heads_ = kv_heads;
  capacity_ = capacity;
  grown(pages_, (size_t)rows * kv_heads * capacity);
  counts_.assign((size_t)rows * kv_heads, 0);
  per_head_.assign(rows, 0);
}

void AttendJob::configure(const hb_model& model, const hb_cache& cache, int isa) {
  const bool same_shape = isa == isa_ && !std::memcmp(&model, &model_, sizeof model) &&
                          cache.token_stride == cache_.token_stride && cache.value_offset == cache_.value_offset;
  cache_ = cache;
  if (same_shape) return;
  isa_ = kUnconfigured;
  check_model(model);
  require(isa_runs(isa), "this instruction set is not available on this CPU");
  model_ = model;
  require(model.kv_encoding == HB_KV_PLAIN ||
              (cache.token_stride == kv_row_bytes(model) && cache.value_offset == part_bytes(model)),
          "pages in 8 bits must be contiguous");
  shape_ = {model.type,  kv_type(model),     model.head_dim,     model.group, model.page_size,
            model.scale, cache.token_stride, cache.value_offset, nullptr,     1};
  build_prefetch_order();
  shape_.prefetch_distance = (int)std::max<int64_t>(1, 16384 / head_bytes(model));
  kernels_ = kernels_for(isa, shape_);
  isa_ = isa;
}

// prefetch.h explains the table. It is padded, so that kernels which request whole doses never run past its end.
void AttendJob::build_prefetch_order() {
  const int64_t row_bytes = kv_row_bytes(model_);
  std::vector<std::vector<int32_t>> by_memory_page;
  int64_t last_page = -1, last_line = -1;
  auto add_lines = [&](int64_t begin, int64_t bytes) {
    for (int64_t b = 0; b < bytes; b += kLine) {
      const int64_t offset = begin + b;
      if (offset / kLine == last_line) continue;
      last_line = offset / kLine;
      if (offset / kMemoryPage != last_page || by_memory_page.empty()) by_memory_page.emplace_back();
      last_page = offset / kMemoryPage;
      by_memory_page.back().push_back((int32_t)offset);
    }
  };
  for (int part = 0; part < 2; part++)
    for (int t = 0; t < model_.page_size; t++)
      add_lines(part * cache_.value_offset + t * cache_.token_stride, row_bytes);
  add_lines(2 * part_bytes(model_), scale_bytes(model_));
  prefetch_order_.clear();
  for (size_t i = 0, before = 1; before != prefetch_order_.size(); i += 2) {
    before = prefetch_order_.size();
    for (const auto& lines : by_memory_page)
      for (size_t k = i; k < std::min(i + 2, lines.size()); k++) prefetch_order_.push_back(lines[k]);
  }
  const size_t asked = 2 * (size_t)model_.page_size * (row_bytes / kLine + 2) + 1024;
  prefetch_order_.resize(std::max(asked, prefetch_order_.size()), prefetch_order_.back());
  shape_.prefetch_order = prefetch_order_.data();
}

void AttendJob::plan(int lanes) {
  lanes_ = std::max(lanes, 1);
  if (lanes_ > cursor_capacity_) {
    cursors_.reset(new Cursor[lanes_]);
    cursor_capacity_ = lanes_;
  }
  items_ = io.rows * model_.kv_heads;
  grown(item_begin_, items_ + 1);
  int64_t total = 0;
  for (int i = 0; i < items_; i++) {
    item_begin_[i] = total;
    if (!is_stale(i / model_.kv_heads)) total += lists.count(list_of(i));
  }
  item_begin_[items_] = total;
  grown(refs_, total);
  if (!writes_directly()) {
    grown(item_out_, items_ * item_floats());
    grown(item_lse_, (size_t)items_ * model_.group);
  }
  cut(lanes_);
  for (int i = 0; i < items_; i++)
    if (item_begin_[i] == item_begin_[i + 1]) write_empty(i);
}

int AttendJob::most_chunks(const hb_model& model, int64_t pages, int lanes) {
  const int64_t chunks_by_size = lanes == 1 ? 1 : std::max<int64_t>(pages * head_bytes(model) / kChunkBytes, 1);
  return (int)std::min({chunks_by_size, (int64_t)kChunksPerLane * lanes, pages});
}

void AttendJob::cut(int lanes) {
  const int64_t total = item_begin_[items_];
  chunk_count_ = most_chunks(model_, total, lanes);
  grown(chunks_, chunk_count_);
  grown(segments_, items_ + chunk_count_);
  grown(part_out_, 2 * chunk_count_ * item_floats());
  grown(part_lse_, (size_t)2 * chunk_count_ * model_.group);
  parts_left_.reset(items_);
  int item = 0;
  for (int c = 0; c < chunk_count_; c++) {
    const int64_t begin = total * c / chunk_count_, end = total * (c + 1) / chunk_count_;
    while (item_begin_[item + 1] <= begin) item++;
    chunks_[c] = {begin, end, item};
    for (int i = item; i < items_ && item_begin_[i] < end; i++)
      if (item_begin_[i + 1] > item_begin_[i]) parts_left_[i].fetch_add(1, std::memory_order_relaxed);
  }
  // Each lane has a run of chunks of its own, so that a sequence stays with few threads. A thread without work then
  // takes chunks of other lanes.
  for (int lane = 0; lane < lanes; lane++) {
    cursors_[lane].next.store(chunk_count_ * lane / lanes, std::memory_order_relaxed);
    cursors_[lane].end = chunk_count_ * (lane + 1) / lanes;
  }
  done_.store(0, std::memory_order_release);
}

void AttendJob::run(int lane, const std::atomic<bool>* cancelled) {
  for (int i = 0; i < lanes_; i++) {
    Cursor& cursor = cursors_[(lane + i) % lanes_];
    for (int c; (c = cursor.next.fetch_add(1, std::memory_order_relaxed)) < cursor.end;) {
      if (!cancelled || !cancelled->load(std::memory_order_relaxed)) run_chunk(c);
      done_.fetch_add(1, std::memory_order_acq_rel);
    }
  }
}

float* AttendJob::direct_out(int item) const {
  const int row = item / model_.kv_heads, head = item % model_.kv_heads * model_.group;
  const int64_t out_row = io.tokens ? io.tokens[row] : row;
  return (float*)(io.out + out_row * io.out_row_stride + head * io.out_head_stride);
}

float* AttendJob::direct_lse(int item) const {
  const int64_t row = item / model_.kv_heads, head = item % model_.kv_heads;
  return io.lse + ((io.lse_by_token ? io.tokens[row] : row) * model_.kv_heads + head) * model_.group;
}

void AttendJob::run_chunk(int c) {
  const Chunk& chunk = chunks_[c];
  Segment* segments = &segments_[chunk.first_item + c];
  int count = 0;
  int item = chunk.first_item;
  for (int64_t unit = chunk.begin; unit < chunk.end; item++) {
    const int64_t begin = item_begin_[item], end = std::min(item_begin_[item + 1], chunk.end);
    if (begin == item_begin_[item + 1]) continue;
    const int row = item / model_.kv_heads, head = item % model_.kv_heads;
    const bool whole = begin >= chunk.begin && item_begin_[item + 1] <= chunk.end;
    Segment& seg = segments[count++];
    seg.q = io.q + (io.tokens ? io.tokens[row] : row) * io.q_row_stride + head * model_.group * io.q_head_stride;
    seg.q_head_stride = io.q_head_stride;
    seg.first = (int)(unit - chunk.begin);
    seg.count = (int)(end - unit);
    if (!whole) {
      const size_t slot = 2 * (size_t)c + (begin < chunk.begin ? 0 : 1);
      seg.out = &part_out_[slot * item_floats()];
      seg.lse = &part_lse_[slot * model_.group];
    } else if (writes_directly()) {
      seg.out = direct_out(item);
      seg.lse = direct_lse(item);
    } else {
      seg.out = &item_out_[item * item_floats()];
      seg.lse = &item_lse_[(size_t)item * model_.group];
    }
    const ListedPage* listed = lists.pages(list_of(item)) + (unit - begin);
    const char* base = (io.bases ? io.bases[row] : cache_.base) + head * cache_.head_stride;
    for (int p = 0; p < seg.count; p++)
      refs_[unit + p] = {base + listed[p].id * cache_.page_stride, listed[p].tokens, listed[p].skip};
    unit = end;
  }
  kernels_.attend(&shape_, segments, count, &refs_[chunk.begin], (int)(chunk.end - chunk.begin));

  item = chunk.first_item;
  for (; item < items_ && item_begin_[item] < chunk.end; item++) {
    if (item_begin_[item] == item_begin_[item + 1]) continue;
    const bool whole = item_begin_[item] >= chunk.begin && item_begin_[item + 1] <= chunk.end;
    if (!whole) {
      if (parts_left_[item].fetch_sub(1, std::memory_order_acq_rel) == 1) finish_split_item(item);
    } else if (is_stale(item / model_.kv_heads)) {
      write_empty(item);
    } else if (!writes_directly()) {
      write_item(item, &item_out_[item * item_floats()], &item_lse_[(size_t)item * model_.group]);
    }
  }
}

// Merges the parts of an item. An item is the last item of its first chunk (slot 1), and the first item of all later
// chunks (slot 0).
void AttendJob::finish_split_item(int item) {
  if (is_stale(item / model_.kv_heads)) return write_empty(item);
  const int64_t begin = item_begin_[item], end = item_begin_[item + 1];
  const int dim = model_.head_dim;
  int first = 0;
  while (chunks_[first].end <= begin) first++;
  int last = first;
  while (chunks_[last].end < end) last++;
  auto slot = [&](int c) { return 2 * (size_t)c + (begin < chunks_[c].begin ? 0 : 1); };
  // The sum overwrites the first part, which no other thread reads.
  float* out = &part_out_[slot(first) * item_floats()];
  float* lse = &part_lse_[slot(first) * model_.group];
  for (int g = 0; g < model_.group; g++) {
    float top = kEmpty;
    for (int c = first; c <= last; c++) top = std::max(top, part_lse_[slot(c) * model_.group + g]);
    if (top == kEmpty) continue;  // all parts are empty, so the first part is the result: 0 and -inf
    float sum = 0;
    for (int c = first; c <= last; c++) {
      const float weight = std::exp(part_lse_[slot(c) * model_.group + g] - top);
      const float* part = &part_out_[slot(c) * item_floats() + (size_t)g * dim];
      float* to = out + (size_t)g * dim;
      sum += weight;
      if (c == first)
        for (int d = 0; d < dim; d++) to[d] *= weight;
      else
        for (int d = 0; d < dim; d++) to[d] += weight * part[d];
    }
    const float norm = 1.f / sum;
    for (int d = 0; d < dim; d++) out[(size_t)g * dim + d] *= norm;
    lse[g] = top + std::log(sum);
  }
  write_item(item, out, lse);
}

void AttendJob::add_sinks(int item, float* out, float* lse) const {
  const float* sinks = io.sinks + item % model_.kv_heads * model_.group;
  for (int g = 0; g < model_.group; g++) {
    if (sinks[g] == kEmpty) continue;
    const float share = 1.f / (1.f + std::exp(sinks[g] - lse[g]));  // the keys' share of the softmax; 0 without keys
    for (int d = 0; d < model_.head_dim; d++) out[(size_t)g * model_.head_dim + d] *= share;
    lse[g] = std::max(sinks[g], lse[g]) + std::log1p(std::exp(-std::abs(sinks[g] - lse[g])));
  }
}

void AttendJob::write_item(int item, float* out, float* lse) {
  if (io.sinks) add_sinks(item, out, lse);
  char* to = (char*)direct_out(item);
  if (io.out_head_stride == (int64_t)element_size(io.out_type) * model_.head_dim)
    kernels_.base->convert(io.out_type, out, to, (int)item_floats());
  else
    for (int g = 0; g < model_.group; g++)
      kernels_.base->convert(io.out_type, out + (size_t)g * model_.head_dim, to + g * io.out_head_stride,
                             model_.head_dim);
  if (io.lse) std::memcpy(direct_lse(item), lse, model_.group * sizeof(float));
}

void AttendJob::write_empty(int item) {
  if (io.lse) std::fill_n(direct_lse(item), model_.group, kEmpty);
  if (!io.zero_empty) return;
  char* to = (char*)direct_out(item);
  for (int g = 0; g < model_.group; g++)
    std::memset(to + g * io.out_head_stride, 0, (size_t)model_.head_dim * element_size(io.out_type));
}

}  // namespace hb
