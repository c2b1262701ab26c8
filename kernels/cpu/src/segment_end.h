// The end of a segment of partial attention. Included after vector.h.
#pragma once
#include "vector.h"

namespace {

// Writes the outputs and log-sum-exps of a segment. maximum, sum: of each head's weights, in base 2. weighted(head,
// channel) is the weighted sum of the values, wherever the kernel keeps it.
template <class Weighted>
INLINE void write_segment(const Shape& shape, const Segment& seg, const float* maximum, const vf* sum,
                          Weighted weighted) {
  const int dim = shape.head_dim;
  for (int g = 0; g < shape.group; g++) {
    const float total = sum_of(sum[g]);
    float* out = seg.out + g * dim;
    if (!(total > 0)) {  // no page, or every logit was -inf
      memset(out, 0, dim * sizeof(float));
      seg.lse[g] = -INFINITY;
      continue;
    }
    seg.lse[g] = (maximum[g] + log2f(total)) * LN2;
    const float norm = 1.f / total;
    for (int d = 0; d < dim; d++) out[d] = weighted(g, d) * norm;
  }
}

}  // namespace
