"""Counters of decode steps: totals that operations write on the device tier, and totals that a method adds itself."""

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
    """Adds the counters of the device tier to `Stats`, without waiting for the device.

    The host reads the device's totals later, so that `Stats` may be some steps behind.
    """

    def __init__(
        self, stats: Stats, model: ModelSpec, tiers: Tiers, buffers: StepBuffers, asks_cpu: bool, pages_per_load: int
    ) -> None:
        """Begin to count.

        Args:
            stats: counters of the server.
            model: shapes on this rank.
            tiers: totals of copied pages.
            buffers: buffers of the steps, with the device's counters.
            asks_cpu: CPU workers attend the selected pages that are not resident.
            pages_per_load: pages that are copied when a KV head's cache misses (`HeadLoads`); 0: no such cache.
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
        """Add the increments since the last call to `Stats`, as far as the device has published its totals."""
        published = self._published.clone()
        increments = published - self._counted
        # More hits than lookups: the device is just writing the totals, so the next call counts them.
        if bool((increments[:, _LOOKUPS] < increments[:, _HITS]).any()):
            return
        self._counted = published
        for layer, buffers in self._buffers.layers.items():
            self._count_layer(layer, Counters(*increments[buffers.position].tolist()))

    def _count_layer(self, layer: int, counted: Counters) -> None:
        """Add the increments of one layer to `Stats`."""
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
        loaded_head_pages = (counted.lookups - counted.hits) * pages
        entry.loaded_head_pages += loaded_head_pages
        self._tiers.copied_head_pages += loaded_head_pages
        stats.looked_up(layer, counted.lookups * pages / kv_heads, counted.hits * pages / kv_heads)

    def count_strategy(self, chosen: str, preferred: str) -> None:
        """Count a decode step by the strategy for rows whose KV is on the CPU.

        Args:
            chosen: strategy that the step runs.
            preferred: strategy that the method's rule would choose if nothing forced another one.
        """
        self._stats.steps[chosen, preferred] += 1

    def count_tokens(
        self,
        resident_tokens: float,
        resident_pages: float,
        cpu_tokens: float | Sequence[float] = 0,
        missing_pages: float = 0,
        layers: Iterable[int] | None = None,
    ) -> None:
        """Count attended tokens and pages of a method that makes its page lists itself, unseen by the operations.

        Args:
            resident_tokens: tokens that the device tier attends, summed over rows.
            resident_pages: attended pages that are resident, summed over rows.
            cpu_tokens: tokens that the CPU attends: one number per layer, or one number for all layers.
            missing_pages: attended pages that are not resident, summed over rows.
            layers: layers to count in; None: all layers with full attention.
        """
        for i, layer in enumerate(self._buffers.full_layers if layers is None else layers):
            on_cpu = cpu_tokens if isinstance(cpu_tokens, int | float) else cpu_tokens[i]
            self._stats.attended(layer, resident_tokens + on_cpu, on_cpu)
            self._stats.looked_up(layer, resident_pages + missing_pages, resident_pages)
