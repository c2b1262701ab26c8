"""ScoutAttention really happens: ahead, on the CPU, merged, recalled."""

from __future__ import annotations

import itertools
import os
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from hybrid_backend.attention.partial import paged_partial
from hybrid_backend.kernels import reference
from hybrid_backend.step import patience
from hybrid_backend.step.cpu_attention import PoolCpuAttention
from hybrid_backend.step.driver import StepDriver
from hybrid_backend.workers.pool import TorchPool
from tests.support.harness import PAGE, Engine, config, decode_step, resident, spec, watch

LONG = 12 * PAGE
CPUS = sorted(os.sched_getaffinity(0))


def test_cpu_partials_start_a_layer_before_they_are_merged() -> None:
    """Layer l's job is submitted at layer l-1's input: by the time that layer l needs it, layer l-1 has run."""
    engine = Engine(config(recall={"enabled": False}), spec(layers=4))
    engine.admit("a", LONG)
    engine.step({"a": 1}, tolerance=None)
    partials, method, events = decode_step(engine).cpu_attention, engine.runtime.method, []
    assert isinstance(partials, PoolCpuAttention)

    def note(layer: int, q: torch.Tensor, pages: object, counts: torch.Tensor, in_mailbox: bool = False) -> None:
        if counts.max() > 0:  # else no job is submitted
            events.append(("submit", layer))

    watch(partials, "ask", before=note)
    watch(method, "attend", before=lambda step, layer, q: events.append(("attend", layer)))
    engine.decode("a", steps=40, noise=0.5, tolerance=None)
    ahead = [layer for what, layer in events if what == "submit" and layer > 0]
    assert len(ahead) > 20, "a moving query must miss pages"
    for (what, layer), following in itertools.pairwise(events):
        if what == "submit" and layer > 0:
            assert following == ("attend", layer - 1), "a layer's job starts before the layer before it attends"


def test_removing_the_cpu_partials_changes_the_output() -> None:
    engine = Engine(config(recall={"enabled": False}, sparse="never", frames_per_request=5), spec())
    engine.admit("a", LONG)
    engine.step({"a": 1})  # with them: dense
    decode_step(engine).toolbox.take_cpu = lambda layer, rows: None  # type: ignore[method-assign]
    with pytest.raises(AssertionError, match="is off by"):
        engine.step({"a": 1})


