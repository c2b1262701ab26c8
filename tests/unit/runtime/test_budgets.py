"""Budgets that requests ask for themselves (`Batch.budgets`)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from statistics import fmean
from typing import Annotated, Any

import pytest
import torch
from fastapi import Body, FastAPI
from fastapi.responses import StreamingResponse
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st

from hybrid_backend.batch import Step
from hybrid_backend.engines.vllm.middleware import Middleware
from hybrid_backend.engines.vllm.request_budget import check_names, requested_budget
from hybrid_backend.step.budgets import LayerBudgets
from tests.support.attended import Attended
from tests.support.harness import PAGE, Engine, config, decode_step, resident, spec

PAGES = 30
JSON = {"Content-Type": "application/json"}


class Params:
    def __init__(self, **extra_args: object) -> None:
        self.extra_args = extra_args or None


@pytest.mark.parametrize("method", ["quest", "scout"])
def test_each_row_attends_the_budget_that_its_request_asked_for(method: str) -> None:
    """Requests of one step, whose outputs are checked against fp64 attention of what each says that it attended."""
    keys = {"sparse": "always", "method": method, "frames_per_request": 10, "metrics": {"sample_interval": 0}}
    engine = Engine(config(**keys), spec(), num_pages=200, is_witnessed=True)
    asked = {"none": 0, "less": 3 * PAGE - 5, "more": 8 * PAGE, "all": 1000 * PAGE, "least": 1}
    expected = {"none": 4, "less": 3, "more": 8, "all": PAGES + 1 if method == "quest" else 10, "least": 3}
    for name, budget in asked.items():
        engine.add(name, PAGES * PAGE).budget = budget
        engine.prefill(name)
    engine.step(dict.fromkeys(asked, 1), tolerance=None)
    assert engine.witness is not None and engine.ran.decode is not None
    for name, pages in expected.items():
        row = engine.ran.decode.request_ids.index(name)
        attended = engine.witness.of(1, engine.ran, row).tokens
        assert int(attended[0].sum()) == (pages - 1) * PAGE + 1, name  # the growing page has one token


@pytest.mark.parametrize("method", ["quest", "scout", "infinigen"])
def test_each_layer_of_scout_attends_its_factor_of_every_rows_budget(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At least what is always attended and one page more, which others then have less; a row that leaves
    nothing out has no budget."""
    keys = {"method": method, "sparse": "always", "frames_per_request": 10, "metrics": {"sample_interval": 0}}
    cfg = config(**keys, exact_layers=[2], budget_factors=[0.25, 1.5, 1, 1.25])
    engine = Engine(cfg, spec(layers=4), num_pages=200, is_witnessed=True)
    asked = {"none": 0, "more": 8 * PAGE, "short": 0}
    expected = {"none": (3, 5, PAGES + 1, 4), "more": (3, 11, PAGES + 1, 10), "short": (3,) * 4}
    if method == "infinigen":
        expected |= {"none": (4, 4, PAGES + 1, 4), "more": (8, 8, PAGES + 1, 8)}
    assert engine.witness is not None
    of, seen = engine.witness.of, dict[tuple[int, int], int]()

    def noted(layer: int, ran: Step, row: int) -> Attended:
        found = of(layer, ran, row)
        seen[row, layer] = int(found.tokens[0].sum())
        return found

    monkeypatch.setattr(engine.witness, "of", noted)
    for name, budget in asked.items():
        engine.add(name, 2 * PAGE if name == "short" else PAGES * PAGE).budget = budget
        engine.prefill(name)
    engine.step(dict.fromkeys(asked, 1), tolerance=None)
    assert engine.ran.decode is not None
    for name, pages in expected.items():
        row = engine.ran.decode.request_ids.index(name)
        found = [seen[row, layer] for layer in range(4)]
        assert found == [(each - 1) * PAGE + 1 for each in pages], name  # the growing page has one token


