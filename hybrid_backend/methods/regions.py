"""Regions of slots through a request's life: filled, grown by new tokens, given back."""

from __future__ import annotations

from torch import Tensor

from hybrid_backend.step import DecodeRows
from hybrid_backend.tiers import Tiers
from hybrid_backend.tiers.transfers import Recall


class Regions:
    """What every method with slots does with them, whatever it keeps resident."""

    def __init__(self, tiers: Tiers, page_size: int) -> None:
        self._tiers = tiers
        self._page_size = page_size

    def find(self, rows: DecodeRows, r: int) -> tuple[int, bool]:
        """``(region, is new)`` of a row."""
        slots = self._tiers.slots
        region = slots.region(rows.request_ids[r])
        if region is not None:
            return region, False
        return slots.allocate(rows.request_ids[r]), True

    def begins_page(self, rows: DecodeRows, r: int) -> bool:
        """Whether the row's new token is the first of its page."""
        return int(rows.seq_lens[r] - 1) % self._page_size == 0

    def fill(
        self, layer: int, rows: DecodeRows, r: int, region: int, local: Tensor, pages: Tensor, scores: Tensor
    ) -> None:
        """Make logical ``pages`` resident in the slots ``local`` (0..size) of an empty region, now."""
        slots = self._tiers.slots
        self._tiers.transfers.copy(
            Recall(
                layer,
                region,
                int(slots.generation[region]),
                rows.page_table[r, pages],
                region * slots.size + local,
                lambda: None,
            )
        )
        self._tiers.residency.put(layer, region, local, pages, scores)

    def append(self, layer: int, rows: DecodeRows, regions: Tensor, kv: Tensor) -> None:
        """Write each row's new token to its tail page's slot. ``kv``: ``[rows, kv_heads, 2, head_dim]``."""
        slots = self._tiers.slots
        if not slots.separate:
            return
        mine = self._tiers.residency.held(layer, regions) == (rows.num_pages - 1)[:, None]
        warm = mine.any(1)  # a cold layer is filled from the host pool when it first attends
        target = regions * slots.size + mine.int().argmax(1)
        offsets = (rows.seq_lens - 1) % self._page_size
        slots.layers[layer][target[warm], :, :, offsets[warm]] = kv[warm]

    def release(self, request_id: str) -> int | None:
        """Free the request's region and all that it holds; returns it, if there was one."""
        region = self._tiers.slots.release(request_id)
        if region is not None:
            self._tiers.residency.reset(region)
        return region