@pytest.mark.parametrize("query", ["predicted", "real"])
def test_a_layer_that_is_not_to_be_predicted_selects_by_its_own_query(query: str) -> None:
    """However wrong a prediction would be: the CPU's partial, too, is of the true query."""
    ahead = {"partial_query": query, "skip_layers": [1]}
    outputs = []
    for noise in (0.0, 3.0):
        engine = Engine(config(lookahead=ahead, recall={"intervals": 2}), spec(layers=3), seed=5)
        engine.admit("a", LONG)
        predicted, attended = list[int](), list[torch.Tensor]()
        watch(engine.runtime.method, "lookahead", before=lambda step, layer, q, log=predicted: log.append(layer))
        watch(engine.runtime.method, "attend", after=lambda out, *_, log=attended: log.append(out.clone()))
        engine.decode("a", steps=8, noise=noise, tolerance=None)
        assert set(predicted) == {2} and engine.runtime.stats.cpu_ratio() > 0.02
        outputs.append(torch.stack(attended).unflatten(0, (8, 3)))
    exact, guessed = outputs
    torch.testing.assert_close(guessed[:, 1], exact[:, 1], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(guessed[:, 2], exact[:, 2], atol=1e-3), "other layers follow the prediction"


def test_a_sparse_step_selects_the_pages_of_quest() -> None:
    """With a perfect prediction. That these pages are attended is what a witnessed engine checks."""
    quest = {"granularity": "layer", "aggregate": "sum", "bound": 1, "digest": "minmax"}
    cfg = config(recall={"intervals": 2}, selection=quest)
    engine = Engine(cfg, spec(layers=2), is_witnessed=True)
    engine.admit("a", LONG)
    assert engine.witness is not None
    queries = dict[int, torch.Tensor]()
    watch(engine.runtime.method, "attend", before=lambda step, layer, q: queries.update({layer: q[0]}))
    for _ in range(20):
        engine.step({"a": 1}, tolerance=None)
        pages = engine.sequences["a"].pages
        for layer, q in queries.items():
            chosen = engine.witness._selected[layer]
            selected = chosen.pages[0, 0, : chosen.pages_listed[0, 0]].tolist()
            assert len(selected) == cfg.budget_pages
            digests = torch.stack([reference.digest(engine.kv[layer][page], PAGE) for page in pages[:-1]])
            scores = reference.digest_scores(q, digests).sum(0)
            free = sorted(range(cfg.sinks, len(pages) - cfg.recent), key=lambda page: -float(scores[page]))
            assert set(free[: cfg.budget_pages - cfg.sinks - cfg.recent]) <= set(selected)


def drifting(engine: Engine, steps: int) -> float:
    """Decode with queries that change slowly, as a real model's do. Returns the CPU's share of the attended tokens."""
    m = engine.model
    base = torch.randn(m.num_layers, 1, m.num_heads, m.head_dim, generator=engine.rng)
    normal = torch.randn

    def slow_queries(*size: int, generator: torch.Generator | None = None) -> torch.Tensor:
        nonlocal base
        drawn = normal(*size, generator=generator)
        if size != tuple(base.shape):
            return drawn
        base = 0.98 * base + 0.2 * drawn
        return base

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "randn", slow_queries)
        engine.decode("a", steps=steps, tolerance=None)
    return engine.runtime.stats.cpu_ratio()


def test_recall_brings_the_cpu_share_down() -> None:
    ratios = {}
    for enabled in (False, True):
        keys = {"recall": {"enabled": enabled, "intervals": 4}, "frames_per_request": 6}
        engine = Engine(config(**keys), spec(layers=4), seed=3)
        engine.admit("a", LONG)
        ratios[enabled] = drifting(engine, 128)
        assert (sum(layer.recalled_pages for layer in engine.runtime.stats.layers) > 0) == enabled
    print(f"CPU share of attended tokens over 128 steps: {ratios[False]:.3f} without recall, {ratios[True]:.3f} with")
    assert ratios[True] < 0.7 * ratios[False]


def test_a_recalled_page_equals_its_host_page_and_is_visible_from_the_next_step() -> None:
    engine = Engine(config(recall={"intervals": 1}), spec(layers=3))
    engine.admit("a", LONG)
    step, frames, seen = decode_step(engine), engine.runtime.tiers.frames, 0
    for _ in range(30):
        engine.step({"a": 1}, lookahead_noise=0.5, tolerance=None)
        planned = [(row, *found) for row in range(3) for found in _copies(step, row)]
        for row, frame, _, _ in planned:
            assert step.buffers.maps.page_of[row, frame] == -1, "visible too early"
        engine._begin({"a": 1})
        for row, frame, host_page, page in planned:
            if step.buffers.maps.page_of[row, frame] != page:
                continue  # the page that begins took its frame
            assert torch.equal(frames.layers[row][frame], engine.kv[row][host_page])
            assert step.buffers.maps.frame_of[row, 0, page] == frame
            seen += 1
    assert seen > 20


def _copies(step: StepDriver, row: int) -> list[tuple[int, int, int]]:
    """``(frame, host page, logical page)`` of the first row's copies under way in a layer."""
    copies = step.buffers.state.copies.of(row)
    found = zip(copies.frames[0].tolist(), copies.host_pages[0].tolist(), copies.pages[0].tolist(), strict=True)
    return [copy for copy in found if copy[0] >= 0]


