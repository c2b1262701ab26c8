// A millisecond of distrust before a fast path becomes the default.
#pragma once

namespace hb {

// The best ISA that runs here and, if it is AMX, computes what the next one computes on a few small jobs. Tile
// instructions are where compilers go wrong silently (see memory_barrier() in amx.h), and a library built by one
// compiler meets CPUs that its builder never saw.
int best_checked_isa();

}  // namespace hb
