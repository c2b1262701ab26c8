"""Scores by digests of maxima and minima and by digests in bytes, on every instruction set."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_backend.config import SelectionConfig
from hybrid_backend.errors import WorkerError
from hybrid_backend.kernels import cpu, oracle
from hybrid_backend.kernels.cpu import digests as native
from hybrid_backend.kernels.cpu import operations
from tests.support import cases

pytestmark = pytest.mark.skipif(not cpu.available(), reason=str(cpu.why_unavailable()))

ISAS = cpu.isas() if cpu.available() else ["generic"]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_scores(isa, data):
    dtype = data.draw(st.sampled_from(DTYPES))
    dim, group = data.draw(st.sampled_from([16, 64, 80, 96, 128, 256, 512])), data.draw(st.integers(1, 9))
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
    whole = torch.full((2,), columns, dtype=torch.int32)
    arguments = (
        q, digests, table.int(), whole, torch.zeros_like(whole), how.aggregate, how.granularity == "kv_head", how.bound,
        1.0,
    )  # fmt: skip
    mine, expected = operations.page_scores_with(isa, *arguments), oracle.page_scores(*arguments)
    assert mine.shape == expected.shape
    assert torch.allclose(mine, expected, rtol=1e-4, atol=1e-3 * group)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kv_heads", "group", "dim"), [(3, 3, 64), (8, 2, 128), (1, 9, 80), (2, 1, 16), (5, 4, 96)])
def test_a_decoder_selects_by_sums_of_byte_digests(isa, dtype, kv_heads, group, dim):
    """The selected pages have the best scores, computed here from rounded digests and rounded weights of the query."""
    torch.manual_seed(0)
    digests = torch.randn(40, kv_heads, 2, dim)
    digests[:, :, 0] += 1
    digests[:, :, 1] -= 1
    digests[3, 0], digests[4] = 0, 1e-3
    digests = digests.to(dtype)
    layer, q = torch.randn(40, kv_heads, 2, 16, dim).to(dtype), torch.randn(2, kv_heads * group, dim).to(dtype)
    table = torch.stack([torch.randperm(40)[:21] for _ in range(2)])
    byte_digests = native.empty_byte_digests(digests)
    native.write_byte_digests(byte_digests, digests, torch.arange(40))
    decoder = cpu.Decoder(
        [layer],
        {0: digests},
        kv_heads * group,
        dim**-0.5,
        byte_digests={0: byte_digests},
        bound=0.5,
        team="caller",
        isa=isa,
    )
    decoder.begin(table, torch.tensor([336, 336]), torch.tensor([8, 8]), sinks=0)
    decoder.layer(0, q, None, None, torch.empty_like(q))
    for row in range(2):
        scores = cases.byte_scores(q[row], digests[table[row]], bound=0.5)
        scores[20] = float("inf")  # the growing page
        is_selected = torch.zeros(21, dtype=torch.bool).index_fill(0, decoder.selected(row).long(), True)
        assert is_selected.sum() == 8
        assert scores[is_selected].min() > scores[~is_selected].max() - 1e-4 * scores[:20].abs().max()


def test_quantizing_odd_digests():
    """Zeros, subnormals, infinities and NaN become finite bytes and scales."""
    digests = torch.zeros(4, 1, 2, 32)
    digests[1] = 1e-42
    digests[2, 0, 0, :3] = torch.tensor([float("inf"), float("nan"), 2.0])
    digests[3] = 3e38
    byte_digests = native.empty_byte_digests(digests)
    native.write_byte_digests(byte_digests, digests, torch.arange(4))
    scales = byte_digests[:, 64:72].contiguous().view(torch.float32)
    maxima = (byte_digests[:, :32].float() - 128) * scales[:, :1]
    assert scales.isfinite().all() and maxima[3] == pytest.approx(3e38, rel=1e-2)
    assert maxima[:3, :3].tolist() == [[0, 0, 0], [0, 0, 0], pytest.approx([0, 0, 2.0])]
    assert (byte_digests[0, :64] == 128).all() and byte_digests[2, 2] == 255


def test_refuses_foreign_pages():
    digests, q = torch.zeros(4, 1, 2, 16), torch.zeros(1, 1, 16)
    table, pages = torch.tensor([[0, 4]], dtype=torch.int32), torch.tensor([2], dtype=torch.int32)
    with pytest.raises(WorkerError, match="page id 4 is beyond the 4 pages"):
        operations.page_scores(q, digests, table, pages, torch.zeros_like(pages), "sum", False, 1.0, 1.0)
