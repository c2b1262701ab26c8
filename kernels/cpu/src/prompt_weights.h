// Weights that a prompt's last queries give to the keys before them: the products of prompt.h around a softmax over
// spans of keys. Included once per ISA.
#pragma once
#include "prompt.h"

namespace {

// Rows of packed queries. They stand at the beginning of the scratch memory; packed keys follow.
inline int padded_rows(const PromptBlock& b, int unit_rows) {
  return (b.tokens * b.group + unit_rows - 1) / unit_rows * unit_rows;
}

template <class Unit>
void pack_prompt(const PromptBlock* b) {
  pack_queries<Unit>(*b, b->scratch, padded_rows(*b, Unit::ROWS));
}

// Extends the largest product and the sum of weights of one query by n products; NaN counts as -inf.
INLINE void extend_span(float* s, int n, float scale, float& top, float& sum) {
  const float best = largest_in(s, n);
  if (best > top) {
    sum *= exp2f((top - best) * scale);
    top = best;
  }
  if (top == -INFINITY) return;
  vf total = {};
  for (int t = 0; t < n; t += LANES) total += exp2_of((larger(*(const vf*)&s[t], splat(-INFINITY)) - top) * scale);
  sum += sum_of(total);
}

template <class Unit>
void weigh_prompt(const WeighBlock* block) {
  const PromptBlock& b = block->prompt;
  constexpr int ROWS = Unit::ROWS;
  const int cells = b.head_dim / Unit::DEPTH, live = b.tokens * b.group, rows = padded_rows(b, ROWS);
  const int keys = (int)(block->end - block->begin), n = (keys + PANEL - 1) / PANEL * PANEL;
  const float scale = b.scale * LOG2E;
  float* k = b.scratch + (int64_t)rows * b.head_dim;
  alignas(64) float s[ROWS * KEYS];
  alignas(64) float of_head[kMaxGroup * KEYS];
  if (block->weights) memset(of_head, 0, b.group * KEYS * sizeof(float));
  [[maybe_unused]] const typename Unit::Session session;
  pack_keys<Unit>(b, k, nullptr, block->begin, block->begin, block->end);
  for (int r = 0; r < rows; r += ROWS) {
    Unit::logits(b.scratch + r * cells, k, cells, n, s);
    for (int i = 0; i < ROWS && r + i < live; i++) {
      const int row = r + i;
      float* products = s + i * KEYS;
      const int64_t seen = b.first + row / b.group + 1 - block->begin;
      for (int64_t t = seen < 0 ? 0 : seen < keys ? seen : keys; t < n; t++) products[t] = -INFINITY;
      if (!block->weights) {
        extend_span(products, n, scale, block->top[row], block->sum[row]);
      } else if (block->sum[row] > 0) {
        const float top = block->top[row], share = 1.f / (block->sum[row] * (float)b.tokens);
        float* to = of_head + row % b.group * KEYS;
        for (int t = 0; t < n; t += LANES)
          *(vf*)&to[t] += exp2_of((larger(*(const vf*)&products[t], splat(-INFINITY)) - top) * scale) * share;
      }
    }
  }
  if (!block->weights) return;
  for (int t = 0; t < keys; t++) {
    float largest = of_head[t];
    for (int g = 1; g < b.group; g++) largest = of_head[g * KEYS + t] > largest ? of_head[g * KEYS + t] : largest;
    block->weights[t] = largest;
  }
}

template <class Unit>
constexpr PromptKernels prompt_kernels() {
  return {attend_prompt<Unit>, pack_prompt<Unit>, weigh_prompt<Unit>};
}

}  // namespace
