// Random partial attention jobs and their expected results, computed in a plain double loop.
#pragma once
#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <vector>

#include "api.h"
#include "check.h"

// A bf16 cache [pages, kv_heads, 2, page_size, head_dim], one partial attention job on it, and the expected result.
struct Job {
  hb_partial_args args{};
  std::vector<uint16_t> cache, q;
  std::vector<int64_t> ids, valid;
  std::vector<float> out, lse, expected_out, expected_lse;

  Job(Rng& rng, int dim, int group, int page_size, int kv_heads, int rows, int lists, int capacity) {
    const int pages = 24;
    cache = random_bf16((size_t)pages * kv_heads * 2 * page_size * dim, rng);
    q = random_bf16((size_t)rows * kv_heads * group * dim, rng);
    ids.resize((size_t)rows * lists * capacity);
    valid.resize(ids.size());
    for (int list = 0; list < rows * lists; list++) {
      const int length = (int)(rng() % (capacity + 1));
      for (int k = 0; k < capacity; k++) {
        ids[(size_t)list * capacity + k] = k < length ? (int)(rng() % pages) : -1;
        valid[(size_t)list * capacity + k] = k < length ? (k == length - 1 ? 1 + rng() % page_size : page_size) : 0;
      }
    }
    out.assign(q.size(), NAN);
    lse.assign((size_t)rows * kv_heads * group, NAN);
    args.model = {0, kv_heads, group, dim, page_size, 1.f / std::sqrt((float)dim)};
    const int64_t part = (int64_t)page_size * dim * 2;
    args.cache = {(char*)cache.data(), pages, kv_heads * 2 * part, 2 * part, part, dim * 2};
    args.q = (const char*)q.data();
    args.q_head_stride = dim * 2;
    args.q_row_stride = (int64_t)kv_heads * group * dim * 2;
    args.rows = rows;
    args.lists = lists;
    args.capacity = capacity;
    args.ids = ids.data();
    args.valid = valid.data();
    args.out = (char*)out.data();
    args.out_type = 2;
    args.out_head_stride = dim * 4;
    args.out_row_stride = (int64_t)kv_heads * group * dim * 4;
    args.lse = lse.data();
    reference();
  }

  void reference() {
    const hb_model& m = args.model;
    expected_out.assign(out.size(), 0);
    expected_lse.assign(lse.size(), -INFINITY);
    for (int r = 0; r < args.rows; r++)
      for (int head = 0; head < m.kv_heads * m.group; head++) {
        const int kv_head = head / m.group, list = r * args.lists + (args.lists > 1 ? kv_head : 0);
        const size_t item = (size_t)r * m.kv_heads * m.group + head;
        double sum = 0, maximum = -INFINITY;
        std::vector<double> acc(m.head_dim);
        for (int k = 0; k < args.capacity; k++)
          for (int t = 0; t < valid[(size_t)list * args.capacity + k]; t++) {
            const int64_t page = ids[(size_t)list * args.capacity + k];
            const uint16_t* key =
                cache.data() +
                (page * args.cache.page_stride + kv_head * args.cache.head_stride + t * args.cache.token_stride) / 2;
            const uint16_t* value = key + args.cache.value_offset / 2;
            double logit = 0;
            for (int d = 0; d < m.head_dim; d++) logit += (double)to_float(q[item * m.head_dim + d]) * to_float(key[d]);
            logit *= m.scale;
            const double top = std::max(maximum, logit), shrink = std::exp(maximum - top),
                         weight = std::exp(logit - top);
            sum = sum * shrink + weight;
            for (int d = 0; d < m.head_dim; d++) acc[d] = acc[d] * shrink + weight * to_float(value[d]);
            maximum = top;
          }
        if (sum == 0) continue;
        expected_lse[item] = (float)(maximum + std::log(sum));
        for (int d = 0; d < m.head_dim; d++) expected_out[item * m.head_dim + d] = (float)(acc[d] / sum);
      }
  }

  bool right() const {
    for (size_t i = 0; i < lse.size(); i++)
      if (!(lse[i] == expected_lse[i] || std::fabs(lse[i] - expected_lse[i]) < 1e-3)) return false;
    double error = 0, size = 1e-9;
    for (size_t i = 0; i < out.size(); i++) {
      if (std::isnan(out[i])) return false;
      error += (out[i] - expected_out[i]) * (out[i] - expected_out[i]);
      size += expected_out[i] * expected_out[i];
    }
    return std::sqrt(error / size) < 1e-2;
  }
};

inline int pick(Rng& rng, std::initializer_list<int> from) { return *(from.begin() + rng() % from.size()); }

inline Job random_job(Rng& rng) {
  const int kv_heads = pick(rng, {1, 2, 3});
  return Job(rng, pick(rng, {16, 64, 80, 96, 128, 256, 512}), 1 + rng() % 16, pick(rng, {16, 32, 64, 128}), kv_heads,
             1 + rng() % 4, pick(rng, {1, kv_heads}), 1 + rng() % 20);
}
