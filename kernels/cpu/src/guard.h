// Functions that turn C++ exceptions into an error code and a message at the C ABI.
#pragma once
#include <exception>
#include <new>
#include <stdexcept>
#include <string>

#include "api.h"

#define HB_API extern "C" __attribute__((visibility("default")))

namespace hb {

class Pool;

std::string& last_error();  // of this thread
Pool* pool_of(hb_pool* pool);

inline void require(bool ok, const char* what) {
  if (!ok) throw std::invalid_argument(what);
}

// Returns `id` if it is below `count`. `what`: the name of the thing that the id counts, in the singular.
inline int64_t check_id(int64_t id, int64_t count, const char* what) {
  if (id < 0 || id >= count) {
    const std::string name = what;
    throw std::out_of_range(name + " id " + std::to_string(id) + " is beyond the " + std::to_string(count) + " " +
                            name + "s");
  }
  return id;
}

template <class Body>
int guarded(const Body& body) {
  try {
    body();
    return HB_OK;
  } catch (const std::bad_alloc&) {
    last_error() = "out of memory";
  } catch (const std::exception& failure) {
    last_error() = failure.what();
  }
  return HB_ERROR;
}

}  // namespace hb
