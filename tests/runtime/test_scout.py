"""ScoutAttention really happens: ahead, on the CPU, merged, recalled."""

from __future__ import annotations

import dataclasses
import itertools
import os
import threading
import time

import pytest
import torch

from hybrid_backend.attention.partial import PageList, Partial, empty_partial, paged_partial
from hybrid_backend.kernels import reference
from hybrid_backend.methods.scout import Scout
from hybrid_backend.workers.pool import TorchPool
from tests.runtime.harness import PAGE, Engine, config, spec

LONG = 12 * PAGE
CPUS = sorted(os.sched_getaffinity(0))


def long_context(engine: Engine, name: str = "a") -> None:
    engine.add(name, LONG)
    engine.prefill(name)


def scout(engine: Engine) -> Scout:
    method = engine.runtime.method
    assert isinstance(method, Scout)
    return method


def test_cpu_partials_start_a_layer_before_they_are_merged() -> None:
    """Layer l's job is submitted at layer l-1's input: by the time that layer l needs it, layer l-1 has run."""
    engine = Engine(config(tiers="separate", recall={"enabled": False}), spec(layers=4))
    long_context(engine)
    engine.step({"a": 1}, tolerance=None)
    method, events = scout(engine), []
    submit, attend = method._submit, method.attend

    def log_submit(layer, owners, entry, q):  # type: ignore[no-untyped-def]
        ticket = submit(layer, owners, entry, q)
        events.append(("submit" if ticket else "nothing", layer))
        return ticket

    def log_attend(layer, step, q):  # type: ignore[no-untyped-def]
        events.append(("attend", layer))
        return attend(layer, step, q)

    method._submit, method.attend = log_submit, log_attend  # type: ignore[method-assign]
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
    engine = Engine(config(tiers="separate", recall={"enabled": False}, sparse="never", slots_per_request=5), spec())
    long_context(engine)
    engine.step({"a": 1})  # with them: dense
    method = scout(engine)
    method._wait = lambda layer, ticket: empty_partial(torch.zeros(1, 4, 16))  # type: ignore[method-assign]
    with pytest.raises(AssertionError, match="is off by"):
        engine.step({"a": 1})
    engine.close()


@pytest.mark.parametrize("granularity", ["layer", "kv_head"])
@pytest.mark.parametrize("query", ["predicted", "real"])
def test_both_tier_modes_give_the_same_numbers(granularity: str, query: str) -> None:
    outputs = []
    for tiers in ("separate", "unified"):
        engine = Engine(
            config(
                tiers=tiers,
                selection={"granularity": granularity},
                lookahead={"enabled": True, "partial_query": query},
                recall={"intervals": 3},
            ),
            spec(layers=4),
            seed=5,
        )
        long_context(engine)
        engine.add("b", 20)
        engine.prefill("b")
        steps = [engine.step({"a": 1, "b": 1}, lookahead_noise=0.3, tolerance=None) for _ in range(90)]
        outputs.append(torch.stack([torch.cat([s["a"], s["b"]]) for s in steps]))
        assert engine.runtime.stats.cpu_ratio() > 0.02, "nothing was left to the CPU: this test shows nothing"
        engine.close()
    assert torch.equal(outputs[0], outputs[1])


def test_a_sparse_step_attends_exactly_the_selected_pages() -> None:
    """With a perfect prediction the output is the oracle's attention over the pages that Quest selects."""
    quest = {"granularity": "layer", "aggregate": "sum", "bound": 1}
    cfg = config(tiers="separate", recall={"intervals": 2}, selection=quest)
    engine = Engine(cfg, spec(layers=2))
    long_context(engine)
    method = scout(engine)
    plans, queries = {}, {}
    plan_layer, attend = method._plan_layer, method.attend

    def log_plan(layer, rows, plan, q):  # type: ignore[no-untyped-def]
        plans[layer] = plan_layer(layer, rows, plan, q)
        return plans[layer]

    def log_attend(layer, step, q):  # type: ignore[no-untyped-def]
        queries[layer] = (q, step.decode, attend(layer, step, q))
        return queries[layer][2]

    method._plan_layer, method.attend = log_plan, log_attend  # type: ignore[method-assign]
    for _ in range(20):
        engine.step({"a": 1}, tolerance=None)
        for layer, (q, rows, out) in queries.items():
            selected = plans[layer].selected
            assert (selected >= 0).sum() == cfg.budget_pages
            tail = int(rows.seq_lens[0] - (rows.num_pages[0] - 1) * PAGE)
            valid = torch.where(selected == rows.num_pages[0] - 1, tail, PAGE)
            expected, _ = reference.paged_attention(
                q, engine.kv[layer], rows.page_table[0][selected], valid, engine.model.scale
            )
            torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
            digests = torch.stack([reference.digest(engine.kv[layer][p], PAGE) for p in rows.page_table[0][:-1]])
            scores = reference.digest_scores(q[0], digests).sum(0)
            free = [j for j in range(1, len(scores)) if j < int(rows.num_pages[0]) - cfg.recent]
            best = sorted(free, key=lambda j: -float(scores[j]))[: cfg.budget_pages - cfg.sinks - cfg.recent]
            assert set(best) <= set(selected[0, 0].tolist())
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
        keys = {"tiers": "separate", "recall": {"enabled": enabled, "intervals": 4}, "slots_per_request": 6}
        engine = Engine(config(**keys), spec(layers=4), seed=3)
        long_context(engine)
        ratios[enabled] = drifting(engine, 128)
        assert (sum(layer.recalled_pages for layer in engine.runtime.stats.layers) > 0) == enabled
        engine.close()
    print(f"CPU share of attended tokens over 128 steps: {ratios[False]:.3f} without recall, {ratios[True]:.3f} with")
    assert ratios[True] < 0.7 * ratios[False]


