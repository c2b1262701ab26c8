"""The answers at the top of the status page, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from hybrid_backend.tools.status.glance import glance
from hybrid_backend.tools.status.model import Column, Layer
from hybrid_backend.tools.status.reading import LayerCounts, Reading


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
    assert said == level and text.endswith("promised: 98.0%.") and "at 2,304 tokens of budget" in text
    profiled = Reading(time=1, gauges=gauges | {"hybrid_quality_max_kl": 0.01})
    text, said = told(profiled, [column(1)], [layer(0, 0.5)])["Is it faithful?"]
    assert said == level and "within 0.01 nats of dense" in text


def test_rates_are_those_of_the_last_fifteen_seconds() -> None:
    columns = [
        column(0, generated_per_second=900, wait_share=0.9),
        column(20, generated_per_second=40, wait_share=0.05),
    ]
    found = told(Reading(time=20, running=4), columns, [])
    assert found["Is it fast?"] == (
        "40.0 tokens/s, 100 ms per token of each of 4 requests; the device tier waits 5.0% of the time.", "good",
    )  # fmt: skip
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
    found = told(Reading(time=1, **last), columns, [layer(0, 0.99, cpu=0.25)])
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
    assert found["Is it fast?"][0].endswith("nothing is waited for.")


def test_copies_that_are_waited_for_are_the_bus() -> None:
    columns = [column(1, generated_per_second=10, wait_share=0.4, copied_bytes_per_second=2e9)]
    found = told(Reading(time=1), columns, [layer(0, 0.99, cpu=0.0)])
    assert found["What holds it back?"][0] == "The bus: the device tier waits 40% of the time for copies, 2,000 MB/s."
