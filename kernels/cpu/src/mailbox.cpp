#include "mailbox.h"

#include <time.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>

#include "guard.h"

namespace hb {
namespace {

constexpr int kIdleRounds = 20000;        // looks at all boxes before the thread begins to sleep: some milliseconds
constexpr long kNapNanoseconds = 50'000;  // then between two looks; a busy device asks every few hundred microseconds

uint32_t look_at(const uint32_t* flag) { return __atomic_load_n(flag, __ATOMIC_ACQUIRE); }

// Each number of a question is read once and then checked: a device that gave up may write its next question meanwhile.
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
    answered_[b] = look_at(box.asked);
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
  int idle = 0;
  while (!stop_.load(std::memory_order_relaxed)) {
    bool found = false;
    for (size_t b = 0; b < boxes_.size(); b++) {
      const uint32_t number = look_at(boxes_[b].asked);
      if (number == answered_[b]) continue;
      serve(b, number);
      answered_[b] = number;
      found = true;
    }
    if (found) {
      idle = 0;
    } else if (++idle > kIdleRounds) {
      const timespec nap{0, kNapNanoseconds};
      nanosleep(&nap, nullptr);
    } else {
      relax();
    }
  }
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
    // The device must not wait for what will never come, nor merge what an earlier step left.
    const size_t heads = (size_t)box.rows * model_.kv_heads * model_.group;
    std::memset(box.out, 0, heads * model_.head_dim * sizeof(float));
    std::fill(box.lse, box.lse + heads, -std::numeric_limits<float>::infinity());
    __atomic_store_n(box.failed + number % HB_MAIL_STEPS, number, __ATOMIC_RELEASE);
  }
  served_.fetch_add(1, std::memory_order_relaxed);
  __atomic_store_n(box.answered, number, __ATOMIC_RELEASE);
}

void MailServer::compute(const hb_mailbox& box) {
  AttendJob& job = round_.job;
  const hb_cache& cache = cache_of(box);
  job.configure(model_, cache, pool_.isa());
  const int64_t element = element_size(model_.type), head = model_.head_dim * element;
  const int64_t heads = (int64_t)model_.kv_heads * model_.group;
  job.io = {box.rows,
            nullptr,
            box.q,
            heads * head,
            head,
            (char*)box.out,
            FP32,
            heads * model_.head_dim * 4,
            model_.head_dim * 4,
            box.lse,
            box.request,
            box.generation,
            box.current};
  job.lists.reset(box.rows, model_.kv_heads, box.capacity);
  const int whole = model_.page_size;
  for (int r = 0; r < box.rows; r++) {
    job.lists.set_row(r, box.lists);
    const int64_t owner = box.ids ? r : box.request[r];
    if (owner < 0 || owner >= box.rows)
      throw std::out_of_range("row " + std::to_string(r) + " has request " + std::to_string(owner));
    for (int l = 0; l < box.lists; l++) {
      const int64_t at = owner * box.lists + l, tokens = (int64_t)read_once(box.counts + at) * (box.ids ? whole : 1);
      const int64_t count = (tokens + whole - 1) / whole;
      if (tokens < 0 || count > box.capacity)
        throw std::out_of_range("row " + std::to_string(r) + " lists " + std::to_string(count) +
                                " pages, but there is room for " + std::to_string(box.capacity));
      const int list = job.lists.of(r, l);
      ListedPage* to = job.lists.pages(list);
      for (int64_t k = 0; k < count; k++) {
        const int64_t page = box.ids ? read_once(box.ids + at * box.capacity + k) : owner * box.capacity + k;
        if (page < 0 || page >= cache.pages)
          throw std::out_of_range("page id " + std::to_string(page) + " of row " + std::to_string(r) +
                                  " is beyond the cache's " + std::to_string(cache.pages) + " pages");
        to[k] = {page, (int32_t)std::min<int64_t>(whole, tokens - k * whole)};
      }
      job.lists.count(list) = (int32_t)count;
    }
  }
  const int lanes = pool_.threads() + 1;
  job.plan(lanes);
  if (job.chunks() > 1) {
    pool_.push(round_);
    job.run(lanes - 1);
    while (!job.finished()) relax();
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
