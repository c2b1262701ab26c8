"""Which page of its sequence each slot holds, per layer. One owner, one truth: the slot -> page map."""

from __future__ import annotations

import torch
from torch import Tensor

_FREE = float("-inf")
_PINNED = float("inf")


class Residency:
    """``page_of[layer, region, slot]``: logical page of the region's request, -1 for an empty slot.

    Pages are logical (position in the sequence), not host ids: requests that share a prefix page may each hold their
    own copy of it. The inverse map is derived when it is asked for, so that the two cannot disagree.
    ``score`` is the importance of the slot's page at the last selection (inf: never evict, -inf: empty).
    ``warm[layer, region]``: the region was filled for its running request.
    """

    def __init__(self, layers: list[int], regions: int, size: int) -> None:
        self.layers = list(layers)
        self._row = {layer: i for i, layer in enumerate(layers)}
        self.size = size
        shape = (len(layers), regions, size)
        self.page_of = torch.full(shape, -1, dtype=torch.int64)
        self.score = torch.full(shape, _FREE, dtype=torch.float32)
        self.warm = torch.zeros(shape[:2], dtype=torch.bool)

    @property
    def resident_pages(self) -> int:
        """Occupied slots over all layers and regions."""
        return int((self.page_of >= 0).sum())

    def reset(self, region: int) -> None:
        self.page_of[:, region] = -1
        self.score[:, region] = _FREE
        self.warm[:, region] = False

    def is_warm(self, layer: int, regions: Tensor) -> Tensor:
        return self.warm[self._row[layer], regions]

    def held(self, layer: int, regions: Tensor) -> Tensor:
        """``[rows, size]`` logical pages in the rows' slots, -1 for empty ones."""
        return self.page_of[self._row[layer], regions]

    def slot_of(self, layer: int, regions: Tensor, columns: int) -> Tensor:
        """``[rows, columns]``: slot id of each logical page below ``columns``, -1 if it is not resident."""
        held = self.held(layer, regions)
        rows = held.shape[0]
        slots = torch.full((rows, columns + 1), -1, dtype=torch.int64)
        ids = regions[:, None] * self.size + torch.arange(self.size)[None]
        # Empty slots scatter into the spare last column.
        slots.scatter_(1, torch.where(held >= 0, held, columns), ids)
        return slots[:, :columns]

    def put(self, layer: int, region: int, slots: Tensor, pages: Tensor, scores: Tensor) -> None:
        """Record that ``slots`` (0..size) of a region now hold ``pages``."""
        row = self._row[layer]
        self.page_of[row, region, slots] = pages
        self.score[row, region, slots] = scores.float()
        self.warm[row, region] = True

    def note_scores(self, layer: int, regions: Tensor, scores: Tensor) -> None:
        """Refresh the importance of resident pages. ``scores``: ``[rows, columns]``, inf for pinned pages."""
        row = self._row[layer]
        held = self.page_of[row, regions]
        fresh = scores.gather(1, held.clamp(min=0, max=scores.shape[1] - 1))
        self.score[row, regions] = torch.where(held >= 0, fresh.float(), _FREE)

    def victims(self, layer: int, region: int, keep: Tensor, wanted: int) -> Tensor:
        """Up to ``wanted`` slots (0..size) to overwrite, empty ones first, then the least important.

        ``keep``: logical pages that must stay resident.
        """
        row = self._row[layer]
        score = self.score[row, region].masked_fill(torch.isin(self.page_of[row, region], keep), _PINNED)
        order = score.argsort()[:wanted]
        return order[score[order] < _PINNED]

    def clear(self, layer: int, region: int, slots: Tensor) -> None:
        """Slots (0..size) that are about to be overwritten hold nothing until `put` says what."""
        row = self._row[layer]
        self.page_of[row, region, slots] = -1
        self.score[row, region, slots] = _FREE

    def open_page(self, region: int, page: int) -> None:
        """Give the newly begun page ``page`` a slot in every warm layer, evicting the least important page."""
        slots = self.score[:, region].argmin(1)
        held = (self.page_of[:, region] == page).any(1)  # by a step that failed half-way and is now tried again
        layers = (self.warm[:, region] & ~held).nonzero().flatten()
        self.page_of[layers, region, slots[layers]] = page
        # The youngest page outranks older ones where importance is age; a selection overwrites it elsewhere.
        self.score[layers, region, slots[layers]] = float(page)
