// Tile instructions with numbers as template arguments.
#pragma once
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#ifdef HB_EMULATE_TILES
#include "../tests/tiles.h"
#endif

#define ALWAYS_INLINE inline __attribute__((always_inline))

namespace {

// gcc's tile loads and stores are volatile asm WITHOUT a memory clobber: without this barrier, stores that feed a tile
// load are moved behind it or dropped, and results are silently wrong.
ALWAYS_INLINE void memory_barrier() { asm volatile("" ::: "memory"); }

// Tile numbers must be literals in the source.
#define HB_FOR_TILE(T, CALL) \
  if constexpr (T == 0) { CALL(0); } else if constexpr (T == 1) { CALL(1); } else if constexpr (T == 2) { CALL(2); } \
  else if constexpr (T == 3) { CALL(3); } else if constexpr (T == 4) { CALL(4); } else if constexpr (T == 5) { CALL(5); } \
  else if constexpr (T == 6) { CALL(6); } else { CALL(7); }

template <int T> ALWAYS_INLINE void tile_zero() {
#define CALL(N) _tile_zero(N)
  HB_FOR_TILE(T, CALL)
#undef CALL
}
template <int T> ALWAYS_INLINE void tile_load(const void* from, int64_t stride) {
#define CALL(N) _tile_loadd(N, from, stride)
  HB_FOR_TILE(T, CALL)
#undef CALL
}
template <int T> ALWAYS_INLINE void tile_store(void* to, int64_t stride) {
#define CALL(N) _tile_stored(N, to, stride)
  HB_FOR_TILE(T, CALL)
#undef CALL
}
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};

  ALWAYS_INLINE void set(int tile, int tile_rows, int tile_bytes) {
    rows[tile] = tile_rows;
    bytes[tile] = tile_bytes;
  }
  ALWAYS_INLINE void load() const {
    memory_barrier();
    _tile_loadconfig(this);
  }
};

}  // namespace
