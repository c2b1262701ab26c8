"""ScoutAttention really happens: ahead, on the CPU, merged, recalled."""

from __future__ import annotations

import dataclasses
import itertools
import os
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from hybrid_backend.attention.partial import PageList, Partial, empty_partial, paged_partial
from hybrid_backend.kernels import reference
from hybrid_backend.step.cpu_attention import PoolCpuAttention
from hybrid_backend.step.driver import StepDriver
from hybrid_backend.workers.pool import TorchPool
from tests.support.harness import PAGE, Engine, config, decode_step, resident, spec

LONG = 12 * PAGE
CPUS = sorted(os.sched_getaffinity(0))


def long_context(engine: Engine, name: str = "a") -> None:
    engine.add(name, LONG)
    engine.prefill(name)


def test_cpu_partials_start_a_layer_before_they_are_merged() -> None:
    """Layer l's job is submitted at layer l-1's input: by the time that layer l needs it, layer l-1 has run."""
    engine = Engine(config(recall={"enabled": False}), spec(layers=4))
    long_context(engine)
    engine.step({"a": 1}, tolerance=None)
    partials, method, events = decode_step(engine).cpu_attention, engine.runtime.method, []
    assert isinstance(partials, PoolCpuAttention)
    ask, attend = partials.ask, method.attend

    def log_ask(layer, q, pages, counts, in_mailbox=False):  # type: ignore[no-untyped-def]
        if counts.max() > 0:
            events.append(("submit", layer))
        ask(layer, q, pages, counts, in_mailbox)

    def log_attend(step, layer, q):  # type: ignore[no-untyped-def]
        events.append(("attend", layer))
        return attend(step, layer, q)

    partials.ask, method.attend = log_ask, log_attend  # type: ignore[method-assign]
    for _ in range(40):
        engine.step({"a": 1}, lookahead_noise=0.5, tolerance=None)
    ahead = [layer for what, layer in events if what == "submit" and layer > 0]
    assert len(ahead) > 20, "a moving query must miss pages"
    for now, after in itertools.pairwise(events):
        if now[0] == "submit" and now[1] > 0:
            assert after == ("attend", now[1] - 1), "a layer's job starts before the layer before it attends"
    engine.close()


def test_workers_run_at_the_same_time_as_the_caller() -> None:
    """A slow job does not hold up the submission; several jobs sleep side by side."""

    def slow(q, layer, pages, scale):  # type: ignore[no-untyped-def]
        time.sleep(0.3)
        return empty_partial(q)

    pool = TorchPool(4, CPUS, slow)
    started = time.perf_counter()
    ticket = pool.submit(torch.zeros(4, 2, 8), torch.zeros(1), _lists(4), 1.0, "test")
    assert time.perf_counter() - started < 0.2, "a submission returns at once"
    ticket.wait(5)
    assert time.perf_counter() - started < 0.9, "four jobs of 0.3 s took more than one after another would half take"
    pool.close()


def _lists(rows: int) -> PageList:
    return PageList(torch.zeros(rows, 1, 1, dtype=torch.int64), torch.ones(rows, 1, 1, dtype=torch.int64))


def test_removing_the_cpu_partials_changes_the_output() -> None:
    engine = Engine(config(recall={"enabled": False}, sparse="never", frames_per_request=5), spec())
    long_context(engine)
    engine.step({"a": 1})  # with them: dense
    decode_step(engine).toolbox.take_cpu = lambda layer, rows: None  # type: ignore[method-assign]
    with pytest.raises(AssertionError, match="is off by"):
        engine.step({"a": 1})
    engine.close()


