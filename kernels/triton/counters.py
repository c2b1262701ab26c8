"""Columns of a layer's counters for kernels, and the device's clock.

A layer's counters are a row ``[len(Counters._fields)]`` int64 on the device (`operations.Counters`). The kernel that
knows a number adds it, so that the host reads no list back. A kernel without counters counts nothing.
"""

from __future__ import annotations

import time
from typing import Any

import triton
import triton.language as tl
from triton.language.extra import cuda

from hybrid_backend.kernels.operations import Counters

# fmt: off
(RESIDENT_PAGES, MISSING_PAGES, RESIDENT_TOKENS, MISSING_TOKENS, RECALLED_PAGES, LOOKUPS, HITS,
 WAITED, AHEAD, ASKED_AT) = (tl.constexpr(column) for column in range(len(Counters._fields)))
# fmt: on

if triton.knobs.runtime.interpret:

    def clock() -> Any:
        """Read the host's clock in nanoseconds, because the interpreter runs on the host."""
        return tl.full([], time.perf_counter_ns(), tl.int64)

else:

    @triton.jit
    def clock() -> Any:
        """Read the clock in nanoseconds, which is the same on the whole device."""
        return cuda.globaltimer()
