"""Admission: which pages a request that begins to decode has on the device tier at first."""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_backend.batch import ModelSpec, PrefillRow
from hybrid_backend.config import HybridConfig
from hybrid_backend.kernels.operations import Maps, Operations
from hybrid_backend.tiers import Tiers


class Admission:
    """Fills the frames of a request: with all of its pages if they fit, else with the first ones, the last ones and
    the most important of the others, layer by layer. Important is what the prompt's last query attends (by the scores
    that select while decoding); a layer without digests, or a prompt whose queries were not seen, takes the last
    pages. One query, since a prompt's last chunk may be a single token (after a prefix hit, or where its pages came
    from another server), and what is resident must not depend on how a prompt was computed.
    """

    def __init__(self, config: HybridConfig, model: ModelSpec, tiers: Tiers) -> None:
        self._config, self._model, self._tiers, self._ops = config, model, tiers, tiers.operations
        self._queries: dict[str, dict[int, Tensor]] = {}  # by request and layer, [1, heads, head_dim]
        self._fits = tiers.frames.size * config.page_size

    def saw(self, layer: int, row: PrefillRow, q: Tensor) -> None:
        """A prompt chunk was attended in ``layer``; ``q``: ``[chunk, heads, head_dim]``."""
        if row.seq_len > self._fits and self._tiers.has_digests(layer):
            self._queries.setdefault(row.request_id, {})[layer] = q[-1:].clone()

    def forget(self, request_id: str) -> None:
        self._queries.pop(request_id, None)

    def admit(self, layer: int, maps: Maps, request_id: str, index: int, table: Tensor, num_pages: int) -> int:
        """Make pages of one layer resident in the empty frames of an index, at once.

        Args:
            maps: of the layer.
            table: ``[1, columns]`` int32 host pages of the sequence, the one of its next token included.

        Returns:
            Pages copied.
        """
        config = self._config
        digests = self._tiers.digest_layer(layer)
        query = None if digests is None else self._queries.get(request_id, {}).get(layer)
        if table.device.type == "cuda":  # whatever the sequence's length, by the kernels of a decode step
            table = torch.nn.functional.pad(table, (0, maps.frame_of.shape[1] - table.shape[1]))
        pages, importance = best_pages(
            self._ops, config, query, digests, table, num_pages, maps.size, self._model.scale
        )
        chosen = place(maps, index, pages, importance)
        host_pages = table[0, pages.long()].contiguous()
        self._ops.copy_pages(self._tiers.host.views[layer], self._tiers.frames.layers[layer], host_pages, chosen)
        return len(pages)


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
    """The pages of one layer that a request has in its frames when it begins to decode.

    Args:
        query: ``[1, heads, head_dim]`` that chooses, None: the last pages are taken.
        digests: of all host pages.
        table: ``[1, columns]`` int32 host pages of the sequence.

    Returns:
        ``(pages, importance)``, ``[min(num_pages, frames)]`` int32 and fp32.
    """
    if num_pages <= frames:
        pages = torch.arange(num_pages, dtype=torch.int32, device=table.device)
        return pages, _by_age(pages, config)
    one = torch.full((1,), num_pages, dtype=torch.int32, device=table.device)
    if query is None or digests is None:
        scores = torch.arange(table.shape[1], dtype=torch.float32, device=table.device)[None, None]
    else:
        how = config.selection
        scores = operations.page_scores(
            query, digests, table, one, torch.zeros_like(one), how.aggregate, False, how.bound, scale, config.page_size
        )
    picked = operations.select_pages(
        scores, one, one * config.page_size, torch.full_like(one, frames), torch.zeros_like(one), None, table,
        config.page_size, config.sinks, min(config.recent, max(1, frames - config.sinks)), frames,
    )  # fmt: skip
    pages = picked.pages[0, 0]
    if query is None or digests is None:
        return pages, _by_age(pages, config)
    always = (pages < config.sinks) | (pages >= num_pages - config.recent)
    return pages, scores[0, 0, pages.long()].masked_fill(always, float("inf"))


def place(maps: Maps, index: int, pages: Tensor, importance: Tensor) -> Tensor:
    """Enter pages into the first of an index's empty frames; returns the frames, ``[pages]`` int32. ``maps``: of a
    layer."""
    requests = len(maps.frame_of)
    mine = slice(index, index + len(pages) * requests, requests)
    chosen = torch.arange(mine.start, mine.stop, requests, dtype=torch.int32, device=pages.device)
    maps.frame_of[index, pages.long()] = chosen
    maps.page_of[mine] = pages
    maps.importance[mine] = importance
    return chosen


def _by_age(pages: Tensor, config: HybridConfig) -> Tensor:
    """Importance where nothing better is known: the oldest page goes first, the sinks never."""
    return pages.float().masked_fill(pages < config.sinks, float("inf"))
