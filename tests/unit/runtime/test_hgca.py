"""HGCA: a dense window, averages, eviction, per-head context caches, judging again after a prompt."""

from __future__ import annotations

import pytest
import torch

from hybrid_backend.errors import DeadlineError, WorkerError
from hybrid_backend.kernels.operations import Judgement
from hybrid_backend.methods.hgca import Hgca
from hybrid_backend.workers import NativePool
from tests.support.harness import PAGE, Engine, config, decode_step, resident, spec, watch
from tests.support.judged import hold_judgements, judge_at_once, replace_judge

RING = 4
WINDOW = RING * PAGE


def engine(layers: int = 2, seed: int = 0, **keys: object) -> Engine:
    hgca = {"window_tokens": WINDOW, "alpha": 0.25, **keys.pop("hgca", {})}  # type: ignore[dict-item]
    running = Engine(config(method="hgca", hgca=hgca, **keys), spec(layers=layers), seed=seed, is_witnessed=True)
    judge_at_once(running.runtime.workers)
    return running


def hgca(running: Engine) -> Hgca:
    method = running.runtime.method
    assert isinstance(method, Hgca)
    return method


def kept(running: Engine, name: str = "a", layer: int = 0) -> list[set[int]]:
    """Per KV head, the positions of the tokens in a request's context cache."""
    return [set(p.tolist()) for p in running.runtime.tiers.cache.positions(layer, index(running, name))]


def index(running: Engine, name: str = "a") -> int:
    found = running.runtime.tiers.frames.index(name)
    assert found is not None
    return found


def averages(running: Engine, name: str = "a") -> torch.Tensor:
    """Of the first layer, ``[ring, kv_heads, page_size]``."""
    return hgca(running)._average[0].view(-1, RING, *running.kv[0].shape[1::2][:2])[index(running, name)]