def test_a_recalled_page_equals_its_host_page_and_is_visible_from_the_next_step() -> None:
    engine = Engine(config(tiers="separate", recall={"intervals": 1}), spec(layers=3))
    long_context(engine)
    tiers, seen = engine.runtime.tiers, 0
    for _ in range(30):
        engine.step({"a": 1}, lookahead_noise=0.5, tolerance=None)
        in_flight = [recall for recall, _ in tiers.transfers._in_flight]
        for recall in in_flight:
            held = tiers.residency.held(recall.layer, torch.tensor([recall.region]))[0]
            assert (held[recall.slots - recall.region * tiers.slots.size] == -1).all(), "visible too early"
        engine.step({"a": 1}, lookahead_noise=0.5, tolerance=None)
        for recall in in_flight:
            pages = tiers.residency.held(recall.layer, torch.tensor([recall.region]))[0]
            for slot, host_page in zip(recall.slots.tolist(), recall.host_pages.tolist(), strict=True):
                if pages[slot - recall.region * tiers.slots.size] < 0:
                    continue  # on its way out again
                copy, page = tiers.slots.layers[recall.layer][slot], engine.kv[recall.layer][host_page]
                if engine.sequences["a"].pages[int(pages[slot - recall.region * tiers.slots.size])] == host_page:
                    assert torch.equal(copy, page)
                    seen += 1
    assert seen > 20
    engine.close()


def test_a_copy_in_flight_for_a_released_request_is_neither_made_nor_committed() -> None:
    engine = Engine(config(tiers="separate", recall={"intervals": 1}), spec(layers=3), max_requests=1)
    long_context(engine)
    while not engine.runtime.tiers.transfers.in_flight:
        engine.step({"a": 1}, lookahead_noise=0.5, tolerance=None)
    engine.drop("a")
    tiers = engine.runtime.tiers
    assert tiers.transfers.finish() == 0
    assert tiers.residency.resident_pages == 0
    engine.add("b", 3 * PAGE)  # takes over the region; exact while it fits
    engine.prefill("b")
    for _ in range(2 * PAGE):
        engine.step({"b": 1})
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

    settings = config(
        tiers="separate", sparse="never", slots_per_request=4, workers={"threads": 2, "deadline_seconds": deadline}
    )
    engine = Engine(settings, spec(layers=8))
    engine.runtime.workers.close()
    engine.runtime.workers = scout(engine).workers = TorchPool(2, CPUS, kernel)
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


def test_when_one_copy_is_late_the_others_are_finished_later() -> None:
    """The copy thread is held up; what was planned beside the late copy is not forgotten."""
    workers = {"threads": 2, "deadline_seconds": 0.3}
    engine = Engine(config(tiers="separate", recall={"intervals": 1}, workers=workers), spec(layers=4))
    long_context(engine)
    transfers, held = engine.runtime.tiers.transfers, threading.Event()
    assert transfers._thread is not None
    blocked = transfers._thread.submit(held.wait)
    for _ in range(20):
        if transfers.in_flight <= 1:
            engine.step({"a": 1}, lookahead_noise=0.5, tolerance=None)
    assert transfers.in_flight > 1
    planned = [recall for recall, _ in transfers._in_flight]
    engine.step({"a": 1}, tolerance=None)
    failure = engine.runtime.failure(engine.ran)
    assert failure is not None and "did not end within 0.3 s" in str(failure.error)
    assert [recall for recall, _ in transfers._in_flight] == planned
    held.set()
    blocked.result()
    assert transfers.finish() == sum(len(recall.slots) for recall in planned) and transfers.in_flight == 0
    engine.close()


def test_results_of_many_sequences_come_back_in_order() -> None:
    def own_number(q, layer, pages, scale):  # type: ignore[no-untyped-def]
        time.sleep(0.002 * float(5 - q[0, 0, 0]))
        return Partial(q.clone(), q[..., 0].clone())

    for groups in (True, False):
        pool = TorchPool(3, CPUS, own_number, groups)
        q = torch.arange(5.0)[:, None, None].expand(5, 2, 4).contiguous()
        assert torch.equal(pool.submit(q, torch.zeros(1), _lists(5), 1.0, "test").wait(5).out, q)
        pool.close()


def test_a_prefill_row_beside_decoding_rows_is_dense() -> None:
    engine = Engine(config(tiers="separate"), dataclasses.replace(spec(), dtype=torch.float32))
    engine.add("a", 10)
    engine.prefill("a")
    engine.add("b", 100)
    for chunk in (1, 30, 1, 40, 28):
        engine.step({"a": 1, "b": chunk})
    engine.step({"b": 1, "a": 1}, tolerance=None)
    engine.close()
