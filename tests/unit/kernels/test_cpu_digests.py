"""What the native decoder scores and selects by, on every instruction set, against the oracle."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_backend.config import SelectionConfig
from hybrid_backend.errors import WorkerError
from hybrid_backend.kernels import cpu, oracle
from hybrid_backend.kernels.cpu import digests as native

pytestmark = pytest.mark.skipif(not cpu.available(), reason=str(cpu.why_unavailable()))

ISAS = cpu.isas() if cpu.available() else ["generic"]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_scores(isa, data):
    dtype = data.draw(st.sampled_from(DTYPES))
    dim, group = data.draw(st.sampled_from([16, 64, 80, 96, 128, 256])), data.draw(st.integers(1, 9))
    kv_heads, columns = data.draw(st.integers(1, 8)), data.draw(st.integers(1, 37))
    how = SelectionConfig(
        granularity=data.draw(st.sampled_from(["layer", "kv_head"])),
        aggregate=data.draw(st.sampled_from(["sum", "max"])),
        bound=data.draw(st.sampled_from([0.3, 1.0])),
    )
    rng = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    digests = torch.randn(50, kv_heads, 2, dim, generator=rng).to(dtype)
    q = torch.randn(2, kv_heads * group, dim, generator=rng).to(dtype)
    table = torch.randint(0, 50, (2, columns), generator=rng)
    mine = native.scores(
        q, digests, table, per_head=how.granularity == "kv_head", aggregate=how.aggregate, bound=how.bound, isa=isa
    )
    whole = torch.full((2,), columns, dtype=torch.int32)
    expected = oracle.page_scores(
        q, digests, table.int(), whole, torch.zeros_like(whole), how.aggregate, how.granularity == "kv_head", how.bound,
        1.0,
    )  # fmt: skip
    assert mine.shape == expected.shape
    assert torch.allclose(mine, expected, rtol=1e-4, atol=1e-3 * group)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kv_heads", "group", "dim"), [(3, 3, 64), (8, 2, 128), (1, 9, 80), (2, 1, 16), (5, 4, 96)])
def test_byte_scores(isa, dtype, kv_heads, group, dim):
    """Bytes give the scores to within their rounding."""
    torch.manual_seed(0)
    digests = torch.randn(40, kv_heads, 2, dim)
    digests[:, :, 0] += 1
    digests[:, :, 1] -= 1
    digests[3, 0], digests[4] = 0, 1e-3
    digests = digests.to(dtype)
    quantized = native.quantized_like(digests)
    native.quantize(quantized, digests, torch.arange(40))
    q = torch.randn(2, kv_heads * group, dim).to(dtype)
    table = torch.randint(0, 40, (2, 21))
    mine = native.byte_scores(q, quantized, kv_heads, table, isa=isa)
    expected = native.scores(q, digests, table)
    assert mine.shape == expected.shape
    assert (mine - expected).abs().max() < 0.02 * expected.abs().max()
    assert torch.allclose(mine, native.byte_scores(q, quantized, kv_heads, table, isa="generic"), rtol=1e-4, atol=1e-3)


def test_quantizing_odd_digests():
    """Zeros, subnormals, infinities and NaN: finite bytes, a score that is finite."""
    digests = torch.zeros(4, 1, 2, 32)
    digests[1] = 1e-42
    digests[2, 0, 0, :3] = torch.tensor([float("inf"), float("nan"), 2.0])
    digests[3] = 3e38
    quantized = native.quantized_like(digests)
    native.quantize(quantized, digests, torch.arange(4))
    scores = native.byte_scores(torch.ones(1, 1, 32), quantized, 1, torch.arange(4)[None])
    assert scores[0, 0, :3].tolist() == pytest.approx([0, 0, 2], abs=1e-2)
    assert (quantized[0, :64] == 128).all() and quantized[2, 2] == 255


@settings(max_examples=150, deadline=None)
@given(
    columns=st.integers(1, 600),
    budget=st.integers(0, 700),
    sinks=st.integers(0, 3),
    recent=st.integers(1, 4),
    levels=st.sampled_from([1, 3, 50, 10**6]),
    seed=st.integers(0, 2**31),
)
def test_select(columns, budget, sinks, recent, levels, seed):
    rng = torch.Generator().manual_seed(seed)
    scores = (torch.randint(0, levels, (columns,), generator=rng) - levels // 2).float() / 7
    mine = native.select(scores, budget, sinks, recent)
    column = torch.arange(columns)
    forced = scores.masked_fill((column < sinks) | (column >= columns - recent), float("inf"))
    count = min(columns, max(budget, int(forced.isinf().sum())))
    assert len(mine) == count
    assert (mine[1:] > mine[:-1]).all()
    # Ties may be broken in another way, so compare what was selected by value.
    assert torch.equal(forced[mine.long()].sort().values, forced.topk(count).values.sort().values)


def test_select_extremes():
    scores = torch.tensor([0.0, float("-inf"), -1e38, 1e38, float("inf"), -0.0, 1e-40])
    assert native.select(scores, 3, 0, 0).tolist() == [3, 4, 6]
    assert native.select(scores, 100, 0, 0).tolist() == list(range(7))
    assert native.select(scores, 0, 1, 1).tolist() == [0, 6]


def test_refuses_foreign_pages():
    digests, q = torch.zeros(4, 1, 2, 16), torch.zeros(1, 1, 16)
    with pytest.raises(WorkerError, match="page id 4 is beyond the 4 pages"):
        native.scores(q, digests, torch.tensor([[0, 4]]))
