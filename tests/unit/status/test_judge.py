"""The state and the three answers at the top of the status page, with the keys that would help."""

from __future__ import annotations

import math
from typing import Any

import pytest

from hybrid_backend.tools.status.judge import Load, judge, unjudged
from hybrid_backend.tools.status.model import Answer, Headline, Layer, Rates
from hybrid_backend.tools.status.reading import LayerCounts, Reading

NO_RATES: dict[str, Any] = dict.fromkeys(Rates.model_fields)
SERVED = {
    "running": 1.0, "budget_tokens": 1024.0, "page_tokens": 32.0, "frames_per_request": 67.0, "recall_interval": 8.0,
    "frame_bytes": 1.0, "max_requests": 12.0, "worker_threads": 2.0, "worker_cpus": 4.0,
}  # fmt: skip
BUS = {"bus_bytes_per_second": 50e9}
IN_PLACE = {"running": 2.0, "budget_tokens": 1024.0, "page_tokens": 32.0, "frame_bytes": 0.0}
WAITS = {"generated_per_second": 10, "wait_share": 0.5}


def layer(
    index: int,
    mass: float | None,
    cosine: float | None = None,
    attended: float | None = None,
    samples: int | None = None,
) -> Layer:
    return Layer(
        layer=index, attended=attended, residency=None, cpu_ratio=0.25, attended_tokens_per_second=0,
        recalled_per_second=0, wait_share=0, attention_share=None, query_cosine=cosine, mass_recall=mass,
        mass_samples=samples,
    )  # fmt: skip


def judged(
    figures: dict[str, float], layers: tuple[Layer, ...] = (layer(0, 0.99),), engine: str = "vllm", **rates: Any
) -> tuple[Headline, dict[str, Answer]]:
    """Judge a server by its figures and rates; return the headline, and the answers by their questions' last words."""
    last = Reading(time=1, engine=engine, figures=figures, layers=(LayerCounts(),), replicas=1)
    running = figures.get("running")
    means = {"seconds": 15, "recalled_per_second": 0, "wait_share": 0, "running": running, "most_running": running}
    headline, answers = judge(Load(last, Rates(**NO_RATES | means | rates), layers))
    return headline, {answer.question.rstrip("?").split()[-1]: answer for answer in answers}


@pytest.mark.parametrize(
    ("figures", "rates", "state", "title", "level"),
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
    figures: dict[str, float], rates: dict[str, Any], state: str, title: str, level: str
) -> None:
    headline, _ = judged(figures, **rates)
    assert (headline.state, headline.level) == (state, level) and headline.title.startswith(title)


def test_an_unfaithful_server_is_told_though_it_is_idle() -> None:
    headline, answers = judged({"running": 0, "waiting": 0}, (layer(0, 0.5),))
    assert headline.title == "Idle: not faithful" and headline.level == "bad" and answers["faithful"].change


def test_a_server_whose_faithfulness_nobody_measured_is_not_said_to_decode_well() -> None:
    headline, answers = judged({"running": 2}, (layer(0, None, attended=0.25),), generated_per_second=20)
    assert answers["faithful"].verdict == "Not measured"
    assert (headline.title, headline.level) == ("Decoding: faithfulness not measured yet", "unknown")
    headline, _ = judged({"running": 2}, (layer(0, None, attended=0.25),), generated_per_second=2)
    assert headline.title.startswith("Decoding: very slow") and headline.level == "bad"


@pytest.mark.parametrize(
    ("was_read", "seconds", "state", "title"),
    [
        (False, None, "starting", "Waiting for the first reading"),
        (True, None, "starting", "Measuring the first interval"),
        (False, 3.0, "silent", "No server answers"),
        (True, 42.0, "silent", "No answer for 42 s"),
        (True, 600.0, "silent", "No answer for 10 min"),
    ],
)
def test_of_a_server_without_fresh_rates_nothing_is_judged(
    was_read: bool, seconds: float | None, state: str, title: str
) -> None:
    headline = unjudged(was_read, seconds, "It refuses")
    assert (headline.state, headline.title) == (state, title)
    assert headline.detail.startswith("It refuses. ") == (state == "silent")


# --- is it faithful? ---


