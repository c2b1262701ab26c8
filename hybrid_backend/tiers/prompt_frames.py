"""Frames that hold the KV of running prompts, so that a later prefill chunk does not read the KV over the bus.

A prompt gets the request index that its request will decode with, and fills the frames of that index first. Then it
borrows the frames of indices that no request has. A request that needs a borrowed index takes the frames back, and the
prompt's pages in these frames are streamed from the host pool from then on. Every page is in the host pool as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hybrid_backend.batch import PrefillRow, Step, sent
from hybrid_backend.tiers.frames import FramePool


@dataclass
class _Prompt:
    """A running prompt. ``frames`` has the frame of each page, -1 for none; ``spare`` are frames without a page."""

    index: int
    tokens: int
    frames: list[int]
    spare: list[int]
    lent: set[int] = field(default_factory=set)


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

    def __init__(self, pool: FramePool, page_size: int, device: torch.device) -> None:
        """Keep the pool; nothing is allocated, because prompts use frames that exist anyway."""
        self._pool, self._page_size, self._device = pool, page_size, device
        self._prompts: dict[str, _Prompt] = {}
        self._chunks: dict[str, ChunkPages] = {}
        self.token_frames: Tensor | None = None
        """``[tokens]`` int32 frame of each token of the open step, -1 for none; None: no token has a frame."""

    def begin(self, step: Step) -> None:
        """Give frames to the pages that the prefill chunks of a step write, before any layer runs."""
        self._chunks.clear()
        # An index that a new prompt takes may be lent to another prompt of the step, so all indices are taken first.
        for row in step.prefill:
            self._reserve(row)
        frames = torch.full((step.num_tokens,), -1, dtype=torch.int32)
        for row in step.prefill:
            prompt = self._prompts.get(row.request_id)
            if prompt is not None:
                self._extend(prompt, row)
                self._chunks[row.request_id] = self._split(prompt, row)
                pages = torch.arange(row.earlier_tokens, row.seq_len) // self._page_size
                frames[row.start : row.end] = torch.tensor(prompt.frames, dtype=torch.int32)[pages]
        self.token_frames = sent(frames, self._device) if self._chunks else None

    @property
    def running(self) -> int:
        """Number of prompts that have frames."""
        return len(self._prompts)

    def chunk(self, request_id: str) -> ChunkPages | None:
        """Return the pages of a request's chunk in the open step; None if the prompt has no frames."""
        return self._chunks.get(request_id)

    def take(self, request_id: str, tokens: int) -> list[int]:
        """Return the frame of each page of a request that begins to decode after ``tokens`` tokens; -1 for no frame.

        The prompt is forgotten. The frames of other indices in the result stay as they are until the next step begins.
        """
        prompt = self._prompts.get(request_id)
        frames = [-1] * -(-tokens // self._page_size)
        if prompt is not None and (prompt.tokens, prompt.index) == (tokens, self._pool.index(request_id)):
            self._drop_lost(request_id, prompt)
            frames = prompt.frames
        self.release(request_id)
        return frames

    def release(self, request_id: str) -> None:
        """Forget a prompt, and give back the frames that it has borrowed."""
        self._prompts.pop(request_id, None)
        self._chunks.pop(request_id, None)
        self._pool.return_lent(request_id)

    def _reserve(self, row: PrefillRow) -> None:
        """Take the request index of a prompt that begins, and frames that it has lost from one that goes on."""
        prompt = self._prompts.get(row.request_id)
        if prompt is not None and prompt.tokens != row.earlier_tokens:
            self.release(row.request_id)  # A step failed, or the engine computes the prompt again.
            prompt = None
        index = self._pool.reserve(row.request_id)
        if index is None:
            self.release(row.request_id)
        elif prompt is None or prompt.index != index:
            self._pool.return_lent(row.request_id)
            pages = -(-row.earlier_tokens // self._page_size)
            spare = self._frames_of(index)
            self._prompts[row.request_id] = _Prompt(index, row.earlier_tokens, [-1] * pages, spare)

    def _frames_of(self, index: int) -> list[int]:
        """Return the frames of a request index, the first one last."""
        return [index + slot * self._pool.requests for slot in reversed(range(self._pool.size))]

    def _drop_lost(self, request_id: str, prompt: _Prompt) -> None:
        """Forget the frames of indices that requests have taken back."""
        lost = prompt.lent - self._pool.lent(request_id)
        if lost:
            prompt.lent -= lost
            requests = self._pool.requests
            prompt.frames = [-1 if frame % requests in lost else frame for frame in prompt.frames]
            prompt.spare = [frame for frame in prompt.spare if frame % requests not in lost]

    def _extend(self, prompt: _Prompt, row: PrefillRow) -> None:
        """Give frames to the pages that a chunk begins: spare ones, borrowed ones, then those of the oldest pages."""
        self._drop_lost(row.request_id, prompt)
        size, before = self._page_size, row.earlier_tokens
        first, pages = -(-before // size), -(-row.seq_len // size)
        new = pages - len(prompt.frames)
        while len(prompt.spare) < new and (index := self._pool.lend(row.request_id)) is not None:
            prompt.lent.add(index)
            prompt.spare = self._frames_of(index) + prompt.spare
        for page in range(before // size):
            if len(prompt.spare) >= new:
                break
            if prompt.frames[page] >= 0:
                prompt.spare.append(prompt.frames[page])
                prompt.frames[page] = -1
        prompt.frames += [-1] * new
        # If the chunk itself is larger than all frames, the last pages get them: the request decodes with these first.
        for page in range(max(first, pages - len(prompt.spare)), pages):
            prompt.frames[page] = prompt.spare.pop()
        prompt.tokens = row.seq_len

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
