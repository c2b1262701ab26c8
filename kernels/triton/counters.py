"""What the kernels of a step count by themselves, so that nobody reads lists back to count them.

A layer's counters are one row ``[len(Counters._fields)]`` int64 on the device, each added to by whichever kernel knows
the number anyway. A kernel that is given none counts nothing.
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
        """The host's, on which the interpreter runs."""
        return tl.full([], time.perf_counter_ns(), tl.int64)

else:

    @triton.jit
    def clock() -> Any:
        """Nanoseconds, the same on all of the device."""
        return cuda.globaltimer()
