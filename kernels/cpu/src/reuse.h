// Rows that attend the selection of an earlier step again (Reuse in kernels/operations.py).
#pragma once
#include <cstdint>

#include "api_operations.h"

namespace hb {

// Tells whether a row of `pages` pages reuses its selection. All lists of a row have the same epoch.
inline bool reuses(const hb_reuse& reuse, int64_t row, int64_t lists, int64_t pages) {
  return reuse.epochs && pages > 0 && reuse.list_epochs[row * lists] == reuse.epochs[row];
}

}  // namespace hb
