"""Residency of whole requests in frames that all of them share."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hybrid_backend.batch import DecodeRows, PrefillRow, Step, sent
from hybrid_backend.methods.apex.placement import Placement
from hybrid_backend.step.buffers import StepBuffers
from hybrid_backend.tiers import Tiers
from hybrid_backend.tiers.frame_supply import SharedFrames


class SharedResidency:
    """Residency of whole requests, in any of the frames that all requests share.

    A frame id is the same in all layers, so that all layers have the same map.
    """

    def __init__(
        self, tiers: Tiers, buffers: StepBuffers, placement: Placement, is_settled: Callable[[int], bool]
    ) -> None:
        """Begin without requests.

        Args:
            tiers: host pool, and frames that all requests share.
            buffers: buffers of the steps; of the residency maps only ``frame_of`` is written.
            placement: requests on the device.
            is_settled: tells whether a request, by its index, is between two tokens.
        """
        self.placement = placement
        self.moved = 0
        """Requests that were evicted or came back since start."""
        self._tiers, self._frame_of, self._is_settled = tiers, buffers.maps.frame_of, is_settled
        self._awaited_fills = buffers.awaited_fills
        supply = tiers.prompt_frames.supply
        assert isinstance(supply, SharedFrames)
        self._supply = supply
        self._frames: dict[int, list[int]] = {}  # Keyed by the request's index.
        self._begun: dict[int, list[int]] = {}
        """Frames of the prompts' pages of requests that begin to decode in the open step, -1 for none, by index."""

    @property
    def shared_pages(self) -> int:
        """Frames of one layer that hold a page."""
        return sum(map(len, self._frames.values()))

    def saw_prompt(self, layer: int, row: PrefillRow, q: Tensor) -> None:
        """Do nothing, because whole requests are admitted whatever their scores."""

    def begin_prompts(self, step: Step) -> None:
        self._tiers.begin_prompts(step)

    def admit(self, request_id: str, index: int, table: Tensor, seq_len: int) -> int:
        """Return 0: `open` places the request together with the other requests of the step."""
        frames = self._tiers.prompt_frames.take(request_id, seq_len - 1)
        self._supply.keep([frame for frame in frames if frame >= 0])
        self._begun[index] = frames
        return 0

    def lacks(self, index: int) -> bool:
        """Return False, because a request on the device has all of its pages there."""
        return False

    def open(self, rows: DecodeRows, indices: list[int]) -> int:
        pages = dict(zip(rows.request_ids, rows.num_pages.tolist(), strict=True))
        index_of = dict(zip(rows.request_ids, indices, strict=True))
        settled = {name for name, index in index_of.items() if self._is_settled(index)}
        moves = self.placement.step(pages, settled)
        self.moved += len(moves.evicted) + len(moves.returned)
        for name in moves.evicted:
            evicted = self._tiers.frames.index(name)
            if evicted is not None:
                self._give_back(evicted)
        # Requests on the CPU give back what their prompts left, before other requests need frames.
        for name, index in index_of.items():
            if name not in self.placement:
                self._free_frames(self._begun.pop(index, []))
        return sum(
            self._hold(index, rows.page_table[r, : pages[name]])
            for r, (name, index) in enumerate(index_of.items())
            if name in self.placement
        )

    def release(self, request_id: str, index: int | None) -> None:
        self.placement.release(request_id)
        self._tiers.prompt_frames.release(request_id)
        if index is not None:
            self._free_frames(self._begun.pop(index, []))
            self._give_back(index)

    def _hold(self, index: int, table: Tensor) -> int:
        """Give frames to all pages of a request on the device, and return the copied pages of all layers.

        If the request had no frame, pages that its prompt did not leave on the device are copied. Otherwise the step's
        token begins the new page.
        """
        frames, source = self._frames.setdefault(index, []), self._begun.pop(index, None)
        had, new = len(frames), len(table) - len(frames)
        assert new >= 0, "a request with fewer pages than before was released"
        if not new:
            return 0
        left = [-1] * new if source is None else source + [-1] * (new - len(source))
        absent = [page for page, frame in enumerate(left) if frame < 0]
        for page, frame in zip(absent, self._supply.take(len(absent)), strict=True):
            left[page] = frame
        frames += left
        tiers = self._tiers
        self._frame_of[:, index, had : len(frames)] = sent(torch.tensor(left, dtype=torch.int32), tiers.device)
        written = len(table) if source is None else len(source)
        copied = [] if had else [page for page in absent if page < written]
        if copied:
            host_pages = table[sent(torch.tensor(copied), tiers.device)].int()
            targets = sent(torch.tensor([left[page] for page in copied], dtype=torch.int32), tiers.device)
            for layer in tiers.frames.layers:
                self._awaited_fills.add(layer, index, host_pages, targets)
        return len(copied) * len(tiers.frames.layers)

    def _give_back(self, index: int) -> None:
        self._awaited_fills.release(index)
        frames = self._frames.pop(index, None)
        if frames:
            self._free_frames(frames)
            self._frame_of[:, index] = -1

    def _free_frames(self, frames: list[int]) -> None:
        self._supply.free([frame for frame in frames if frame >= 0])
