"""What residency on the device is kept in (`residency`), and what is counted there (`tally`). Needs no Triton."""

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


class Tally(NamedTuple):
    """A row as the host reads it: totals since start. Pages and tokens are summed over the lists of each row."""

    resident_pages: int  # selected, in a slot
    missing_pages: int  # selected, in none
    resident_tokens: int  # that those pages hold
    missing_tokens: int
    recalled_pages: int  # copies into slots that were begun
    waited: int  # nanoseconds in which the stream stood still for the CPU
    ahead: int  # nanoseconds from asking the CPU for pages to waiting for them
    asked_at: int  # the device's clock at the last question; 0: it was about no page
