// Table-driven software prefetch of the next page: the main lever on scattered pages.
//
// The table lists the cache lines of a page's K and V in the order in which they are requested: all its 4 KB memory
// pages take turns, 128 bytes each, so that the hardware streamer of every one of them starts early and the software
// requests find their lines in L2. Page after page instead, the fill buffers cap a core at about 10 GB/s.
// A kernel requests as many lines as it reads, in small doses between its arithmetic.
#pragma once
#include <stdint.h>

struct Prefetch {
  const char* base;
  const int32_t* next;

  template <int LINES>
  inline __attribute__((always_inline)) void lines() {
#pragma GCC unroll 16
    for (int i = 0; i < LINES; i++) __builtin_prefetch(base + next[i], 0, 2);
    next += LINES;
  }

  // The lines of a page's scales, which a kernel reads beside those of its rows: `bytes` of K's and V's.
  inline __attribute__((always_inline)) void scales(int bytes) {
    for (int i = 0; i < bytes; i += 64) lines<1>();
  }

  // For a kernel step that reads BYTES per call: a step below one line asks for one line every few calls.
  template <int BYTES>
  inline __attribute__((always_inline)) void step(int call) {
    if constexpr (BYTES >= 64) {
      lines<BYTES / 64>();
    } else if (call % (64 / BYTES) == 0) {
      lines<1>();
    }
  }
};
