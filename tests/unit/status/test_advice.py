"""The changes that the status page recommends: one value each, reckoned from what the server publishes."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from hybrid_backend.tools.status.reading import LayerCounts, Reading
from tests.unit.status.made import BUS, IN_PLACE, SERVED, advised, in_place, rates_of

WAITS = rates_of(running=1, generated_per_second=10, wait_share=0.5)


def waiting(**more: float) -> Reading:
    return Reading(time=1, running=1, gauges=SERVED | more)


def test_a_promise_that_is_broken_densely_is_proposed_as_it_can_be_kept() -> None:
    gauges = {
        "hybrid_quality_min_mass": 0.98, "hybrid_quality_mass": 0.9612, "hybrid_quality_budget_tokens": math.inf,
    }  # fmt: skip
    assert advised(Reading(time=1, gauges=gauges)) == [
        "Promise: quality.min_mass=0.96 (now 0.98), which the largest budget keeps"
    ]
    assert advised(Reading(time=1, gauges=SERVED | gauges | {"hybrid_quality_max_kl": 0.01})) == [
        "Promise: frames_per_request=134 (now 67; 8.0 MiB more on the devices together), up to which the budget grows",
        "quality.max_kl=0.02 (now 0.01), of which hybrid profile makes a promise",
    ]


def test_one_change_is_recommended_and_other_ways_come_after_it() -> None:
    assert advised(waiting(), WAITS) == [
        "CPU workers: workers.threads=4 (now 2)",
        "frames_per_request=134 (now 67; 8.0 MiB more on the devices together)",
        "recall.intervals=4 (now 8)",
        "budget_tokens=512 (now 1024)",
        "more cores: hybrid plan --machine NAME --cores N reckons how many",
    ]
    busy = Reading(time=1, running=12, waiting=4, pool_fill=0.5, gauges=SERVED)
    assert advised(busy) == ["The batch: --max-num-seqs 16 (now 12)"]
    assert advised(replace(busy, waiting=99)) == ["The batch: --max-num-seqs 24 (now 12)"], "one step at a time"
    on_gpu = replace(busy, gauges=SERVED | BUS)
    assert advised(on_gpu)[0].endswith(
        "if the log said that no more fit the device, with frames_per_request=50 (now 67)"
    )
    attention = rates_of(running=2, generated_per_second=10, attention_share=0.7)
    assert advised(in_place(), attention) == [
        "Attention: budget_tokens=512 (now 1024), as far as it is faithful enough",
        "more cores: hybrid plan --machine NAME --cores N reckons how many",
    ]
    dense = in_place(gauges={"hybrid_frame_bytes": 0.0})
    assert advised(dense, attention)[0].startswith("Attention: method=scout with sparse=auto")


def test_a_larger_budget_is_named_with_the_frames_that_hold_it() -> None:
    assert advised(Reading(time=1, gauges=IN_PLACE), mass=0.5) == [
        "Faithfulness: budget_tokens=2048 (now 1024)",
        "quality.min_mass=0.95 with method=scout, by which the server finds the budget",
    ]
    few_frames = Reading(time=1, gauges=SERVED | {"hybrid_frames_per_request": 35.0})
    assert advised(few_frames, mass=0.5)[0].endswith(
        "budget_tokens=2048 (now 1024) with frames_per_request=67 (now 35)"
    )
    assert "sparse=never" in advised(Reading(time=1), mass=0.5)[0], "a method without a budget"


def test_advice_does_not_ask_for_a_larger_and_a_smaller_budget_at_once() -> None:
    changes = advised(waiting(), WAITS, mass=0.5)
    assert "budget_tokens=2048" in changes[0] and "recall.intervals=4 (now 8)" in changes
    assert not [change for change in changes if "budget_tokens=512" in change]


def test_where_a_promise_sets_the_budget_the_promise_is_what_can_be_changed() -> None:
    changes = advised(waiting(hybrid_quality_min_mass=0.98, hybrid_quality_mass=0.99), WAITS)
    assert not [change for change in changes if "budget_tokens" in change]
    assert "quality.min_mass below 0.98" in changes[-2] and "hybrid profile" in changes[-2]


def test_a_promise_in_nats_is_changed_in_nats() -> None:
    gauges = {"hybrid_quality_min_mass": 0.98, "hybrid_quality_mass": 0.99, "hybrid_quality_max_kl": 0.01}
    changes = advised(waiting(**gauges), WAITS)
    assert "quality.max_kl=0.02 (now 0.01)" in changes[-2]
    assert not [change for change in changes if "min_mass" in change]


@pytest.mark.parametrize(
    ("running", "gibibytes", "context", "more"),
    [
        (4, 6, "16000, with which 8", ""),
        (8, 5, "10656, with which 12", ""),
        (12, 6, "5312, with which 24", ", with --max-num-seqs 24 (now 12)"),
    ],
)
def test_memory_is_proposed_for_those_that_may_run_and_at_most_twice_of_those_that_do(
    running: int, gibibytes: int, context: str, more: str
) -> None:
    """However many wait: a context of a few tokens would be none."""
    size = f"host_pool.size={gibibytes}GiB (now 3.0 GiB; or the engine's own setting of it)"
    assert advised(Reading(time=1, running=running, waiting=1000, pool_fill=0.97, gauges=SERVED)) == [
        f"Host memory: {size}, if the machine has it{more}",
        f"--max-model-len {context} fit at once{more}",
    ]


def test_contexts_of_less_than_half_of_what_runs_are_not_proposed() -> None:
    tiny = Reading(time=1, running=8, waiting=9, pool_fill=1.0, gauges=SERVED | {"hybrid_host_pool_pages": 23.0})
    assert "--max-model-len" not in str(advised(tiny)), "32 tokens, where one takes 92"
    assert "--max-model-len 64" in str(advised(replace(tiny, running=6, waiting=3)))


def test_fewer_frames_are_proposed_on_a_gpu_only_and_never_too_few_for_the_budget() -> None:
    busy = Reading(time=1, running=12, waiting=99, pool_fill=0.5, gauges=SERVED | BUS)
    assert advised(busy)[0].endswith("with frames_per_request=33 (now 67)")
    for gauges in (SERVED | BUS | {"hybrid_frames_per_request": 65.0}, SERVED | {"hybrid_device_bytes": 1.0}):
        assert advised(replace(busy, gauges=gauges)) == ["The batch: --max-num-seqs 24 (now 12)"]


def test_more_frames_are_proposed_up_to_what_a_request_takes_at_most() -> None:
    changes = str(advised(waiting(hybrid_frames_per_request=400.0), WAITS))
    assert "frames_per_request=512 (now 400; 2.2 MiB more on the devices together)" in changes
    assert "frames_per_request" not in str(advised(waiting(hybrid_frames_per_request=512.0), WAITS))
    changes = str(advised(replace(waiting(**BUS), engine="sglang"), WAITS))
    assert "more on the devices together, or none with half the --max-running-requests)" in changes


def test_what_cannot_be_reckoned_names_the_command_that_does() -> None:
    full = Reading(time=1, running=1, waiting=3, pool_fill=0.97)
    for last in (full, replace(full, pool_fill=0.5)):
        assert "hybrid plan reckons" in advised(last)[0]
    assert "hybrid plan --machine NAME --cores N" in advised(Reading(time=1), WAITS)[0]


def test_replicas_are_counted_where_a_flag_is_for_one() -> None:
    last = Reading(time=1, running=24, waiting=8, pool_fill=0.5, gauges=SERVED, replicas=2)
    assert advised(last) == ["The batch: --max-num-seqs 16 (now 12)"]


def test_each_engine_is_told_its_own_flag_for_the_tokens_of_a_step() -> None:
    slow = rates_of(running=4, generated_per_second=4, prompt_per_second=300)
    for engine, flag in (("vllm", "--max-num-batched-tokens"), ("sglang", "--chunked-prefill-size")):
        last = Reading(time=1, running=4, engine=engine, layers=(LayerCounts(),))
        assert f"half of {flag}" in advised(last, slow)[0]
