"""The page's numbers, in groups of one span of time each, so that no number's window has to be guessed."""

from __future__ import annotations

from collections.abc import Sequence

from hybrid_backend.tools.counts import counted
from hybrid_backend.tools.status.model import Layer, Rates, Tile, TileGroup
from hybrid_backend.tools.status.reading import Reading
from hybrid_backend.tools.status.words import (
    bandwidth,
    bytes_text,
    duration,
    mean,
    number,
    percent,
    rate,
)


def tile_groups(last: Reading, rates: Rates | None, layers: Sequence[Layer]) -> tuple[TileGroup, ...]:
    """Return the tiles of the last reading, of the last seconds, and since the server's start."""
    groups = [TileGroup(window="at the last reading", tiles=tuple(_gauges(last)))]
    if rates is not None:
        window = f"mean of the last {rates.seconds:.0f} s"
        groups.append(TileGroup(window=window, tiles=tuple(_rates(last, rates, layers))))
    groups.append(TileGroup(window="since the server's start", tiles=tuple(_totals(last))))
    return tuple(groups)


def _gauges(last: Reading) -> list[Tile]:
    most = last.gauges.get("hybrid_max_requests")
    pages = last.gauges.get("hybrid_host_pool_pages")
    used = ""
    if pages is not None and last.pool_fill is not None:
        used = f"{last.pool_fill * pages:,.0f} of {counted(pages, 'page')}"
    tiles = [
        Tile(
            name="Running",
            value=number(last.running),
            unit=f"of {counted(most * last.replicas, 'request')}" if most else "requests",
        ),
        Tile(name="Waiting", value=number(last.waiting), unit="requests"),
        Tile(name="Host pool", value=percent(last.pool_fill), unit=used, share=last.pool_fill),
    ]
    digests = bytes_text(last.gauges.get("hybrid_digest_bytes"))
    if last.is_in_place:
        return [*tiles, Tile(name="Digests", value=digests, unit="of host memory")]
    frames, owners = last.gauges.get("hybrid_frames_in_use"), last.gauges.get("hybrid_resident_requests")
    return [
        *tiles,
        Tile(
            name="Frames in use",
            value=number(frames),
            unit="pages" if owners is None else f"pages of {counted(owners, 'request')}",
        ),
        Tile(name="Device tier", value=bytes_text(last.gauges.get("hybrid_device_bytes")), unit=f"{digests} digests"),
    ]


def _rates(last: Reading, rates: Rates, layers: Sequence[Layer]) -> list[Tile]:
    def ratio(name: str, key: str, unit: str) -> Tile:
        """Average the layers that attended in this time: an idle layer keeps the ratio of its last busy time."""
        share = mean(getattr(layer, key) for layer in layers if layer.attended_tokens_per_second)
        return Tile(name=name, value=percent(share), unit=unit, share=share)

    tiles = [
        Tile(name="Decode", value=rate(rates.generated_per_second), unit="tokens/s"),
        Tile(name="Each request", value=rate(rates.request_speed), unit="tokens/s"),
        Tile(
            name="First token", value=duration(rates.first_token_seconds), unit=_or("TTFT", rates.first_token_seconds)
        ),
        Tile(name="Between tokens", value=duration(rates.token_seconds), unit=_or("TPOT", rates.token_seconds)),
        Tile(name="Prompts", value=rate(rates.prompt_per_second), unit="tokens/s"),
        _prefix(rates.prefix_hit_ratio),
        ratio("Attended", "attended", "of the contexts"),
    ]
    if last.is_in_place:
        reads = rates.attention_bytes_per_second
        unit = "of the time" if reads is None else f"of the time, at {bandwidth(reads)}"
        return [
            *tiles,
            Tile(name="Attention", value=percent(rates.attention_share), unit=unit, share=_bar(rates.attention_share)),
        ]
    return [
        *tiles,
        ratio("Resident", "residency", "of selected pages"),
        ratio("On CPU", "cpu_ratio", "of attended tokens"),
        Tile(name="Waits", value=percent(rates.wait_share), unit="of the time", share=_bar(rates.wait_share)),
        Tile(name="Recalls", value=rate(rates.recalled_per_second), unit="pages/s"),
    ]


def _totals(last: Reading) -> list[Tile]:
    first, gap = last.first_token, last.token_gap
    hits = last.prefix_hits / last.prefix_queries if last.prefix_hits is not None and last.prefix_queries else None
    return [
        Tile(name="Generated", value=number(last.generated_tokens), unit="tokens"),
        Tile(
            name="First token",
            value=duration(first.mean if first else None),
            unit=f"TTFT, mean of {first.count:,.0f}" if first and first.count else "TTFT",
        ),
        Tile(name="Between tokens", value=duration(gap.mean if gap else None), unit="TPOT, mean"),
        _prefix(hits),
        Tile(name="Preempted", value=number(last.preemptions), unit="requests"),
    ]


def _prefix(ratio: float | None) -> Tile:
    return Tile(name="Prefix cache hits", value=percent(ratio), unit="of prompt tokens", share=ratio)


def _or(name: str, seconds: float | None) -> str:
    return name if seconds is not None else f"{name}; none in this time"


def _bar(share: float | None) -> float | None:
    """Limit a share of time to what a bar can hold: several ranks together may exceed one."""
    return None if share is None else min(max(share, 0.0), 1.0)
