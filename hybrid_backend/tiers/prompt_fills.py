"""Copies of earlier pages of running prompts from the host pool to frames, layer by layer in parallel with the step."""

from __future__ import annotations

import torch

from hybrid_backend.kernels.operations import Operations
from hybrid_backend.tiers.frames import FramePool
from hybrid_backend.tiers.host_pool import HostPool
from hybrid_backend.tiers.prompt_frames import Fills
from hybrid_backend.tiers.side_stream import side_stream


class PromptFills:
    """Copies the pages of one step to frames (`PromptFrames.fills`), on a GPU in a separate CUDA stream.

    A layer waits for its own copy alone, while the copy of the next layer is under way.
    """

    def __init__(self, host: HostPool, frames: FramePool, operations: Operations, device: torch.device) -> None:
        self._host, self._frames, self._operations = host, frames, operations
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._fills: Fills | None = None
        self._waiting = set[int]()  # Layers whose copy has not begun.
        self._begun = dict[int, torch.cuda.Event]()  # Layers whose copy the step's stream has not waited for.
        self.copied_pages = 0  # Pages copied since start, summed over layers.

    def begin(self, fills: Fills | None) -> None:
        """Take the pages of a step, whose layers have not run; None: no page."""
        self.join()
        self._fills = fills
        self._waiting = set() if fills is None else set(self._frames.layers)

    def has_begun_page(self, layer: int) -> bool:
        """Tell whether a chunk goes on with a page that is copied, so that the layer waits before it stores tokens."""
        return self._fills is not None and self._fills.has_begun_page and layer in self._frames.layers

    def is_waiting(self, layer: int) -> bool:
        """Tell whether pages must be copied for a layer, and the copy has not begun."""
        return layer in self._waiting

    def copy(self, layer: int | None) -> None:
        """Begin the copy of a layer, after all work launched so far; nothing is done if no copy waits to begin."""
        if layer is None or layer not in self._waiting:
            return
        assert self._fills is not None
        self._waiting.remove(layer)
        pages, frames, _ = self._fills
        with side_stream(self._stream):
            self._operations.copy_pages(self._host.views[layer], self._frames.layers[layer], pages, frames)
            if self._stream is not None:
                self._begun[layer] = self._stream.record_event()
        self.copied_pages += len(pages)

    def wait(self, layer: int) -> None:
        """Make the current CUDA stream wait until the pages of a layer are in their frames."""
        done = self._begun.pop(layer, None)
        if done is not None:
            torch.cuda.current_stream().wait_event(done)

    def join(self) -> None:
        """Make the current CUDA stream wait for the copies that a failed step has begun, and begin no more."""
        self._waiting.clear()
        for layer in list(self._begun):
            self.wait(layer)
