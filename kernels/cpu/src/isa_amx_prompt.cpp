// Prompts in bf16 on AMX tiles: 32 queries by 32 keys, or channels, at once. prompt.h does the rest in AVX-512.
#include "amx.h"
#include "pairs_avx512.h"
#include "prompt_weights.h"

namespace {

// Two tiles of 16 queries times two tiles of 16 keys or channels, 32 numbers deep: each tile that is loaded is used
// twice, so that the loads do not take longer than the products.
struct Tiles {
  static constexpr int DEPTH = 2, ROWS = 32, QUERY_STRIDE = 1, DEEP = 16;  // cells of a tile's row
  struct Session {
    Session() {
      TileConfig config;
      for (int t = 0; t < 8; t++) config.set(t, 16, 64);
      config.load();
    }
    ~Session() { _tile_release(); }  // idle tiles would make every context switch dearer
  };

  static float* query(float* q, int r, int cells) { return q + r * cells; }

  // Sums in tiles 4..7 += left[32][cells] * right[cells][32]; strides in floats.
  INLINE void multiply(const float* left, int left_stride, const float* right, int right_stride, int cells) {
    for (int c = 0; c < cells; c += DEEP, left += DEEP, right += DEEP * right_stride) {
      tile_load<0>(left, left_stride * 4);
      tile_load<2>(right, right_stride * 4);
      _tile_dpbf16ps(4, 0, 2);
      tile_load<3>(right + 16, right_stride * 4);
      _tile_dpbf16ps(5, 0, 3);
      tile_load<1>(left + 16 * left_stride, left_stride * 4);
      _tile_dpbf16ps(6, 1, 2);
      _tile_dpbf16ps(7, 1, 3);
    }
  }
  INLINE void store(float* to, int stride) {
    tile_store<4>(to, stride * 4);
    tile_store<5>(to + 16, stride * 4);
    tile_store<6>(to + 16 * stride, stride * 4);
    tile_store<7>(to + 16 * stride + 16, stride * 4);
  }

  INLINE void logits(const float* q, const float* k, int cells, int n, float* s) {
    memory_barrier();
    for (int t = 0; t < n; t += 32) {
      tile_zero<4>(), tile_zero<5>(), tile_zero<6>(), tile_zero<7>();
      multiply(q, cells, k + t / PANEL * PANEL * cells + t % PANEL, PANEL, cells);
      store(s + t, KEYS);
    }
    memory_barrier();
  }
  INLINE void add_values(const float* s, const float* v, int cells, int dim, float* o) {
    memory_barrier();
    for (int d = 0; d < dim; d += 32) {
      tile_load<4>(o + d, dim * 4);
      tile_load<5>(o + d + 16, dim * 4);
      tile_load<6>(o + d + 16 * dim, dim * 4);
      tile_load<7>(o + d + 16 * dim + 16, dim * 4);
      multiply(s, KEYS, v + d, dim, cells);
      store(o + d, dim);
    }
    memory_barrier();
  }
};
static_assert(Tiles::ROWS <= kPromptRows && PANEL % 32 == 0, "");

}  // namespace

extern "C" const PromptKernels hb_amx_prompt = prompt_kernels<Tiles>();
