"""The history of a server: what happened between its readings, for a bounded time."""

from __future__ import annotations

from collections import deque

from hybrid_backend.tools.status.model import Column, Layer, Rates
from hybrid_backend.tools.status.reading import COUNTERS, LayerCounts, Reading, ratio

WINDOW = 15.0
"""Seconds that rates are means of. An engine's step may take longer than the interval between two readings."""
_TOTALS = ("generated_tokens", "prompt_tokens", "copied_bytes", "first_tokens", "token_gaps")


class History:
    """The latest columns, and the readings that the next column starts from.

    Attributes:
        columns: the latest intervals, the oldest first.
        recent: the readings of the last ``WINDOW`` seconds, the oldest first.
    """

    def __init__(self, max_columns: int, longest: float) -> None:
        """Begin an empty history of ``max_columns`` columns, each of at most ``longest`` seconds."""
        self._longest = longest
        self.recent: list[Reading] = []
        self.columns: deque[Column] = deque(maxlen=max_columns)

    @property
    def last(self) -> Reading | None:
        """The last reading."""
        return self.recent[-1] if self.recent else None

    @property
    def rates(self) -> Rates | None:
        """The rates up to the last reading; None if no column ends there: after a start, a restart or a long gap."""
        return self.columns[-1].rates if len(self.recent) > 1 else None

    @property
    def layers(self) -> tuple[Layer, ...]:
        """Figures of each layer over the same window as `rates`; empty if there is none."""
        if len(self.recent) < 2:
            return ()
        first, last = self.recent[0], self.recent[-1]
        window = zip(last.layers, _growth(first, last), strict=True)
        return tuple(_layer(index, *counts, last.time - first.time) for index, counts in enumerate(window))

    def add(self, reading: Reading) -> None:
        """Add the column up to this reading.

        No column is added if a counter fell (the server was started again), if time stood still, or if more than the
        longest interval passed: an average over it would hide what happened.
        """
        last = self.last
        if last is None or _has_restarted(last, reading) or not 0 < reading.time - last.time <= self._longest:
            self.recent = [reading]
            return
        self.recent = [r for r in self.recent if reading.time - r.time <= WINDOW or r is last] + [reading]
        growth = _growth(last, reading)
        self.columns.append(
            Column(
                time=reading.time,
                seconds=reading.time - last.time,
                **{name: reading.get(name) for name in ("running", "waiting", "pool_fill", "frames_in_use")},
                rates=_rates(self.recent),
                attended=tuple(layer.attended for layer in growth),
                residency=tuple(layer.residency for layer in growth),
                cpu_ratio=tuple(layer.cpu_ratio for layer in growth),
            )
        )


def _growth(first: Reading, last: Reading) -> list[LayerCounts]:
    """Return the counts of each layer between two readings; a new layer began at zero."""
    missing = [LayerCounts()] * (len(last.layers) - len(first.layers))
    return [after.since(before) for before, after in zip([*first.layers, *missing], last.layers, strict=True)]


def _rates(readings: list[Reading]) -> Rates:
    """Compute the means from the first of the readings to the last one."""
    first, last = readings[0], readings[-1]
    seconds, layers = last.time - first.time, _growth(first, last)
    running = [count for reading in readings[1:] if (count := reading.get("running")) is not None]
    attention = sum(layer.attention_seconds for layer in layers)

    def growth(name: str) -> float | None:
        return last.growth(first, name)

    def quotient(value: float | None, divisor: float | None) -> float | None:
        return value / divisor if value is not None and divisor else None

    hits, queries = growth("prefix_hits"), growth("prefix_queries")
    return Rates(
        seconds=seconds,
        running=sum(running) / len(running) if running else None,
        most_running=max(running, default=None),
        generated_per_second=quotient(growth("generated_tokens"), seconds),
        prompt_per_second=quotient(growth("prompt_tokens"), seconds),
        prefix_hit_ratio=None if hits is None or queries is None else ratio(hits, queries),
        first_token_seconds=quotient(growth("first_token_seconds"), growth("first_tokens")),
        token_seconds=quotient(growth("token_gap_seconds"), growth("token_gaps")),
        recalled_per_second=sum(layer.recalled_pages for layer in layers) / seconds,
        copied_bytes_per_second=quotient(growth("copied_bytes"), seconds),
        wait_share=sum(layer.wait_seconds for layer in layers) / seconds,
        attention_share=attention / seconds if any(layer.attention_seconds for layer in last.layers) else None,
    )


def _layer(index: int, total: LayerCounts, counts: LayerCounts, seconds: float) -> Layer:
    """Compute a layer's figures of its counts since the server's start, and of a window of so many seconds."""
    return Layer(
        layer=index,
        attended=counts.attended,
        residency=counts.residency,
        cpu_ratio=counts.cpu_ratio,
        attended_tokens_per_second=counts.selected_tokens / seconds,
        recalled_per_second=counts.recalled_pages / seconds,
        wait_share=counts.wait_seconds / seconds,
        attention_share=counts.attention_seconds / seconds if total.attention_seconds else None,
        query_cosine=total.query_cosine,
        mass_recall=total.mass_recall,
        mass_samples=None if total.attended in (None, 1) else int(total.mass_samples),
    )


def _has_restarted(last: Reading, reading: Reading) -> bool:
    """Return True if any counter fell: another server answers, or the same server was started again."""
    if len(reading.layers) < len(last.layers) or any((reading.growth(last, name) or 0) < 0 for name in _TOTALS):
        return True
    return any(getattr(layer, name) < 0 for layer in _growth(last, reading) for name in COUNTERS)
