"""The state and the three answers at the top of the status page, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from hybrid_backend.hardware import find_hardware
from hybrid_backend.tools.status.glance import unjudged
from hybrid_backend.tools.status.reading import LayerCounts, Reading
from tests.unit.status.made import BUS, IN_PLACE, SERVED, in_place, judged_of, layer, rates_of, told


def test_what_is_not_measured_says_so() -> None:
    answers = told(Reading(time=1, running=1))
    assert answers["faithful"][:2] == ("Not measured", "unknown") and answers["fast"][1] == "unknown"
    assert not judged_of(Reading(time=1), rates_of()).changes


# --- the headline ---


@pytest.mark.parametrize(
    ("last", "rates", "state", "title", "level"),
    [
        ({"running": 0, "waiting": 0}, {"generated_per_second": 0}, "idle", "Idle", "unknown"),
        ({"running": 3}, {"prompt_per_second": 900}, "prompts", "Reading prompts", "unknown"),
        ({"running": 3}, {"generated_per_second": 0}, "prompts", "Working, no token yet", "unknown"),
        ({"running": 2}, {"generated_per_second": 20}, "decoding", "Decoding well", "good"),
        ({"running": 2}, {"generated_per_second": 2}, "decoding", "Decoding: very slow, held back by", "bad"),
        (
            {"running": 9, "waiting": 3, "pool_fill": 0.99}, {"generated_per_second": 99},
            "decoding", "Decoding: held back by host memory", "fair",
        ),
    ],
)  # fmt: skip
def test_the_headline_names_the_state_and_the_worst_of_the_answers(
    last: dict[str, Any], rates: dict[str, Any], state: str, title: str, level: str
) -> None:
    judged = judged_of(
        Reading(time=1, **last), rates_of(running=last["running"], **rates), (layer(0, 0.99, attended=1.0),)
    )
    headline = judged.headline
    assert (headline.state, headline.level) == (state, level) and headline.title.startswith(title)


def test_requests_that_run_are_never_called_idle() -> None:
    """A long prompt, or a step that is longer than the window, counts no token at all."""
    answers = told(
        Reading(time=1, running=3, waiting=0), rates_of(running=3, generated_per_second=0, prompt_per_second=0)
    )
    assert answers["fast"] == (
        "No token yet", "unknown",
        "3 requests run and no token was counted: a prompt is read, or one step takes longer than 15 s.",
    )  # fmt: skip
    assert answers["back"][:2] == ("Prompts", "unknown")


def test_an_unfaithful_server_is_told_though_it_is_idle() -> None:
    judged = judged_of(Reading(time=1, running=0, waiting=0), rates_of(running=0), (layer(0, 0.5),))
    assert judged.headline.title == "Idle: not faithful" and judged.headline.level == "bad" and judged.changes


def test_of_a_server_that_is_silent_nothing_is_judged() -> None:
    judged = unjudged(was_read=True, stale_seconds=42.0, problem="It refuses")
    assert judged.headline.title == "No answer for 42 s" and judged.headline.level == "bad"
    assert judged.headline.detail.startswith("It refuses. Everything below is as old as the last reading")
    assert judged.answers == () and judged.changes == ()
    assert unjudged(False, 3.0, None).headline.title == "No server answers"
    assert unjudged(True, 600.0, None).headline.title == "No answer for 10 min"


def test_one_reading_is_no_rate_yet() -> None:
    for was_read in (False, True):
        assert unjudged(was_read, None, None).headline.state == "starting"


# --- is it faithful? ---


@pytest.mark.parametrize(
    ("masses", "verdict", "level"),
    [
        ((0.99, 0.97), "Faithful", "good"),
        ((0.95, 0.9), "Nearly faithful", "fair"),
        ((0.9, 0.5), "Not faithful", "bad"),
    ],
)
def test_the_mass_that_sampled_layers_keep_says_how_faithful(
    masses: tuple[float, float], verdict: str, level: str
) -> None:
    layers = (layer(0, None), layer(1, masses[0]), layer(2, masses[1]))
    last = Reading(time=1)
    said, how_good, text = told(last, layers=layers)["faithful"]
    assert (said, how_good) == (verdict, level) and f"{masses[1]:.1%} in the worst (2), means since start" in text
    assert bool(judged_of(last, rates_of(), layers).changes) == (level != "good")


@pytest.mark.parametrize(
    ("mass", "verdict", "level"), [(0.981, "Promise kept", "good"), (0.979, "Promise broken", "bad")]
)
def test_a_promise_is_what_counts_where_there_is_one(mass: float, verdict: str, level: str) -> None:
    gauges = {"hybrid_quality_min_mass": 0.98, "hybrid_quality_mass": mass, "hybrid_quality_budget_tokens": 2304.0}
    said = told(Reading(time=1, gauges=gauges), layers=(layer(0, 0.5),))["faithful"]
    assert said[:2] == (verdict, level) and said[2].endswith("promised: 98%.")
    assert "at 2,304 tokens of budget" in said[2]
    said = told(Reading(time=1, gauges=gauges | {"hybrid_quality_max_kl": 0.01}), layers=(layer(0, 0.5),))["faithful"]
    assert said[1] == level and "within 0.01 nats of dense" in said[2]


@pytest.mark.parametrize(("mass", "shown"), [(0.97999, "97.99%"), (0.57, "57%"), (0.98, "98%"), (1.0, "100%")])
def test_the_mass_is_never_shown_as_more_than_it_is(mass: float, shown: str) -> None:
    gauges = {"hybrid_quality_min_mass": 0.98, "hybrid_quality_mass": mass}
    _, level, text = told(Reading(time=1, gauges=gauges))["faithful"]
    assert text.startswith(f"{shown} of the") and level == ("good" if mass >= 0.98 else "bad")


def test_contexts_that_are_attended_whole_are_exact_whatever_was_sampled_before() -> None:
    layers = (layer(0, 0.5, attended=1.0), layer(1, None, attended=1.0))
    assert told(Reading(time=1), layers=layers)["faithful"][:2] == ("Exact", "good")
    layers = (layer(0, 0.5, attended=1.0), layer(1, None, attended=0.3))
    assert told(Reading(time=1), layers=layers)["faithful"][1] == "bad"


def test_the_cosine_of_predicted_queries_is_told_with_the_worst_layer() -> None:
    layers = (layer(1, 0.99, query_cosine=0.5), layer(4, 0.99, query_cosine=0.96))
    _, level, text = told(Reading(time=1), layers=layers)["faithful"]
    assert level == "good" and text.endswith("Cosine of predicted and true queries: 0.73, 0.50 in the worst (1).")


# --- is it fast? ---


@pytest.mark.parametrize(
    ("generated", "verdict", "level"),
    [(40, "Faster than reading", "good"), (19.9, "Slow", "fair"), (4, "Very slow", "bad")],
)
def test_speed_is_judged_by_how_fast_a_person_reads(generated: float, verdict: str, level: str) -> None:
    """In place too, where nothing is waited for."""
    for last in (in_place(running=4), Reading(time=1, running=4)):
        said = told(last, rates_of(running=4, generated_per_second=generated, attention_share=0.1))["fast"]
        assert said[:2] == (verdict, level), said
        assert said[2].startswith(f"{generated:.1f} tokens/s, {generated / 4:.1f} for each of 4 requests;")


def test_latencies_of_the_engine_are_told() -> None:
    rates = {"generated_per_second": 40, "token_seconds": 0.1, "first_token_seconds": 2.25}
    text = told(Reading(time=1, running=4), rates_of(running=4, **rates))["fast"][2]
    assert "Between two tokens 100 ms passed (TPOT). First tokens came after 2.2 s (TTFT)." in text


def test_attention_in_place_is_compared_with_the_memory_of_the_machine() -> None:
    rates = {"generated_per_second": 20, "attention_share": 0.7, "attention_bytes_per_second": 12e9}
    machine = find_hardware("a10").replace(gpus=1)
    share = f"{12e9 / machine.host_read_achieved:.0%} of the {machine.host_read_achieved / 1e9:.1f} GB/s"
    judged = told(in_place(), rates_of(running=2, **rates), machine=machine)
    assert f"Attention reads 12.0 GB/s of K and V while it runs, {share} of its memory." in judged["fast"][2]
    assert "is not what it waits for" in judged["back"][2]
    unknown = told(in_place(), rates_of(running=2, **rates))
    assert "what this machine's memory can is unknown (hybrid profile --hardware," in unknown["fast"][2]
    rates["attention_bytes_per_second"] = 0.9 * machine.host_read_achieved
    judged = told(in_place(), rates_of(running=2, **rates), machine=machine)
    assert (
        judged["back"][0] == "Attention"
        and "bound by the memory, of whose bandwidth it reaches 90%" in judged["back"][2]
    )
    text = told(in_place(), rates_of(running=2, generated_per_second=20))["fast"][2]
    assert "the server does not time its attention" in text


def test_waits_that_were_never_counted_are_not_told_as_none() -> None:
    """`infinigen` and `clo` wait for copies alone, which nobody times; a `scout` may never have waited."""
    recent = rates_of(running=1, generated_per_second=1)
    last = Reading(time=1, running=1, layers=(LayerCounts(selected_tokens=3, recalled_pages=1),))
    assert "No wait was counted" in told(last, recent)["fast"][2]
    for last in (
        Reading(time=1, running=1, gauges={"hybrid_recall_interval": 8.0}),
        Reading(time=1, running=1, layers=(LayerCounts(selected_tokens=3, cpu_tokens=1),)),
    ):
        assert "The device tier waits 0.0% of the time for the CPU." in told(last, recent)["fast"][2]


# --- what holds it back? ---


@pytest.mark.parametrize(
    ("last", "waits", "verdict", "change"),
    [
        ({"waiting": 3, "pool_fill": 0.97}, 0.5, "Host memory", "host_pool.size"),
        ({"waiting": 3, "pool_fill": 0.5}, 0.5, "CPU workers", "frames_per_request"),
        ({"waiting": 3, "pool_fill": 0.5}, 0.02, "The batch", "--max-num-seqs"),
        ({"waiting": 3, "pool_fill": 0.5, "engine": "sglang"}, 0.02, "The batch", "--max-running-requests"),
        ({"waiting": 3, "pool_fill": 0.97, "engine": "sglang"}, 0.5, "Host memory", "--context-length"),
        ({"waiting": 0, "pool_fill": 0.97}, 0.02, "Nothing", None),
    ],
)
def test_what_holds_it_back_is_named_with_the_key_to_change(
    last: dict[str, Any], waits: float, verdict: str, change: str | None
) -> None:
    served = Reading(time=1, running=1, gauges={"hybrid_frames_per_request": 67}, **last)
    recent = rates_of(running=1, generated_per_second=10, wait_share=waits)
    judged = judged_of(served, recent, (layer(0, 0.99, cpu=0.25),))
    assert judged.answers[2].verdict == verdict
    assert (change in str(judged.changes)) if change else not judged.changes


@pytest.mark.parametrize("last", [in_place(running=4), Reading(time=1, running=4, waiting=0)])
def test_one_token_a_second_while_prompts_are_read_is_not_good(last: Reading) -> None:
    recent = rates_of(running=4, generated_per_second=4, prompt_per_second=250, attention_share=0.08)
    answers = told(last, recent)
    assert answers["fast"][:2] == ("Very slow", "bad")
    verdict, level, text = answers["back"]
    assert (verdict, level) == ("Prompts", "fair") and text.startswith("98% of the computed tokens were prompts'")
    (change,) = judged_of(last, recent).changes
    assert "--max-num-batched-tokens" in change.change and "prefix cache" in change.others[0]


@pytest.mark.parametrize(
    ("attention", "generated", "verdict", "level"),
    [(0.62, 40, "Attention", "fair"), (0.2, 40, "Nothing", "good"), (0.2, 4, "The model's matrices", "fair")],
)
def test_in_place_attention_is_told_from_the_rest(attention: float, generated: float, verdict: str, level: str) -> None:
    recent = rates_of(running=2, generated_per_second=generated, attention_share=attention)
    said = told(in_place(), recent, layers=(layer(0, 0.99, attended=0.3),))["back"]
    assert said[:2] == (verdict, level)
    assert said[2].startswith(f"Attention takes {attention:.0%} of the time for 30% of the contexts' tokens")
    changes = judged_of(in_place(), recent, (layer(0, 0.99, attended=0.3),)).changes
    assert ("budget_tokens" in str(changes)) == (verdict == "Attention")


def test_a_batch_that_is_not_full_is_not_what_requests_wait_for() -> None:
    last = Reading(time=1, running=5, waiting=3, pool_fill=0.5, gauges=SERVED)
    verdict, level, text = told(last, rates_of(running=7, prompt_per_second=9))["back"]
    assert (verdict, level) == ("Prompts", "fair") and text.startswith("3 requests wait although only 7 of 12 run")
    assert not judged_of(last, rates_of(running=7, prompt_per_second=9)).changes
    for rate in (None, 0):
        verdict, _, text = told(last, rates_of(running=7, prompt_per_second=rate))["back"]
        assert verdict == "Not known"
        assert text == "3 requests wait although only 7 of 12 run and the host pool is 50% full."
    assert told(last, rates_of(running=12))["back"][0] == "The batch", "it was full a moment ago"


@pytest.mark.parametrize(
    ("gigabytes", "waits", "cpu", "verdict"),
    [
        (40, 0.2, 0.1, "The bus"),
        (40, 0.9, 0.1, "CPU workers"),
        (10, 0.2, 0.1, "CPU workers"),
        (10, 0.2, 0.0, "CPU workers"),
        (40, 0.0, 0.0, "The bus"),
        (10, 0.0, 0.0, "Nothing"),
    ],
)
def test_bus_and_cpu_are_told_apart_by_the_time_that_each_takes(
    gigabytes: float, waits: float, cpu: float, verdict: str
) -> None:
    """Whatever share of the tokens the CPU attends."""
    recent = rates_of(running=1, generated_per_second=10, wait_share=waits, copied_bytes_per_second=gigabytes * 1e9)
    judged = judged_of(Reading(time=1, running=1, gauges=SERVED | BUS), recent, (layer(0, 0.99, cpu=cpu),))
    held = judged.answers[2]
    assert held.verdict == verdict and held.level == ("good" if verdict == "Nothing" else "fair")
    if verdict == "The bus":
        assert "take about 80% of the time" in held.text
        (change,) = judged.changes
        assert (
            change.change.startswith("frames_per_request=134 (now 67")
            and "recall.intervals=16 (now 8)" in change.others
        )


def test_waits_are_for_the_cpu_where_it_is_not_known_what_the_bus_carries() -> None:
    recent = rates_of(running=1, generated_per_second=10, wait_share=0.4, copied_bytes_per_second=2e9)
    for share in (0.0, 0.2):
        text = told(Reading(time=1, running=1), recent, layers=(layer(0, 0.99, cpu=share),))["back"][2]
        assert text.startswith("The device tier waits 40% of the time for them;")
    recent = rates_of(running=1, generated_per_second=10, copied_bytes_per_second=2e9)
    verdict, level, text = told(Reading(time=1, running=1), recent, layers=(layer(0, 0.99, cpu=0.0),))["back"]
    assert (verdict, level) == ("Not measured", "unknown") and text.startswith("2,000 MB/s are copied to the device")


def test_in_place_needs_no_frames_gauge_of_another_server() -> None:
    assert in_place().is_in_place and not Reading(time=1, gauges=IN_PLACE).is_in_place
