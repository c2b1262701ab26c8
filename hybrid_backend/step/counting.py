"""Counters of decode steps: what the operations counted on the device, and what a method counts itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from hybrid_backend.batch import ModelSpec
from hybrid_backend.kernels.operations import Counters
from hybrid_backend.observe.stats import Stats
from hybrid_backend.step.buffers import StepBuffers
from hybrid_backend.tiers import Tiers

_LOOKUPS, _HITS = Counters._fields.index("lookups"), Counters._fields.index("hits")


class StepCounters:
    """Brings the device's counters into `Stats`. The device may be steps ahead of what the host has counted."""

    def __init__(
        self, stats: Stats, model: ModelSpec, tiers: Tiers, buffers: StepBuffers, asks_cpu: bool, pages_per_load: int
    ) -> None:
        """Begin to count.

        Args:
            stats: counters that are added to.
            model: shapes on this rank.
            tiers: byte counters of copies.
            buffers: of the steps.
            asks_cpu: missing pages are attended by the CPU.
            pages_per_load: `HeadLoads.pages_per_load`, or 0.
        """
        self._stats, self._model, self._tiers, self._buffers = stats, model, tiers, buffers
        self._asks_cpu, self._pages_per_load = asks_cpu, pages_per_load
        counters = buffers.state.counters
        is_pinned = tiers.device.type == "cuda"
        self._published = torch.zeros(counters.shape, dtype=torch.int64, pin_memory=is_pinned)
        self._counted = torch.zeros_like(counters, device="cpu")

    def publish(self) -> None:
        """Copy the device's counters to the host without waiting for the device."""
        self._published.copy_(self._buffers.state.counters, non_blocking=True)

    def count(self) -> None:
        """Add what the operations counted since the last call, as far as the device has come."""
        published = self._published.clone()
        increments = published - self._counted
        if bool((increments[:, _LOOKUPS] < increments[:, _HITS]).any()):
            return  # the device is writing the counters at this moment
        self._counted = published
        for layer, buffers in self._buffers.layers.items():
            self._count_layer(layer, Counters(*increments[buffers.position].tolist()))

    def _count_layer(self, layer: int, counted: Counters) -> None:
        stats, entry = self._stats, self._stats.layers[layer]
        lists = self._buffers.shape.lists if self._tiers.has_digests(layer) else 1
        on_cpu = counted.missing_tokens if self._asks_cpu else 0
        stats.attended(layer, (counted.resident_tokens + counted.missing_tokens) / lists, on_cpu / lists)
        lookups = counted.resident_pages + counted.missing_pages
        stats.looked_up(layer, lookups / lists, counted.resident_pages / lists)
        entry.recalled_pages += counted.recalled_pages
        entry.wait_seconds += counted.waited / 1e9
        entry.lead_seconds += counted.ahead / 1e9
        self._tiers.copied_pages += counted.recalled_pages
        entry.head_lookups += counted.lookups
        entry.head_hits += counted.hits
        pages, kv_heads = self._pages_per_load, self._model.num_kv_heads
        loaded_pages = (counted.lookups - counted.hits) * pages  # of one KV head
        entry.loaded_head_pages += loaded_pages
        self._tiers.copied_head_pages += loaded_pages
        stats.looked_up(layer, counted.lookups * pages / kv_heads, counted.hits * pages / kv_heads)

    def count_strategy(self, chosen: str, preferred: str) -> None:
        """Count a step by how rows on the CPU are attended, and by how the method's rule would have it."""
        self._stats.steps[chosen, preferred] += 1

    def count_tokens(
        self,
        resident_tokens: float,
        resident_pages: float,
        cpu_tokens: float | Sequence[float] = 0,
        missing_pages: float = 0,
        layers: Iterable[int] | None = None,
    ) -> None:
        """Count what the operations do not see, because the method made the lists of pages itself.

        Args:
            resident_tokens: tokens that the device tier attends, summed over rows.
            resident_pages: pages that the device tier has, summed over rows.
            cpu_tokens: tokens that the CPU attends: of each layer, or a number for all layers.
            missing_pages: pages that the device tier lacks, summed over rows.
            layers: layers to count in; None: all with full attention.
        """
        for i, layer in enumerate(self._buffers.full_layers if layers is None else layers):
            on_cpu = cpu_tokens if isinstance(cpu_tokens, int | float) else cpu_tokens[i]
            self._stats.attended(layer, resident_tokens + on_cpu, on_cpu)
            self._stats.looked_up(layer, resident_pages + missing_pages, resident_pages)
