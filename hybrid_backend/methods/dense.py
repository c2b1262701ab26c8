"""Method ``dense``: every step attends every page. The exact oracle of all other methods."""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_backend.attention.partial import paged_partial
from hybrid_backend.attention.selection import all_pages
from hybrid_backend.config import HybridConfig
from hybrid_backend.methods.base import Method, decodes_in_place, staging_tokens
from hybrid_backend.methods.in_place import InPlace
from hybrid_backend.methods.lists import page_list
from hybrid_backend.observe.stats import Stats
from hybrid_backend.step import ModelSpec, Step
from hybrid_backend.tiers import TierLayout, Tiers
from hybrid_backend.workers import WorkerPool


class Dense(Method):
    """No slots, no digests, no workers: attention over host pages in place, which a GPU reads over the bus."""

    @classmethod
    def runs_on(cls, config: HybridConfig, device: torch.device) -> bool:
        return True

    @classmethod
    def layout(cls, config: HybridConfig, model: ModelSpec, device: torch.device) -> TierLayout:
        """Staging only, for the prompts of a GPU."""
        separate = device.type != "cpu"
        return TierLayout(separate=separate, staging_tokens=staging_tokens(config) if separate else 0)

    def __init__(self, config: HybridConfig, model: ModelSpec, tiers: Tiers, workers: WorkerPool, stats: Stats) -> None:
        super().__init__(config, model, tiers, workers, stats)
        if decodes_in_place(config, model, tiers.device):
            self.in_place = InPlace(config, model, tiers, stats)

    def begin_step(self, step: Step) -> None:
        if step.decode and self.in_place is not None:
            self.in_place.begin_step(step, torch.zeros(step.decode.count, dtype=torch.bool))
        elif step.decode:
            selected = all_pages(step.decode.num_pages)
            step.plan = page_list(step.decode, selected, step.decode.page_table, self.config.page_size)

    def attend(self, layer: int, step: Step, q: Tensor) -> Tensor:
        self.stats.attended(layer, selected=step.plan.tokens, on_cpu=0)
        self.stats.looked_up(layer, step.plan.pages, 0 if q.is_cuda else step.plan.pages)  # a GPU reads over the bus
        if q.is_cuda:
            return self._over_the_bus(layer, step, q)
        return paged_partial(q, self.tiers.host.layers[layer], step.plan, self.model.scale).out

    def _over_the_bus(self, layer: int, step: Step, q: Tensor) -> Tensor:
        from hybrid_backend.kernels import triton as kernels  # late: Triton is there where CUDA is

        host, longest = self.tiers.host.seen[layer], step.plan.ids.shape[2] * self.config.page_size
        processors = torch.cuda.get_device_properties(q.device).multi_processor_count
        splits = kernels.splits_for(len(q), self.model.num_kv_heads, longest, processors)
        ids, tokens = (x.int().to(q.device, non_blocking=True) for x in (step.plan.ids, step.plan.valid.sum(2)))
        parts = kernels.paged_partial(q.contiguous(), host, ids, tokens, self.model.scale, splits)
        return kernels.merge_partials(*parts, dtype=torch.float32)[0]