@given(
    st.lists(st.floats(0.3, 2), min_size=2, max_size=30),
    st.lists(st.tuples(st.integers(4, 300), st.integers(1, 600)), min_size=1, max_size=4),
    st.none() | st.integers(300, 400),
)
def test_the_budget_is_the_mean_of_what_layers_attend_whatever_some_of_them_cannot_take(
    shares: list[float], rows: list[tuple[int, int]], most: int | None
) -> None:
    """Of rows that are hardly longer than their budgets, and of budgets hardly larger than what is always attended."""
    mean, layers = fmean(shares), range(1, len(shares) + 1)  # layer 0 attends everything
    factors = {layer: share / mean for layer, share in zip(layers, shares, strict=True)}
    budgets, pages = torch.tensor(rows).T
    limits = most and [most] * (len(shares) + 1)
    found = LayerBudgets(config(), factors, range(len(shares) + 1), limits).of_rows(budgets, pages)
    for row, (budget, count) in enumerate(rows):
        mine = found[1:, row]
        if budget >= count:
            assert mine.tolist() == [count] * len(shares)
            continue
        assert int(mine.min()) >= 3 and int(mine.max()) <= min(count, most or count)
        assert abs(float(mine.double().mean()) - budget) <= 0.5 + 0.02 * budget
        in_order = sorted(zip(shares, mine.tolist(), strict=True))
        assert [each for _, each in in_order] == sorted(each for _, each in in_order)