def test_a_copy_planned_for_a_released_request_is_never_visible() -> None:
    engine = Engine(config(recall={"intervals": 1}), spec(layers=3), max_requests=1)
    engine.admit("a", LONG)
    step = decode_step(engine)
    while not any(_copies(step, row) for row in range(3)):
        engine.step({"a": 1}, lookahead_noise=0.5, tolerance=None)
    engine.drop("a")
    assert (step.buffers.maps.page_of == -1).all()
    engine.admit("b", 3 * PAGE)  # takes over the index; exact while it fits
    for _ in range(2 * PAGE):
        engine.step({"b": 1})
        written = set(range(-(-engine.sequences["b"].tokens // PAGE)))
        assert all(resident(engine, "b", layer) == written for layer in range(3))


@pytest.mark.parametrize("chunk", [100, LONG + 4])
@pytest.mark.parametrize("kernels", ["torch", "native"])
def test_a_request_begins_with_the_pages_that_its_prompt_attends_most(kernels: str, chunk: int) -> None:
    """Scores by the last query of the prompt, in every layer with digests; an exact layer, of which
    nothing is known, has the last pages."""
    cfg = config(device_kernels=kernels, exact_layers=[0], frames_per_request=6)
    engine, queries = Engine(cfg, spec(layers=3)), {}
    watch(engine.runtime, "forward", before=lambda layer, step, q, *_: queries.update({layer: q[-1:].clone()}))
    engine.admit("a", LONG + 5, chunk=chunk)
    engine._begin({"a": 1})
    count = LONG // PAGE + 1
    for layer in (1, 2):
        pages = engine.sequences["a"].pages
        digests = torch.stack([reference.digest(engine.kv[layer][p], PAGE) for p in pages[:-1]]).double()
        middle, half = (digests[:, :, 0] + digests[:, :, 1]) / 2, (digests[:, :, 0] - digests[:, :, 1]) / 2
        q = queries[layer].double().view(1, 2, 2, 16)
        bound = cfg.selection.bound
        logits = torch.einsum("nhgd,phd->nhgp", q, middle) + bound * torch.einsum("nhgd,phd->nhgp", q.abs(), half)
        shares = (logits * engine.model.scale).softmax(-1).sum((1, 2)).mean(0)
        free = sorted(range(cfg.sinks, count - cfg.recent), key=lambda p: -float(shares[p]))
        always = {*range(cfg.sinks), *range(count - cfg.recent, count)}
        assert resident(engine, "a", layer) == always | set(free[: 6 - len(always)]), f"layer {layer}"
    assert resident(engine, "a", 0) == {0, *range(count - 5, count)}


def test_a_recall_is_due_in_a_requests_first_step_and_then_every_interval_of_its_own() -> None:
    """Whoever has just begun does not leave its budget to the CPU until the next common step of recalls."""
    engine = Engine(config(recall={"intervals": 4}), spec(layers=2), max_requests=3)
    step, due = decode_step(engine).toolbox, []
    plan = step._ops.plan_recall

    def log(*args):  # type: ignore[no-untyped-def]
        ages, _, _, interval, phase = args[10:15]
        due.append([bool(age == 0 or (age + phase) % interval == 0) for age in ages.tolist()])
        return plan(*args)

    step._ops = SimpleNamespace(**{**vars(step._ops), "plan_recall": log})  # type: ignore[assignment]
    engine.admit("a", LONG)
    engine.decode("a", steps=3, noise=0.5, tolerance=None)
    assert due == [[True], [True], [False], [False], [False], [False]]
    engine.admit("b", LONG)
    due.clear()
    engine.decode("a", "b", steps=2, noise=0.5, tolerance=None)
    assert due == [[False, True], [True, True], [True, False], [False, False]]


@pytest.mark.parametrize("method", ["scout", "apex"])
def test_after_a_missed_deadline_steps_wait_shortly_until_the_workers_answer_again(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With dead workers every step would otherwise take a whole deadline."""
    deadline, is_dead, is_over = 2.0, threading.Event(), threading.Event()
    monkeypatch.setattr(patience, "AFTER_MISS_SECONDS", 0.1)

    def kernel(q, layer, pages, scale):  # type: ignore[no-untyped-def]
        if is_dead.is_set():
            is_over.wait(60)
        return paged_partial(q, layer, pages, scale)

    keys = {"scout": {"sparse": "never", "frames_per_request": 4},
            "apex": {"method": "apex", "apex": {"strategy": "lockstep", "device_tokens": PAGE}}}[method]  # fmt: skip
    engine = Engine(config(**keys, workers={"threads": 2, "deadline_seconds": deadline}), spec(layers=2))
    engine.runtime.workers.close()
    engine.runtime.workers = TorchPool(2, CPUS, kernel)
    driver = decode_step(engine)
    asker = driver.cpu_attention if driver.waiting is None else driver.waiting.questions  # type: ignore[attr-defined]
    asker._workers = engine.runtime.workers
    for name in ("a", "b"):
        engine.admit(name, LONG)
    engine.step({"a": 1})
    assert engine.runtime.failure(engine.ran) is None
    is_dead.set()
    seconds = []
    for name in ("a", "b"):
        began = time.monotonic()
        engine.step({name: 1}, tolerance=None)
        assert engine.runtime.failure(engine.ran) is not None
        seconds.append(time.monotonic() - began)
    assert seconds[0] >= deadline > 1.0 > seconds[1]
    is_dead.clear()
    is_over.set()
    for name in ("a", "b"):
        engine.preempt(name)
        engine.prefill(name)
    engine.step({"a": 1, "b": 1})
    assert engine.runtime.failure(engine.ran) is None
    waits = driver.cpu_attention if driver.waiting is None else driver.waiting
    assert waits._patience.seconds == deadline  # type: ignore[attr-defined]


@pytest.mark.parametrize("fault", ["slow", "broken"])
def test_a_step_whose_workers_fail_goes_on_without_them_and_fails_its_requests_only(fault: str) -> None:
    """Two of three requests are in the step; seven layers remain. One deadline passes, the forward does not raise, the
    workers' jobs are forgotten; the third request, and the two when they are computed again, are served exactly."""
    deadline, held = 1.0, threading.Event()

    def kernel(q, layer, pages, scale):  # type: ignore[no-untyped-def]
        if held.is_set():
            if fault == "broken":
                raise ValueError("bad page")
            time.sleep(1.4)
        return paged_partial(q, layer, pages, scale)

    settings = config(sparse="never", frames_per_request=4, workers={"threads": 2, "deadline_seconds": deadline})
    engine = Engine(settings, spec(layers=8))
    engine.runtime.workers.close()
    engine.runtime.workers = TorchPool(2, CPUS, kernel)
    partials = decode_step(engine).cpu_attention
    assert isinstance(partials, PoolCpuAttention)
    partials._workers = engine.runtime.workers
    for name in ("a", "b", "c"):
        engine.admit(name, LONG)
    engine.step({"a": 1, "b": 1, "c": 1})
    assert engine.runtime.failure(engine.ran) is None
    held.set()
    began = time.monotonic()
    engine.step({"c": 1, "a": 1}, tolerance=None)
    assert time.monotonic() - began < 4 * deadline
    late = engine.ran
    held.clear()
    engine.step({"b": 1})
    failure = engine.runtime.failure(late)
    assert failure is not None and engine.runtime.failure(engine.ran) is None
    assert ("deadline_seconds=1.0" if fault == "slow" else "bad page") in str(failure.error)
    assert sorted(failure.request_ids) == ["a", "c"]
    assert sorted(failure.pages) == sorted(engine.sequences[name].pages[-1] for name in ("a", "c"))
    for name in ("a", "c"):
        engine.preempt(name)
        engine.prefill(name)
    engine.step({"a": 1, "b": 1, "c": 1})
    assert engine.runtime.failure(engine.ran) is None
