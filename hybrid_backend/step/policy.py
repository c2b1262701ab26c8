"""What execution asks of a method (`methods.base.Method` is the class that methods derive from)."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from hybrid_backend.batch import DecodeRows
from hybrid_backend.config import HybridConfig

Open = TypeVar("Open", contravariant=True)


class Policy(Protocol[Open]):
    """``Open``: the open step, whose operations the method runs (`DecodeStep`). See `Method` for what each one
    means."""

    @property
    def uses_workers(self) -> bool: ...

    @property
    def attends_selection(self) -> bool: ...

    @property
    def has_fixed_frames(self) -> bool: ...

    @property
    def pages_per_load(self) -> int: ...

    def looks_ahead(self, config: HybridConfig, device: torch.device) -> bool: ...

    def may_park(self, config: HybridConfig, device: torch.device) -> bool: ...

    def factors(self, config: HybridConfig, layers: Collection[int]) -> dict[int, float]: ...

    def recalls(self, config: HybridConfig) -> bool: ...

    def frame_of(self, pages: Tensor) -> Tensor: ...

    def held_pages(self, num_pages: int) -> Tensor: ...

    def budgets(self, rows: DecodeRows) -> Tensor: ...

    def begin_decode(self, step: Open, rows: DecodeRows) -> None: ...

    def predicts(self, layer: int) -> bool: ...

    def lookahead(self, step: Open, layer: int, q: Tensor) -> None: ...

    def append(self, layer: int, pages: Tensor, positions: Tensor, k: Tensor, v: Tensor) -> None: ...

    def attend(self, step: Open, layer: int, q: Tensor) -> Tensor: ...

    def covered(self, step: Open, layer: int, rows: DecodeRows, r: int) -> Tensor | None: ...
