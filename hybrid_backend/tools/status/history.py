"""From readings to what happened between them, kept for a bounded time."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from hybrid_backend.tools.status.model import Column, Layer, Rates
from hybrid_backend.tools.status.reading import Durations, LayerCounts, Reading

WINDOW = 15.0  # seconds that rates are means of: an engine's step may take longer than an interval
_DIGITS = 4


@dataclass(frozen=True)
class History:
    """The latest columns, and the readings that the next ones start from. ``add`` returns the next history.

    ``kept``: columns at most; ``longest``: seconds that one column may cover. ``recent``: the readings of the last
    ``WINDOW`` seconds, the oldest first.
    """

    kept: int
    longest: float
    columns: tuple[Column, ...] = ()
    layers: tuple[Layer, ...] = ()
    recent: tuple[Reading, ...] = ()

    @property
    def last(self) -> Reading | None:
        return self.recent[-1] if self.recent else None

    @property
    def rates(self) -> Rates | None:
        """The rates up to the last reading; None if no column ends there: after a start, a restart or a long gap."""
        return self.columns[-1].rates if len(self.recent) > 1 else None

    def add(self, reading: Reading) -> History:
        """Return the history with the column up to this reading, and with the layers over the last ``WINDOW`` seconds.

        No column is added if the counters went back (the server was started again), if time stood still, or if more
        than ``longest`` seconds passed: an average over them would hide what happened.
        """
        last = self.last
        seconds = reading.time - last.time if last is not None else 0.0
        if last is None or not 0 < seconds <= self.longest or _went_back(last, reading):
            layers = self.layers if last is not None and not _went_back(last, reading) else ()
            return History(self.kept, self.longest, self.columns, layers, (reading,))
        recent = tuple(r for r in self.recent if reading.time - r.time <= WINDOW or r is last)
        columns = deque(self.columns, maxlen=self.kept)
        columns.append(_column(last, reading, seconds, _rates(recent, reading)))
        span = reading.time - recent[0].time
        layers = tuple(
            _layer(index, a, b, span, self.layers[index] if index < len(self.layers) else None)
            for index, (a, b) in enumerate(_pairs(recent[0], reading))
        )
        return History(self.kept, self.longest, tuple(columns), layers, (*recent, reading))


def _pairs(before: Reading, after: Reading) -> list[tuple[LayerCounts, LayerCounts]]:
    """Pair the counts of each layer in both readings; a new layer began at zero."""
    missing = [LayerCounts()] * (len(after.layers) - len(before.layers))
    return list(zip([*before.layers, *missing], after.layers, strict=True))


def _column(last: Reading, reading: Reading, seconds: float, rates: Rates) -> Column:
    pairs = _pairs(last, reading)
    return Column(
        time=round(reading.time, 3),
        seconds=round(seconds, 3),
        running=reading.running,
        waiting=reading.waiting,
        pool_fill=_rounded(reading.pool_fill),
        frames_in_use=reading.gauges.get("hybrid_frames_in_use"),
        resident_requests=reading.gauges.get("hybrid_resident_requests"),
        rates=rates,
        attended=tuple(_attended(a, b) for a, b in pairs),
        residency=tuple(_residency(a, b) for a, b in pairs),
        cpu_ratio=tuple(_cpu_ratio(a, b) for a, b in pairs),
    )


def _rates(recent: tuple[Reading, ...], reading: Reading) -> Rates:
    """Compute the means from the oldest of the ``recent`` readings to this one."""
    first, seconds = recent[0], reading.time - recent[0].time
    pairs = _pairs(first, reading)
    running = [r.running for r in (*recent[1:], reading) if r.running is not None]
    hits, queries = (
        _growth(first.prefix_hits, reading.prefix_hits),
        _growth(first.prefix_queries, reading.prefix_queries),
    )
    return Rates(
        seconds=round(seconds, 3),
        running=_rounded(sum(running) / len(running)) if running else None,
        most_running=max(running, default=None),
        generated_per_second=_rate(first.generated_tokens, reading.generated_tokens, seconds),
        prompt_per_second=_rate(first.prompt_tokens, reading.prompt_tokens, seconds),
        prefix_hit_ratio=None if hits is None or queries is None else _ratio(hits, queries),
        first_token_seconds=_mean_duration(first.first_token, reading.first_token),
        token_seconds=_mean_duration(first.token_gap, reading.token_gap),
        recalled_per_second=round(sum(b.recalled_pages - a.recalled_pages for a, b in pairs) / seconds, _DIGITS),
        copied_bytes_per_second=_rate(
            first.gauges.get("hybrid_copied_bytes"), reading.gauges.get("hybrid_copied_bytes"), seconds
        ),
        wait_share=round(sum(b.wait_seconds - a.wait_seconds for a, b in pairs) / seconds, _DIGITS),
        attention_share=_attention_share(pairs, seconds),
        attention_bytes_per_second=_attention_bytes(pairs, reading.token_bytes),
    )


def _layer(index: int, a: LayerCounts, b: LayerCounts, seconds: float, before: Layer | None) -> Layer:
    """Compute a layer's rates over a window. Its ratios stay those of the last window in which it attended."""
    idle = b.selected_tokens == a.selected_tokens
    kept = before if idle else None
    return Layer(
        layer=index,
        attended=kept.attended if kept else _attended(a, b),
        residency=kept.residency if kept else _residency(a, b),
        cpu_ratio=kept.cpu_ratio if kept else _cpu_ratio(a, b),
        attended_tokens_per_second=round((b.selected_tokens - a.selected_tokens) / seconds, 1),
        recalled_per_second=round((b.recalled_pages - a.recalled_pages) / seconds, _DIGITS),
        wait_share=round((b.wait_seconds - a.wait_seconds) / seconds, 6),
        lead_share=round((b.lead_seconds - a.lead_seconds) / seconds, 6),
        attention_share=_attention_share([(a, b)], seconds),
        query_cosine=_rounded(b.query_cosine),
        mass_recall=_rounded(b.mass_recall),
    )


