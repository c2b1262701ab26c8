"""Residency of pages: copies to frames when a request begins to decode, new pages, and the end of a request."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Protocol

import torch
from torch import Tensor

from hybrid_backend.batch import DecodeRows, ModelSpec, PrefillRow, Step, sent
from hybrid_backend.config import HybridConfig
from hybrid_backend.step.admission import FRESH, Admission, Filling, age_importance
from hybrid_backend.step.buffers import StepBuffers
from hybrid_backend.step.fills import Fills
from hybrid_backend.tiers import Tiers


class Residency(Protocol):
    """Decides which pages the frames of the running requests hold."""

    def saw_prompt(self, layer: int, row: PrefillRow, q: Tensor) -> None:
        """Take note of a prefill chunk that was attended in ``layer`` with ``q`` ``[chunk, heads, head_dim]``."""

    def begin_prompts(self, step: Step) -> None:
        """Give frames to the prefill chunks of a step, after `admit` and `open` of the same step."""

    def admit(self, request_id: str, index: int, table: Tensor, seq_len: int) -> int:
        """Fill the frames of a request that begins to decode, in all layers; return the number of pages copied at once.

        Args:
            request_id: the engine's id of the request.
            index: request index (`FramePool.index`).
            table: block table ``[1, pages]`` int32 of the sequence.
            seq_len: tokens of the sequence, including the one that the step computes.
        """

    def lacks(self, index: int) -> bool:
        """Tell whether a request began to decode without all of its pages on the device."""

    def open(self, rows: DecodeRows, indices: list[int]) -> int:
        """Prepare the frames for a step whose inputs are written; return the number of copied pages.

        ``indices`` are the request indices of the decode rows (`FramePool.index`).
        """

    def release(self, request_id: str, index: int | None) -> None:
        """Forget a request that ended; ``index`` is its request index, or None if the request has not decoded."""

    @property
    def shared_pages(self) -> int | None:
        """Pages in the frames of one layer if all requests share the frames; None if each request has its own."""


class MappedResidency:
    """Residency in which a page may be in any frame of its request, in each layer a different one.

    A prompt keeps its KV in frames (`PromptFrames`). A request begins with its most important pages (`Admission`). The
    pages that its prompt left on the device are resident at once, and the others are copied in parallel with the next
    steps (`Fills`). At the beginning of a step, the recalls of earlier steps become resident, and a token that opens a
    page gets a frame for the page.
    """

    shared_pages = None
    """Always None, because each request has its own frames."""

    def __init__(
        self,
        config: HybridConfig,
        model: ModelSpec,
        tiers: Tiers,
        buffers: StepBuffers,
        fillings: Mapping[int, Filling],
        guessed_layers: Collection[int],
    ) -> None:
        """Begin without requests.

        Args:
            config: page size, sinks, and what selects pages.
            model: shapes on this rank.
            tiers: host pool and frames.
            buffers: buffers of the steps.
            fillings: what becomes, in each layer, of pages that a request does not find on the device.
            guessed_layers: layers whose missing pages the CPU attends with a predicted query. A request that fits its
                frames is exact, so it does not begin without a page in these layers.
        """
        self._config, self._tiers, self._state = config, tiers, buffers.state
        self._maps = maps = {layer: layer_buffers.maps for layer, layer_buffers in buffers.layers.items()}
        self._awaited_fills, state = buffers.awaited_fills, buffers.state
        self._fillings, self._guessed_layers = fillings, guessed_layers
        self._admission = Admission(config, model, tiers)
        self._fills = Fills(tiers, state, {layer: position for position, layer in enumerate(maps)})
        self._lacking: set[int] = set()
        self._has_recalls = state.copies.frames.shape[2] > 0
        requests = tiers.frames.requests
        # Frames that a layer does not have get infinite importance, so that no operation evicts a page from them.
        for row, layer in enumerate(maps):
            state.empty[row, maps[layer].size :] = float("inf")
        state.maps.importance.copy_(state.empty.repeat_interleave(requests, 1))

    def saw_prompt(self, layer: int, row: PrefillRow, q: Tensor) -> None:
        self._admission.saw(layer, row, q)

    def begin_prompts(self, step: Step) -> None:
        self._tiers.begin_prompts(step)

    def admit(self, request_id: str, index: int, table: Tensor, seq_len: int) -> int:
        requests, copied = self._tiers.frames.requests, 0
        frames = self._tiers.prompt_frames.take(request_id, seq_len - 1)
        fits = table.shape[1] <= self._tiers.frames.size
        if fits and all(frame >= 0 and frame % requests == index for frame in frames):
            self._enter(index, frames)
        else:
            frames += [FRESH] * (table.shape[1] - len(frames))
            copied = self._choose(request_id, index, table, frames)
        self._admission.forget(request_id)
        return copied

    def _choose(self, request_id: str, index: int, table: Tensor, frames: list[int]) -> int:
        """Choose pages for the frames of a request; return the number of copied pages.

        ``frames`` has the frame that holds each page, -1 for none, `FRESH` for a page without tokens.
        """
        tiers, copied = self._tiers, 0
        source = sent(torch.tensor(frames, dtype=torch.int32), table.device)
        lacks_earlier, lacks_last = -1 in frames[:-1], frames[-1] == -1
        fits = len(frames) <= tiers.frames.size
        for layer, maps in self._maps.items():
            filling = self._filling(layer, fits)
            missing = self._admission.admit(layer, maps, request_id, index, table, source, filling)
            if lacks_earlier and filling == "later":
                self._fills.add(layer, index, missing)
            if lacks_last or (lacks_earlier and filling == "at once"):
                self._awaited_fills.add(layer, index, missing.host_pages, missing.resident)
                copied += self._absent(frames, maps.size) if filling == "at once" else 1
            if lacks_earlier and filling != "at once":
                self._lacking.add(index)
        return copied

    def _filling(self, layer: int, fits: bool) -> Filling:
        """Return what becomes of a layer's missing pages, given whether the request fits its frames."""
        filling = self._fillings[layer]
        return "at once" if filling == "later" and fits and layer in self._guessed_layers else filling

    def _absent(self, frames: list[int], size: int) -> int:
        """Count the absent pages among those that a layer without digests chooses: the first and the last ones."""
        sinks = self._config.sinks if len(frames) > size else 0
        return (frames[:sinks] + frames[sinks - min(size, len(frames)) :]).count(-1)

    def lacks(self, index: int) -> bool:
        return index in self._lacking

    def _enter(self, index: int, frames: list[int]) -> None:
        """Make all pages of a request resident in the frames that hold them, without a copy."""
        maps, pages = self._state.maps, torch.arange(len(frames), dtype=torch.int32, device=self._tiers.device)
        ids = sent(torch.tensor(frames, dtype=torch.int32), self._tiers.device)
        maps.frame_of[:, index, : len(frames)] = ids
        maps.page_of[:, ids.long()] = pages
        maps.importance[:, ids.long()] = age_importance(pages, self._config)

    def open(self, rows: DecodeRows, indices: list[int]) -> int:
        operations, maps, inputs = self._tiers.operations, self._state.maps, self._state.inputs
        if self._has_recalls:
            operations.commit_pages(maps, self._state.copies, self._tiers.frames.generation)
        self._fills.commit()
        self._fills.begin()
        page_size, sinks = self._config.page_size, self._config.sinks
        for index, tokens in zip(indices, rows.seq_lens.tolist(), strict=True):
            if tokens % page_size == 1:
                self._fills.make_room(index)
        operations.open_pages(maps, inputs.requests, inputs.pages, inputs.positions, page_size, sinks)
        return 0

    def release(self, request_id: str, index: int | None) -> None:
        self._admission.forget(request_id)
        self._tiers.prompt_frames.release(request_id)
        if index is not None:
            self._fills.release(index)
            self._lacking.discard(index)
            maps, requests = self._state.maps, self._tiers.frames.requests
            maps.frame_of[:, index] = -1
            maps.page_of[:, index::requests] = -1
            maps.importance[:, index::requests] = self._state.empty


