"""The page's numbers as texts: tiles in groups of one span of time each, and the table of layers."""

from __future__ import annotations

from collections.abc import Sequence

from hybrid_backend.tools.counts import counted
from hybrid_backend.tools.status.model import Layer, Rates, Table, Tile, TileGroup
from hybrid_backend.tools.status.reading import Reading
from hybrid_backend.tools.status.words import duration, mean, millis, number, percent, rate, size


def tile_groups(last: Reading, rates: Rates | None, layers: Sequence[Layer]) -> tuple[TileGroup, ...]:
    """Return the tiles of the last reading, of the last seconds, and since the server's start."""
    groups = [("at the last reading", _gauges(last)), ("since the server's start", _totals(last))]
    if rates is not None:
        groups.insert(1, (f"mean of the last {rates.seconds:.0f} s", _rates(last, rates, layers)))
    return tuple(TileGroup(window, tuple(tiles)) for window, tiles in groups)


def table(layers: Sequence[Layer], in_place: bool) -> Table:
    """Return the table of layers; ``in_place``: without the columns of frames, copies and CPU workers."""
    separate = not in_place
    columns = [
        ("Layer", [str(layer.layer) for layer in layers], True),
        ("Attended", [percent(layer.attended) for layer in layers], True),
        ("Resident", [percent(layer.residency) for layer in layers], separate),
        ("On CPU", [percent(layer.cpu_ratio) for layer in layers], separate),
        ("Attended tokens/s", [number(layer.attended_tokens_per_second) for layer in layers], True),
        ("Attention, ms per s", [millis(layer.attention_share) for layer in layers], in_place),
        ("Recalled pages/s", [rate(layer.recalled_per_second) for layer in layers], separate),
        ("Waits, ms per s", [millis(layer.wait_share) for layer in layers], separate),
        ("Head start, ms per s", [millis(layer.lead_share) for layer in layers], separate),
        ("Query cosine", [number(layer.query_cosine, 3) for layer in layers], separate),
        ("Mass recall", [number(layer.mass_recall, 3) for layer in layers], True),
    ]
    shown = [(title, texts) for title, texts, is_shown in columns if is_shown]
    return Table(tuple(title for title, _ in shown), tuple(zip(*(texts for _, texts in shown), strict=True)))


def _gauges(last: Reading) -> list[Tile]:
    most, pages, owners = (last.gauge(name) for name in ("max_requests", "host_pool_pages", "resident_requests"))
    used = f"{last.pool_fill * pages:,.0f} of {counted(pages, 'page')}" if pages and last.pool_fill is not None else ""
    limit, digests = counted(most * last.replicas, "request") if most else "", size(last.gauge("digest_bytes"))
    tiles = [
        Tile("Running", number(last.running), f"of {limit}" if most else "requests"),
        Tile("Waiting", number(last.waiting), "requests"),
        Tile("Host pool", percent(last.pool_fill), used, last.pool_fill),
    ]
    if last.is_in_place:
        return [*tiles, Tile("Digests", digests, "of host memory")]
    of_requests = "" if owners is None else f" of {counted(owners, 'request')}"
    tiles.append(Tile("Frames in use", number(last.gauge("frames_in_use")), f"pages{of_requests}"))
    return [*tiles, Tile("Device tier", size(last.gauge("device_bytes")), f"{digests} digests")]


def _rates(last: Reading, rates: Rates, layers: Sequence[Layer]) -> list[Tile]:
    def ratio(name: str, unit: str, ratios: Sequence[float | None]) -> Tile:
        return Tile(name, percent(mean(ratios)), unit, mean(ratios))

    def latency(name: str, figure: str, seconds: float | None) -> Tile:
        return Tile(name, duration(seconds), figure if seconds is not None else f"{figure}; none in this time")

    busy = [layer for layer in layers if layer.attended_tokens_per_second]  # An idle layer's ratios are older.
    tiles = [
        Tile("Decode", rate(rates.generated_per_second), "tokens/s"),
        Tile("Each request", rate(rates.request_speed), "tokens/s"),
        latency("First token", "TTFT", rates.first_token_seconds),
        latency("Between tokens", "TPOT", rates.token_seconds),
        Tile("Prompts", rate(rates.prompt_per_second), "tokens/s"),
        ratio("Prefix cache hits", "of prompt tokens", [rates.prefix_hit_ratio]),
        ratio("Attended", "of the contexts", [layer.attended for layer in busy]),
    ]
    if last.is_in_place:
        reads = rates.attention_bytes_per_second
        speed = "" if reads is None else f", at {size(reads)}/s"
        return [*tiles, ratio("Attention", f"of the time{speed}", [rates.attention_share])]
    return [
        *tiles,
        ratio("Resident", "of selected pages", [layer.residency for layer in busy]),
        ratio("On CPU", "of attended tokens", [layer.cpu_ratio for layer in busy]),
        ratio("Waits", "of the time", [rates.wait_share]),
        Tile("Recalls", rate(rates.recalled_per_second), "pages/s"),
    ]


def _totals(last: Reading) -> list[Tile]:
    def quotient(total: float | None, count: float | None) -> float | None:
        return total / count if total is not None and count else None

    first_token = quotient(last.first_token_seconds, last.first_tokens)
    hits = quotient(last.prefix_hits, last.prefix_queries)
    return [
        Tile("Generated", number(last.generated_tokens), "tokens"),
        Tile(
            "First token", duration(first_token), f"TTFT, mean of {last.first_tokens:,.0f}" if first_token else "TTFT"
        ),
        Tile("Between tokens", duration(quotient(last.token_gap_seconds, last.token_gaps)), "TPOT, mean"),
        Tile("Prefix cache hits", percent(hits), "of prompt tokens", hits),
        Tile("Preempted", number(last.preemptions), "requests"),
    ]