def _attended(a: LayerCounts, b: LayerCounts) -> float | None:
    return _ratio(b.selected_tokens - a.selected_tokens, b.context_tokens - a.context_tokens)


def _attention_share(pairs: list[tuple[LayerCounts, LayerCounts]], seconds: float) -> float | None:
    """``None`` where it is not counted; nothing else tells that from an idle server."""
    if not any(b.attention_seconds for _, b in pairs):
        return None
    return round(sum(b.attention_seconds - a.attention_seconds for a, b in pairs) / seconds, 6)


def _attention_bytes(pairs: list[tuple[LayerCounts, LayerCounts]], token_bytes: float | None) -> float | None:
    """Return the bytes of K and V read per second of attention; None if no time or no token of it was counted."""
    seconds = sum(b.attention_seconds - a.attention_seconds for a, b in pairs)
    tokens = sum(b.selected_tokens - a.selected_tokens for a, b in pairs)
    return round(tokens * token_bytes / seconds) if token_bytes and tokens > 0 and seconds > 0 else None


def _residency(a: LayerCounts, b: LayerCounts) -> float | None:
    return _ratio(b.resident_hits - a.resident_hits, b.resident_lookups - a.resident_lookups)


def _cpu_ratio(a: LayerCounts, b: LayerCounts) -> float | None:
    return _ratio(b.cpu_tokens - a.cpu_tokens, b.selected_tokens - a.selected_tokens)


def _ratio(part: float, whole: float) -> float | None:
    """Within 0..1: a reading may fall between the publication of two counters."""
    return round(min(max(part / whole, 0.0), 1.0), _DIGITS) if whole > 0 else None


def _mean_duration(before: Durations | None, after: Durations | None) -> float | None:
    """Return seconds; None if nothing was observed between the two readings."""
    return None if after is None else _rounded(after.since(before).mean)


def _growth(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None else after - before


def _rate(before: float | None, after: float | None, seconds: float) -> float | None:
    return None if before is None or after is None else round((after - before) / seconds, 2)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, _DIGITS)


def _went_back(last: Reading, reading: Reading) -> bool:
    """Return whether any counter fell: another server answers, or the same one was started again."""
    if len(reading.layers) < len(last.layers):
        return True
    totals = [(last.generated_tokens, reading.generated_tokens), (last.prompt_tokens, reading.prompt_tokens)]
    totals += [(a.count, b.count) for a, b in _durations(last, reading)]
    totals.append((last.gauges.get("hybrid_copied_bytes"), reading.gauges.get("hybrid_copied_bytes")))
    for a, b in zip(last.layers, reading.layers, strict=False):
        totals += [
            (getattr(a, name), getattr(b, name))
            for name in ("selected_tokens", "cpu_tokens", "recalled_pages", "resident_hits", "wait_seconds")
        ]
    return any(before is not None and after is not None and after < before for before, after in totals)


def _durations(last: Reading, reading: Reading) -> list[tuple[Durations, Durations]]:
    pairs = [(last.first_token, reading.first_token), (last.token_gap, reading.token_gap)]
    return [(a, b) for a, b in pairs if a is not None and b is not None]
