"""Memory that each method, and the engine by itself, takes of device and host for a context and a batch.

Sizes of tiers come from the code that allocates them (`TierLayout.memory`, `Method.own_memory`). So they are exact:
the runtime's gauges report the same numbers (`MethodMemory.gauges`). The engine's own memory besides weights and KV is
an estimate, and marked as one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from hybrid_backend.config import HybridConfig
from hybrid_backend.errors import HybridError
from hybrid_backend.memory_plan.blocks import Blocks, window_blocks
from hybrid_backend.methods import resolve_method
from hybrid_backend.model import ModelShape, spec_of

Place = Literal["device", "host"]
Kind = Literal["exact", "at most", "estimate"]

UTILIZATION = 0.92
"""Share of the device's memory that the engine takes (vLLM 0.32, config/cache.py, ``gpu_memory_utilization``)."""
DEVICE_OVERHEAD = 1536 * 2**20
"""Bytes of a device for the CUDA context, library workspaces and captured graphs: a general figure, not measured."""
HOST_OVERHEAD = 4 * 2**30
"""Bytes of the host for the server's processes besides the KV cache: a general figure, not measured."""
BATCHES_IN_FLIGHT = 2
"""Batches under way: vLLM 0.32 schedules one step ahead (``VllmConfig.max_concurrent_batches``)."""


@dataclass(frozen=True)
class MemoryRoom:
    """Memory of one device and of its share of the host.

    Attributes:
        device: bytes of the device; 0 if the device tier is the host's own memory.
        host: bytes of the host.
        chunk_tokens: tokens of one step (``--max-num-batched-tokens``).
        device_overhead: bytes of the device that the engine takes besides weights, KV and activations.
        host_overhead: bytes of the host that the server takes besides the host pool.
        utilization: share of the device that the server may take.
    """

    device: int
    host: int
    chunk_tokens: int
    device_overhead: int = DEVICE_OVERHEAD
    host_overhead: int = HOST_OVERHEAD
    utilization: float = UTILIZATION

    @property
    def on_host(self) -> bool:
        """Tell whether the device tier is the host's own memory."""
        return self.device == 0

    @property
    def in_flight(self) -> int:
        """Tokens that are scheduled and not yet settled."""
        return BATCHES_IN_FLIGHT * self.chunk_tokens

    def limit(self, place: Place) -> int:
        """Return the bytes of host memory or device memory that the server may use."""
        return self.host if place == "host" else int(self.device * self.utilization)


def default_chunk(device_bytes: int) -> int:
    """Return vLLM 0.32's ``--max-num-batched-tokens`` of a server (engine/arg_utils.py, ``get_batch_defaults``)."""
    return 8192 if device_bytes >= 70 * 2**30 else 2048


@dataclass(frozen=True)
class Item:
    """Name and bytes of one allocation of the server."""

    name: str
    place: Place
    bytes: int
    kind: Kind


@dataclass(frozen=True)
class Memory:
    """All memory that serving takes.

    Attributes:
        pages: pages of the KV pool, which is the host pool, or the device's for the stock engine.
        items: the pieces that add up to the whole.
    """

    pages: int
    items: tuple[Item, ...]

    def at(self, place: Place) -> int:
        """Return the bytes of all items in host memory or device memory."""
        return sum(item.bytes for item in self.items if item.place == place)

    def missing(self, room: MemoryRoom) -> str | None:
        """Say how much host or device memory is missing, and which item is largest; None if all items fit."""
        places: tuple[Place, ...] = ("host",) if room.on_host else ("device", "host")
        for place in places:
            short = self.at(place) - room.limit(place)
            if short > 0:
                most = max((item for item in self.items if item.place == place), key=lambda item: item.bytes)
                return f"{place}: {short / 2**30:.1f} GiB short ({most.name} takes {most.bytes / 2**30:.1f} GiB)"
        return None


@dataclass(frozen=True)
class StockMemory:
    """Memory of the engine by itself, whose whole KV cache is in the device's memory."""

    shape: ModelShape
    blocks: Blocks
    room: MemoryRoom
    name: str = "stock"

    def memory(self, context: int, batch: int) -> Memory:
        """Return what ``batch`` sequences of ``context`` tokens take."""
        pages = self.blocks.pool_pages(context, batch, self.room.in_flight)
        place: Place = "host" if self.room.on_host else "device"
        kv = Item("KV cache", place, pages * self.blocks.page_bytes, "exact")
        return Memory(pages, (*engine_items(self.shape, self.room, batch), kv))

    def cpu_requests(self, context: int, batch: int) -> int:
        """Return 0: the engine by itself attends every request on its device."""
        return 0


