"""Attention, merge, selection, digests and prefill against the fp64 oracle."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid_backend.attention.partial import PageList, Partial, paged_partial, with_sinks
from hybrid_backend.attention.prefill import KVBlock, gather_tokens, windowed
from hybrid_backend.attention.prompts import TorchPrompts
from hybrid_backend.attention.quality import covered_tokens, mass_recall
from hybrid_backend.batch import ModelSpec, PrefillRow
from hybrid_backend.kernels import oracle, reference
from hybrid_backend.kernels.digest_format import MINMAX
from hybrid_backend.kernels.kv_format import KvFormat
from hybrid_backend.kernels.operations import Operations
from hybrid_backend.tiers.digests import Digests
from hybrid_backend.tiers.host_pool import HostPool
from hybrid_backend.workers import kernel_names, resolve_kernel
from hybrid_backend.workers.registry import PartialKernel

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
INF = float("inf")


def random_pool(seed: int, pages: int, kv_heads: int, page_size: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(pages, kv_heads, 2, page_size, dim, generator=generator).to(dtype)


@st.composite
def page_lists(draw: st.DrawFn, rows: int, lists: int, pages: int, page_size: int) -> PageList:
    """Ragged lists: some empty, the last page of each possibly partial, padding last."""
    k = draw(st.integers(0, 5))
    ids = torch.full((rows, lists, k), -1)
    valid = torch.zeros(rows, lists, k, dtype=torch.int64)
    for r in range(rows):
        count = draw(st.integers(0, k))
        tail = draw(st.integers(1, page_size))
        for line in range(lists):
            chosen = draw(st.permutations(range(pages)))[:count]
            ids[r, line, :count] = torch.tensor(chosen, dtype=torch.int64)
            valid[r, line, :count] = page_size
            if count:
                valid[r, line, count - 1] = tail
    return PageList(ids, valid)


@given(
    data=st.data(),
    seed=st.integers(0, 999),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    dim=st.sampled_from([16, 64]),
    page_size=st.sampled_from([16, 32]),
    rows=st.integers(1, 3),
    per_head=st.booleans(),
    kernel=st.sampled_from([resolve_kernel(name) for name in kernel_names()]),
)
def test_partial_attention_equals_the_oracle_for_ragged_and_empty_lists(
    data: st.DataObject,
    seed: int,
    dtype: torch.dtype,
    kv_heads: int,
    group: int,
    dim: int,
    page_size: int,
    rows: int,
    per_head: bool,
    kernel: PartialKernel,
) -> None:
    """Every worker kernel of the registry."""
    pool = random_pool(seed, 8, kv_heads, page_size, dim, dtype)
    pages = data.draw(page_lists(rows, kv_heads if per_head else 1, 8, page_size))
    q = torch.randn(rows, kv_heads * group, dim, generator=torch.Generator().manual_seed(seed + 1)).to(dtype)
    out, lse = kernel(q, pool, pages, 0.3)
    expected_out, expected_lse = reference.paged_attention(q, pool, pages.ids, pages.valid, 0.3)
    torch.testing.assert_close(out.double(), expected_out, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    torch.testing.assert_close(lse.double(), expected_lse, atol=1e-3, rtol=1e-5)


@given(seed=st.integers(0, 999), spread=st.sampled_from([1.0, 100.0, 3e4]))
def test_a_sink_is_one_more_key_without_a_value(seed: int, spread: float) -> None:
    """Of an empty partial too; a logit of -inf changes nothing."""
    rng = torch.Generator().manual_seed(seed)
    lse, sinks = torch.randn(3, 4, generator=rng) * spread, torch.randn(4, generator=rng) * spread
    lse[0], sinks[1:3] = -INF, torch.tensor([-INF, 3e4])
    out = torch.randn(3, 4, 8, generator=rng).masked_fill((lse == -INF)[..., None], 0)
    found = with_sinks(Partial(out, lse), sinks)
    logits = torch.stack([lse, sinks.expand(3, -1)], 2).double()
    shares = logits.softmax(-1)[..., :1].nan_to_num(0.0)
    # A share is an exponential of a difference of logits, which fp32 holds to a part of their size.
    torch.testing.assert_close(found.out.double(), out * shares, atol=1e-6, rtol=1e-5 + 4e-7 * spread)
    torch.testing.assert_close(found.lse.double(), logits.logsumexp(-1), atol=1e-5, rtol=1e-6)
    assert torch.equal(found.out[:, 1], out[:, 1]) and torch.equal(found.lse[:, 1], lse[:, 1])


@given(
    seed=st.integers(0, 99),
    writes=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 16)), min_size=1, max_size=6),
)
def test_digests_cover_exactly_the_tokens_written_since_offset_zero(seed: int, writes: list[tuple[int, int]]) -> None:
    """Pages are written token by token, or by chunks; a page taken over by another request starts anew."""
    pool = random_pool(seed, 4, 2, 16, 8, torch.float32)
    host = HostPool([pool])
    digests = Digests(host, [0], oracle, MINMAX, torch.device("cpu"), torch.float32)
    for step, (page, tokens) in enumerate(writes):
        keys = torch.randn(tokens, 2, 8, generator=torch.Generator().manual_seed(seed + step))
        for t in range(tokens):
            kv = torch.stack([keys[t], keys[t]], 1)[None]
            oracle.append_tokens(
                kv[:, :, 0], kv[:, :, 1], pool, torch.tensor([page], dtype=torch.int32), torch.tensor([t]),
                digests=digests.layers[0],
            )  # fmt: skip
        assert torch.equal(digests.layers[0][page], reference.digest(pool[page], tokens))
        digests.layers[0][page] = 99  # what it was before the first token of the page counts for nothing
        for start, end in ((0, (tokens + 1) // 2), ((tokens + 1) // 2, tokens)):
            if start < end:
                table = torch.tensor([page])
                row = PrefillRow("", 0, end - start, end, table, written=table.int())
                digests.extend(0, row, keys[start:end], lambda: None)
        assert torch.equal(digests.layers[0][page], reference.digest(pool[page], tokens))
        digests.layers[0][page] = 0
        digests.rebuild(0, torch.tensor([page]), torch.tensor([tokens]))  # a connector brought it
        assert torch.equal(digests.layers[0][page], reference.digest(pool[page], tokens))
        if tokens == 16:
            digests.layers[0][page] = 0
            digests.rebuild(0, torch.tensor([page]))
            assert torch.equal(digests.layers[0][page], reference.digest(pool[page], tokens))


@given(
    seed=st.integers(0, 999),
    seq_len=st.integers(1, 70),
    chunk=st.integers(1, 70),
    window=st.integers(1, 80),
    by_head=st.booleans(),
    has_sinks=st.booleans(),
)
def test_prefill_equals_the_oracle_for_every_chunk_and_window(
    seed: int, seq_len: int, chunk: int, window: int, by_head: bool, has_sinks: bool
) -> None:
    """What came before the chunk arrives in one block, or head by head and page by page."""
    chunk = min(chunk, seq_len)
    pool = random_pool(seed, 8, 2, 16, 16, torch.float32)
    pages = torch.randperm(8, generator=torch.Generator().manual_seed(seed))[: -(-seq_len // 16)]
    q = torch.randn(chunk, 4, 16, generator=torch.Generator().manual_seed(seed))
    k, v = (pool[pages, :, i].permute(0, 2, 1, 3).reshape(-1, 2, 16)[:seq_len].double() for i in (0, 1))
    logits = torch.einsum("qhd,thd->hqt", q.double(), k.repeat_interleave(2, 1)) * 0.25
    position = torch.arange(seq_len - chunk, seq_len)[:, None]
    key = torch.arange(seq_len)[None]
    before = seq_len - chunk
    old_k, old_v = gather_tokens(pool.flatten(0, 2), pages, 2, 0, before, q.dtype)
    spans = [(h, t, min(t + 16, before)) for h in (0, 1) for t in range(0, before, 16)] if by_head else []
    blocks = [KVBlock((h,), old_k[h : h + 1, a:b], old_v[h : h + 1, a:b]) for h, a, b in spans]
    if before and not by_head:
        blocks = [KVBlock((0, 1), old_k, old_v)]
    sinks = torch.tensor([1.0, -INF, 5.0, -2.0]) if has_sinks else None
    column = torch.full((4, chunk, 1), -INF) if sinks is None else sinks[:, None, None].expand(-1, chunk, -1)
    model = ModelSpec(1, num_heads=4, num_kv_heads=2, head_dim=16, scale=0.25, dtype=torch.float32)
    prompts = TorchPrompts(cast(Operations, oracle), model)
    new = k[before:].float(), v[before:].float()
    (own,) = prompts.own(q, *new, [(0, chunk)])
    for width, result in (
        (10**9, prompts.attend(q, own, blocks, sinks)),
        (window, windowed(q, new, pool.flatten(0, 2), pages, seq_len, 0.25, window, sinks)),
    ):
        seen = (key <= position) & (key > position - width)
        weights = torch.cat([logits.masked_fill(~seen, -INF), column.double()], 2).softmax(-1)[..., :-1]
        expected = torch.einsum("hqt,thd->qhd", weights, v.repeat_interleave(2, 1))
        torch.testing.assert_close(result.double(), expected, atol=1e-5, rtol=1e-5)


def test_mass_recall_is_one_for_all_pages_and_their_share_otherwise() -> None:
    pool = random_pool(1, 4, 2, 16, 16, torch.float32)
    pages, q = torch.tensor([2, 0, 3]), torch.zeros(4, 16)  # a zero query weighs all tokens alike
    blocks = pool.flatten(0, 2)
    everything = torch.arange(3)[None]
    assert mass_recall(q, blocks, pages, covered_tokens(everything, 40, 16), 2, 0.25) == pytest.approx(1.0)
    assert mass_recall(q, blocks, pages, covered_tokens(torch.tensor([[0, -1]]), 40, 16), 2, 0.25) == pytest.approx(
        16 / 40
    )
    assert mass_recall(q, blocks, pages, covered_tokens(torch.tensor([[2]]), 40, 16), 2, 0.25) == pytest.approx(8 / 40)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_slots_that_were_never_written_may_hold_anything(dtype: torch.dtype) -> None:
    """Padding of a list reads page 0, which may have no request; K and V that are not attended may be NaN."""
    kv = KvFormat(2, 16, 64, dtype)
    layer = torch.zeros(kv.shape(3), dtype=dtype)
    position = torch.arange(16, 40)
    k, v = torch.randn(2, len(position), 2, 64)
    kv.write(layer, position // 16, position % 16, k, v)
    ids, valid = torch.tensor([[[1, 2, -1], [1, -1, -1]]]), torch.tensor([[[16, 8, 0], [16, 0, 0]]])
    q = torch.randn(1, 4, 64)
    right = paged_partial(q, layer, PageList(ids, valid), 0.125)
    if dtype is torch.int8:
        kv.parts(layer)[1][0] = float("nan")
    else:
        layer[0] = float("nan")
    found = paged_partial(q, layer, PageList(ids, valid), 0.125)
    assert torch.equal(found.out, right.out) and torch.equal(found.lse, right.lse)
