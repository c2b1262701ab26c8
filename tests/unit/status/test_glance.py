"""The answers at the top of the status page, by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from hybrid_backend.tools.status.glance import glance
from hybrid_backend.tools.status.model import Column, Layer
from hybrid_backend.tools.status.reading import LayerCounts, Reading, read
from tests.unit.status.server_stand import MetricsStand


def column(time: float, **more: Any) -> Column:
    nothing = dict.fromkeys(
        ("running", "waiting", "pool_fill", "generated_per_second", "prompt_per_second", "copied_bytes_per_second",
         "attention_share", "frames_in_use", "resident_requests")
    )  # fmt: skip
    values = {"recalled_per_second": 0, "wait_share": 0, "attended": (), "residency": (), "cpu_ratio": ()}
    return Column(time=time, seconds=2, **{**nothing, **values, **more})


def layer(index: int, mass: float | None, cpu: float | None = None, **more: float) -> Layer:
    values: dict[str, Any] = {
        "attended": None, "residency": None, "attended_tokens_per_second": 0, "recalled_per_second": 0,
        "wait_share": 0, "lead_share": 0, "attention_share": None, "query_cosine": None,
    }  # fmt: skip
    return Layer(layer=index, cpu_ratio=cpu, mass_recall=mass, **{**values, **more})


def told(last: Reading, columns: list[Column], layers: list[Layer]) -> dict[str, tuple[str, str]]:
    return {answer.question: (answer.text, answer.level) for answer in glance(last, columns, layers)}


def test_what_is_not_measured_says_so() -> None:
    found = told(Reading(time=1), [column(1)], [])
    assert found["Is it faithful?"][0].startswith("Not measured") and found["Is it fast?"][0] == "Not measured yet."
    assert {level for _, level in found.values()} == {"unknown", "good"} and "What to change" not in found


@pytest.mark.parametrize(("masses", "level"), [((0.99, 0.97), "good"), ((0.95, 0.9), "fair"), ((0.9, 0.5), "bad")])
def test_the_mass_that_sampled_layers_keep_says_how_faithful(masses: tuple[float, float], level: str) -> None:
    layers = [layer(0, None), layer(1, masses[0]), layer(2, masses[1])]
    found = told(Reading(time=1), [column(1)], layers)
    text, said = found["Is it faithful?"]
    assert said == level and f"{masses[1]:.1%} in the worst (2)" in text
    assert ("What to change" in found) == (level != "good")


@pytest.mark.parametrize(("kept", "level"), [(0.981, "good"), (0.979, "bad")])
def test_a_promise_is_what_counts_where_there_is_one(kept: float, level: str) -> None:
    gauges = {"hybrid_quality_min_mass": 0.98, "hybrid_quality_mass": kept, "hybrid_quality_budget_tokens": 2304.0}
    text, said = told(Reading(time=1, gauges=gauges), [column(1)], [layer(0, 0.5)])["Is it faithful?"]
    assert said == level and text.endswith("promised: 98%.") and "at 2,304 tokens of budget" in text
    profiled = Reading(time=1, gauges=gauges | {"hybrid_quality_max_kl": 0.01})
    text, said = told(profiled, [column(1)], [layer(0, 0.5)])["Is it faithful?"]
    assert said == level and "within 0.01 nats of dense" in text


@pytest.mark.parametrize(("kept", "shown"), [(0.97999, "97.99%"), (0.57, "57%"), (0.98, "98%"), (1.0, "100%")])
def test_what_is_kept_is_never_shown_as_more_than_it_is(kept: float, shown: str) -> None:
    gauges = {"hybrid_quality_min_mass": 0.98, "hybrid_quality_mass": kept}
    text, level = told(Reading(time=1, gauges=gauges), [column(1)], [])["Is it faithful?"]
    assert text.startswith(f"{shown} of the") and level == ("good" if kept >= 0.98 else "bad")


def test_rates_are_those_of_the_last_fifteen_seconds() -> None:
    columns = [
        column(0, generated_per_second=900, wait_share=0.9),
        column(20, generated_per_second=40, wait_share=0.05),
    ]
    found = told(Reading(time=20, running=4), columns, [])
    assert found["Is it fast?"] == (
        "40.0 tokens/s, 10.0 of each of 4 requests (100 ms per token); the device tier waits 5.0% of the time for the "
        "CPU.",
        "good",
    )
    reading = told(Reading(time=20), [column(1, generated_per_second=0, prompt_per_second=1234)], [])
    assert reading["Is it fast?"] == ("It reads prompts, 1,234 tokens/s.", "unknown")


@pytest.mark.parametrize(
    ("last", "waits", "what", "change"),
    [
        ({"waiting": 3, "pool_fill": 0.97}, 0.5, "Host memory: 3 requests wait", "host_pool.size"),
        ({"waiting": 3, "pool_fill": 0.5}, 0.5, "The CPU: the device tier waits 50%", "frames_per_request"),
        ({"waiting": 3, "pool_fill": 0.5}, 0.02, "The batch: 3 requests wait", "--max-num-seqs"),
        ({"waiting": 3, "pool_fill": 0.5, "engine": "sglang"}, 0.02, "The batch", "--max-running-requests"),
        ({"waiting": 3, "pool_fill": 0.97, "engine": "sglang"}, 0.5, "Host memory", "--context-length"),
        ({"waiting": 0, "pool_fill": 0.97}, 0.02, "Nothing that is measured here", None),
    ],
)
def test_what_holds_it_back_is_named_with_the_key_to_change(
    last: dict[str, Any], waits: float, what: str, change: str | None
) -> None:
    columns = [column(1, generated_per_second=10, wait_share=waits)]
    served = Reading(time=1, gauges={"hybrid_frames_per_request": 67}, **last)
    found = told(served, columns, [layer(0, 0.99, cpu=0.25)])
    assert found["What holds it back?"][0].startswith(what)
    assert (change in found["What to change"][0]) if change else "What to change" not in found


def test_contexts_that_are_attended_whole_are_exact_whatever_was_sampled_before() -> None:
    found = told(Reading(time=1), [column(1)], [layer(0, 0.5, attended=1.0), layer(1, None, attended=1.0)])
    assert found["Is it faithful?"][0].startswith("Exact") and found["Is it faithful?"][1] == "good"
    found = told(Reading(time=1), [column(1)], [layer(0, 0.5, attended=1.0), layer(1, None, attended=0.3)])
    assert found["Is it faithful?"][1] == "bad"


def test_the_cosine_of_predicted_queries_is_told_with_the_worst_layer() -> None:
    layers = [layer(1, 0.99, query_cosine=0.5), layer(4, 0.99, query_cosine=0.96)]
    text, level = told(Reading(time=1), [column(1)], layers)["Is it faithful?"]
    assert level == "good" and text.endswith("Cosine of predicted and true queries: 0.73, 0.50 in the worst (1).")


@pytest.mark.parametrize(
    ("attention", "level", "begins"),
    [(0.62, "fair", "The CPU's attention: it takes 62% of the time for 30%"), (0.2, "good", "Not attention, which")],
)
def test_in_place_attention_is_told_from_the_rest(attention: float, level: str, begins: str) -> None:
    counts = LayerCounts(selected_tokens=3, context_tokens=10, attention_seconds=1)
    last = Reading(time=1, running=1, waiting=0, layers=(counts,), gauges={"hybrid_frame_bytes": 0})
    columns = [column(1, generated_per_second=10, attention_share=attention)]
    found = told(last, columns, [layer(0, 0.99, attended=0.3)])
    assert found["What holds it back?"][0].startswith(begins) and found["What holds it back?"][1] == level
    assert ("budget_tokens" in found.get("What to change", ("", ""))[0]) == (level == "fair")


SERVED = {
    "hybrid_budget_tokens": 1024.0, "hybrid_page_tokens": 32.0, "hybrid_frames_per_request": 67.0,
    "hybrid_frame_bytes": 8.0 * 2**20, "hybrid_recall_interval": 8.0, "hybrid_host_pool_pages": 4000.0,
    "hybrid_host_pool_bytes": 3.0 * 2**30, "hybrid_max_requests": 12.0, "hybrid_worker_threads": 2.0,
    "hybrid_worker_cpus": 4.0,
}  # fmt: skip
BUS = {"hybrid_bus_bytes_per_second": 50e9}
IN_PLACE = {"hybrid_budget_tokens": 1024.0, "hybrid_page_tokens": 32.0, "hybrid_frame_bytes": 0.0}


def advised(last: Reading, *columns: Column, mass: float = 0.99, cpu: float = 0.25) -> str:
    return told(last, list(columns or [column(1)]), [layer(0, mass, cpu=cpu)]).get("What to change", ("", ""))[0]


def test_a_dense_spell_says_that_everything_is_attended_and_why() -> None:
    gauges = {
        "hybrid_quality_min_mass": 0.98, "hybrid_quality_mass": 0.9612, "hybrid_quality_budget_tokens": math.inf,
    }  # fmt: skip
    text, level = told(Reading(time=1, gauges=gauges), [column(1)], [layer(0, 0.5)])["Is it faithful?"]
    assert text.startswith("Everything is attended just now") and level == "good"
    assert "kept 96.12% of the attention mass" in text and "less than the promised 98%" in text
    assert advised(Reading(time=1, gauges=gauges)) == (
        "Promise: quality.min_mass=0.96 (now 0.98), which the largest budget keeps."
    )
    text = advised(Reading(time=1, gauges=SERVED | gauges | {"hybrid_quality_max_kl": 0.01}))
    assert "frames_per_request=134 (now 67; 8.0 MiB more on the devices together), up to which the budget grows" in text
    assert "quality.max_kl=0.02 (now 0.01), of which hybrid profile makes a promise" in text


def test_a_dense_spell_is_read_from_a_real_metrics_text() -> None:
    stand = MetricsStand(2)
    stand.gauges |= {
        "hybrid_quality_min_mass": 0.98, "hybrid_quality_mass": 0.9, "hybrid_quality_budget_tokens": math.inf,
    }  # fmt: skip
    last = read(stand.text(), 1.0)
    assert told(last, [column(1)], [])["Is it faithful?"][0].startswith("Everything is attended just now")


def test_advice_names_each_key_with_the_value_to_give_it() -> None:
    """And what it is now."""
    waits = column(1, generated_per_second=10, wait_share=0.5)
    assert advised(Reading(time=1, gauges=SERVED), waits).splitlines() == [
        "CPU: frames_per_request=134 (now 67; 8.0 MiB more on the devices together); or recall.intervals=4 (now 8); or "
        "budget_tokens=512 (now 1024); or workers.threads=4 (now 2)."
    ]
    busy = Reading(time=1, running=12, waiting=4, pool_fill=0.5, gauges=SERVED)
    assert advised(busy) == "Batch: --max-num-seqs 16 (now 12)."
    assert advised(replace(busy, waiting=99)) == "Batch: --max-num-seqs 24 (now 12).", "one step at a time"
    on_gpu = replace(busy, gauges=SERVED | BUS)
    assert advised(on_gpu).endswith("if the log said that no more fit the device, with frames_per_request=50 (now 67).")
    full = replace(busy, running=8, pool_fill=0.97)
    assert advised(full) == (
        "Memory: host_pool.size=5GiB (now 3.0 GiB; or the engine's own setting of it), if the machine has it; or "
        "--max-model-len 10656, with which 12 fit at once."
    )
    in_place = Reading(time=1, running=1, layers=(LayerCounts(selected_tokens=1),), gauges=IN_PLACE)
    assert advised(in_place, column(1, generated_per_second=10, attention_share=0.7)) == (
        "Attention: budget_tokens=512 (now 1024), as far as it is faithful enough; or more cores: "
        "hybrid plan --machine NAME --what-if cores=N reckons how many."
    )


def test_a_larger_budget_is_named_with_the_frames_that_hold_it() -> None:
    text = advised(Reading(time=1, gauges=IN_PLACE), mass=0.5)
    assert text.startswith("Faithful: budget_tokens=2048 (now 1024); or, with method=scout, quality.min_mass=0.95,")
    text = advised(Reading(time=1, gauges=SERVED | {"hybrid_frames_per_request": 35.0}), mass=0.5)
    assert "budget_tokens=2048 (now 1024) with frames_per_request=67 (now 35)" in text
    assert "sparse=never" in advised(Reading(time=1), mass=0.5), "a method without a budget"


def test_advice_does_not_ask_for_a_larger_and_a_smaller_budget_at_once() -> None:
    text = advised(Reading(time=1, gauges=SERVED), column(1, generated_per_second=10, wait_share=0.5), mass=0.5)
    assert "budget_tokens=2048" in text and "budget_tokens=512" not in text and "recall.intervals=4" in text


def test_where_a_promise_sets_the_budget_the_promise_is_what_can_be_changed() -> None:
    gauges = SERVED | {"hybrid_quality_min_mass": 0.98, "hybrid_quality_mass": 0.99}
    text = advised(Reading(time=1, gauges=gauges), column(1, generated_per_second=10, wait_share=0.5))
    assert "budget_tokens" not in text and "quality.min_mass below 0.98" in text and "hybrid profile" in text


def test_a_promise_in_nats_is_changed_in_nats() -> None:
    gauges = SERVED | {"hybrid_quality_min_mass": 0.98, "hybrid_quality_mass": 0.99, "hybrid_quality_max_kl": 0.01}
    text = advised(Reading(time=1, gauges=gauges), column(1, generated_per_second=10, wait_share=0.5))
    assert "quality.max_kl=0.02 (now 0.01)" in text and "min_mass" not in text


@pytest.mark.parametrize(
    ("running", "proposed"),
    [
        (4, "host_pool.size=6GiB (now 3.0 GiB; or the engine's own setting of it), if the machine has it; or "
            "--max-model-len 16000, with which 8 fit at once."),
        (8, "host_pool.size=5GiB (now 3.0 GiB; or the engine's own setting of it), if the machine has it; or "
            "--max-model-len 10656, with which 12 fit at once."),
        (12, "host_pool.size=6GiB (now 3.0 GiB; or the engine's own setting of it), if the machine has it; or "
             "--max-model-len 5312, with which 24 fit at once; with --max-num-seqs 24 (now 12)."),
    ],
)  # fmt: skip
def test_memory_is_proposed_for_those_that_may_run_and_at_most_twice_of_those_that_do(
    running: int, proposed: str
) -> None:
    """However many wait: a context of a few tokens would be none."""
    assert advised(Reading(time=1, running=running, waiting=1000, pool_fill=0.97, gauges=SERVED)) == (
        f"Memory: {proposed}"
    )


def test_contexts_of_less_than_half_of_what_runs_now_are_not_proposed() -> None:
    tiny = Reading(time=1, running=8, waiting=9, pool_fill=1.0, gauges=SERVED | {"hybrid_host_pool_pages": 23.0})
    assert "--max-model-len" not in advised(tiny), "32 tokens, where one takes 92"
    assert "--max-model-len 64" in advised(replace(tiny, running=6, waiting=3))


def test_fewer_frames_are_proposed_on_a_gpu_only_and_never_too_few_for_the_budget() -> None:
    busy = Reading(time=1, running=12, waiting=99, pool_fill=0.5, gauges=SERVED | BUS)
    assert advised(busy).endswith("with frames_per_request=33 (now 67).")
    for gauges in (SERVED | BUS | {"hybrid_frames_per_request": 65.0}, SERVED | {"hybrid_device_bytes": 1.0}):
        assert advised(replace(busy, gauges=gauges)) == "Batch: --max-num-seqs 24 (now 12)."


def test_more_frames_are_proposed_up_to_what_a_request_takes_at_most() -> None:
    waits = column(1, generated_per_second=10, wait_share=0.5)
    text = advised(Reading(time=1, gauges=SERVED | {"hybrid_frames_per_request": 400.0}), waits)
    assert "frames_per_request=512 (now 400; 2.2 MiB more on the devices together)" in text
    text = advised(Reading(time=1, gauges=SERVED | {"hybrid_frames_per_request": 512.0}), waits)
    assert "frames_per_request" not in text
    text = advised(Reading(time=1, gauges=SERVED | BUS, engine="sglang"), waits)
    assert "more on the devices together, or none with half the --max-running-requests)" in text


def test_what_cannot_be_reckoned_names_the_command_that_does() -> None:
    full = Reading(time=1, running=1, waiting=3, pool_fill=0.97)
    for last in (full, replace(full, pool_fill=0.5)):
        assert "hybrid plan reckons" in advised(last)
    waits = column(1, generated_per_second=10, wait_share=0.5)
    assert "hybrid plan --machine NAME --what-if cores=N" in advised(Reading(time=1), waits)


def test_replicas_are_counted_where_a_flag_is_for_one() -> None:
    last = Reading(time=1, running=24, waiting=8, pool_fill=0.5, gauges=SERVED, replicas=2)
    assert advised(last) == "Batch: --max-num-seqs 16 (now 12)."


def test_a_batch_that_is_not_full_is_not_what_requests_wait_for() -> None:
    last = Reading(time=1, running=5, waiting=3, pool_fill=0.5, gauges=SERVED)
    text, level = told(last, [column(1, running=7, prompt_per_second=9)], [])["What holds it back?"]
    assert text.startswith("Prompts, most likely: 3 requests wait although only 7 of 12 run") and level == "fair"
    assert not advised(last)
    for rate in (None, 0):
        text, _ = told(last, [column(1, running=7, prompt_per_second=rate)], [])["What holds it back?"]
        assert text == "Not known: 3 requests wait although only 7 of 12 run and the host pool is 50% full."
    text, _ = told(last, [column(1, running=12)], [])["What holds it back?"]
    assert text.startswith("The batch"), "it was full a moment ago"


@pytest.mark.parametrize("rate", [1, 1000])
def test_in_place_speed_is_told_and_not_judged(rate: float) -> None:
    """Nothing is waited for: there is nothing to judge by."""
    last = Reading(time=1, running=2, layers=(LayerCounts(selected_tokens=3),), gauges={"hybrid_frame_bytes": 0})
    columns = [column(1, generated_per_second=rate, attention_share=0.4)]
    text, level = told(last, columns, [])["Is it fast?"]
    assert level == "unknown" and "; attention takes 40% of the time. In place nothing is waited for" in text
    assert text.startswith(
        f"{rate:,.1f} tokens/s, {rate / 2:,.1f} of each of 2 requests ({2000 / rate:,.0f} ms per token)"
    )
    assert "attention takes" not in told(last, [column(1, generated_per_second=rate)], [])["Is it fast?"][0]


def test_speed_is_not_judged_by_waits_that_were_never_counted() -> None:
    """`infinigen` and `clo` wait for copies alone, which nobody times."""
    layers = (LayerCounts(selected_tokens=3, recalled_pages=1),)
    found = told(Reading(time=1, running=1, layers=layers), [column(1, generated_per_second=1)], [])["Is it fast?"]
    assert found == (
        "1.0 tokens/s, 1.0 of the one request (1,000 ms per token); no wait was counted, by which it could be judged.",
        "unknown",
    )
    layers = (LayerCounts(selected_tokens=3, wait_seconds=1),)
    assert told(Reading(time=1, layers=layers), [column(1, generated_per_second=1)], [])["Is it fast?"][1] == "good"


def test_a_scout_that_never_waited_is_judged_by_its_not_waiting() -> None:
    """As where everything is resident."""
    columns = [column(1, generated_per_second=1)]
    for last in (
        Reading(time=1, gauges={"hybrid_recall_interval": 8.0}),
        Reading(time=1, layers=(LayerCounts(selected_tokens=3, cpu_tokens=1),)),
    ):
        assert told(last, columns, [])["Is it fast?"] == (
            "1.0 tokens/s; the device tier waits 0.0% of the time for the CPU.", "good"
        )  # fmt: skip


@pytest.mark.parametrize(
    ("gigabytes", "waits", "cpu", "begins"),
    [
        (40, 0.2, 0.1, "The bus: copies, 40,000 MB/s, take about 80% of the time; the device tier waits 20%"),
        (40, 0.9, 0.1, "The CPU: the device tier waits 90%"),
        (10, 0.2, 0.1, "The CPU: the device tier waits 20%"),
        (10, 0.2, 0.0, "The CPU: the device tier waits 20%"),
        (40, 0.0, 0.0, "The bus: copies, 40,000 MB/s, take about 80% of the time"),
        (10, 0.0, 0.0, "Nothing that is measured here"),
    ],
)
def test_bus_and_cpu_are_told_apart_by_the_time_that_each_takes(
    gigabytes: float, waits: float, cpu: float, begins: str
) -> None:
    """Whatever share of the tokens the CPU attends."""
    columns = [column(1, generated_per_second=10, wait_share=waits, copied_bytes_per_second=gigabytes * 1e9)]
    found = told(Reading(time=1, gauges=SERVED | BUS), columns, [layer(0, 0.99, cpu=cpu)])
    assert found["What holds it back?"][0].startswith(begins)
    assert found["Is it fast?"][1] == ("good" if begins.startswith("Nothing") else "fair")
    if begins.startswith("The bus"):
        change = found["What to change"][0]
        assert change.startswith("Bus: frames_per_request=134 (now 67") and "recall.intervals=16 (now 8)" in change


def test_waits_are_for_the_cpu_where_it_is_not_known_what_the_bus_carries() -> None:
    columns = [column(1, generated_per_second=10, wait_share=0.4, copied_bytes_per_second=2e9)]
    for share in (0.0, 0.2):
        found = told(Reading(time=1), columns, [layer(0, 0.99, cpu=share)])
        assert found["What holds it back?"][0].startswith("The CPU: the device tier waits 40% of the time;")
    columns = [column(1, generated_per_second=10, copied_bytes_per_second=2e9)]
    text, level = told(Reading(time=1), columns, [layer(0, 0.99, cpu=0.0)])["What holds it back?"]
    assert text.startswith("Not measured: 2,000 MB/s are copied to the device tier") and level == "unknown"
