"""Admission: choose the pages that are copied to the device tier when a request begins to decode."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from hybrid_backend.batch import ModelSpec, PrefillRow
from hybrid_backend.config import HybridConfig
from hybrid_backend.kernels.operations import Maps, Operations
from hybrid_backend.tiers import Tiers

FRESH = -2
"""Frame of a page that has no token yet, and so needs no copy."""


Filling = Literal["at once", "later", "recall"]
"""Treatment of the chosen pages that are not on the device when a request begins to decode.

The pages are copied before the step's first layer, or copied in parallel with the next steps (`Fills`), or left to the
method, which recalls what it selects.
"""


class Missing(NamedTuple):
    """Pages of one layer that were chosen for the frames of a request. All tensors are ``[n]``.

    Attributes:
        pages: logical pages, int32.
        host_pages: host pages, int32.
        frames: int32 frame that is reserved for a page that is not on the device; -1: none is.
        importance: fp32.
        resident: int32 frame of a page that is resident but must still be copied from the host; -1: no such page.
    """

    pages: Tensor
    host_pages: Tensor
    frames: Tensor
    importance: Tensor
    resident: Tensor


class Admission:
    """Chooses the pages for the frames of a request that begins to decode, layer by layer.

    All pages of the request are chosen if all fit. Otherwise the sink pages, the recent pages and the pages with
    the highest scores are chosen. The query of the prompt's last token gives the scores. A layer without digests,
    or a request whose prompt queries are unknown, takes the last pages.

    A single query decides, because the last prefill chunk may be a single token, for example after a prefix-cache hit.
    The resident pages must not depend on how a prompt was split into chunks.
    """

    def __init__(self, config: HybridConfig, model: ModelSpec, tiers: Tiers) -> None:
        self._config, self._model, self._tiers, self._ops = config, model, tiers, tiers.operations
        self._queries: dict[str, dict[int, Tensor]] = {}
        """Last prompt query of each request id and layer, ``[1, heads, head_dim]``."""
        self._frame_tokens = tiers.frames.size * config.page_size
        """Tokens that the frames of one request hold."""

    def saw(self, layer: int, row: PrefillRow, q: Tensor) -> None:
        """Keep the last query of a prefill chunk with queries ``q`` ``[chunk, heads, head_dim]``.

        The query is kept only if the prompt does not fit into the frames of its request.
        """
        if row.seq_len > self._frame_tokens and self._tiers.has_digests(layer):
            self._queries.setdefault(row.request_id, {})[layer] = q[-1:].clone()

    def forget(self, request_id: str) -> None:
        """Drop the queries that `saw` kept for a request."""
        self._queries.pop(request_id, None)

    def admit(
        self, layer: int, maps: Maps, request_id: str, index: int, table: Tensor, source: Tensor, filling: Filling
    ) -> Missing:
        """Choose the pages of one layer for the frames of a request, and make those resident that are on the device.

        A page that is in a frame of the request stays there, and a page in a borrowed frame is copied on the device.

        Args:
            layer: index of the layer.
            maps: residency maps of the layer.
            request_id: the engine's id of the request.
            index: index of the request (`FramePool.index`).
            table: block table of the sequence, ``[1, num_pages]`` int32, including the page of the next token.
            source: ``[num_pages]`` int32 frame that holds each page (`PromptFrames.take`); -1: none; `FRESH`: the page
                has no token yet.
            filling: what becomes of the chosen pages that are not on the device.

        Returns:
            The chosen pages that are not on the device.
        """
        config, frames, num_pages = self._config, self._tiers.frames, table.shape[1]
        digests = self._tiers.digest_layer(layer)
        query = None if digests is None else self._queries.get(request_id, {}).get(layer)
        # A GPU pads the table to the width of decode steps, so that no kernel is compiled for another width.
        if table.device.type == "cuda":
            table = torch.nn.functional.pad(table, (0, maps.frame_of.shape[1] - table.shape[1]))
        pages, importance = best_pages(
            self._ops, config, query, digests, table, num_pages, maps.size, self._model.scale
        )
        source = source[pages.long()]
        # The page of the next token is always resident, even if its earlier tokens are on the host alone.
        is_resident = (source != -1) | (pages == num_pages - 1) | (filling == "at once")
        is_reserved = ~is_resident if filling == "later" else torch.zeros_like(is_resident)
        if filling == "later" and len(pages) == maps.size:
            # One frame stays free for the next page that the request begins.
            least = torch.where(is_reserved, importance, float("inf")).argmin()
            is_reserved = is_reserved.index_fill(0, least, False)
        targets = frames_for(maps, index, source)
        of_empty = torch.where(is_reserved, float("inf"), float("-inf"))
        place(maps, index, pages, targets, torch.where(is_resident, importance, of_empty), is_resident)
        store = frames.layers[layer]
        is_moved = (source >= 0) & (source != targets)
        self._ops.copy_pages(store, store, source, torch.where(is_moved, targets, -1))
        host_pages = table[0, pages.long()].contiguous()
        return Missing(
            pages, host_pages, torch.where(is_reserved, targets, -1), importance,
            torch.where(is_resident & (source == -1), targets, -1),
        )  # fmt: skip


def best_pages(
    operations: Operations,
    config: HybridConfig,
    query: Tensor | None,
    digests: Tensor | None,
    table: Tensor,
    num_pages: int,
    frames: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Choose the pages of one layer that become resident when a request begins to decode.

    Args:
        operations: implementation that scores and selects pages.
        config: selection, sink pages, recent pages and page size.
        query: query that scores the pages, ``[1, heads, head_dim]``; None: the last pages are chosen.
        digests: digests of all host pages of the layer; None: the last pages are chosen.
        table: block table of the sequence, ``[1, columns]`` int32 host pages.
        num_pages: pages of the sequence.
        frames: frames that the request has in this layer.
        scale: factor of the logits.

    Returns:
        ``(pages, importance)``: logical pages int32 and their importance fp32, both ``[min(num_pages, frames)]``.
    """
    if num_pages <= frames:
        pages = torch.arange(num_pages, dtype=torch.int32, device=table.device)
        return pages, age_importance(pages, config)
    page_counts = torch.full((1,), num_pages, dtype=torch.int32, device=table.device)
    if query is None or digests is None:
        scores = torch.arange(table.shape[1], dtype=torch.float32, device=table.device)[None, None]
    else:
        selection = config.selection
        scores = operations.page_scores(
            query, digests, table, page_counts, torch.zeros_like(page_counts), selection.aggregate, False,
            selection.bound, scale, config.page_size,
        )  # fmt: skip
    selected = operations.select_pages(
        scores, page_counts, page_counts * config.page_size, torch.full_like(page_counts, frames),
        torch.zeros_like(page_counts), None, table, config.page_size, config.sinks,
        min(config.recent, max(1, frames - config.sinks)), frames,
    )  # fmt: skip
    pages = selected.pages[0, 0]
    if query is None or digests is None:
        return pages, age_importance(pages, config)
    is_always_selected = (pages < config.sinks) | (pages >= num_pages - config.recent)
    return pages, scores[0, 0, pages.long()].masked_fill(is_always_selected, float("inf"))