@dataclass(frozen=True)
class MethodMemory:
    """Memory of one method: the KV cache is the host pool, the method's own tensors are on the device."""

    shape: ModelShape
    blocks: Blocks
    room: MemoryRoom
    config: HybridConfig

    @property
    def name(self) -> str:
        """Name of the method."""
        return self.config.method

    @property
    def device(self) -> torch.device:
        """Kind of the device tier."""
        return torch.device("cpu" if self.room.on_host else "cuda")

    def refusal(self) -> str | None:
        """Say why the configuration cannot serve this model with this method; None if it can."""
        if not self.room.on_host and (self.shape.window_heads is not None or self.shape.has_chunks):
            kind = "attention in chunks" if self.shape.has_chunks else "windows of another shape than full attention"
            return (
                f"{self.shape.name}: {kind}, which is not supported on a GPU: plan for a CPU (--gpu-mem 0), or use the "
                "engine's own backend"
            )
        try:
            layers = len(self.shape.attention_windows)
            self.config.validate_for(layers)
            method = resolve_method(self.config.method)
            method.check(self.config, self.device, layers, self.shape.kv_heads)
            method.layout(self.config, spec_of(self.shape), self.device)
        except HybridError as error:
            return str(error)
        return None if self.shape.full_layers else "no layer has full attention: nothing to offload"

    def gauges(self, pages: int, batch: int, max_tokens: int | None = None) -> dict[str, int]:
        """Return the gauges that the runtime reports at start (`HybridRuntime.gauges`).

        Args:
            pages: pages of the host pool.
            batch: requests that run at once, at most (``--max-num-seqs``).
            max_tokens: tokens of the longest sequence, if the engine tells the runtime.
        """
        model, method = spec_of(self.shape, max_tokens), resolve_method(self.config.method)
        tiers = method.layout(self.config, model, self.device).memory(self.config, model, pages, batch)
        own = method.own_memory(self.config, model, self.device, pages, batch)
        return {
            "hybrid_host_pool_pages": pages,
            "hybrid_digest_bytes": tiers.digests,
            "hybrid_frame_bytes": tiers.frames,
            "hybrid_device_bytes": own.device + (tiers.total if tiers.separate else 0),
            "hybrid_context_cache_bytes": own.host,
        }

    def cpu_requests(self, context: int, batch: int) -> int:
        """Count the requests that the CPU attends, of a method that has a request on the device whole or not at all."""
        model, method = spec_of(self.shape, context), resolve_method(self.config.method)
        layout = method.layout(self.config, model, self.device)
        if not layout.shares_frames:
            return 0
        return batch - min(batch, layout.shared_pages(batch) // -(-context // self.config.page_size))

    def windows(self, batch: int) -> int:
        """Return the device's bytes for sliding-window layers, which stay on a GPU whole."""
        if self.room.on_host:
            return 0
        page_size = self.config.page_size
        return sum(
            layers
            * self.shape.page_bytes(page_size, window)
            * window_blocks(window, page_size, batch, self.room.in_flight)
            for window, layers in Counter(self.shape.attention_windows).items()
            if window is not None
        )

    def memory(self, context: int, batch: int) -> Memory:
        """Return what ``batch`` sequences of ``context`` tokens take."""
        blocks = self.blocks if self.room.on_host else self.blocks.offloaded
        pages = blocks.pool_pages(context, batch, self.room.in_flight)
        model, method = spec_of(self.shape, context), resolve_method(self.config.method)
        tiers = method.layout(self.config, model, self.device).memory(self.config, model, pages, batch)
        own = method.own_memory(self.config, model, self.device, pages, batch)
        grown = batch * method.grown_bytes(self.config, model, self.device, context)
        tier: Place = "host" if self.room.on_host or not tiers.separate else "device"
        own_tier: Place = "host" if self.room.on_host else "device"
        items = (
            *engine_items(self.shape, self.room, batch),
            Item("host pool", "host", pages * self.blocks.page_bytes, "exact"),
            Item("sliding windows", "device", self.windows(batch), "exact"),
            Item("digests", tier, tiers.digests, "exact"),
            Item("frames", tier, tiers.frames, "exact"),
            Item("whole layers", tier, tiers.whole_layers, "exact"),
            Item("staging", tier, tiers.staging, "exact"),
            Item("method, device", own_tier, own.device, "exact"),
            Item("method, host", "host", own.host, "exact"),
            Item("growth", "host", grown, "at most"),
        )
        return Memory(pages, tuple(item for item in items if item.bytes))


Candidate = StockMemory | MethodMemory


def engine_items(shape: ModelShape, room: MemoryRoom, batch: int) -> tuple[Item, ...]:
    """Return the engine's own memory, which does not depend on the attention backend.

    Activations are the larger of one MLP's over a step's tokens (residual, norm, gate, up and their product) and the
    logits of the batch (in the model's type, and the sampler's copy in fp32).
    """
    place: Place = "host" if room.on_host else "device"
    mlp = room.chunk_tokens * (2 * shape.hidden + 3 * shape.intermediate) * shape.dtype_bytes
    logits = batch * shape.vocab * (shape.dtype_bytes + 4)
    overhead = () if room.on_host else (Item("engine overhead", "device", room.device_overhead, "estimate"),)
    return (
        Item("weights", place, shape.weight_bytes, "at most" if shape.weights_are_counted else "exact"),
        *((Item("state of other layers", place, batch * shape.state_bytes, "estimate"),) if shape.state_bytes else ()),
        Item("activations", place, max(mlp, logits), "estimate"),
        *overhead,
        Item("server", "host", room.host_overhead, "estimate"),
    )


def largest(spare: Callable[[int], int], limit: int) -> int:
    """Return the largest number from 1 to ``limit`` that fits, 0 if none does.

    Args:
        spare: returns the bytes that a number leaves over, negative if they are missing. More never leave more over.
            Memory is nearly linear, so that interpolation tries few numbers.
        limit: the end of the search.
    """
    low, high = 1, limit
    left, short = spare(low), spare(high)
    if left < 0:
        return 0
    if short >= 0:
        return limit
    tried, tried_spare, least_step = low, left, 1
    while high - low > 1 and (low == 1 or high == limit):  # Interpolate: afterwards the answer is near `tried`.
        step = math.floor(tried_spare * (high - low) / (left - short))
        step = max(step, least_step) if tried_spare >= 0 else min(step, -least_step)
        tried = min(max(tried + step, low + 1), high - 1)
        tried_spare, least_step = spare(tried), 4 * least_step
        low, left, high, short = (
            (tried, tried_spare, high, short) if tried_spare >= 0 else (low, left, tried, tried_spare)
        )
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if spare(middle) >= 0 else (low, middle)
    return low
