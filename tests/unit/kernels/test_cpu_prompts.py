"""Attention of prompts in place against fp64, for every instruction set that runs here."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hybrid_backend.batch import ModelSpec
from hybrid_backend.errors import WorkerError
from hybrid_backend.in_place.prompts import InPlacePrompts
from hybrid_backend.kernels import cpu
from tests.support import cases

pytestmark = pytest.mark.skipif(not cpu.available(), reason=str(cpu.why_unavailable()))

ISAS = list(cpu.isas()) if cpu.available() else ["generic"]
# Outputs are rounded to the type; in bf16 the weights too, where the CPU multiplies pairs.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def expected(
    q: Tensor, kv: Tensor, pages: Tensor, seq_len: int, window: int | None = None, sinks: Tensor | None = None
) -> Tensor:
    """By the definition, in fp64: every query over all keys, those that it must not see masked."""
    tokens, heads, dim = q.shape
    group = heads // kv.shape[1]
    first = 0 if window is None else max(0, seq_len - tokens - window + 1)
    page_size = kv.shape[3]
    at = torch.arange(first, seq_len)
    k, v = kv[pages.long()[at // page_size], :, :, at % page_size].double().permute(2, 1, 0, 3)
    logits = torch.einsum("thd,hkd->htk", q.double(), k.repeat_interleave(group, 0)) * dim**-0.5
    position = torch.arange(seq_len - tokens, seq_len)[:, None]
    seen = (at <= position) & (at > position - (window or seq_len))
    logits = logits.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        logits = torch.cat([logits, sinks.double()[:, None, None].expand(-1, tokens, 1)], 2)
    return torch.einsum("htk,hkd->thd", logits.softmax(2)[..., : len(at)], v.repeat_interleave(group, 0))


def prompt(
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    dim: int,
    tokens: int,
    seq_len: int,
    page_size: int = 16,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries and outputs that are slices, pages in any order, and NaN where no token is."""
    rng = torch.Generator().manual_seed(seed)
    count = -(-seq_len // page_size)
    kv = torch.full((count + 2, kv_heads, 2, page_size, dim), float("nan"), dtype=dtype)
    pages = torch.randperm(count + 2, generator=rng)[:count].int()
    at = torch.arange(seq_len)
    rows = torch.randn(seq_len, kv_heads, 2, dim, generator=rng).to(dtype)
    kv[pages.long()[at // page_size], :, :, at % page_size] = rows
    q = torch.randn(tokens, heads + 2, dim, generator=rng).to(dtype)[:, 1:-1]
    return q, kv, pages, torch.full((tokens, heads + 1, dim), float("nan"), dtype=dtype)[:, 1:]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_a_prompt_s_attention_is_fp64_s(isa: str, dtype: torch.dtype, data: st.DataObject) -> None:
    dim = data.draw(st.sampled_from([16, 64, 80, 96, 128, 256, 512]), label="head_dim")
    group, kv_heads = data.draw(st.integers(1, 16), label="group"), data.draw(st.integers(1, 3), label="kv_heads")
    tokens = data.draw(st.one_of(st.integers(1, 8), st.integers(1, 300)), label="tokens")
    seq_len = tokens + data.draw(st.one_of(st.just(0), st.integers(0, 400)), label="before")
    window = data.draw(st.one_of(st.none(), st.integers(1, 300)), label="window")
    page_size = data.draw(st.sampled_from([16, 32, 128]), label="page_size")
    seed = data.draw(st.integers(0, 2**31), label="seed")
    q, kv, pages, out = prompt(dtype, group * kv_heads, kv_heads, dim, tokens, seq_len, page_size, seed)
    sinks = torch.randn(group * kv_heads) * 3 if data.draw(st.booleans(), label="sinks") else None
    if window is not None:  # what no window reaches may be gone
        pages[: max(0, seq_len - tokens - window + 1) // page_size] = -1
    cpu.attend_prompt(q, kv, pages, seq_len, dim**-0.5, window, sinks, out, isa=isa)
    assert cases.relative_error(out, expected(q, kv, pages, seq_len, window, sinks)) <= TOLERANCE[dtype]


def test_a_sink_far_above_all_logits_leaves_almost_nothing_and_one_far_below_changes_nothing() -> None:
    q, kv, pages, out = prompt(torch.float32, 2, 1, 64, 40, 90)
    cpu.attend_prompt(q, kv, pages, 90, 0.125, None, torch.tensor([300.0, -300.0]), out)
    assert float(out[:, 0].abs().max()) < 1e-6
    assert cases.relative_error(out[:, 1], expected(q, kv, pages, 90)[:, 1]) <= 1e-5


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("token", [0, 3, 20, 70])
def test_a_key_of_a_prompt_that_is_nan_weighs_nothing(isa: str, dtype: torch.dtype, token: int) -> None:
    q, kv, pages, out = prompt(dtype, 4, 2, 64, 10, 90)
    kv[int(pages[token // 16]), :, 0, token % 16] = -torch.inf  # what weighs nothing for sure, of one sign each
    q = q.abs()
    without = expected(q, kv, pages, 90)
    kv[int(pages[token // 16]), :, 0, token % 16] = torch.nan
    cpu.attend_prompt(q, kv, pages, 90, 0.125, None, None, out, isa=isa)
    assert cases.relative_error(out, without) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_chunks_of_a_prompt_are_the_whole_prompt(dtype: torch.dtype) -> None:
    q, kv, pages, out = prompt(dtype, 6, 2, 64, 300, 300)
    cpu.attend_prompt(q, kv, pages, 300, 0.125, None, None, out)
    for start, end in ((0, 1), (1, 130), (130, 131), (131, 300)):
        part = torch.empty(end - start, 6, 64, dtype=dtype)
        cpu.attend_prompt(q[start:end], kv, pages, end, 0.125, None, None, part)
        assert cases.relative_error(part, out[start:end]) <= TOLERANCE[dtype]


def test_a_page_beyond_the_cache_and_a_prompt_beyond_its_pages_are_refused_before_anything_is_read() -> None:
    q, kv, pages, out = prompt(torch.float32, 2, 1, 64, 4, 40)
    with pytest.raises(WorkerError, match="page id 77 is beyond the"):
        cpu.attend_prompt(q, kv, torch.tensor([0, 77, 1], dtype=torch.int32), 40, 0.125, None, None, out)
    with pytest.raises(WorkerError, match="more tokens than its pages hold"):
        cpu.attend_prompt(q, kv, pages, 49, 0.125, None, None, out)
    with pytest.raises(WorkerError, match="more new tokens than tokens"):
        cpu.attend_prompt(q, kv, pages, 3, 0.125, None, None, out)
    with pytest.raises(ValueError, match="queries of 32 channels do not fit pages of 64"):
        cpu.attend_prompt(q[..., :32], kv, pages, 40, 0.125, None, None, out[..., :32])
    assert out.isnan().all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("size", [4.0, 1e2, 1e4, 1e12])
def test_large_and_huge_scores(isa: str, dtype: torch.dtype, size: float) -> None:
    """The maximum rises by tens of nats from block to block; with logits of 1e24 and their negatives the softmax is
    one-hot. Nothing overflows."""
    q, kv, pages, out = prompt(dtype, 6, 2, 64, 50, 300)
    kv[:, :, 0] *= size
    q = (q * size).to(dtype)
    cpu.attend_prompt(q, kv, pages, 300, 0.125, None, None, out, isa=isa)
    assert cases.relative_error(out, expected(q, kv, pages, 300)) <= 1e-2


@pytest.mark.parametrize("dim", [64, 80])
def test_prompts_in_bf16_stay_with_pytorch_where_only_its_products_take_amx(
    dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = [torch.zeros(2, 1, 2, 16, dim)]
    for isas, taken in ((["avx512", "generic"], True), (["amx", "avx512", "generic"], dim == 64)):
        monkeypatch.setattr(cpu, "isas", lambda isas=isas: isas)
        models = {dtype: ModelSpec(1, 2, 1, dim, 0.125, dtype) for dtype in TOLERANCE}
        found = {dtype: InPlacePrompts.of(model, layers) is not None for dtype, model in models.items()}
        assert found == {torch.float32: True, torch.float16: True, torch.bfloat16: taken}
