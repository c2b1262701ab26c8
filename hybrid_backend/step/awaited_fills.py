"""Copies of host pages that decode rows attend in the very step in which the copies begin."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hybrid_backend.batch import sent
from hybrid_backend.config import HybridConfig
from hybrid_backend.errors import DeadlineError
from hybrid_backend.kernels.cpu import STEPS
from hybrid_backend.tiers import Tiers
from hybrid_backend.tiers.side_stream import side_stream
from hybrid_backend.tiers.state import StepState


class _Fill(NamedTuple):
    """Copies into the frames of one request in one layer: ``[n]`` int32; frame -1: no copy."""

    request: int
    layer: int
    host_pages: Tensor
    frames: Tensor


class AwaitedFills:
    """Fills frames in a CUDA stream of its own, layer by layer, while rows wait for the pages of one layer at a time.

    A step may replay a CUDA graph, which cannot wait for an event from outside. So the copies write numbers to device
    memory, and `append_tokens`, which begins each layer, waits for the number of its row (`AwaitedPages`). The pages of
    the next layer cross while this layer computes, and a row without such copies does not wait.

    Rows that wait keep processors busy, which the copies need as well. All copies are launched before the step's first
    layer, so that nothing that a copy needs is launched behind a row that waits. And fewer programs wait than the GPU
    has processors, so that a processor stays free for the copies. If more rows begin at once, the step waits for their
    copies before its first layer.
    """

    def __init__(self, config: HybridConfig, tiers: Tiers, state: StepState, layers: Iterable[int]) -> None:
        """Begin without copies; ``layers`` are those of the stacked buffers of ``state``, in order."""
        self._tiers, self._state = tiers, state
        self._deadline = config.workers.deadline_seconds
        self._positions = {layer: position for position, layer in enumerate(layers) if layer in tiers.frames.layers}
        on_gpu = tiers.device.type == "cuda"
        self._stream = torch.cuda.Stream(tiers.device) if on_gpu else None
        self._most_programs = _processors(tiers.device) - 1 if on_gpu else 0
        self._added: list[_Fill] = []
        self._begun: dict[int, tuple[list[_Fill], torch.cuda.Event | None]] = {}
        """Last copies of each request index, and the event at their end. The tensors live as long as the copies."""
        self._number = 0
        if tiers.is_async and self._positions:
            # A CPU server does not need Triton, so Triton is imported only with a GPU.
            from hybrid_backend.kernels.triton import signal

            self._signal = signal
            signal.arrive(state.awaited.arrived[:1], self._number)  # Compiled before requests come.

    def add(self, layer: int, index: int, host_pages: Tensor, frames: Tensor) -> None:
        """Add copies of ``[n]`` int32 host pages to ``[n]`` int32 frames of a request index; frame -1: no copy."""
        self._added.append(_Fill(index, layer, host_pages, frames))

    def begin(self) -> None:
        """Begin the added copies, after all work launched so far, and make their rows wait for them."""
        fills, self._added = self._added, []
        if not fills:
            return
        self._number += 1
        awaited, device = self._state.awaited, self._tiers.device
        indices = list(dict.fromkeys(fill.request for fill in fills))
        awaited.expected.index_fill_(0, sent(torch.tensor(indices), device), self._number)
        awaited.time_left.fill_(round(self._deadline * 1e9))
        done = None
        with side_stream(self._stream):
            for layer in self._positions:
                self._copy(layer, [fill for fill in fills if fill.layer == layer])
            if self._stream is not None:
                done = self._stream.record_event()
        for index in indices:
            self._begun[index] = [fill for fill in fills if fill.request == index], done
        heads = self._tiers.frames.layers[fills[0].layer].shape[1]
        if done is not None and len(indices) * heads > self._most_programs:
            torch.cuda.current_stream().wait_event(done)

    def _copy(self, layer: int, fills: list[_Fill]) -> None:
        tiers = self._tiers
        for fill in fills:
            tiers.operations.copy_pages(
                tiers.host.views[layer], tiers.frames.layers[layer], fill.host_pages, fill.frames
            )
        if tiers.is_async:
            self._signal.arrive(self._state.awaited.of(self._positions[layer]).arrived, self._number)

    def failure(
        self, number: int, request_ids: Sequence[str], indices: Sequence[int | None]
    ) -> tuple[DeadlineError | None, list[int]]:
        """Return the error of step ``number``, which the device has passed, and the rows whose pages were late.

        Args:
            number: number of the step (`StepInputs.number`).
            request_ids: requests of the rows.
            indices: request index of each row; None for a request that is gone.
        """
        late = self._state.awaited.late[number % STEPS].tolist()
        rows = [row for row, index in enumerate(indices) if index is not None and late[index] == number]
        if not rows:
            return None, []
        names = ", ".join(request_ids[row] for row in rows)
        seconds = f"workers.deadline_seconds={self._deadline}"
        return DeadlineError(f"the pages of {names} were not copied to the GPU within {seconds}"), rows

    def release(self, index: int) -> None:
        """Forget the copies of a request, whose frames are about to change. The step's stream waits for the last."""
        self._added = [fill for fill in self._added if fill.request != index]
        _, done = self._begun.pop(index, (None, None))
        if done is not None:
            torch.cuda.current_stream().wait_event(done)


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