class FixedResidency:
    """Residency in which the method fixes the frame of each page, the same in all layers.

    Several pages of a request may share a frame, which then holds the latest of these pages. The map from pages to
    frames never changes. A prompt keeps its KV in frames (`PromptFrames`). Pages that lie in other frames than the
    method's are copied on the device when the request begins to decode.

    Args:
        tiers: host pool and frames.
        buffers: buffers of the steps; of the residency maps only ``frame_of`` is written.
        frame_of: function from logical pages to frames (`FixedFrames.frame_of`).
        admitted_pages: function from the pages of a sequence to the pages that the request begins to decode with
            (`FixedFrames.held_pages`).
        keeps_prompts: prompts attend their earlier tokens in frames; false for a method that attends prompts itself.
    """

    shared_pages = None
    """Always None, because each request has its own frames."""

    def __init__(
        self,
        tiers: Tiers,
        buffers: StepBuffers,
        frame_of: Callable[[Tensor], Tensor],
        admitted_pages: Callable[[int], Tensor],
        keeps_prompts: bool,
    ) -> None:
        self._tiers, self._frame_of, self._admitted_pages = tiers, frame_of, admitted_pages
        self._keeps_prompts, self._awaited_fills, maps = keeps_prompts, buffers.awaited_fills, buffers.maps
        requests, columns = maps.frame_of.shape[1:]
        first = torch.arange(requests, dtype=torch.int32, device=maps.frame_of.device)
        pages = torch.arange(columns, dtype=torch.int32, device=maps.frame_of.device)
        maps.frame_of.copy_(tiers.frames.ids(first[:, None], frame_of(pages)))

    def saw_prompt(self, layer: int, row: PrefillRow, q: Tensor) -> None:
        """Do nothing, because the frame of a page does not depend on queries."""

    def begin_prompts(self, step: Step) -> None:
        if self._keeps_prompts:
            self._tiers.begin_prompts(step)

    def admit(self, request_id: str, index: int, table: Tensor, seq_len: int) -> int:
        tiers, source = self._tiers, self._tiers.prompt_frames.take(request_id, seq_len - 1)
        pages = [page for page in self._admitted_pages(table.shape[1]).tolist() if page < len(source)]
        targets = tiers.frames.ids(torch.tensor(index), self._frame_of(torch.tensor(pages))).tolist()
        moves = [(source[page], to) for page, to in zip(pages, targets, strict=True) if source[page] not in (-1, to)]
        missing = [(page, to) for page, to in zip(pages, targets, strict=True) if source[page] == -1]
        if moves:
            self._move(*self._columns(moves))
        if missing:
            absent, frames = self._columns(missing)
            host_pages, frames = table[0, absent].contiguous(), frames.int()
            for layer in tiers.frames.layers:
                self._awaited_fills.add(layer, index, host_pages, frames)
        return len(missing) * len(tiers.frames.layers)

    def _columns(self, pairs: list[tuple[int, int]]) -> Tensor:
        return sent(torch.tensor(pairs).T.contiguous(), self._tiers.device)

    def _move(self, frames: Tensor, to: Tensor) -> None:
        """Copy pages from some frames to others in all layers. A frame may be in both lists."""
        for store in self._tiers.frames.layers.values():
            store.index_copy_(0, to, store.index_select(0, frames))

    def lacks(self, index: int) -> bool:
        """Return False, because all pages that the method attends on the device are there from the first step on."""
        return False

    def open(self, rows: DecodeRows, indices: list[int]) -> int:
        """Return 0, because the frame of a new page is already in the map."""
        return 0

    def release(self, request_id: str, index: int | None) -> None:
        """Forget the prompt. Frames stay as they are: the next request reads only those that it has written."""
        self._tiers.prompt_frames.release(request_id)