@pytest.mark.parametrize("query", ["predicted", "real"])
def test_a_layer_that_is_not_to_be_predicted_selects_by_its_own_query(query: str) -> None:
    """However wrong a prediction would be: the CPU's partial, too, is of the true query."""
    ahead = {"partial_query": query, "skip_layers": [1]}
    outputs = []
    for noise in (0.0, 3.0):
        engine = Engine(config(lookahead=ahead, recall={"intervals": 2}), spec(layers=3), seed=5)
        long_context(engine)
        method, asked, seen = engine.runtime.method, set[int](), dict[int, list[torch.Tensor]]()
        lookahead, attend = method.lookahead, method.attend

        def log_lookahead(step, layer, q, lookahead=lookahead, asked=asked):  # type: ignore[no-untyped-def]
            asked.add(layer)
            lookahead(step, layer, q)

        def log_attend(step, layer, q, attend=attend, seen=seen):  # type: ignore[no-untyped-def]
            seen.setdefault(layer, []).append(attend(step, layer, q).clone())
            return seen[layer][-1]

        method.lookahead, method.attend = log_lookahead, log_attend  # type: ignore[method-assign]
        for _ in range(8):
            engine.step({"a": 1}, lookahead_noise=noise, tolerance=None)
        assert asked == {2} and engine.runtime.stats.cpu_ratio() > 0.02
        outputs.append({layer: torch.stack(out) for layer, out in seen.items()})
        engine.close()
    exact, guessed = outputs
    torch.testing.assert_close(guessed[1], exact[1], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(guessed[2], exact[2], atol=1e-3), "the others do follow the prediction"


def test_a_sparse_step_attends_exactly_the_selected_pages() -> None:
    """With a perfect prediction the output is the oracle's attention over the pages that Quest selects."""
    quest = {"granularity": "layer", "aggregate": "sum", "bound": 1, "digest": "minmax"}
    cfg = config(recall={"intervals": 2}, selection=quest)
    engine = Engine(cfg, spec(layers=2))
    long_context(engine)
    step, method, seen = decode_step(engine).toolbox, engine.runtime.method, {}
    attend = method.attend

    def log_attend(_, layer, q):  # type: ignore[no-untyped-def]
        out, chosen = attend(step, layer, q), step.selection(layer)
        seen[layer] = (q, out, chosen.pages[0, 0, : chosen.pages_listed[0, 0]].long())
        return out

    method.attend = log_attend  # type: ignore[method-assign]
    for _ in range(20):
        engine.step({"a": 1}, tolerance=None)
        rows = engine.ran.decode
        assert rows is not None
        for layer, (q, out, selected) in seen.items():
            assert len(selected) == cfg.budget_pages
            tail = int(rows.seq_lens[0] - (rows.num_pages[0] - 1) * PAGE)
            valid = torch.where(selected == rows.num_pages[0] - 1, tail, PAGE)[None, None]
            pages = rows.page_table[0][selected][None, None]
            expected, _ = reference.paged_attention(q, engine.kv[layer], pages, valid, engine.model.scale)
            torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
            digests = torch.stack([reference.digest(engine.kv[layer][p], PAGE) for p in rows.page_table[0][:-1]])
            scores = reference.digest_scores(q[0], digests).sum(0)
            free = [j for j in range(1, len(scores)) if j < int(rows.num_pages[0]) - cfg.recent]
            best = sorted(free, key=lambda j: -float(scores[j]))[: cfg.budget_pages - cfg.sinks - cfg.recent]
            assert set(best) <= set(selected.tolist())
    engine.close()


def drifting(engine: Engine, steps: int) -> float:
    """Decode with queries that change slowly, as a real model's do; the share of tokens that the CPU attended."""
    m = engine.model
    base = torch.randn(m.num_layers, 1, m.num_heads, m.head_dim, generator=engine.rng)
    normal = torch.randn

    def slow_queries(*size, generator=None):  # type: ignore[no-untyped-def]
        nonlocal base
        if size == tuple(base.shape):
            base = 0.98 * base + 0.2 * normal(*size, generator=generator)
            return base
        return normal(*size, generator=generator)

    torch.randn = slow_queries  # type: ignore[assignment]
    try:
        for _ in range(steps):
            engine.step({"a": 1}, tolerance=None)
    finally:
        torch.randn = normal
    return engine.runtime.stats.cpu_ratio()


def test_recall_brings_the_cpu_share_down() -> None:
    ratios = {}
    for enabled in (False, True):
        keys = {"recall": {"enabled": enabled, "intervals": 4}, "frames_per_request": 6}
        engine = Engine(config(**keys), spec(layers=4), seed=3)
        long_context(engine)
        ratios[enabled] = drifting(engine, 128)
        assert (sum(layer.recalled_pages for layer in engine.runtime.stats.layers) > 0) == enabled
        engine.close()
    print(f"CPU share of attended tokens over 128 steps: {ratios[False]:.3f} without recall, {ratios[True]:.3f} with")
    assert ratios[True] < 0.7 * ratios[False]


def test_a_recalled_page_equals_its_host_page_and_is_visible_from_the_next_step() -> None:
    engine = Engine(config(recall={"intervals": 1}), spec(layers=3))
    long_context(engine)
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
    engine.close()


def _copies(step: StepDriver, row: int) -> list[tuple[int, int, int]]:
    """``(frame, host page, logical page)`` of the first row's copies under way in a layer."""
    copies = step.buffers.state.copies.of(row)
    found = zip(copies.frames[0].tolist(), copies.host_pages[0].tolist(), copies.pages[0].tolist(), strict=True)
    return [copy for copy in found if copy[0] >= 0]


def test_a_copy_planned_for_a_released_request_is_never_visible() -> None:
    engine = Engine(config(recall={"intervals": 1}), spec(layers=3), max_requests=1)
    long_context(engine)
    step = decode_step(engine)
    while not any(_copies(step, row) for row in range(3)):
        engine.step({"a": 1}, lookahead_noise=0.5, tolerance=None)
    engine.drop("a")
    assert (step.buffers.maps.page_of == -1).all()
    engine.add("b", 3 * PAGE)  # takes over the index; exact while it fits
    engine.prefill("b")
    for _ in range(2 * PAGE):
        engine.step({"b": 1})
        assert all(resident(engine, "b", layer) == set(range(-(-engine.sequences["b"].tokens // PAGE)))
                   for layer in range(3))  # fmt: skip
    engine.close()


@pytest.mark.parametrize("chunk", [100, LONG + 4])
@pytest.mark.parametrize("kernels", ["torch", "native"])
def test_a_request_begins_with_the_pages_that_its_prompt_attends_most(kernels: str, chunk: int) -> None:
    """Scores by the last query of the prompt, in every layer with digests; an exact layer, of which
    nothing is known, has the last pages."""
    cfg = config(device_kernels=kernels, exact_layers=[0], frames_per_request=6)
    engine, queries = Engine(cfg, spec(layers=3)), {}
    forward = engine.runtime.forward

    def log(layer, step, q, *rest):  # type: ignore[no-untyped-def]
        queries[layer] = q[-1:].clone()
        forward(layer, step, q, *rest)

    engine.runtime.forward = log  # type: ignore[method-assign]
    engine.add("a", LONG + 5)
    engine.prefill("a", chunk=chunk)
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
    engine.close()


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
    long_context(engine, "a")
    for _ in range(3):
        engine.step({"a": 1}, lookahead_noise=0.5, tolerance=None)
    assert due == [[True], [True], [False], [False], [False], [False]]
    long_context(engine, "b")
    due.clear()
    engine.step({"a": 1, "b": 1}, lookahead_noise=0.5, tolerance=None)
    engine.step({"a": 1, "b": 1}, lookahead_noise=0.5, tolerance=None)
    assert due == [[False, True], [True, True], [True, False], [False, False]]
    engine.close()


def test_a_worker_that_fails_or_hangs_turns_into_an_error_that_names_the_layer() -> None:
    from hybrid_backend.errors import DeadlineError, WorkerError

    def broken(q, layer, pages, scale):  # type: ignore[no-untyped-def]
        raise ValueError("bad page")

    def hanging(q, layer, pages, scale):  # type: ignore[no-untyped-def]
        time.sleep(1.5)
        return paged_partial(q, layer, pages, scale)

    for kernel, error, text in ((broken, WorkerError, "layer 7.*bad page"), (hanging, DeadlineError, "layer 7")):
        pool = TorchPool(1, CPUS, kernel)
        ticket = pool.submit(torch.zeros(1, 2, 8), torch.zeros(1), _lists(1), 1.0, "layer 7")
        with pytest.raises(error, match=text):
            ticket.wait(0.2)
        pool.close()


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
        long_context(engine, name)
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
    engine.close()


def test_results_of_many_sequences_come_back_in_order() -> None:
    def own_number(q, layer, pages, scale):  # type: ignore[no-untyped-def]
        time.sleep(0.002 * float(5 - q[0, 0, 0]))
        return Partial(q.clone(), q[..., 0].clone())

    pool = TorchPool(3, CPUS, own_number)
    q = torch.arange(5.0)[:, None, None].expand(5, 2, 4).contiguous()
    assert torch.equal(pool.submit(q, torch.zeros(1), _lists(5), 1.0, "test").wait(5).out, q)
    pool.close()


def test_a_prefill_row_beside_decoding_rows_is_dense() -> None:
    engine = Engine(config(), dataclasses.replace(spec(), dtype=torch.float32))
    engine.add("a", 10)
    engine.prefill("a")
    engine.add("b", 100)
    for chunk in (1, 30, 1, 40, 28):
        engine.step({"a": 1, "b": chunk})
    engine.step({"b": 1, "a": 1}, tolerance=None)
    engine.close()