def frames_for(maps: Maps, index: int, source: Tensor) -> Tensor:
    """Return a frame of a request for each of its pages in one layer: ``[n]`` int32, all different.

    Args:
        maps: residency maps of the layer.
        index: index of the request (`FramePool.index`).
        source: ``[n]`` int32 frame that holds each page, negative for none; at most as many pages as the request has
            frames. A page in a frame of the request keeps it.
    """
    requests, size = len(maps.frame_of), maps.size
    is_placed = (source >= 0) & (source % requests == index)
    own_slots = torch.where(is_placed, source // requests, size).long()
    taken = torch.zeros(size + 1, dtype=torch.int32, device=source.device).index_fill_(0, own_slots, 1)
    free = taken[:size].argsort(stable=True)
    slots = torch.where(is_placed, own_slots, free[((~is_placed).cumsum(0) - 1).clamp(min=0)])
    return (index + slots * requests).int()


def place(maps: Maps, index: int, pages: Tensor, frames: Tensor, importance: Tensor, is_resident: Tensor) -> None:
    """Enter pages into the residency maps of one layer of a request whose map is empty.

    Args:
        maps: residency maps of the layer.
        index: index of the request (`FramePool.index`).
        pages: ``[n]`` int32 logical pages.
        frames: ``[n]`` int32 frame of each page (`frames_for`).
        importance: ``[n]`` fp32 importance of each frame.
        is_resident: ``[n]`` bool, false for pages whose frame is still empty.
    """
    maps.frame_of[index, pages.long()] = torch.where(is_resident, frames, -1)
    maps.page_of[frames.long()] = torch.where(is_resident, pages, -1)
    maps.importance[frames.long()] = importance


def age_importance(pages: Tensor, config: HybridConfig) -> Tensor:
    """Return an importance that evicts the oldest page first and never a sink page."""
    return pages.float().masked_fill(pages < config.sinks, float("inf"))
