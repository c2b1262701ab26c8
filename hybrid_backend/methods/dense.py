"""Method ``dense``: every step attends every page. The exact oracle of all other methods."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hybrid_backend.batch import DecodeRows, ModelSpec
from hybrid_backend.config import HybridConfig
from hybrid_backend.in_place.step import why_not_in_place
from hybrid_backend.step import Toolbox
from hybrid_backend.step.method import Method, OwnMemory, staging_tokens
from hybrid_backend.tiers import TierLayout, Tiers


class Dense(Method):
    """Attention over all host pages in place, without frames, digests and workers; a GPU reads over the bus."""

    name = "dense"
    suits_cpu = True
    reads_int8 = True

    def __init__(self, config: HybridConfig, model: ModelSpec, tiers: Tiers) -> None:
        super().__init__(config, model, tiers)
        self.attends_in_place = _is_in_place(config, model, tiers.device)

    @classmethod
    def exact_tokens(cls, config: HybridConfig) -> float:
        return math.inf

    @classmethod
    def layout(cls, config: HybridConfig, model: ModelSpec, device: torch.device) -> TierLayout:
        """Return staging buffers for the prompts of a GPU, and no other tier."""
        separate = device.type != "cpu"
        return TierLayout(separate=separate, staging_tokens=staging_tokens(config) if separate else 0)

    @classmethod
    def own_memory(
        cls, config: HybridConfig, model: ModelSpec, device: torch.device, pages: int, max_requests: int
    ) -> OwnMemory:
        if _is_in_place(config, model, device):
            return OwnMemory()
        return super().own_memory(config, model, device, pages, max_requests)

    def budgets(self, rows: DecodeRows) -> Tensor:
        return rows.num_pages

    def begin_decode(self, step: Toolbox, rows: DecodeRows) -> None:
        step.counting.count_tokens(int(rows.seq_lens.sum()), int(rows.num_pages.sum()))

    def attend(self, step: Toolbox, layer: int, q: Tensor) -> Tensor:
        inputs = step.inputs(len(q))
        host, table = self.tiers.host.views[layer], inputs.table[:, None]
        partials = step.attend(q, host, table, inputs.seq_lens[:, None], host_tokens=step.seq_lens)
        return step.merge(layer, partials, None, q.dtype)


def _is_in_place(config: HybridConfig, model: ModelSpec, device: torch.device) -> bool:
    """Tell whether the native decoder attends, instead of the operations of the device tier."""
    return not why_not_in_place(config, model.num_heads, model.num_kv_heads, model.head_dim, device)
