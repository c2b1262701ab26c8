// The exported functions of api.h, but for those of mailboxes (mailbox.cpp).
#include "api.h"

#include <algorithm>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>

#include "decode.h"
#include "digest.h"
#include "dispatch.h"
#include "guard.h"
#include "measure.h"
#include "pool.h"
#include "selfcheck.h"

struct hb_pool : hb::Pool {
  using hb::Pool::Pool;
};
struct hb_ticket {
  hb_pool* pool;
  std::unique_ptr<hb::PartialTask> task;
};
struct hb_decode : hb::DecodeLayer {
  using hb::DecodeLayer::DecodeLayer;
};

std::string& hb::last_error() {
  static thread_local std::string text;
  return text;
}

hb::Pool* hb::pool_of(hb_pool* pool) { return pool; }

using hb::check_id;
using hb::guarded;
using hb::kernels_of;
using hb::require;

HB_API const char* hb_last_error(void) { return hb::last_error().c_str(); }
HB_API const char* hb_interface_hash(void) { return HB_INTERFACE_HASH; }
HB_API int hb_isa_count(void) { return hb::isa_count(); }
HB_API const char* hb_isa_name(int isa) { return isa >= 0 && isa < hb::isa_count() ? hb::isa_at(isa).name : ""; }
HB_API int hb_isa_runs(int isa) { return hb::isa_runs(isa); }

// --- variants --------------------------------------------------------------------------------------------------

HB_API int hb_operation_count(void) { return hb::kOperations; }
HB_API const char* hb_operation_name(int operation) { return hb::operation_name(operation); }
HB_API int hb_variant_count(int operation) { return hb::variant_count(operation); }
HB_API const char* hb_variant_name(int operation, int variant) { return hb::variant_name(operation, variant); }
HB_API int hb_variant_runs(int operation, int variant, const hb_model* model) {
  hb::Kernels kernels;
  return hb::variant_isa(operation, variant) >= hb::best_checked_isa() &&
         hb::take_variant(operation, variant, hb::shape_of(*model), kernels);
}
HB_API int hb_set_variant_order(int operation, const hb_model* model, const int* order) {
  return guarded([&] {
    hb::check_model(*model);
    const int count = hb::variant_count(operation);
    for (int i = 0; i < count; i++) {
      check_id(order[i], count, "variant");
      if (std::count(order, order + count, order[i]) > 1) throw std::invalid_argument("a variant is named twice");
    }
    hb::set_variant_order(operation, hb::shape_of(*model), {order, order + count});
  });
}
HB_API int hb_measure_variants(int operation, const hb_model* model, int rounds, double* seconds) {
  return guarded([&] { hb::measure_variants((hb::Operation)operation, *model, rounds, seconds); });
}

HB_API int hb_partial(const hb_partial_args* args, int isa) {
  return guarded([&] {
    static thread_local hb::AttendJob job;
    hb::prepare_partial(job, *args, isa, 1);
    job.run(0);
  });
}

HB_API uint64_t hb_read(const void* from, int64_t n) {
  int isa = hb::best_isa();
  while (!hb::isa_at(isa).read) isa++;
  return hb::isa_at(isa).read(from, n);
}

// --- digests ---------------------------------------------------------------------------------------------------

HB_API int hb_write_byte_digests(const hb_model* model, const hb_digests* digests, const hb_byte_digests* byte_digests,
                                 int64_t pages_total, int32_t n, const int64_t* pages) {
  return guarded([&] {
    const hb::Kernels kernels = kernels_of(*model, hb::best_isa());
    for (int i = 0; i < n; i++) check_id(pages[i], pages_total, "page");
    for (int i = 0; i < n; i++) hb::write_byte_digest(*model, *digests, *byte_digests, *kernels.base, pages[i]);
  });
}

// --- asynchronous jobs -----------------------------------------------------------------------------------------

HB_API hb_pool* hb_pool_new(int threads, const int* cpus, int isa, int64_t spin) {
  hb_pool* pool = nullptr;
  guarded([&] {
    require(threads >= 1, "a pool has at least one thread");
    require(hb::isa_runs(isa), "this instruction set is not available on this CPU");
    pool = new hb_pool(threads, cpus, isa, spin);
  });
  return pool;
}
HB_API void hb_pool_free(hb_pool* pool) { delete pool; }
HB_API void hb_pool_pause(hb_pool* pool, int paused) { pool->pause(paused != 0); }

HB_API hb_ticket* hb_submit(hb_pool* pool, const hb_partial_args* args) {
  hb_ticket* ticket = nullptr;
  guarded([&] {
    auto made = std::make_unique<hb_ticket>();
    made->pool = pool;
    made->task = pool->take_spare();
    const int lanes = pool->threads() + 1;  // whoever waits may help
    made->task->reset(*args, pool->isa(), lanes);
    const int64_t pages = (int64_t)args->rows * args->model.kv_heads * args->capacity;  // at most
    pool->push(*made->task, std::max(1, hb::AttendJob::most_chunks(args->model, pages, lanes)));
    ticket = made.release();
  });
  return ticket;
}

HB_API int hb_wait(hb_ticket* ticket, double seconds, int help) {
  const int rc = ticket->task->wait(seconds, help != 0);
  if (rc == HB_ERROR) hb::last_error() = ticket->task->error();
  return rc;
}
HB_API void hb_cancel(hb_ticket* ticket) { ticket->task->cancel(); }
HB_API int hb_ticket_idle(hb_ticket* ticket) { return ticket->pool->is_idle(*ticket->task); }
HB_API void hb_ticket_span(hb_ticket* ticket, double* started, double* ended) {
  *started = ticket->task->started();
  *ended = ticket->task->ended();
}
HB_API void hb_ticket_free(hb_ticket* ticket) {
  ticket->pool->retire(*ticket->task);
  ticket->pool->give_spare(std::move(ticket->task));
  delete ticket;
}

// --- decode ----------------------------------------------------------------------------------------------------

HB_API hb_decode* hb_decode_new(const hb_model* model, int layers, int isa) {
  hb_decode* decode = nullptr;
  guarded([&] { decode = new hb_decode(*model, layers, isa); });
  return decode;
}
HB_API void hb_decode_free(hb_decode* decode) { delete decode; }
HB_API int hb_decode_set_layer(hb_decode* decode, int layer, const hb_cache* cache, const hb_digests* digests,
                               const hb_byte_digests* byte_digests, const float* sinks) {
  return guarded([&] {
    decode->set_layer(layer, *cache, digests ? *digests : hb_digests{},
                      byte_digests ? *byte_digests : hb_byte_digests{}, sinks);
  });
}
HB_API int hb_decode_begin(hb_decode* decode, const hb_step* step) {
  return guarded([&] { decode->begin(*step); });
}
HB_API void hb_decode_forget(hb_decode* decode, int64_t sequence) { decode->forget(sequence); }
HB_API int64_t hb_decode_span_bytes(hb_decode* decode) { return decode->span_bytes(); }
HB_API int hb_decode_layer(hb_decode* decode, int layer, const hb_layer* args, hb_pool* pool, void* gomp_parallel,
                           int threads) {
  return guarded([&] { decode->run(layer, *args, pool, gomp_parallel, threads); });
}
HB_API int hb_decode_selected(hb_decode* decode, int row, int list, const int32_t** pages) {
  return decode->selected(row, list, pages);
}
