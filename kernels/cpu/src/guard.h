// C++ exceptions stop at the C ABI and become an error code and a message.
#pragma once
#include <exception>
#include <new>
#include <string>

#include "api.h"

#define HB_API extern "C" __attribute__((visibility("default")))

namespace hb {

class Pool;

std::string& last_error();  // of this thread
Pool* pool_of(hb_pool* pool);

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
