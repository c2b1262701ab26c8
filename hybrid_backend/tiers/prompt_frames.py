"""Frames that hold the KV of running prompts, so that a later prefill chunk does not read the KV over the bus.

A prompt fills the frames that it will decode with, and then borrows frames that no request uses (`FrameSupply`). A
decoding request takes borrowed frames back when it needs them. Every page is in the host pool as well. A page that has
no frame, such as one of a prefix-cache hit, is copied to a frame if the prompt has one to spare (`PromptFills`). All
other pages are streamed from the host pool, chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hybrid_backend.batch import PrefillRow, Step, sent
from hybrid_backend.tiers.frame_supply import FrameSupply


@dataclass
class _Prompt:
    """A running prompt.

    Attributes:
        index: index whose frames the prompt owns (`FrameSupply.reserve`).
        tokens: tokens of the prompt that were computed, or found in a prefix cache.
        own: own frames, in the order of the pages that prefer them.
        frames: frame of each page, -1 for none.
        spare: frames without a page, in the order of a dict's keys.
    """

    index: int
    tokens: int
    own: list[int]
    frames: list[int]
    spare: dict[int, None]

    def put(self, pages: Sequence[int]) -> None:
        """Give a spare frame to each of some pages. If all pages fit the own frames, they lie there in order."""
        later = []
        for page in pages:
            if page < len(self.own) and self.own[page] in self.spare:
                self.frames[page] = self.own[page]
                del self.spare[self.own[page]]
            else:
                later.append(page)
        for page in later:
            self.frames[page] = self.spare.popitem()[0]


class Fills(NamedTuple):
    """Earlier pages of the prompts of a step that are copied from the host pool to frames, the same in all layers.

    Attributes:
        pages: ``[n]`` int32 host pages.
        frames: ``[n]`` int32 frames.
        has_begun_page: a chunk of the step goes on with one of the pages.
    """

    pages: Tensor
    frames: Tensor
    has_begun_page: bool


@dataclass(frozen=True)
class ChunkPages:
    """Pages of a prefill chunk's sequence, split into those in a store on the device and those on the host alone.

    Attributes:
        ids: ``[n]`` int32 pages of the store, on the device; full pages first.
        earlier: number of tokens before the chunk that ``ids`` holds.
        tokens: number of tokens that ``ids`` holds with the chunk's own tokens, which are the last ones; 0 if the store
            lacks some of the chunk's own tokens.
        missing: ``[m]`` int64 host pages of the tokens before the chunk that the store lacks.
        missing_tokens: number of tokens in ``missing``.
        first_frame: frame of the page that an earlier chunk began and this chunk goes on with; -1: no such frame.
    """

    ids: Tensor
    earlier: int
    tokens: int
    missing: Tensor
    missing_tokens: int
    first_frame: int = -1


class PromptFrames:
    """Frames of the running prompts, the same frame of a page in all layers."""

    def __init__(self, supply: FrameSupply, page_size: int, sinks: int, device: torch.device) -> None:
        """Keep the supply; nothing is allocated, because prompts use frames that exist anyway.

        Args:
            supply: frames that prompts may use.
            page_size: tokens of a page.
            sinks: first pages, which keep their frames longest because every method begins to decode with them.
            device: device of the frames.
        """
        self.supply = supply
        self._page_size, self._sinks, self._device = page_size, sinks, device
        self._prompts: dict[str, _Prompt] = {}
        self._chunks: dict[str, ChunkPages] = {}
        self.token_frames: Tensor | None = None
        """``[tokens]`` int32 frame of each token of the open step, -1 for none; None: no token has a frame."""
        self.fills: Fills | None = None
        """Pages that the open step copies to frames; None: the step copies no page."""

    def begin(self, step: Step) -> None:
        """Give frames to the pages of the prefill chunks of a step, before any layer runs."""
        self._chunks.clear()
        # A frame that a new prompt takes may be lent to another prompt of the step, so all own frames are taken first.
        for row in step.prefill:
            self._reserve(row)
        rows = [(row, self._prompts[row.request_id]) for row in step.prefill if row.request_id in self._prompts]
        # New pages come first: they cost no copy, and a request decodes with its latest pages.
        for row, prompt in rows:
            self._extend(prompt, row)
        filled = [(row, prompt, self._refill(prompt, row)) for row, prompt in rows]
        self._list_fills([fill for fill in filled if fill[2]])
        frames = torch.full((step.num_tokens,), -1, dtype=torch.int32)
        for row, prompt in rows:
            self._chunks[row.request_id] = self._split(prompt, row)
            pages = torch.arange(row.earlier_tokens, row.seq_len) // self._page_size
            frames[row.start : row.end] = torch.tensor(prompt.frames, dtype=torch.int32)[pages]
        self.token_frames = sent(frames, self._device) if rows else None

    @property
    def running(self) -> int:
        """Number of prompts that have frames."""
        return len(self._prompts)

    def chunk(self, request_id: str) -> ChunkPages | None:
        """Return the pages of a request's chunk in the open step; None if the prompt has no frames."""
        return self._chunks.get(request_id)

    def take(self, request_id: str, tokens: int) -> list[int]:
        """Return the frame of each page of a request that begins to decode after ``tokens`` tokens; -1 for no frame.

        The prompt is forgotten. Its borrowed frames in the result stay as they are until the next step begins.
        """
        prompt = self._prompts.get(request_id)
        frames = [-1] * -(-tokens // self._page_size)
        if prompt is not None and (prompt.tokens, prompt.index) == (tokens, self.supply.index(request_id)):
            self._drop_lost(request_id, prompt)
            frames = prompt.frames
        self.release(request_id)
        return frames

    def release(self, request_id: str) -> None:
        """Forget a prompt, and give back the frames that it has borrowed."""
        self._prompts.pop(request_id, None)
        self._chunks.pop(request_id, None)
        self.supply.give_back(request_id)

    def _reserve(self, row: PrefillRow) -> None:
        """Take the request index of a prompt that begins, and frames that it has lost from one that goes on."""
        prompt = self._prompts.get(row.request_id)
        if prompt is not None and prompt.tokens != row.earlier_tokens:
            self.release(row.request_id)  # A step failed, or the engine computes the prompt again.
            prompt = None
        index = self.supply.reserve(row.request_id)
        if index is None:
            self.release(row.request_id)
        elif prompt is None or prompt.index != index:
            self.supply.give_back(row.request_id)
            own, pages = self.supply.own(index), -(-row.earlier_tokens // self._page_size)
            self._prompts[row.request_id] = _Prompt(index, row.earlier_tokens, own, [-1] * pages, dict.fromkeys(own))

    def _drop_lost(self, request_id: str, prompt: _Prompt) -> None:
        """Forget the frames that requests have taken back."""
        lost = self.supply.lost(request_id)
        if lost:
            prompt.frames = [-1 if frame in lost else frame for frame in prompt.frames]
            prompt.spare = {frame: None for frame in prompt.spare if frame not in lost}

    def _borrow(self, prompt: _Prompt, request_id: str, count: int) -> None:
        """Borrow until ``count`` frames are spare, or until nobody has a frame to lend."""
        while (needed := count - len(prompt.spare)) > 0 and (frames := self.supply.borrow(request_id, needed)):
            prompt.spare |= dict.fromkeys(frames)

    def _sinks_first(self, pages: Sequence[int]) -> list[int]:
        """Return ascending pages in the order in which they get frames: sink pages, then the last page first."""
        return [page for page in pages if page < self._sinks] + [
            page for page in reversed(pages) if page >= self._sinks
        ]

    def _extend(self, prompt: _Prompt, row: PrefillRow) -> None:
        """Give frames to the pages that a chunk begins: spare ones, borrowed ones, then those of the oldest pages."""
        self._drop_lost(row.request_id, prompt)
        size, before = self._page_size, row.earlier_tokens
        first, pages = -(-before // size), -(-row.seq_len // size)
        new = pages - len(prompt.frames)
        self._borrow(prompt, row.request_id, new)
        for page in reversed(self._sinks_first(range(before // size))):
            if len(prompt.spare) >= new:
                break
            if prompt.frames[page] >= 0:
                prompt.spare[prompt.frames[page]] = None
                prompt.frames[page] = -1
        prompt.frames += [-1] * new
        prompt.put(sorted(self._sinks_first(range(first, pages))[: len(prompt.spare)]))
        prompt.tokens = row.seq_len

    def _refill(self, prompt: _Prompt, row: PrefillRow) -> list[int]:
        """Give spare frames to earlier pages that have none, and return these pages."""
        absent = [page for page in range(-(-row.earlier_tokens // self._page_size)) if prompt.frames[page] < 0]
        self._borrow(prompt, row.request_id, len(absent))
        filled = sorted(self._sinks_first(absent)[: len(prompt.spare)])
        prompt.put(filled)
        return filled

    def _list_fills(self, filled: Sequence[tuple[PrefillRow, _Prompt, list[int]]]) -> None:
        """Set `fills` to the filled pages of the step's prompts."""
        self.fills = None
        if filled:
            device, size = filled[0][0].pages.device, self._page_size
            host_pages = [row.pages[sent(torch.tensor(pages), device)] for row, _, pages in filled]
            frames = [prompt.frames[page] for _, prompt, pages in filled for page in pages]
            has_begun_page = any(pages[-1] >= row.earlier_tokens // size for row, _, pages in filled)
            self.fills = Fills(torch.cat(host_pages).int().to(self._device), self._sent(frames), has_begun_page)

    def _split(self, prompt: _Prompt, row: PrefillRow) -> ChunkPages:
        """Return the pages of a chunk's sequence by the tier that holds them."""
        size, frames, before = self._page_size, prompt.frames, row.earlier_tokens
        full, begun = before // size, before % size
        resident = [page for page in range(full) if frames[page] >= 0]
        absent = [page for page in range(full) if frames[page] < 0]
        is_whole = all(frame >= 0 for frame in frames[full:])
        has_begun = begun > 0 and frames[full] >= 0
        listed = [frames[page] for page in resident]
        listed += frames[full:] if is_whole else frames[full : full + has_begun]
        missing_tokens = len(absent) * size
        if begun and not has_begun:
            absent, missing_tokens = [*absent, full], missing_tokens + begun
        return ChunkPages(
            ids=self._sent(listed),
            earlier=len(resident) * size + begun * has_begun,
            tokens=len(resident) * size + row.seq_len - full * size if is_whole else 0,
            missing=row.pages[sent(torch.tensor(absent, dtype=torch.int64), row.pages.device)],
            missing_tokens=missing_tokens,
            first_frame=frames[full] if has_begun else -1,
        )

    def _sent(self, numbers: Sequence[int]) -> Tensor:
        return sent(torch.tensor(numbers, dtype=torch.int32), self._device)