@pytest.mark.parametrize(("frames", "expected"), [(12, [12, 14, 12, 12]), (4, [4, 6, 4, 4]), (3, [3, 4, 3, 3])])
def test_a_layer_has_as_many_more_frames_as_its_budget_is_larger(frames: int, expected: list[int]) -> None:
    """In proportion, where a budget of 4 pages is more than the frames; all of them are filled after a few steps, and
    the maps give each page a frame of its own."""
    cfg = config(frames_per_request=frames, exact_layers=[3], budget_factors=[0.5, 1.5, 1, 1])
    engine = Engine(cfg, spec(layers=4), num_pages=200, max_requests=2)
    tiers = engine.runtime.tiers
    assert [len(tiers.frames.layers[layer]) for layer in range(4)] == [2 * each for each in expected]
    assert tiers.frames.nbytes == tiers.layout.memory(cfg, engine.model, 200, 2).frames
    for name in ("a", "b"):
        engine.admit(name, PAGES * PAGE)
    for _ in range(PAGE + 2):  # one frame stays free until a page begins
        engine.step({"a": 1, "b": 1}, tolerance=None)
    assert engine.ran.decode is not None
    under_way = (decode_step(engine).buffers.state.copies.frames >= 0).sum(2)
    for row, name in enumerate(engine.ran.decode.request_ids):
        held = [len(resident(engine, name, layer)) + int(under_way[layer, row]) for layer in range(4)]
        assert held == expected
    assert engine.runtime.gauges()["hybrid_frames_in_use"] == 2 * sum(expected)
    engine.drop("a")
    assert engine.runtime.gauges()["hybrid_frames_in_use"] == sum(expected)


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["native", "triton"])
def test_a_row_that_fits_the_frames_is_exact_and_asks_nobody_whatever_its_layers_budgets(
    kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a row that leaves pages out, whose partials are of predicted queries."""
    keys = {"frames_per_request": 9, "budget_factors": [1, 1.5, 0.5, 1], "device_kernels": kernels}
    cfg = config(**keys, budget_tokens=8 * PAGE, lookahead={"enabled": True, "partial_query": "predicted"})
    engine, compare, asked = Engine(cfg, spec(layers=4), num_pages=200), Engine._compare, list[float]()

    def only_a(name: str, *given: Any) -> None:  # b is not exact: it is there for a to be beside it
        if name == "a":
            compare(name, *given)

    monkeypatch.setattr(engine, "_compare", only_a)
    for name, pages in (("a", 8), ("b", 20)):
        engine.admit(name, pages * PAGE - 2)
    for work in ({"a": 1}, {"a": 1, "b": 1}, {"b": 1, "a": 1}, {"a": 1}):
        engine.step(work, lookahead_noise=0.3)
        asked.append(sum(layer.cpu_tokens for layer in engine.runtime.stats.layers))
    assert asked[0] == 0
    if kernels == "native":  # counted as the step runs
        assert asked[1] > 0 and asked[3] == asked[2]


def test_a_preempted_request_keeps_its_budget_and_a_new_one_under_its_name_does_not() -> None:
    engine = Engine(config(sparse="always"), spec(), num_pages=80, is_witnessed=True)
    engine.add("a", 20 * PAGE).budget = 6 * PAGE
    engine.prefill("a")
    engine.step({"a": 1}, tolerance=None)
    engine.preempt("a")
    engine.prefill("a")
    engine.step({"a": 1}, tolerance=None)
    assert engine.witness is not None
    assert int(engine.witness.of(1, engine.ran, 0).tokens[0].sum()) == 5 * PAGE + 2
    engine.drop("a")
    engine.admit("a", 20 * PAGE)
    engine.step({"a": 1}, tolerance=None)
    assert int(engine.witness.of(1, engine.ran, 0).tokens[0].sum()) == 3 * PAGE + 1


def test_clo_does_not_heed_the_budget_of_a_request() -> None:
    """A head's frames are of the configuration's."""
    keys = {"method": "clo", "sparse": "always", "clo": {"persistent": "none"}}
    seen = []
    for asked in (0, 20):
        engine = Engine(config(**keys), spec(), num_pages=200, seed=3, is_witnessed=True)
        engine.add("a", 30 * PAGE).budget = asked * PAGE
        engine.prefill("a")
        engine.decode("a", steps=5, tolerance=None)
        seen.append(engine.witness.of(0, engine.ran, 0).tokens.sum(1).tolist())
    assert seen[0] == seen[1]


@pytest.mark.parametrize("method", ["quest", "scout"])
def test_a_promise_is_not_judged_by_requests_with_budgets_of_their_own(method: str) -> None:
    keys = {
        "sparse": "always", "method": method, "quality": {"min_mass": 0.5}, "metrics": {"sample_interval": 1},
        "budget_tokens": 12 * PAGE, "frames_per_request": 28,
    }  # fmt: skip
    budgets = []
    for own in (0, PAGE):
        engine = Engine(config(**keys), spec(), num_pages=120)
        for name in "ab":
            engine.admit(name, 30 * PAGE)
        engine.sequences["b"].budget = own
        engine.decode("a", "b", steps=60, tolerance=None)
        budgets.append(engine.runtime.gauges()["hybrid_quality_budget_tokens"])
    assert budgets[0] == budgets[1]


@pytest.mark.parametrize("method", ["quest", "scout"])
def test_a_promise_is_kept_after_a_request_whose_logits_were_no_numbers(method: str) -> None:
    keys = {"sparse": "always", "method": method, "quality": {"min_mass": 0.9}, "metrics": {"sample_interval": 1}}
    engine = Engine(config(**keys), spec(), num_pages=120)
    engine.admit("bad", 20 * PAGE)
    for kv in engine.kv:
        kv[engine.sequences["bad"].pages[3], :, 0, 0, 0] = float("inf")
    with suppress(AssertionError):  # its answer is none
        engine.step({"bad": 1}, tolerance=None)
    engine.drop("bad")
    engine.admit("a", 20 * PAGE)
    engine.decode("a", steps=30, tolerance=None)
    gauges = engine.runtime.gauges()
    assert 0 < gauges["hybrid_quality_mass"] <= 1 and gauges["hybrid_quality_budget_tokens"] > 4 * PAGE


@pytest.mark.parametrize("given", [0, -16, 1.5, True, "2048", [2048], float("nan"), float("inf")])
def test_what_is_no_number_of_tokens_is_refused_with_the_value(given: object) -> None:
    with pytest.raises(ValueError, match=r"budget_tokens: got .*, expected a whole number of tokens, 1 or more"):
        requested_budget(Params(budget_tokens=given))


@pytest.fixture(scope="module")
def asked_over_http() -> Iterator[TestClient]:
    """A server behind the check of bodies, which coerces ``true`` as vLLM's does."""
    app = FastAPI()
    app.add_middleware(Middleware)

    @app.post("/")
    async def answer(request: Annotated[dict[str, Any], Body()]) -> StreamingResponse:
        return StreamingResponse(iter([str(request.get("vllm_xargs"))]))

    with TestClient(app, raise_server_exceptions=False) as client:
        yield client


@pytest.mark.parametrize("value", ["0", "true", "1.5", '"2048"', "[2048]", "NaN", "{}"])
def test_over_http_a_wrong_budget_has_status_400_before_the_answer_begins(
    asked_over_http: TestClient, value: str
) -> None:
    body = f'{{"stream": true, "vllm_xargs": {{"budget_tokens": {value}}}}}'
    answer = asked_over_http.post("/", content=body, headers=JSON)
    assert answer.status_code == 400
    assert answer.json()["detail"].startswith("budget_tokens: got ")


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ('{"vllm_xargs": {"budget_tokens": 2048}}', 200),
        ('{"vllm_xargs": {"budget_tokens": 2048.0}}', 200),
        ('{"vllm_xargs": {"budget_tokens": null}}', 200),
        ('{"vllm_xargs": null, "prompt": "budget_tokens"}', 200),
        ('{"prompt": "budget_tokens", "vllm_xargs": {"other": true}}', 200),
        ('{"vllm_xargs": {"budget_tokens": ', 422),
        ("[" * 100_000 + '"budget_tokens"', 400),
        ('["budget_tokens"]', 422),
    ],
)
def test_other_bodies_reach_the_server_as_they_are(asked_over_http: TestClient, body: str, status: int) -> None:
    answer = asked_over_http.post("/", content=body, headers=JSON)
    assert answer.status_code == status and "budget_tokens: got" not in answer.text


