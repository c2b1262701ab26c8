// A check of a fast path, about a millisecond, before it becomes the default.
#pragma once

namespace hb {

// Returns the best instruction set that this CPU runs. AMX counts only if it computes the same as the next instruction
// set on a few small jobs: compilers have miscompiled tile instructions silently (memory_barrier() in amx.h), and the
// CPU may be newer than the machine of the build.
int best_checked_isa();

}  // namespace hb
