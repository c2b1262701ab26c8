"""CUDA streams that run work in parallel with the step's stream."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def side_stream(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Launch the block's work on ``stream``, after all work launched so far on the current stream.

    If ``stream`` is None, the block's work stays on the current stream.
    """
    if stream is None:
        yield
        return
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
