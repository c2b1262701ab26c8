"""Method ``dense``: every step attends every page. The exact oracle of all other methods."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hybrid_backend.config import HybridConfig
from hybrid_backend.methods.base import Method, can_fuse, staging_tokens
from hybrid_backend.step import DecodeRows, ModelSpec
from hybrid_backend.tiers import TierLayout

if TYPE_CHECKING:
    from hybrid_backend.execution import DecodeStep


class Dense(Method):
    """No frames, no digests, no workers: attention over host pages in place, which a GPU reads over the bus."""

    @classmethod
    def is_fused(cls, config: HybridConfig, model: ModelSpec, device: torch.device) -> bool:
        return can_fuse(config, model, device)

    @classmethod
    def layout(cls, config: HybridConfig, model: ModelSpec, device: torch.device) -> TierLayout:
        """Staging only, for the prompts of a GPU."""
        separate = device.type != "cpu"
        return TierLayout(separate=separate, staging_tokens=staging_tokens(config) if separate else 0)

    def budgets(self, rows: DecodeRows) -> Tensor:
        return rows.num_pages

    def begin_decode(self, step: DecodeStep, rows: DecodeRows) -> None:
        step.count_tokens(int(rows.seq_lens.sum()), int(rows.num_pages.sum()))

    def attend(self, step: DecodeStep, layer: int, q: Tensor) -> Tensor:
        now = step.now(len(q))
        host, table = self.tiers.host.views[layer], now.table[:, None]
        parts = step.attend(q, host, table, now.seq_lens[:, None], known=step.seq_lens)
        return step.merge(layer, parts, None, q.dtype)
