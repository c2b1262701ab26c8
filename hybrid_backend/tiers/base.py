"""All tiers of one rank, built from the layout that the method asks for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from hybrid_backend.config import HybridConfig
from hybrid_backend.step import ModelSpec
from hybrid_backend.tiers.digests import Digests
from hybrid_backend.tiers.host_pool import HostPool
from hybrid_backend.tiers.residency import Residency
from hybrid_backend.tiers.slots import SlotPool
from hybrid_backend.tiers.stream import HeadStream
from hybrid_backend.tiers.transfers import Transfers


@dataclass(frozen=True)
class TierLayout:
    """What a method needs on the device: ``slots_per_request`` 0 means none.

    ``staging_tokens``: tokens of all KV heads that each of the two staging buffers holds. Separate tiers have them,
    because prompts attend their cached prefix through them.
    """

    separate: bool
    slots_per_request: int = 0
    digests: Literal["none", "minmax", "minmax_int8"] = "none"
    staging_tokens: int = 0


@dataclass
class Tiers:
    """Host pool, digests, slots, residency, transfers and staging of the layers with full attention."""

    device: torch.device
    host: HostPool
    digests: Digests | None
    slots: SlotPool
    residency: Residency
    transfers: Transfers
    stream: HeadStream | None

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
        digests = None
        if layout.digests != "none":
            digests = Digests(host, [x for x in layers if x not in exact], in_bytes=layout.digests == "minmax_int8")
        slots = SlotPool(
            model, config.page_size, max_requests, layout.slots_per_request, layers, layout.separate, device
        )
        deadline = config.workers.deadline_seconds
        stream = None
        if layout.separate:
            longest = host.layers[layers[0]].shape[0] * config.page_size
            tokens = min(layout.staging_tokens, longest)
            stream = HeadStream(host, model, config.page_size, tokens, device, deadline)
        return cls(
            device=device,
            host=host,
            digests=digests,
            slots=slots,
            residency=Residency(layers, max_requests, layout.slots_per_request),
            transfers=Transfers(host, slots, deadline),
            stream=stream,
        )

    @property
    def device_bytes(self) -> int:
        """Device memory of slots, staging and digests; 0 where the device tier is the host pool itself."""
        if self.stream is None:
            return 0
        return self.slots.nbytes + self.stream.nbytes + (self.digests.nbytes if self.digests else 0)

    @property
    def copied_bytes(self) -> int:
        """Bytes copied from the host pool to the device tier since start."""
        return self.transfers.copied_bytes + (self.stream.copied_bytes if self.stream else 0)

    def close(self) -> None:
        self.transfers.close()
        if self.stream is not None:
            self.stream.close()
