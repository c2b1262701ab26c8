"""What the page reads out of a /metrics: real texts of both engines, and any numbers that the publisher writes."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_backend.errors import EngineError
from hybrid_backend.observe.stats import LayerStats
from hybrid_backend.tools.status.reading import read
from tests.unit.status.server_stand import MetricsStand

DATA = Path(__file__).parent / "data"
COUNT = st.integers(0, 10**12)
SECONDS = st.floats(0, 10**7)
COUNTERS = ("selected_tokens", "cpu_tokens", "recalled_pages", "resident_hits", "resident_lookups", "mass_samples")


@st.composite
def layer_stats(draw: st.DrawFn) -> LayerStats:
    return LayerStats(**{name: draw(COUNT) for name in COUNTERS}, wait_seconds=draw(SECONDS))


@given(st.lists(layer_stats(), min_size=1, max_size=12))
def test_every_number_that_the_plugin_publishes_is_read_back(layers: list[LayerStats]) -> None:
    stand = MetricsStand(len(layers))
    stand.stats.layers[:] = layers
    reading = read(stand.text(), 5.0)
    assert len(reading.layers) == len(layers)
    for wrote, found in zip(layers, reading.layers, strict=True):
        assert [getattr(found, name) for name in COUNTERS] == [getattr(wrote, name) for name in COUNTERS]
        assert math.isclose(found.wait_seconds, wrote.wait_seconds, abs_tol=1e-12)
        assert found.query_cosine is None, "nothing was sampled"
    assert reading.figures["host_pool_pages"] == 1000


def test_ranks_add_their_tokens_and_wait_at_the_same_time() -> None:
    stand = MetricsStand(2)
    stand.decode(cpu=lambda layer: 0.25)
    one = stand.text()
    two = read(one + one.replace('rank="0"', 'rank="1"'), 0.0)
    assert two.layers[1].selected_tokens == 2000 and two.layers[1].cpu_tokens == 500
    assert two.layers[1].wait_seconds == read(one, 0.0).layers[1].wait_seconds
    assert two.figures["host_pool_pages"] == 1000 and two.figures["frames_in_use"] == 480


def test_replicas_add_their_requests_and_parallel_ranks_do_not() -> None:
    lines = [
        f'sglang:num_running_reqs{{dp_rank="{dp}",tp_rank="{tp}",model_name="m",priority=""}} {3 + dp}'
        for dp in (0, 1)
        for tp in (0, 1)
    ]
    lines.append('sglang:num_running_reqs{dp_rank="0",tp_rank="0",model_name="m",priority="7"} 2')
    reading = read("\n".join(lines), 0.0)
    assert reading.get("running") == 7 and reading.engine == "sglang" and reading.model == "m" and reading.replicas == 2


SGLANG = """sglang:num_running_reqs{tp_rank="0"} 3
sglang:generation_tokens_total{is_streaming="false"} 12
sglang:prompt_tokens_total{is_streaming="false"} 80
sglang:realtime_tokens_total{mode="prefill_compute",tp_rank="0"} 900
sglang:realtime_tokens_total{mode="prefill_cache",tp_rank="0"} 300
"""


def test_tokens_of_sglang_are_those_of_its_steps_not_of_its_finished_requests() -> None:
    """Its generation_tokens_total stands still while requests run that are not streamed."""
    decoding = read(SGLANG + 'sglang:realtime_tokens_total{mode="decode",tp_rank="0"} 512\n', 0.0)
    assert decoding.get("generated_tokens") == 512 and decoding.get("prompt_tokens") == 900
    assert decoding.get("prefix_hits") == 300 and decoding.get("prefix_queries") == 1200
    assert read(SGLANG, 0.0).get("generated_tokens") == 0, "so far only prompts were computed"
    replicas = SGLANG.replace("prefill_compute", "decode").replace('tp_rank="0"', 'dp_rank="1",tp_rank="0"')
    assert read(SGLANG.replace("prefill_compute", "decode") + replicas, 0.0).get("generated_tokens") == 1800
    assert read("\n".join(SGLANG.splitlines()[:3]), 0.0).get("generated_tokens") == 12, "a version without the counter"


def test_latencies_and_prefix_hits_are_read_from_both_engines() -> None:
    text = (DATA / "vllm.txt").read_text()
    reading = read(text, 0.0)
    assert reading.get("first_tokens") == 5 and reading.get("first_token_seconds")
    assert reading.get("prefix_hits") == 0 and reading.get("prefix_queries") == 4396
    streamed = [
        f'sglang:{name}{{is_streaming="{kind}"}} {value}'
        for name, value in (("time_to_first_token_seconds_sum", 3), ("time_to_first_token_seconds_count", 2))
        for kind in ("true", "false")
    ]
    reading = read("\n".join(streamed), 0.0)
    assert (reading.get("first_token_seconds"), reading.get("first_tokens")) == (6, 4)


def test_a_real_vllm_is_read() -> None:
    reading = read((DATA / "vllm.txt").read_text(), 0.0)
    assert reading.engine == "vllm" and reading.model == "smollm2-135m-instruct"
    assert reading.get("running") is not None and reading.get("running") >= 1 and reading.get("waiting") is not None
    assert reading.get("pool_fill") is not None and 0 < reading.get("pool_fill") <= 1
    assert len(reading.layers) == 30 and reading.get("generated_tokens")
    assert all(layer.selected_tokens > 0 for layer in reading.layers)
    sparse = reading.layers[3:]
    assert all(0 < layer.cpu_tokens < layer.selected_tokens for layer in sparse)
    assert all(0 < layer.resident_hits < layer.resident_lookups for layer in sparse)
    assert any(layer.recalled_pages for layer in sparse) and reading.figures["frames_in_use"] > 0


def test_a_real_sglang_is_read() -> None:
    reading = read((DATA / "sglang.txt").read_text(), 0.0)
    assert reading.engine == "sglang" and reading.get("running") is not None and reading.get("waiting") is not None
    assert reading.get("pool_fill") is not None and len(reading.layers) == 30 and reading.layers[5].selected_tokens > 0


@given(st.text(max_size=400))
def test_any_text_is_read_or_refused_in_one_line(text: str) -> None:
    for candidate in (
        text,
        f"hybrid_cpu_tokens_total{{layer={text!r}}} 1",
        f'hybrid_wait_seconds_total{{layer="1"}}{text}',
    ):
        try:
            read(candidate, 0.0)
        except EngineError as error:
            assert "/metrics" in str(error)


@pytest.mark.parametrize("layer", ["", "-1", "1.5", "99999", "one"])
def test_a_layer_that_is_none_is_refused(layer: str) -> None:
    with pytest.raises(EngineError, match="not of this version"):
        read(f'hybrid_cpu_tokens_total{{layer="{layer}"}} 1\n', 0.0)


@pytest.mark.parametrize(
    ("name", "ranks", "told"),
    [
        ("quality_mass", ("0.99", "0.97"), 0.97),
        ("quality_mass", ("+Inf",), None),
        ("quality_budget_tokens", ("+Inf", "1024"), 1024),
        ("quality_budget_tokens", ("+Inf", "+Inf"), math.inf),
    ],
    ids=["least of ranks", "no other is infinite", "one rank has a budget", "all is attended"],
)
def test_the_rank_that_keeps_least_is_told(name: str, ranks: tuple[str, ...], told: float | None) -> None:
    """Everything is attended only where every rank attends everything."""
    text = "\n".join(f'hybrid_{name}{{rank="{rank}"}} {value}' for rank, value in enumerate(ranks))
    assert read(text, 0.0).get(name) == told


def test_what_is_not_a_number_is_left_out() -> None:
    reading = read('hybrid_predicted_query_cosine{layer="0"} NaN\nvllm:num_requests_running +Inf\n', 0.0)
    assert reading.layers == () and reading.get("running") is None
