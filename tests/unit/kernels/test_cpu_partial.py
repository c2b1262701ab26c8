"""Partial attention on the CPU against fp64, for every instruction set that runs here."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_backend.errors import WorkerError
from hybrid_backend.kernels import cpu
from hybrid_backend.kernels.reference import paged_attention
from tests.support import cases

pytestmark = pytest.mark.skipif(not cpu.available(), reason=str(cpu.why_unavailable()))

ISAS = cpu.isas() if cpu.available() else ["generic"]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# AMX rounds the weights to bf16; everything else computes in fp32.
TOLERANCE = {"amx": 1e-2}


def check(q, layer, ids, valid, scale, isa, tolerance=None):
    out, lse = cpu.partial(q, layer, ids, valid, scale, isa=isa)
    expected, expected_lse = paged_attention(q, layer, ids, valid, scale)
    assert out.dtype == lse.dtype == torch.float32
    assert not out.isnan().any() and not lse.isnan().any()
    none = expected_lse == float("-inf")
    assert torch.equal(lse == float("-inf"), none)
    assert (out[none] == 0).all()
    assert torch.allclose(lse[~none].double(), expected_lse[~none], rtol=1e-6, atol=1e-3)
    assert cases.relative_error(out, expected) <= (tolerance or TOLERANCE.get(isa, 1e-5))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_matches_fp64(isa, dtype, data):
    dim = data.draw(st.sampled_from([16, 64, 80, 96, 128, 256, 512]), label="head_dim")
    group = data.draw(st.integers(1, 16), label="group")
    page_size = data.draw(st.sampled_from([16, 32, 64, 128]), label="page_size")
    kv_heads = data.draw(st.integers(1, 3), label="kv_heads")
    per_head = data.draw(st.booleans(), label="per_head")
    rows, k, pages = data.draw(st.integers(1, 4), label="rows"), data.draw(st.integers(1, 5), label="k"), 8
    pad = data.draw(st.sampled_from([0, 0, 1, 3, 8]), label="pad")
    rng = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31), label="seed"))
    layer = cases.strided_layer((pages, kv_heads, 2, page_size, dim), dtype, pad, rng)
    ids, valid = cases.page_lists(rows, kv_heads if per_head else 1, k, pages, page_size, rng)
    cases.spoil_beyond(layer, ids, valid)
    wide = torch.randn(rows, kv_heads * group + 2, dim + pad, generator=rng).to(dtype)
    q = wide[:, 1:-1, :dim]  # a slice, as of an engine's fused projection
    check(q, layer, ids, valid, dim**-0.5, isa)


@pytest.mark.parametrize("isa", ISAS)
def test_one_token(isa):
    layer = torch.randn(2, 2, 2, 32, 128).bfloat16()
    layer[:, :, :, 1:] = float("nan")
    q = torch.randn(1, 8, 128).bfloat16()
    ids, valid = torch.tensor([[[1]]]), torch.tensor([[[1]]])
    out, _ = cpu.partial(q, layer, ids, valid, 0.1, isa=isa)
    assert torch.equal(out, layer[1, :, 1, 0].float().repeat_interleave(4, 0)[None])
    check(q, layer, ids, valid, 0.1, isa)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", [1, 2, 4, 5, 8])
@pytest.mark.parametrize("token", [0, 3, 17, 40, 99])
def test_a_key_that_is_nan_weighs_nothing(isa, dtype, group, token):
    """Wherever it lies, also in a page in which the maximum would rise."""
    rng = torch.Generator().manual_seed(token)
    layer = torch.randn(4, 2, 2, 32, 64, generator=rng)
    layer[3, :, 0] *= 30
    layer, q = layer.to(dtype), torch.randn(1, 2 * group, 64, generator=rng).to(dtype)
    page, at = divmod(token, 32)
    ids, valid = torch.arange(4).view(1, 1, 4), torch.full((1, 1, 4), 32)
    layer[page, :, 0, at, 5] = float("nan")
    out, lse = cpu.partial(q, layer, ids, valid, 0.125, isa=isa)
    keys, values = (layer[:, :, part].transpose(1, 2).flatten(0, 1).double() for part in (0, 1))
    left = torch.arange(128) != token
    heads = torch.arange(2 * group) // group
    logits = torch.einsum("hd,thd->ht", q[0].double(), keys[left][:, heads]) * 0.125
    expected = torch.einsum("ht,thd->hd", logits.softmax(1), values[left][:, heads])
    assert torch.allclose(lse[0].double(), logits.logsumexp(1), rtol=1e-6, atol=1e-3)
    assert cases.relative_error(out[0], expected) <= TOLERANCE.get(isa, 1e-5)


@pytest.mark.parametrize("isa", ISAS)
def test_no_page_and_no_row(isa):
    layer, q = torch.randn(2, 2, 2, 16, 64).bfloat16(), torch.randn(3, 4, 64).bfloat16()
    none = torch.zeros(3, 1, 0, dtype=torch.int64)
    for ids, valid in ((none, none), (torch.full((3, 1, 2), -1), torch.zeros(3, 1, 2, dtype=torch.int64))):
        out, lse = cpu.partial(q, layer, ids, valid, 0.1, isa=isa)
        assert (out == 0).all() and (lse == float("-inf")).all()
    out, lse = cpu.partial(q[:0], layer, none[:0], none[:0], 0.1, isa=isa)
    assert out.shape == (0, 4, 64) and lse.shape == (0, 4)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("size", [1e2, 1e4, 1e12])
def test_huge_scores(isa, dtype, size):
    """Logits of 1e24 and their negatives: the softmax is one-hot and nothing overflows."""
    torch.manual_seed(0)
    layer = torch.randn(4, 2, 2, 32, 64)
    layer[:, :, 0] *= size
    q = (torch.randn(2, 4, 64) * size).to(dtype)
    ids, valid = torch.tensor([[[0, 1]], [[2, 3]]]), torch.tensor([[[32, 7]], [[32, 32]]])
    layer = layer.to(dtype)
    out, lse = cpu.partial(q, layer, ids, valid, 0.125, isa=isa)
    expected, expected_lse = paged_attention(q, layer, ids, valid, 0.125)
    assert torch.isfinite(out).all() and torch.isfinite(lse).all()
    assert torch.allclose(lse.double(), expected_lse, rtol=1e-5)
    assert cases.relative_error(out, expected) <= 1e-2


@pytest.mark.parametrize("isa", ISAS)
def test_scores_of_minus_infinity(isa):
    """A key that scores -inf weighs nothing; a list of such keys only is the empty partial."""
    torch.manual_seed(0)
    layer = torch.randn(2, 1, 2, 16, 64)
    layer[0, 0, 0, 3:9, 0] = float("-inf")
    layer[1, 0, 0, :, 0] = float("-inf")
    layer = layer.bfloat16()
    q = torch.rand(1, 2, 64).bfloat16() + 0.5
    check(q, layer, torch.tensor([[[0]]]), torch.tensor([[[16]]]), 0.125, isa)
    check(q, layer, torch.tensor([[[1, 0]]]), torch.tensor([[[16, 16]]]), 0.125, isa)
    out, lse = cpu.partial(q, layer, torch.tensor([[[1]]]), torch.tensor([[[16]]]), 0.125, isa=isa)
    assert (out == 0).all() and (lse == float("-inf")).all()


@pytest.mark.parametrize("isa", ISAS)
def test_a_rising_maximum_is_rescaled(isa):
    """Every page tops the one before by more than the lazy rescaling allows."""
    torch.manual_seed(0)
    layer = torch.randn(6, 1, 2, 32, 128)
    layer[:, :, 0] += torch.arange(6.0).view(6, 1, 1, 1)
    q = torch.ones(1, 3, 128) * torch.tensor([1.0, 0.5, -1.0])[None, :, None]
    check(q.bfloat16(), layer.bfloat16(), torch.arange(6)[None, None], torch.full((1, 1, 6), 32), 0.15, isa)


@pytest.mark.parametrize("isa", ISAS)
def test_subnormal_and_large_halves(isa):
    torch.manual_seed(0)
    layer = torch.randn(2, 1, 2, 16, 64) * 1e-6
    layer[:, :, 1] *= 1e-1
    layer[1] = 6e4
    q = torch.ones(1, 1, 64).half()
    check(q, layer.half(), torch.tensor([[[0]]]), torch.tensor([[[16]]]), 1.0, isa, 1e-4)
    check(q, layer.half(), torch.tensor([[[1]]]), torch.tensor([[[16]]]), 1e-4, isa, 1e-4)


def test_refusals():
    q, layer = torch.randn(1, 2, 64), torch.randn(2, 1, 2, 16, 64)
    ids, valid = torch.tensor([[[0]]]), torch.tensor([[[16]]])
    with pytest.raises(WorkerError, match="page id 2 of row 0 is beyond the cache's 2 pages"):
        cpu.partial(q, layer, torch.tensor([[[2]]]), valid, 1.0)
    with pytest.raises(WorkerError, match="page_size must be a multiple of 16"):
        cpu.partial(q, layer[:, :, :, :8], ids, valid, 1.0)
    with pytest.raises(WorkerError, match="head_dim must be a multiple of 16"):
        cpu.partial(q[..., :24], layer[..., :24], ids, valid, 1.0)
    with pytest.raises(WorkerError, match="scale must be positive"):
        cpu.partial(q, layer, ids, valid, -math.inf)
    with pytest.raises(ValueError, match="3 query heads do not divide among 2 KV heads"):
        cpu.partial(torch.randn(1, 3, 64), torch.randn(2, 2, 2, 16, 64), ids, valid, 1.0)
    with pytest.raises(ValueError, match="this machine runs"):
        cpu.partial(q, layer, ids, valid, 1.0, isa="mmx")