@pytest.mark.parametrize(
    ("masses", "verdict", "level"),
    [
        ((0.99, 0.97), "Faithful", "good"),
        ((0.95, 0.9), "Nearly faithful", "fair"),
        ((1.0, 0.89), "Nearly faithful", "fair"),
        ((1.0, 0.9), "Faithful", "good"),
        ((0.9, 0.5), "Not faithful", "bad"),
    ],
)
def test_the_mass_that_sampled_layers_keep_says_how_faithful(
    masses: tuple[float, float], verdict: str, level: str
) -> None:
    layers = (layer(0, None, cosine=0.5), layer(1, masses[0], cosine=0.96), layer(2, masses[1]))
    answer = judged(SERVED, layers)[1]["faithful"]
    assert (answer.verdict, answer.level) == (verdict, level)
    assert f"is kept in the 2 sampled of 3 layers, {masses[1]:.1%} in the worst (2), means since start" in answer.text
    assert "Cosine of predicted and true queries: 0.73, 0.50 in the worst (0)." in answer.text
    larger = "budget_tokens=2048 (now 1024); or quality.min_mass=0.95, by which the server finds the budget"
    assert answer.change == ("" if level == "good" else larger)


def test_a_server_is_not_called_faithful_before_all_layers_were_sampled() -> None:
    """A layer without a count attends every token, so that it is not sampled."""
    exact, seen, unseen = layer(0, None), layer(1, 0.97, samples=2), layer(2, None, samples=0)
    headline, answers = judged({"running": 2}, (exact, seen, unseen), generated_per_second=20)
    assert (answers["faithful"].verdict, answers["faithful"].level) == ("Faithful so far", "unknown")
    assert "is kept in the 1 sampled so far of 3 layers, 97.0% in the worst (1, 2 samples)" in answers["faithful"].text
    assert (headline.title, headline.level) == ("Decoding: faithful so far", "unknown")
    headline, answers = judged({"running": 2}, (exact, seen, layer(2, 0.96, samples=1)), generated_per_second=20)
    assert (answers["faithful"].verdict, headline.level) == ("Faithful", "good")
    assert "96.0% in the worst (2, 1 sample), means" in answers["faithful"].text
    poor = judged(SERVED, (exact, layer(1, 0.666, samples=1), unseen))[1]["faithful"]
    assert (poor.verdict, poor.level) == ("Not faithful so far", "bad") and poor.change


def test_without_samples_the_share_of_tokens_says_what_can_be_said() -> None:
    answer = judged(SERVED, (layer(0, None, attended=0.25),))[1]["faithful"]
    assert answer.verdict == "Not measured" and answer.text.startswith("75% of the contexts' tokens are left out.")
    assert judged(SERVED, (layer(0, None, attended=1.0),))[1]["faithful"].verdict == "Exact"
    assert "sparse=never" in judged({}, (layer(0, 0.5),))[1]["faithful"].change, "a method without a budget"


@pytest.mark.parametrize(
    ("mass", "verdict", "level"), [(0.981, "Promise kept", "good"), (0.979, "Promise broken", "bad")]
)
def test_a_promise_is_what_counts_where_there_is_one(mass: float, verdict: str, level: str) -> None:
    figures = {"quality_min_mass": 0.98, "quality_mass": mass, "quality_budget_tokens": 2304.0}
    answer = judged(figures, (layer(0, 0.5),))[1]["faithful"]
    assert (answer.verdict, answer.level) == (verdict, level) and answer.text.endswith("promised: 98%.")
    assert "at 2,304 tokens of budget" in answer.text
    answer = judged(figures | {"quality_max_kl": 0.01}, (layer(0, 0.5),))[1]["faithful"]
    assert answer.level == level and "within 0.01 nats of dense" in answer.text


def test_where_everything_is_attended_a_promise_that_can_be_kept_is_named() -> None:
    figures = {"quality_min_mass": 0.98, "quality_mass": 0.99996, "quality_budget_tokens": math.inf}
    answer = judged(figures)[1]["faithful"]
    assert (answer.verdict, answer.level) == ("Everything attended", "good")
    assert "kept 99.99% of the attention mass" in answer.text, "rounded down"
    answer = judged(figures | {"quality_mass": 0.9612})[1]["faithful"]
    assert answer.change == "quality.min_mass=0.96 (now 0.98), which the largest budget keeps"
    answer = judged(SERVED | figures | {"quality_max_kl": 0.01})[1]["faithful"]
    assert answer.change == "frames_per_request=134 (now 67); or quality.max_kl=0.02 (now 0.01)"


# --- is it fast? ---


@pytest.mark.parametrize(
    ("generated", "verdict", "level"),
    [(40, "Faster than reading", "good"), (19.9, "Slow", "fair"), (4, "Very slow", "bad")],
)
def test_speed_is_judged_by_how_fast_a_person_reads(generated: float, verdict: str, level: str) -> None:
    rates = {"generated_per_second": generated, "token_seconds": 0.1, "first_token_seconds": 2.25}
    answer = judged({"running": 4}, **rates)[1]["fast"]
    assert (answer.verdict, answer.level) == (verdict, level)
    assert answer.text.startswith(f"{generated:.1f} tokens/s, {generated / 4:.1f} for each of 4 requests;")
    assert "Between two tokens 100 ms passed (TPOT). First tokens came after 2.2 s (TTFT)." in answer.text