@pytest.mark.parametrize("prompt", [PAGE // 2, 10 * PAGE + 5], ids=["short prompt", "long prompt"])
@pytest.mark.parametrize("sinks", [0, 1, 2])
@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_a_step_attends_the_sinks_the_window_and_what_each_head_kept(kernels: str, sinks: int, prompt: int) -> None:
    """fp64 attention over exactly these tokens, of which the sinks and the window are on the device."""
    attends_sinks_window_and_kept(engine(sinks=sinks, device_kernels=kernels), prompt)


def test_so_does_a_step_of_the_gpus_kernels() -> None:
    """Under Triton's interpreter. The CPU's lists lie where the host keeps them."""
    pytest.importorskip("triton", reason="Triton has no wheel for this platform")
    running = engine(layers=1, device_kernels="triton")
    attends_sinks_window_and_kept(running, 7 * PAGE - 2, steps=PAGE + 4)


def attends_sinks_window_and_kept(running: Engine, prompt: int, steps: int = 0) -> None:
    sinks, witness = running.cfg.sinks, running.witness
    assert witness is not None
    running.admit("a", prompt, chunk=50)
    for _ in range(steps or (3 * PAGE if prompt > WINDOW else 8 * PAGE - prompt)):
        running.step({"a": 1}, tolerance=None)
        tokens = running.sequences["a"].tokens
        first = max(sinks, -(-tokens // PAGE) - WINDOW // PAGE) * PAGE
        device = {token for token in range(tokens) if token < sinks * PAGE or token >= first}
        for layer in range(running.model.num_layers):
            if running.runtime.tiers.frames.size:
                assert resident(running, "a", layer) == {token // PAGE for token in device}
            attended = witness.of(layer, running.ran, 0).tokens
            for head, positions in enumerate(kept(running, layer=layer)):
                assert set(attended[head].nonzero().flatten().tolist()) == positions | device


def test_sinks_stay_whatever_their_averages_when_the_window_passes_them() -> None:
    """A page of the window, looked at as little, is dropped."""
    running = engine(layers=1, sinks=1)
    running.admit("a", WINDOW)
    method = hgca(running)
    for _ in range(4 * PAGE):
        running.step({"a": 1}, tolerance=None)
        method._average.zero_()
    assert resident(running, "a", 0) == {0, 4, 5, 6, 7}
    assert kept(running) == [set(), set()]


def test_heads_keep_different_numbers_of_tokens() -> None:
    running = engine(layers=3)
    running.admit("a", 12 * PAGE)
    running.step({"a": 1}, tolerance=None)
    counts = [len(positions) for layer in range(3) for positions in kept(running, layer=layer)]
    assert len(set(counts)) > 2
    assert min(counts) > 0 and max(counts) < 8 * PAGE


def test_a_page_that_leaves_the_window_keeps_tokens_above_beta_times_uniform() -> None:
    """By the averages before the step in which the page leaves (the formula of which is checked below)."""
    running = engine(layers=1)
    running.admit("a", PAGE + WINDOW - 1)
    running.step({"a": 1}, tolerance=None)  # sinks and window are full now
    partly = False
    for page in range(1, 4):  # page 1 by the prompt's averages alone, page 2 and 3 after 16 and 32 steps
        average = averages(running)[page - 1].clone()
        running.step({"a": 1}, tolerance=None)
        expected = [set((line > 1 / WINDOW).nonzero().flatten().tolist()) for line in average]
        found = [{p - page * PAGE for p in positions if p >= page * PAGE} for positions in kept(running)]
        assert found == expected
        partly = partly or any(0 < len(e) < PAGE for e in expected)
        running.decode("a", steps=PAGE - 1, tolerance=None)
    assert partly


def test_averages_follow_the_formula() -> None:
    """Of the tokens after the sinks, which count for nothing."""
    running = engine(layers=1)
    running.admit("a", PAGE + 20)
    running.step({"a": 1})
    seen: list[torch.Tensor] = []
    watch(hgca(running), "attend", before=lambda step, layer, q: seen.append(q[0]))
    for _ in range(5):
        before = averages(running).transpose(0, 1).flatten(1).clone()
        running.step({"a": 1})
        kv = torch.stack(running.sequences["a"].kv[0])[PAGE:]
        logits = torch.einsum("hgd,thd->hgt", seen[-1].view(2, 2, -1), kv[:, :, 0]) * running.model.scale
        new = logits.softmax(-1).amax(1)
        expected = 0.75 * before[:, : len(kv)] + 0.25 * new
        after = averages(running).transpose(0, 1).flatten(1)[:, : len(kv)]
        torch.testing.assert_close(after, expected, atol=1e-5, rtol=1e-4)


def test_a_token_that_was_pruned_returns_after_a_prompt_that_needs_it() -> None:
    """Algorithm 2: a new turn judges all tokens before the window again; nothing was lost from the host pool."""
    running = engine(layers=1)
    running.admit("a", 10 * PAGE)
    running.step({"a": 1}, tolerance=None)
    pruned = sorted(set(range(5 * PAGE)) - kept(running)[0])
    assert pruned, "every token was kept: this test shows nothing"
    needle = pruned[len(pruned) // 2]
    key = running.sequences["a"].kv[0][needle][0, 0]
    # The next turn: the conversation so far is a cached prefix; its queries look for one pruned token's key.
    running.add("b", 10 * PAGE + 40, shared_with="a")
    normal = torch.randn

    def asking(*size, generator=None):  # type: ignore[no-untyped-def]
        x = normal(*size, generator=generator)
        return x + 8 * key if size[-2:] == (4, 16) else x

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "randn", asking)
        running.prefill("b")
    running.step({"b": 1}, tolerance=None)
    assert needle in kept(running, "b")[0]
    assert needle not in kept(running, "a")[0]
    dropped = kept(running, "a")[0] - kept(running, "b")[0]
    assert dropped, "judging again also drops tokens"


def test_the_cpu_partial_is_submitted_before_the_device_attends() -> None:
    running = engine()
    running.admit("a", 10 * PAGE)
    events: list[str] = []
    workers, step = running.runtime.workers, decode_step(running).toolbox
    assert isinstance(workers, NativePool)
    watch(workers, "submit", before=lambda *_, **__: events.append("cpu"))
    watch(step, "attend", before=lambda *_: events.append("device"))
    running.step({"a": 1}, tolerance=None)
    assert events == ["cpu", "device", "device"] * 2  # the ring, the sinks


def test_a_released_request_leaves_no_context_cache() -> None:
    """Its memory goes back to the system, which gives zeros for it; that of the others stays as it is."""
    running = engine()
    for name in ("a", "b"):
        running.admit(name, 10 * PAGE)
    running.step({"a": 1, "b": 1}, tolerance=None)
    cache = running.runtime.tiers.cache
    of_a, of_b = (cache.stores[0][index(running, name) * cache.pages :][: cache.pages] for name in ("a", "b"))
    held, copy = cache.nbytes, of_b.clone()
    assert of_a.any() and of_b.any() and held > 0
    running.drop("a")
    assert not of_a.any() and torch.equal(of_b, copy)
    assert 0 < cache.nbytes < held
    running.drop("b")
    assert cache.nbytes == 0 and not cache._additions
    assert not hgca(running)._queries and not hgca(running)._running


def test_a_request_that_computes_prompt_tokens_again_is_judged_anew() -> None:
    """By the queries of that prompt alone; nothing that was judged before survives until then."""
    running = engine(layers=1)
    running.admit("a", 10 * PAGE, chunk=50)
    running.step({"a": 1}, tolerance=None)
    assert any(kept(running))
    running.step({"a": 20})  # the engine goes on with a prompt, as after a failed step
    assert running.runtime.tiers.cache.nbytes == 0 and not hgca(running)._running
    assert len(hgca(running)._queries["a"][0][1]) == 20
    sequence = running.sequences["a"]
    sequence.tokens, sequence.prompt, sequence.kv = 0, 25, [[]]  # and begins again without saying so
    running.prefill("a", chunk=15)
    assert len(hgca(running)._queries["a"][0][1]) == 25
    running.step({"a": 1})


def test_a_page_that_a_failed_step_began_leaves_the_window_once() -> None:
    running = engine(layers=1)
    running.admit("a", WINDOW + PAGE)
    running.step({"a": 1}, tolerance=None)
    running.decode("a", steps=PAGE - 1, tolerance=None)
    running.begin_and_die("a", is_told=True)
    judged = kept(running)
    assert judged == kept(running) and any(judged)
    average = averages(running).clone()
    running.begin_and_die("a", is_told=False)
    running.step({"a": 1}, tolerance=None)
    assert kept(running) == judged
    assert not average[(running.sequences["a"].tokens // PAGE - 1) % RING].any(), "the page that begins has no weights"


@pytest.mark.parametrize("kernel", ["native", "torch"])
def test_hgca_keeps_its_window_where_more_pages_are_recent_than_it_holds(kernel: str) -> None:
    keys = {
        "method": "hgca", "sinks": 3, "recent": 3, "budget_tokens": 8 * PAGE,
        "hgca": {"window_tokens": 2 * PAGE}, "exact_layers": [0, 1, 2], "workers": {"threads": 1, "kernel": kernel},
    }  # fmt: skip
    running = Engine(config(**keys), spec())
    running.admit("a", 12 * PAGE)
    running.step({"a": 1})


# --- while the workers judge ---

PROMPT = 10 * PAGE + 5


def engine_of(kernel: str, **keys: object) -> Engine:
    workers = {"threads": 2, "kernel": kernel, "deadline_seconds": 20}
    hgca = {"window_tokens": WINDOW, "alpha": 0.25}
    return Engine(config(method="hgca", hgca=hgca, workers=workers, **keys), spec(2), is_witnessed=True)


@pytest.mark.parametrize("device_kernels", ["auto", "triton"])
@pytest.mark.parametrize("kernel", ["native", "torch"])
def test_a_request_attends_everything_until_it_is_judged_and_its_lists_afterwards(
    kernel: str, device_kernels: str
) -> None:
    """Beside a request that has been judged before. Every step is exact before, and leaves tokens out afterwards."""
    if device_kernels == "triton":
        pytest.importorskip("triton", reason="Triton has no wheel for this platform")
        if kernel == "torch":
            pytest.skip("mailboxes need native workers")
    running = engine_of(kernel, device_kernels=device_kernels)
    held = hold_judgements(running.runtime.workers)
    witness, cache = running.witness, running.runtime.tiers.cache
    assert witness is not None
    running.admit("old", PROMPT)
    running.step({"old": 1})
    held[0].release()
    running.step({"old": 1}, tolerance=None)
    assert any(kept(running, "old"))
    running.admit("a", PROMPT)
    for _ in range(PAGE + 3):  # a page leaves the window meanwhile
        outs = running.step({"a": 1, "old": 1}, tolerance=None)
        assert witness.of(0, running.ran, 0).is_everything and not witness.of(0, running.ran, 1).is_everything
        assert set(outs) == {"a", "old"} and cache.whole[index(running)] > 0
        assert kept(running) == [set(), set()]
    held[1].release()
    running.step({"a": 1, "old": 1}, tolerance=None)
    assert not witness.of(0, running.ran, 0).is_everything and not cache.whole.any()
    assert any(kept(running))


@pytest.mark.parametrize(
    ("kernel", "steps"), [("native", 1), ("torch", 2), ("native", 2 * PAGE + 3), ("native", 5 * PAGE)]
)
def test_a_late_judgement_ends_in_the_lists_and_averages_of_one_at_once(kernel: str, steps: int) -> None:
    """Whatever left the window meanwhile, its prompt tokens and later ones; the rings agree to rounding."""
    engines = [engine_of(kernel), engine_of(kernel)]
    judge_at_once(engines[0].runtime.workers)
    held = hold_judgements(engines[1].runtime.workers)
    for running in engines:
        running.admit("a", PROMPT, chunk=50)
        for _ in range(steps):
            running.step({"a": 1}, tolerance=None)
    held[0].release()
    for running in engines:
        running.decode("a", steps=PAGE + 2, tolerance=None)
    for layer in range(2):
        assert kept(engines[0], layer=layer) == kept(engines[1], layer=layer)
        stores = [running.runtime.tiers.cache.own_pages(layer, index(running)) for running in engines]
        assert torch.equal(*stores)
    torch.testing.assert_close(*(averages(running) for running in engines), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("kernel", ["native", "torch"])
@pytest.mark.parametrize("end", ["aborted", "preempted", "prompt again"])
def test_a_request_that_goes_leaves_no_job_and_no_copy(kernel: str, end: str) -> None:
    running = engine_of(kernel)
    held, method, cache = hold_judgements(running.runtime.workers), hgca(running), running.runtime.tiers.cache
    running.admit("a", PROMPT)
    running.step({"a": 1})
    request = index(running)
    if end == "aborted":
        running.drop("a")
    elif end == "preempted":
        running.preempt("a")
    else:
        running.step({"a": 20})  # The engine goes on with a prompt, as after a failed step.
    assert held[0].is_abandoned and not method._unjudged and not method._running
    with pytest.raises(WorkerError, match="the judging of request a was given up"):
        held[0].judging.poll(1)
    assert cache.nbytes == 0 and not cache.whole.any() and not cache._additions
    assert not any(bool(cache.own_pages(layer, request).any()) for layer in range(2))
    if end == "aborted":
        running.admit("a", PROMPT)  # takes the index of the request that went
    else:
        running.prefill("a")
    running.step({"a": 1})
    held[1].release()
    running.step({"a": 1}, tolerance=None)
    assert any(kept(running)) and index(running) == request


def test_workers_that_die_while_they_judge_fail_the_step_and_say_so() -> None:
    running = engine_of("native")
    held = hold_judgements(running.runtime.workers)
    running.admit("a", PROMPT)
    running.step({"a": 1})

    def fail(deadline: float) -> Judgement | None:
        raise DeadlineError("CPU workers did nothing for the judging of request a")

    held[0].poll = fail  # type: ignore[method-assign]
    step, _ = running._begin({"a": 1})
    failure = running.runtime.failure(step)
    assert failure is not None and failure.request_ids == ["a"]
    assert "the judging of request a" in str(failure.error)


def test_a_prompt_that_cannot_be_submitted_fails_the_step() -> None:
    running = engine_of("native")

    def refuse(prompt: object, what: str) -> object:
        raise WorkerError("the pool of native CPU workers is closed")

    replace_judge(running.runtime.workers, refuse)
    running.admit("a", PROMPT)
    step, _ = running._begin({"a": 1})
    failure = running.runtime.failure(step)
    assert failure is not None and "closed" in str(failure.error)
    again, _ = running._begin({"a": 1})
    assert running.runtime.failure(again) is not None, "a step that is tried again fails too"
    running.runtime.release(["a"])
    cache = running.runtime.tiers.cache
    assert not hgca(running)._unjudged and cache.nbytes == 0 and not cache.whole.any()
