"""The wait for pages on their way to frames, in plain Python, for implementations that run on the host."""

from __future__ import annotations

import time

from torch import Tensor

from hybrid_backend.kernels.operations import AwaitedPages

_POLL_SECONDS = 1e-4


def await_pages(awaited: AwaitedPages | None, requests: Tensor | None, pages: Tensor) -> None:
    """Wait until the pages of all rows are in their frames, or until no time is left (`AwaitedPages`).

    Args:
        awaited: copies of one layer; None: no row waits.
        requests: ``[rows]`` int32 request index of each row, given with ``awaited``.
        pages: ``[rows]`` int32 host page of each row's new token; -1: a padding row, which does not wait.
    """
    if awaited is None:
        return
    assert requests is not None
    steps, number = len(awaited.late), int(awaited.number)
    for request in requests[pages >= 0].tolist():
        began, left = time.perf_counter_ns(), int(awaited.time_left)
        if awaited.arrived >= awaited.expected[request]:
            continue
        while (waited := time.perf_counter_ns() - began) < left and awaited.arrived < awaited.expected[request]:
            time.sleep(_POLL_SECONDS)
        awaited.time_left.fill_(max(left - waited, 0))
        if awaited.arrived < awaited.expected[request]:
            awaited.late[number % steps, request] = number