def test_a_first_token_that_came_late_is_told_though_the_next_ones_came_fast() -> None:
    rates = {"generated_per_second": 40, "prefix_hit_ratio": 0.25, "attention_share": 0.1}
    headline, answers = judged({"running": 2}, first_token_seconds=16.6, **rates)
    assert (answers["fast"].verdict, answers["fast"].level) == ("Slow to begin", "fair")
    assert "First tokens came after 16.6 s (TTFT)." in answers["fast"].text
    assert (answers["back"].verdict, answers["back"].level) == ("Prompts", "fair")
    assert "The prefix cache had 25% of their tokens." in answers["back"].text and answers["back"].change
    assert headline.title == "Decoding: slow to begin, held back by prompts"
    assert judged({"running": 2}, first_token_seconds=9.9, **rates)[1]["fast"].verdict == "Faster than reading"


def test_a_prompt_in_the_window_does_not_make_its_own_answer_slow() -> None:
    """A request that was read for most of the window, and then got a token every 180 ms."""
    rates = {"generated_per_second": 0.8, "prompt_per_second": 200, "token_seconds": 0.18}
    headline, answers = judged({"running": 1}, attention_share=0.1, **rates)
    assert (answers["fast"].verdict, answers["fast"].level) == ("Faster than reading", "good")
    assert answers["fast"].text.startswith("0.8 tokens/s, 5.6 for each of 1 request;")
    assert headline.title == "Decoding well"
    slow = judged({"running": 1}, attention_share=0.1, **rates | {"token_seconds": 0.4})[1]
    assert slow["fast"].verdict == "Slow"
    assert slow["back"].verdict == "The model's matrices", "smaller pieces of its prompt would not help it"


def test_requests_that_run_are_never_called_idle() -> None:
    """A long prompt, or a step that is longer than the window, counts no token at all."""
    _, answers = judged({"running": 3, "waiting": 0}, generated_per_second=0, prompt_per_second=0)
    assert (answers["fast"].verdict, answers["fast"].level) == ("No token yet", "unknown")
    assert answers["fast"].text.startswith("3 requests run and no token was counted: a prompt is read, or one step")
    assert (answers["back"].verdict, answers["back"].level) == ("Prompts", "unknown")


# --- what holds it back? ---


@pytest.mark.parametrize(
    ("figures", "waits", "engine", "verdict", "change"),
    [
        ({"waiting": 3, "pool_fill": 0.97}, 0.5, "vllm", "Host memory", "host_pool.size, or a smaller --max-model-len"),
        ({"waiting": 3, "pool_fill": 0.97}, 0.5, "sglang", "Host memory", "--context-length"),
        ({"waiting": 3, "pool_fill": 0.5}, 0.5, "vllm", "CPU workers", "workers.threads=4 (now 2)"),
        ({"waiting": 3, "pool_fill": 0.5, "running": 12}, 0.02, "vllm", "The batch", "--max-num-seqs 24 (now 12)"),
        ({"waiting": 3, "running": 12}, 0.02, "sglang", "The batch", "--max-running-requests 24"),
        ({"waiting": 3, "pool_fill": 0.5, "running": 7}, 0.02, "vllm", "Prompts", ""),
        ({"waiting": 0, "pool_fill": 0.97}, 0.02, "vllm", "Nothing", ""),
    ],
)
def test_what_requests_wait_for_is_named_with_the_key_to_change(
    figures: dict[str, float], waits: float, engine: str, verdict: str, change: str
) -> None:
    answer = judged(SERVED | figures, engine=engine, generated_per_second=100, wait_share=waits)[1]["back"]
    assert answer.verdict == verdict
    assert change in answer.change and bool(change) == bool(answer.change)


@pytest.mark.parametrize("figures", [IN_PLACE | {"running": 4}, {"running": 4}])
@pytest.mark.parametrize(("engine", "flag"), [("vllm", "max-num-batched-tokens"), ("sglang", "chunked-prefill-size")])
def test_one_token_a_second_while_prompts_are_read_is_not_good(
    figures: dict[str, float], engine: str, flag: str
) -> None:
    rates = {"generated_per_second": 4, "prompt_per_second": 250, "attention_share": 0.08}
    answers = judged(figures, engine=engine, **rates)[1]
    assert (answers["fast"].verdict, answers["fast"].level) == ("Very slow", "bad")
    assert (answers["back"].verdict, answers["back"].level) == ("Prompts", "fair")
    assert answers["back"].text.startswith("98% of the computed tokens were prompts'")
    assert f"half of --{flag}" in answers["back"].change
    larger = judged(figures | {"step_tokens": 2048.0}, engine=engine, **rates)[1]["back"]
    assert larger.change.startswith(f"--{flag} 1024 (now 2048): tokens then come between")


