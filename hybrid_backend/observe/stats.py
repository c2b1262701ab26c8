"""Plain counters, per layer, kept by the runtime; `metrics` publishes them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class LayerStats:
    """Totals of one layer since start."""

    selected_tokens: int = 0
    cpu_tokens: int = 0
    resident_hits: int = 0
    resident_lookups: int = 0
    recalled_pages: int = 0
    wait_seconds: float = 0.0
    lead_seconds: float = 0.0  # from the start of a layer's CPU partial to the moment it was needed
    cosine_sum: float = 0.0
    cosine_samples: int = 0
    mass_sum: float = 0.0
    mass_samples: int = 0


@dataclass
class Stats:
    """All counters of one rank."""

    layers: list[LayerStats]

    @classmethod
    def of(cls, num_layers: int) -> Stats:
        return cls([LayerStats() for _ in range(num_layers)])

    def attended(self, layer: int, selected: int, on_cpu: int) -> None:
        """Tokens that one layer attended in one step, and how many of them the CPU workers did."""
        entry = self.layers[layer]
        entry.selected_tokens += selected
        entry.cpu_tokens += on_cpu

    def looked_up(self, layer: int, pages: int, resident: int) -> None:
        entry = self.layers[layer]
        entry.resident_lookups += pages
        entry.resident_hits += resident

    def cpu_ratio(self) -> float:
        """Share of all attended tokens that the CPU workers attended."""
        selected = sum(layer.selected_tokens for layer in self.layers)
        return sum(layer.cpu_tokens for layer in self.layers) / selected if selected else 0.0
