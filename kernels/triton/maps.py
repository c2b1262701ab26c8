"""The tensors that residency on the device is kept in (`residency`). They need no Triton."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Maps(NamedTuple):
    """Of all layers, or of one (without the first dimension)."""

    slot_of: Tensor  # [layers, regions, columns] int32
    page_of: Tensor  # [layers, regions * size] int32
    importance: Tensor  # [layers, regions * size] fp32

    def of(self, layer: int) -> Maps:
        return Maps(self.slot_of[layer], self.page_of[layer], self.importance[layer])


class Copies(NamedTuple):
    """Recalls under way, ``[layers, rows, n]`` int32 (or of one layer); an entry whose slot is -1 is none."""

    slots: Tensor
    host_pages: Tensor
    pages: Tensor  # logical
    importance: Tensor  # fp32
    regions: Tensor  # [layers, rows] int32
    started: Tensor  # [layers, rows] int64 generation of the region when the copy began

    def of(self, layer: int) -> Copies:
        return Copies(*(x[layer] for x in self))