@pytest.mark.parametrize(
    ("attention", "generated", "verdict", "level"),
    [(0.62, 40, "Attention", "fair"), (0.2, 40, "Nothing", "good"), (0.2, 4, "The model's matrices", "fair")],
)
def test_in_place_attention_is_told_from_the_rest(attention: float, generated: float, verdict: str, level: str) -> None:
    rates, layers = {"generated_per_second": generated, "attention_share": attention}, (layer(0, 0.99, attended=0.3),)
    answer = judged(IN_PLACE, layers, **rates)[1]["back"]
    assert (answer.verdict, answer.level) == (verdict, level)
    assert answer.text.startswith(f"Attention takes {attention:.0%} of the time for 30% of the contexts' tokens")
    assert answer.change == ("budget_tokens=512 (now 1024)" if verdict == "Attention" else "")
    dense = judged({"running": 2, "frame_bytes": 0.0}, layers, **rates)[1]["back"]
    assert ("method=auto" in dense.change) == (verdict == "Attention")


@pytest.mark.parametrize(
    ("gigabytes", "waits", "verdict"),
    [
        (40, 0.2, "The bus"),
        (40, 0.9, "CPU workers"),
        (10, 0.2, "CPU workers"),
        (40, 0.0, "The bus"),
        (10, 0.0, "Nothing"),
    ],
)
def test_bus_and_cpu_are_told_apart_by_the_time_that_each_takes(gigabytes: float, waits: float, verdict: str) -> None:
    rates = {"generated_per_second": 10, "wait_share": waits, "copied_bytes_per_second": gigabytes * 1e9}
    answer = judged(SERVED | BUS, **rates)[1]["back"]
    assert answer.verdict == verdict and answer.level == ("good" if verdict == "Nothing" else "fair")
    if verdict == "The bus":
        assert "take about 80% of the time" in answer.text
        assert answer.change == (
            "frames_per_request=134 (now 67); or recall.intervals=16 (now 8); or budget_tokens=512 (now 1024)"
        )


def test_where_it_is_not_known_what_the_bus_carries_waits_are_for_the_cpu_and_copies_are_not_judged() -> None:
    rates = {"generated_per_second": 10, "copied_bytes_per_second": 2e9}
    answer = judged({"running": 1}, **rates, wait_share=0.4)[1]["back"]
    assert answer.text.startswith("The device tier waits 40% of the time for them;")
    answer = judged({"running": 1}, **rates)[1]["back"]
    assert (answer.verdict, answer.level) == ("Not measured", "unknown") and answer.text.startswith("2,000 MB/s are")


# --- changes ---


def test_a_larger_and_a_smaller_budget_are_never_recommended_at_once() -> None:
    answers = judged(SERVED, (layer(0, 0.5),), **WAITS)[1]
    assert "budget_tokens=2048" in answers["faithful"].change
    assert answers["back"].change == (
        "workers.threads=4 (now 2); or frames_per_request=134 (now 67); or recall.intervals=4 (now 8)"
    )
    assert judged(SERVED, **WAITS)[1]["back"].change.endswith("; or budget_tokens=512 (now 1024)")


@pytest.mark.parametrize(
    ("promise", "change"),
    [
        ({"quality_min_mass": 0.98, "quality_mass": 0.99}, "a quality.min_mass below 0.98"),
        ({"quality_min_mass": 0.98, "quality_mass": 0.99, "quality_max_kl": 0.01}, "a larger quality.max_kl"),
    ],
)
def test_where_a_promise_sets_the_budget_the_promise_is_what_can_be_changed(
    promise: dict[str, float], change: str
) -> None:
    told = judged(SERVED | promise, **WAITS)[1]["back"].change
    assert change in told and "budget_tokens" not in told


def test_frames_are_proposed_up_to_the_most_that_a_request_can_have() -> None:
    assert "frames_per_request=512 (now 400)" in judged(SERVED | {"frames_per_request": 400}, **WAITS)[1]["back"].change
    assert "frames_per_request" not in judged(SERVED | {"frames_per_request": 512}, **WAITS)[1]["back"].change


def test_a_key_whose_gauge_is_not_published_is_not_named() -> None:
    assert judged({"running": 1}, **WAITS)[1]["back"].change == ""