def test_a_budget_where_nothing_reads_it_is_refused_with_the_place_for_it(asked_over_http: TestClient) -> None:
    answer = asked_over_http.post("/", content='{"budget_tokens": 2048}', headers=JSON)
    assert answer.status_code == 400
    assert answer.json()["detail"].endswith('in vllm_xargs, as {"vllm_xargs": {"budget_tokens": 2048}}')


@pytest.mark.parametrize(
    "misspelt", ["budget_token", "Budget_tokens", "budget-tokens", "budgets_tokens", "buget_tokens"]
)
def test_a_misspelt_budget_is_refused_and_not_ignored(asked_over_http: TestClient, misspelt: str) -> None:
    bodies: list[dict[str, Any]] = [{"vllm_xargs": {misspelt: 4096}}]
    if "budget" in misspelt.lower():  # Bodies with neither word are passed on without being parsed.
        bodies.append({misspelt: 4096})
    for body in bodies:
        answer = asked_over_http.post("/", content=json.dumps(body), headers=JSON)
        assert answer.status_code == 400
        assert answer.json()["detail"] == f"{misspelt}: no such key; did you mean budget_tokens?"
    with pytest.raises(ValueError, match="did you mean budget_tokens"):
        check_names({misspelt: 4096})


def test_keys_of_others_are_left_to_them(asked_over_http: TestClient) -> None:
    others = {"budget": 1, "max_tokens": 8, "thinking_token_budget": 512, "min_tokens": 1, "tokens": "budget_token"}
    for body in ({"vllm_xargs": others}, others):
        assert asked_over_http.post("/", content=json.dumps(body), headers=JSON).status_code == 200


def test_a_request_to_a_server_that_ends_is_sent_elsewhere(
    asked_over_http: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HYBRID_ENDING", "1")
    answer = asked_over_http.post("/", content="{}", headers=JSON)
    assert answer.status_code == 503 and answer.headers["Retry-After"] == "1"
    assert answer.json()["error"]["message"] == "the server is ending"
    assert asked_over_http.get("/docs").status_code == 200


def test_bodies_in_pieces_are_checked_as_a_whole(asked_over_http: TestClient) -> None:
    pieces = [b'{"vllm_xargs": {"budget_', b'tokens": tr', b"ue}}"]
    assert asked_over_http.post("/", content=iter(pieces), headers=JSON).status_code == 400


@pytest.mark.parametrize(
    ("given", "expected"), [(512, 512), (512.0, 512), (None, 0), (1e30, 2**31 - 1), (2**63, 2**31 - 1)]
)
def test_tokens_are_taken_as_json_has_them(given: object, expected: int) -> None:
    assert requested_budget(Params(budget_tokens=given)) == expected
    assert requested_budget(Params()) == requested_budget(Params(other=1)) == requested_budget(object()) == 0
