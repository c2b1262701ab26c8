#include "mailbox.h"

#include <time.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>

#include "guard.h"

namespace hb {
namespace {

// A busy device asks every few hundred microseconds, and steps are a few milliseconds apart at most. So the thread
// sleeps between two polls only if no question came for longer.
constexpr int64_t kIdleNanoseconds = 5'000'000;
constexpr long kNapNanoseconds = 50'000;

constexpr float kEmpty = -std::numeric_limits<float>::infinity();

uint32_t look_at(const uint32_t* flag) { return __atomic_load_n(flag, __ATOMIC_ACQUIRE); }

// Each number of a question is read once and then checked, since a device that gave up may already write its next
// question.
int32_t read_once(const int32_t* from) { return __atomic_load_n(from, __ATOMIC_RELAXED); }

const hb_cache& cache_of(const hb_mailbox& box) {
  return box.layer ? box.caches[check_id(read_once(box.layer), box.caches_count, "layer")] : box.cache;
}

}  // namespace

MailServer::MailServer(Pool& pool, const hb_model& model, const hb_mailbox* boxes, int count, int cpu)
    : pool_(pool), model_(model), boxes_(boxes, boxes + count), answered_(count), errors_(count) {
  for (int b = 0; b < count; b++) {
    const hb_mailbox& box = boxes_[b];
    const hb_cache* caches = box.layer ? box.caches : &box.cache;
    for (int c = 0; c < (box.layer ? box.caches_count : 1); c++) round_.job.configure(model_, caches[c], pool_.isa());
    if (box.lists != 1 && box.lists != model_.kv_heads) throw std::invalid_argument("lists must be 1 or kv_heads");
    if (box.rows < 1 || box.capacity < 1) throw std::invalid_argument("a mailbox has rows and room for pages");
    if (!box.ids && !box.request)
      throw std::invalid_argument("lists that the host keeps are found by the rows' requests");
    if (box.whole &&
        (box.host.page_stride != box.cache.page_stride || box.host.head_stride != box.cache.head_stride ||
         box.host.value_offset != box.cache.value_offset || box.host.token_stride != box.cache.token_stride))
      throw std::invalid_argument("host pages must have the layout of the lists' pages");
    answered_[b] = look_at(box.asked_flag);
  }
  thread_ = std::thread([this, cpu] { loop(cpu); });
}

MailServer::~MailServer() {
  stop_ = true;
  thread_.join();
}

std::string MailServer::error(int box) {
  std::lock_guard<std::mutex> lock(error_mutex_);
  return errors_[box];
}

void MailServer::loop(int cpu) {
  if (cpu >= 0) pin_to(cpu);
  int64_t last = nanoseconds();  // end of the last job
  for (unsigned looks = 0; !stop_.load(std::memory_order_relaxed); looks++) {
    bool has_served = false;
    for (size_t b = 0; b < boxes_.size(); b++) {
      const uint32_t number = look_at(boxes_[b].asked_flag);
      if (number == answered_[b]) continue;
      serve(b, number);
      answered_[b] = number;
      has_served = true;
    }
    if (has_served) last = nanoseconds();
    if (has_served || looks % 64 || nanoseconds() - last < kIdleNanoseconds) {
      relax();
      continue;
    }
    const timespec nap{0, kNapNanoseconds};
    while (!stop_.load(std::memory_order_relaxed) && !any_asks()) nanosleep(&nap, nullptr);
  }
}

bool MailServer::any_asks() const {
  for (size_t b = 0; b < boxes_.size(); b++)
    if (look_at(boxes_[b].asked_flag) != answered_[b]) return true;
  return false;
}

void MailServer::serve(size_t index, uint32_t number) {
  const hb_mailbox& box = boxes_[index];
  try {
    compute(box);
  } catch (const std::exception& failure) {
    {
      std::lock_guard<std::mutex> lock(error_mutex_);
      errors_[index] = failure.what();
    }
    // The device must neither wait for an answer that will never come, nor merge the partial of an earlier step.
    for (int64_t r = 0; r < box.rows; r++) write_empty(box, r);
    __atomic_store_n(box.failed + number % HB_MAIL_STEPS, number, __ATOMIC_RELEASE);
  }
  served_.fetch_add(1, std::memory_order_relaxed);
  __atomic_store_n(box.answered, number, __ATOMIC_RELEASE);
}

// A captured graph asks about all rows that it was captured with, few of which may be live. A padding row costs a check
// of its generation and an lse.
void MailServer::find_rows(const hb_mailbox& box) {
  const int64_t unit = box.ids ? 1 : model_.page_size;
  rows_.clear();
  requests_.clear();
  generations_.clear();
  counts_.clear();
  whole_.clear();
  for (int64_t r = 0; r < box.rows; r++) {
    const int64_t request = box.request ? __atomic_load_n(box.request + r, __ATOMIC_RELAXED) : r;
    if (!box.ids && (request < 0 || request >= box.rows))
      throw std::out_of_range("row " + std::to_string(r) + " has request " + std::to_string(request));
    const int64_t generation = box.current ? __atomic_load_n(box.generation + r, __ATOMIC_RELAXED) : 0;
    bool is_live = false, is_whole = false;
    if (!box.current || __atomic_load_n(box.current + request, __ATOMIC_RELAXED) == generation) {
      // The host writes the counts before it clears `whole`.
      const int32_t whole = box.whole ? __atomic_load_n(box.whole + request, __ATOMIC_ACQUIRE) : 0;
      is_whole = whole > 0;
      for (int l = 0; l < box.lists; l++) {
        const int64_t count =
            is_whole ? (l ? 0 : whole * unit) : read_once(box.counts + (box.ids ? r : request) * box.lists + l);
        const int64_t pages = (count + unit - 1) / unit;
        if (count < 0 || pages > box.capacity)
          throw std::out_of_range("row " + std::to_string(r) + " lists " + std::to_string(pages) +
                                  " pages, but there is room for " + std::to_string(box.capacity));
        counts_.push_back(count);
        is_live |= count > 0;
      }
      if (!is_live) counts_.resize(counts_.size() - box.lists);
    }
    if (!is_live) {
      write_empty(box, r);
      continue;
    }
    rows_.push_back(r);
    requests_.push_back(request);
    generations_.push_back(generation);
    whole_.push_back(is_whole);
  }
}

void MailServer::write_empty(const hb_mailbox& box, int64_t row) const {
  const int64_t heads = (int64_t)model_.kv_heads * model_.group;
  std::fill_n(box.lse + row * heads, heads, kEmpty);
  const int64_t bytes = heads * model_.head_dim * element_size(model_.type);
  if (box.layer) std::memset(box.out + row * bytes, 0, bytes);
}

void MailServer::compute(const hb_mailbox& box) {
  const hb_cache& cache = cache_of(box);
  find_rows(box);
  if (rows_.empty()) return;
  AttendJob& job = round_.job;
  job.configure(model_, cache, pool_.isa());
  const int64_t element = element_size(model_.type), head = model_.head_dim * element;
  const int64_t heads = (int64_t)model_.kv_heads * model_.group;
  job.io = {(int)rows_.size(), rows_.data(),        box.q,        heads * head, head,
            box.out,           model_.type,         heads * head, head,         box.lse,
            requests_.data(),  generations_.data(), box.current};
  job.io.lse_by_token = true;
  job.io.zero_empty = box.layer != nullptr;
  if (box.whole) {
    bases_.clear();
    for (const char is_whole : whole_) bases_.push_back(is_whole ? box.host.base : cache.base);
    job.io.bases = bases_.data();
  }
  job.lists.reset((int)rows_.size(), model_.kv_heads, box.capacity);
  const int64_t whole = model_.page_size;
  for (size_t row = 0; row < rows_.size(); row++) {
    const int64_t r = rows_[row];
    const int lists = whole_[row] ? 1 : box.lists;
    const int64_t pages = whole_[row] ? box.host.pages : cache.pages;
    job.lists.set_row((int)row, lists);
    for (int l = 0; l < lists; l++) {
      const int64_t tokens = counts_[row * box.lists + l] * (box.ids ? whole : 1), count = (tokens + whole - 1) / whole;
      const int list = job.lists.of((int)row, l);
      ListedPage* to = job.lists.pages(list);
      for (int64_t k = 0; k < count; k++) {
        const int64_t page = whole_[row] ? read_once(box.whole_ids + requests_[row] * box.whole_stride + k)
                             : box.ids   ? read_once(box.ids + (r * box.lists + l) * box.capacity + k)
                                         : requests_[row] * box.capacity + k;
        if (page < 0 || page >= pages)
          throw std::out_of_range("page id " + std::to_string(page) + " of row " + std::to_string(r) +
                                  " is beyond the cache's " + std::to_string(pages) + " pages");
        to[k] = {page, (int32_t)std::min(whole, tokens - k * whole)};
      }
      job.lists.count(list) = (int32_t)count;
    }
  }
  const int lanes = pool_.threads() + 1;
  job.plan(lanes);
  if (job.chunks() > 1) {
    pool_.push(round_, job.chunks() - 1);
    job.run(lanes - 1);
    Backoff backoff;
    while (!job.finished()) backoff.pause();
    pool_.retire(round_);
  } else {
    job.run(0);
  }
}

}  // namespace hb

struct hb_mail : hb::MailServer {
  using hb::MailServer::MailServer;
};

HB_API hb_mail* hb_mail_new(hb_pool* pool, const hb_model* model, const hb_mailbox* boxes, int count, int cpu) {
  hb_mail* mail = nullptr;
  hb::guarded([&] { mail = new hb_mail(*hb::pool_of(pool), *model, boxes, count, cpu); });
  return mail;
}
HB_API void hb_mail_free(hb_mail* mail) { delete mail; }
HB_API int64_t hb_mail_served(hb_mail* mail) { return mail->served(); }
HB_API const char* hb_mail_error(hb_mail* mail, int box) {
  static thread_local std::string text;
  text = mail->error(box);
  return text.c_str();
}
