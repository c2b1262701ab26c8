"""All tiers of one rank, built from the layout that the method asks for."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal

import torch

from hybrid_backend.config import HybridConfig
from hybrid_backend.kernels.cpu.library import byte_row
from hybrid_backend.step import ModelSpec
from hybrid_backend.tiers.digests import Digests, digest_shape
from hybrid_backend.tiers.host_pool import HostPool
from hybrid_backend.tiers.residency import Residency
from hybrid_backend.tiers.slots import SlotPool, slot_shape
from hybrid_backend.tiers.stream import HeadStream, buffer_shape
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

    def full_layers(self, model: ModelSpec) -> list[int]:
        """Layers with full attention: the only ones that tiers are for."""
        return [layer for layer in range(model.num_layers) if model.window(layer) is None]

    def digest_layers(self, config: HybridConfig, model: ModelSpec) -> list[int]:
        if self.digests == "none":
            return []
        return [layer for layer in self.full_layers(model) if layer not in config.exact_layers]

    def buffer_tokens(self, page_size: int, pages: int) -> int:
        """Tokens of a staging buffer over a host pool of so many pages; 0 where there is none."""
        return min(self.staging_tokens, pages * page_size) if self.separate else 0

    def memory(self, config: HybridConfig, model: ModelSpec, pages: int, max_requests: int) -> TierBytes:
        """What `Tiers.build` allocates over a host pool of ``pages`` pages. Allocates nothing."""
        size, with_digests = model.dtype.itemsize, len(self.digest_layers(config, model))
        digests = with_digests * prod(digest_shape(pages, model.num_kv_heads, model.head_dim)) * size
        if self.digests == "minmax_int8":
            digests += with_digests * pages * byte_row(model.num_kv_heads, model.head_dim)
        slots = max_requests * self.slots_per_request if self.separate else 0
        a_layer = prod(slot_shape(model, config.page_size, slots)) * size
        buffers = prod(buffer_shape(model, config.page_size, self.buffer_tokens(config.page_size, pages))) * size
        return TierBytes(self.separate, digests, len(self.full_layers(model)) * a_layer, buffers)


@dataclass(frozen=True)
class TierBytes:
    """Bytes of the tiers beside the host pool. They are device memory where the tiers are ``separate``."""

    separate: bool
    digests: int
    slots: int
    staging: int

    @property
    def total(self) -> int:
        return self.digests + self.slots + self.staging


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
        layers = layout.full_layers(model)
        digests = None
        if layout.digests != "none":
            in_bytes = layout.digests == "minmax_int8"
            digests = Digests(host, layout.digest_layers(config, model), in_bytes=in_bytes, device=device)
        slots = SlotPool(
            model, config.page_size, max_requests, layout.slots_per_request, layers, layout.separate, device
        )
        deadline = config.workers.deadline_seconds
        stream = None
        if layout.separate:
            tokens = layout.buffer_tokens(config.page_size, host.layers[layers[0]].shape[0])
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
