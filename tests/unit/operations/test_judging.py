"""Judging prompts: weights by the definition in fp64, and jobs in the background against the oracle's."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hybrid_backend.attention.partial import PageList
from hybrid_backend.errors import DeadlineError, WorkerError
from hybrid_backend.kernels import cpu, judging_oracle
from hybrid_backend.kernels.cpu import operations as native_operations
from hybrid_backend.kernels.kv_format import KvFormat
from hybrid_backend.kernels.operations import Judgement, LayerToJudge, PromptToJudge
from hybrid_backend.workers import NativePool, WorkerPool
from hybrid_backend.workers.pool import TorchPool
from hybrid_backend.workers.registry import native_partial
from tests.support.judged import wait_for

ISAS = list(cpu.isas()) if cpu.available() else []
NATIVE = pytest.mark.skipif(not cpu.available(), reason=str(cpu.why_unavailable()))
IMPLEMENTATIONS = ["oracle", *(pytest.param(isa, marks=NATIVE) for isa in [*ISAS, "chosen"])]
KERNELS = [pytest.param("native", marks=NATIVE), "torch"]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-5, torch.bfloat16: 1e-5}
"""Relative to the largest weight. Products of the types are exact in fp32, in which they are added."""
INT8_TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-5, torch.bfloat16: 1e-2}
"""The same over pages in 8 bits, against what these decode to. Units of bf16 round decoded keys to bf16."""
SECONDS = 60.0


def weights(name: str, *args: object) -> Tensor:
    """Run an implementation of `prompt_weights`."""
    if name == "oracle":
        return judging_oracle.prompt_weights(*args)  # type: ignore[arg-type]
    return native_operations.prompt_weights(*args, isa=None if name == "chosen" else name)  # type: ignore[arg-type]


def expected_weights(q: Tensor, kv: Tensor, pages: Tensor, tokens: int, first: int, older: int, scale: float) -> Tensor:
    """Compute `prompt_weights` by its definition, in fp64, one query after the other."""
    count, heads, _ = q.shape
    kv_heads, size = kv.shape[1], kv.shape[3]
    sums = torch.zeros(heads, tokens, dtype=torch.float64)
    position = torch.arange(tokens)
    keys = kv[pages.long()[position // size], :, 0, position % size].double()  # [tokens, kv_heads, head_dim]
    for i in range(count):
        seen = tokens - count + i + 1
        for head in range(heads):
            logits = (keys[:, head // (heads // kv_heads)] @ q[i, head].double()) * scale
            logits[logits.isnan()] = -torch.inf
            for begin, end in ((first, min(older, seen)), (older, seen)):
                if begin < end and bool((logits[begin:end] > -torch.inf).any()):
                    sums[head, begin:end] += logits[begin:end].softmax(0)
    return (sums / count).unflatten(0, (kv_heads, -1)).amax(1)[:, first:]


def prompt_of(
    dtype: torch.dtype, group: int, kv_heads: int, dim: int, queries: int, tokens: int, size: int, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, host pages and the sequence's pages, in any order. What is no token's is NaN."""
    rng = torch.Generator().manual_seed(seed)
    count = -(-tokens // size)
    kv = torch.full((count + 2, kv_heads, 2, size, dim), float("nan"), dtype=dtype)
    pages = torch.randperm(count + 2, generator=rng)[:count].int()
    position = torch.arange(tokens)
    kv[pages.long()[position // size], :, :, position % size] = torch.randn(tokens, kv_heads, 2, dim, generator=rng).to(
        dtype
    )
    return (torch.randn(queries, group * kv_heads, dim, generator=rng) * 2).to(dtype), kv, pages


def in_8_bits(kv: Tensor) -> tuple[Tensor, Tensor]:
    """Return pages in 8 bits of what ``kv`` holds, and what these decode to, in the layout of ``kv``."""
    count, kv_heads, _, size, dim = kv.shape
    encoding, place = KvFormat(kv_heads, size, dim, torch.int8), torch.arange(count * size)
    pages = torch.zeros(encoding.shape(count), dtype=torch.int8)
    k, v = (x.transpose(1, 2).flatten(0, 1) for x in kv.unbind(2))
    encoding.write(pages, place // size, place % size, k, v)
    return pages, torch.stack(encoding.decode(pages), 2)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("is_int8", [False, True], ids=["", "int8"])
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_weights_are_the_mean_softmax_of_the_last_queries_over_each_span(
    name: str, dtype: torch.dtype, is_int8: bool, data: st.DataObject
) -> None:
    dim = data.draw(st.sampled_from([16, 64, 80, 128, 256]), label="head_dim")
    group, kv_heads = data.draw(st.integers(1, 16), label="group"), data.draw(st.integers(1, 3), label="kv_heads")
    size = data.draw(st.sampled_from([16, 32, 128]), label="page_size")
    tokens = data.draw(st.one_of(st.integers(1, 40), st.integers(1, 700)), label="tokens")
    queries = data.draw(st.integers(1, min(tokens, 64)), label="queries")
    first = data.draw(st.integers(0, tokens // size), label="sinks") * size
    older = data.draw(st.integers(first // size, tokens // size), label="older") * size
    q, kv, pages = prompt_of(dtype, group, kv_heads, dim, queries, tokens, size, data.draw(st.integers(0, 2**31)))
    stored, decoded = in_8_bits(kv) if is_int8 else (kv, kv)
    result = weights(name, q, stored, pages, tokens, first, older, dim**-0.5)
    expected = expected_weights(q, decoded, pages, tokens, first, older, dim**-0.5)
    tolerance = INT8_TOLERANCE[dtype] if is_int8 else TOLERANCE[dtype]
    assert result.shape == (kv_heads, tokens - first) and result.dtype == torch.float32
    if result.numel():
        assert float((result - expected).abs().max()) <= tolerance * max(float(expected.max()), 1e-6) * 4


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_key_that_is_nan_weighs_nothing_and_leaves_the_others_their_weights(name: str, dtype: torch.dtype) -> None:
    q, kv, pages = prompt_of(dtype, 2, 2, 64, 20, 300, 16, 1)
    for token in (40, 200, 290):
        kv[int(pages[token // 16]), :, 0, token % 16] = float("nan")
    result = weights(name, q, kv, pages, 300, 16, 192, 0.125)
    expected = expected_weights(q, kv, pages, 300, 16, 192, 0.125)
    torch.testing.assert_close(result.double(), expected, atol=1e-6, rtol=1e-4)
    assert not result[:, [40 - 16, 200 - 16, 290 - 16]].any()


@NATIVE
def test_what_does_not_fit_a_sequence_is_refused() -> None:
    q, kv, pages = prompt_of(torch.float32, 1, 2, 32, 4, 40, 16, 0)
    with pytest.raises(WorkerError, match="more tokens than its pages hold"):
        native_operations.prompt_weights(q, kv, pages, 49, 0, 16, 1.0)
    with pytest.raises(WorkerError, match="spans of a sequence are not in order"):
        native_operations.prompt_weights(q, kv, pages, 40, 32, 16, 1.0)
    with pytest.raises(WorkerError, match="fewer tokens than queries"):
        native_operations.prompt_weights(q, kv, pages, 3, 0, 0, 1.0)
    with pytest.raises(WorkerError, match="page id 77"):
        native_operations.prompt_weights(q, kv, pages.index_fill(0, torch.tensor([1]), 77), 40, 0, 16, 1.0)


# --- jobs ---


@pytest.fixture(params=KERNELS)
def pool(request: pytest.FixtureRequest) -> Iterator[WorkerPool]:
    made = NativePool(2, [0, 0]) if request.param == "native" else TorchPool(2, [0], native_partial)
    yield made
    made.close()


@pytest.fixture
def native_pool() -> Iterator[NativePool]:
    if not cpu.available():
        pytest.skip(str(cpu.why_unavailable()))
    made = NativePool(2, [0, 0])
    yield made
    made.close()


def job(
    tokens: int = 700, layers: int = 3, queries: int = 40, dtype: torch.dtype = torch.float32, seed: int = 0
) -> PromptToJudge:
    """Return a prompt with 1 page of sinks and 4 pages of a window. Its last layer has no queries."""
    size, first = 16, 16
    older = max(first, (tokens // size - 4) * size)
    made, pages = [], torch.empty(0)
    for layer in range(layers):
        q, kv, layer_pages = prompt_of(dtype, 3, 2, 64, queries, tokens, size, seed)
        kv += layer  # alike but for a shift, so that all layers have the same pages
        pages = layer_pages
        store = torch.zeros(-(-tokens // size), *kv.shape[1:], dtype=dtype)
        made.append(LayerToJudge(q[: 0 if layer and layer == layers - 1 else queries], kv, store))
    return PromptToJudge(made, pages, tokens, first, older, 1.0 / max(1, older - first), 0.125)


def copy_of(prompt: PromptToJudge) -> PromptToJudge:
    """Return the same prompt with stores of its own."""
    return prompt._replace(layers=[x._replace(store=torch.zeros_like(x.store)) for x in prompt.layers])


def assert_same(prompt: PromptToJudge, result: Judgement, oracle: PromptToJudge, expected: Judgement) -> None:
    """Compare two judgements. No weight of these seeds is within rounding of the threshold."""
    assert torch.equal(result.keep_mask, expected.keep_mask) and torch.equal(result.counts, expected.counts)
    torch.testing.assert_close(result.recent, expected.recent, atol=1e-6, rtol=1e-4)
    for layer, oracle_layer in zip(prompt.layers, oracle.layers, strict=True):
        assert torch.equal(layer.store, oracle_layer.store)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("tokens", [1, 17, 130, 700, 2500])
def test_a_job_keeps_and_copies_the_tokens_that_the_oracle_keeps(
    pool: WorkerPool, tokens: int, dtype: torch.dtype
) -> None:
    prompt = job(max(tokens, 17), queries=min(tokens, 40), dtype=dtype, seed=tokens)
    oracle = copy_of(prompt)
    result = wait_for(pool.judge(prompt, "a prompt"))
    assert_same(prompt, result, oracle, judging_oracle.judge(oracle))
    if tokens > 500:
        assert 0 < int(result.counts[0].min()) < prompt.older - prompt.first
        assert bool((result.counts[-1] == prompt.older - prompt.first).all())


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("tokens", [17, 700, 2500])
def test_a_job_copies_kept_tokens_in_8_bits_with_their_scales(
    pool: WorkerPool, tokens: int, dtype: torch.dtype
) -> None:
    """All bytes of the store are those that the oracle copies by the same mask."""
    plain = job(tokens, queries=min(tokens, 40), dtype=dtype, seed=tokens)
    layers = []
    for layer in plain.layers:
        host, _ = in_8_bits(layer.host)
        layers.append(LayerToJudge(layer.q, host, torch.zeros(len(layer.store), *host.shape[1:], dtype=torch.int8)))
    prompt = plain._replace(layers=layers)
    oracle = copy_of(prompt)
    result = wait_for(pool.judge(prompt, "a prompt"))
    for index, (layer, oracle_layer) in enumerate(zip(prompt.layers, oracle.layers, strict=True)):
        expected, recent = judging_oracle.judge_layer(oracle_layer, oracle)
        share = (result.keep_mask[index] == expected).float().mean() if expected.numel() else torch.ones(())
        assert share > (0.98 if dtype == torch.bfloat16 else 0.9999), "a weight within rounding of the threshold"
        torch.testing.assert_close(result.recent[index], recent, atol=1e-6, rtol=4 * INT8_TOLERANCE[dtype])
        judging_oracle.copy_kept(oracle_layer, oracle, result.keep_mask[index])
        assert torch.equal(layer.store, oracle_layer.store)
        assert torch.equal(result.counts[index], result.keep_mask[index].sum(1, dtype=torch.int32))
    if tokens > 500:
        assert 0 < int(result.counts[0].min()) < prompt.older - prompt.first


def test_partials_go_first_and_the_prompt_goes_on_afterwards(native_pool: NativePool) -> None:
    """While thousands of partials are computed, the threads have one more step each to do at most before each."""
    prompt = job(6000, layers=4, queries=64)
    oracle, host = copy_of(prompt), prompt.layers[0].host.nan_to_num(0.0)
    judging = native_pool.judge(prompt, "a prompt")
    ids = torch.arange(8).expand(1, 1, -1).contiguous()
    pages = PageList(ids, torch.full_like(ids, 16))
    q = torch.randn(1, 6, 64)
    expected = native_partial(q, host, pages, 0.125)
    before, partials = 0, 0
    while judging.poll(SECONDS) is None:
        steps = judging._job.steps  # type: ignore[attr-defined]
        ticket = native_pool.submit(q, host, pages, 0.125, "a layer")
        partial = ticket.wait(SECONDS)
        assert torch.allclose(partial.out, expected.out, atol=1e-5)
        partials, before = partials + 1, before + (judging.poll(SECONDS) is None and steps > 0)
    assert before > 0, "partials were computed in the midst of judging"
    assert_same(prompt, wait_for(judging), oracle, judging_oracle.judge(oracle))


def test_a_prompt_that_is_given_up_is_not_written_any_more(pool: WorkerPool) -> None:
    for seed in range(10):
        prompt = job(5000, seed=seed)
        judging = pool.judge(prompt, "a prompt")
        time.sleep(seed * 0.004)
        judging.abandon()
        stores = [layer.store.clone() for layer in prompt.layers]
        time.sleep(0.01)
        assert all(torch.equal(layer.store, store) for layer, store in zip(prompt.layers, stores, strict=True))
        with pytest.raises(WorkerError, match="a prompt was given up"):
            judging.poll(SECONDS)
        judging.abandon()
    wait_for(pool.judge(job(), "another prompt"))


def test_many_prompts_are_judged_one_after_the_other(pool: WorkerPool) -> None:
    prompts = [job(900, seed=seed) for seed in range(6)]
    oracles = [copy_of(prompt) for prompt in prompts]
    for prompt, judging, oracle in zip(prompts, [pool.judge(p, "a prompt") for p in prompts], oracles, strict=True):
        assert_same(prompt, wait_for(judging), oracle, judging_oracle.judge(oracle))


def test_workers_without_progress_are_an_error_that_names_the_prompt(native_pool: NativePool) -> None:
    native_pool.native.pause()
    judging = native_pool.judge(job(), "the judging of request 7")
    assert judging.poll(0.05) is None
    time.sleep(0.1)
    with pytest.raises(
        DeadlineError, match=r"did nothing for the judging of request 7 .*deadline_seconds=0\.05: 0 steps"
    ):
        judging.poll(0.05)
    native_pool.native.resume()
    wait_for(judging)


def test_a_pool_that_closes_ends_its_judging(native_pool: NativePool) -> None:
    prompt = job(5000)
    judging = native_pool.judge(prompt, "a prompt")
    native_pool.close()
    with pytest.raises(WorkerError, match="given up"):
        judging.poll(SECONDS)
    with pytest.raises(WorkerError, match="closed"):
        native_pool.judge(prompt, "a prompt")


def test_a_job_that_no_kernel_can_do_is_refused_before_it_begins(native_pool: NativePool) -> None:
    prompt = job()
    with pytest.raises(WorkerError, match="page id 999"):
        native_pool.judge(prompt._replace(pages=prompt.pages.index_fill(0, torch.tensor([3]), 999)), "a prompt")
    with pytest.raises(ValueError, match="do not fit 10000 tokens"):
        native_pool.judge(prompt._replace(tokens=10000), "a prompt")
    halves = [layer._replace(q=layer.q.half()) for layer in prompt.layers]
    with pytest.raises(ValueError, match=r"queries of torch\.float16 do not fit pages of torch\.float32"):
        native_pool.judge(prompt._replace(layers=halves), "a prompt")
    small = prompt.layers[0]._replace(store=prompt.layers[0].store[:2])
    with pytest.raises(ValueError, match="do not fit a store"):
        native_pool.judge(prompt._replace(layers=[small, *prompt.layers[1:]]), "a prompt")
