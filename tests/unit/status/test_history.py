"""From readings to columns: bounded, honest about gaps and restarts, never outside its ranges."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_backend.tools.status.history import History
from hybrid_backend.tools.status.reading import LayerCounts, Reading

GROWTH = st.integers(0, 10**6)


@st.composite
def increments(draw: st.DrawFn) -> tuple[float, int, int, int, int, float]:
    """Seconds, selected, cpu, lookups, hits, wait of one interval, for every layer alike."""
    selected, lookups = draw(GROWTH), draw(GROWTH)
    cpu, hits = draw(st.integers(0, selected)), draw(st.integers(0, lookups))
    seconds = draw(st.floats(0.1, 20))
    return seconds, selected, cpu, lookups, hits, draw(st.floats(0, seconds))


def after(reading: Reading, step: tuple[float, int, int, int, int, float]) -> Reading:
    seconds, selected, cpu, lookups, hits, wait = step
    layers = tuple(
        replace(
            layer,
            selected_tokens=layer.selected_tokens + selected,
            cpu_tokens=layer.cpu_tokens + cpu,
            resident_lookups=layer.resident_lookups + lookups,
            resident_hits=layer.resident_hits + hits,
            wait_seconds=layer.wait_seconds + wait,
        )
        for layer in reading.layers
    )
    return replace(reading, time=reading.time + seconds, layers=layers)


START = Reading(time=100.0, figures={"running": 1.0, "generated_tokens": 0.0}, layers=(LayerCounts(), LayerCounts()))


def history_of(*readings: Reading, kept: int = 9, longest: float = 60) -> History:
    history = History(kept, longest)
    for reading in readings:
        history.add(reading)
    return history


@given(st.lists(increments(), max_size=30), st.integers(1, 8))
def test_the_history_is_bounded_and_says_what_happened(
    steps: list[tuple[float, int, int, int, int, float]], kept: int
) -> None:
    history, reading = history_of(START, kept=kept), START
    for seconds, selected, cpu, lookups, hits, wait in steps:
        reading = after(reading, (seconds, selected, cpu, lookups, hits, wait))
        history.add(reading)
        column = history.columns[-1]
        assert column.seconds == pytest.approx(seconds, abs=1e-3)
        expected = cpu / selected if selected else None
        assert column.cpu_ratio == (pytest.approx(expected, abs=1e-4) if expected is not None else None,) * 2
        expected = hits / lookups if lookups else None
        assert column.residency == (pytest.approx(expected, abs=1e-4) if expected is not None else None,) * 2
        first = history.recent[0] if len(history.recent) > 1 else START
        waited = sum(b.wait_seconds - a.wait_seconds for a, b in zip(first.layers, reading.layers, strict=True))
        window = reading.time - first.time
        assert column.rates.seconds == pytest.approx(window, abs=1e-3)
        assert column.rates.wait_share == pytest.approx(waited / window, abs=1e-3)
    assert len(history.columns) == min(len(steps), kept)
    assert sum(r.time < reading.time - 15.0 for r in history.recent) <= 1, "readings are bounded too"
    times = [column.time for column in history.columns]
    assert times == sorted(set(times)) or len(times) < 2


def test_a_server_that_was_started_again_begins_anew() -> None:
    busy = after(START, (2.0, 100, 50, 10, 5, 0.1))
    again = replace(START, time=busy.time + 2)
    history = history_of(START, busy, again)
    assert len(history.columns) == 1 and history.layers == (), "no column of negative rates"
    history.add(after(again, (2.0, 1, 1, 1, 1, 0.0)))
    assert len(history.columns) == 2


@pytest.mark.parametrize(
    "later",
    [
        replace(START, time=102.0, layers=START.layers[:1]),
        after(START, (20.5, 100, 0, 0, 0, 0.0)),
        START,
        replace(START, time=95.0),
    ],
    ids=["fewer layers: another server", "a long gap, not to be averaged", "no time passed", "time ran back"],
)
def test_no_column_is_made_of_what_is_no_interval(later: Reading) -> None:
    history = history_of(START, later, longest=20)
    assert not history.columns and history.last == later


def test_layers_are_measured_over_the_window_and_an_idle_one_has_no_ratios() -> None:
    busy = after(START, (2.0, 100, 25, 10, 5, 0.1))
    layer = history_of(START, busy).layers[0]
    assert (layer.cpu_ratio, layer.residency, layer.attended_tokens_per_second) == (0.25, 0.5, 50)
    history = history_of(START, busy, *(replace(busy, time=busy.time + 2 * step) for step in range(1, 9)))
    layer = history.layers[0]
    assert (layer.cpu_ratio, layer.residency, layer.attended_tokens_per_second) == (None, None, 0)


def test_latencies_are_those_of_the_window_and_prefix_hits_too() -> None:
    names = ("first_token_seconds", "first_tokens", "prefix_hits", "prefix_queries")
    first = replace(START, figures=dict(zip(names, (50.0, 5, 10, 100), strict=True)))
    second = replace(first, time=102.0, figures=dict(zip(names, (54.0, 7, 40, 160), strict=True)))
    history = history_of(first, second)
    rates = history.columns[-1].rates
    assert rates.first_token_seconds == 2.0 and rates.prefix_hit_ratio == 0.5 and rates.token_seconds is None
    history.add(replace(second, time=120.0))
    rates = history.columns[-1].rates
    assert rates.first_token_seconds is None and rates.prefix_hit_ratio is None, "nothing began since"


def test_attention_in_place_is_a_share_of_the_time_of_all_layers_together() -> None:
    layers = tuple(LayerCounts(selected_tokens=1000, attention_seconds=0.5) for _ in range(2))
    later = replace(START, time=102.0, figures={"frame_bytes": 0.0}, layers=layers)
    assert history_of(START, later).columns[-1].rates.attention_share == 0.5
    assert later.is_in_place and not START.is_in_place


def test_rates_of_a_server_that_was_started_again_are_not_those_of_the_one_before() -> None:
    """Nor those from before a gap: both begin with their second reading."""
    busy = after(START, (2.0, 100, 50, 10, 5, 0.1))
    for later in (replace(START, time=busy.time + 2), replace(busy, time=busy.time + 90)):
        history = history_of(START, busy, longest=20)
        assert history.rates is not None
        history.add(later)
        assert history.rates is None and history.columns
        history.add(after(later, (2.0, 1, 1, 1, 1, 0.0)))
        assert history.rates is not None
