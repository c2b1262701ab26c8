// The tile instructions in plain C++, so that isa_amx.cpp and isa_amx_prompt.cpp can be tested on CPUs without AMX and
// under sanitizers. -DHB_EMULATE_TILES makes amx.h include this; it needs AVX-512 all the same. What it cannot show is
// the compiler's treatment of the real instructions (see memory_barrier() there).
#pragma once
#include <stdint.h>
#include <string.h>

namespace tiles {

struct Config {
  uint8_t palette, start_row, reserved[14];
  uint16_t bytes[16];
  uint8_t rows[16];
};
inline thread_local Config config;
inline thread_local uint8_t data[8][16][64];

inline void load_config(const void* from) {
  memcpy(&config, from, sizeof config);
  memset(data, 0, sizeof data);
}
inline void release() { memset(&config, 0, sizeof config); }
inline void zero(int t) { memset(data[t], 0, sizeof data[t]); }
inline void load(int t, const void* from, int64_t stride) {
  zero(t);
  for (int r = 0; r < config.rows[t]; r++) memcpy(data[t][r], (const char*)from + r * stride, config.bytes[t]);
}
inline void store(int t, void* to, int64_t stride) {
  for (int r = 0; r < config.rows[t]; r++) memcpy((char*)to + r * stride, data[t][r], config.bytes[t]);
}
inline float bf16(const uint8_t* at) {
  uint16_t half;
  memcpy(&half, at, 2);
  const uint32_t bits = (uint32_t)half << 16;
  float x;
  memcpy(&x, &bits, 4);
  return x;
}
// c[m][n] += sum over pairs k of a[m][k] . b[k][n]
inline void dpbf16ps(int c, int a, int b) {
  for (int m = 0; m < config.rows[c]; m++)
    for (int k = 0; k < config.bytes[a] / 4; k++)
      for (int n = 0; n < config.bytes[c] / 4; n++) {
        float sum;
        memcpy(&sum, &data[c][m][4 * n], 4);
        sum += bf16(&data[a][m][4 * k]) * bf16(&data[b][k][4 * n]);
        sum += bf16(&data[a][m][4 * k + 2]) * bf16(&data[b][k][4 * n + 2]);
        memcpy(&data[c][m][4 * n], &sum, 4);
      }
}

}  // namespace tiles

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig tiles::load_config
#define _tile_release tiles::release
#define _tile_zero tiles::zero
#define _tile_loadd tiles::load
#define _tile_stored tiles::store
#define _tile_dpbf16ps tiles::dpbf16ps
