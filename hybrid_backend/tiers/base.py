"""All tiers of one rank, built from the layout that the method asks for."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hybrid_backend.config import HybridConfig
from hybrid_backend.step import ModelSpec
from hybrid_backend.tiers.digests import Digests
from hybrid_backend.tiers.host_pool import HostPool
from hybrid_backend.tiers.residency import Residency
from hybrid_backend.tiers.slots import SlotPool
from hybrid_backend.tiers.transfers import Transfers


@dataclass(frozen=True)
class TierLayout:
    """What a method needs on the device: ``slots_per_request`` 0 means none."""

    slots_per_request: int
    digests: bool
    separate: bool


@dataclass
class Tiers:
    """Host pool, digests, slots, residency and transfers of the layers with full attention."""

    host: HostPool
    digests: Digests | None
    slots: SlotPool
    residency: Residency
    transfers: Transfers

    @classmethod
    def build(
        cls,
        layout: TierLayout,
        config: HybridConfig,
        model: ModelSpec,
        host: HostPool,
        max_requests: int,
        device: torch.device,
    ) -> Tiers:
        layers = [layer for layer in range(model.num_layers) if model.window(layer) is None]
        exact = set(config.exact_layers)
        slots = SlotPool(
            model, config.page_size, max_requests, layout.slots_per_request, layers, layout.separate, device
        )
        return cls(
            host=host,
            digests=Digests(host, [x for x in layers if x not in exact]) if layout.digests else None,
            slots=slots,
            residency=Residency(layers, max_requests, layout.slots_per_request),
            transfers=Transfers(host, slots, config.workers.deadline_seconds),
        )

    def close(self) -> None:
        self.transfers.close()
