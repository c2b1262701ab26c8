"""Contract of the operations that attend pages and merge partials (`kernels.contract.attention`)."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from hybrid_backend.kernels import reference
from hybrid_backend.kernels.operations import Operations, Sample
from tests.support.cases import page_lists, relative_error, spoil_beyond
from tests.support.gpu import ON_GPU
from tests.unit.implementations import over_implementations
from tests.unit.operations.cases import (
    DTYPES,
    ERROR,
    INF,
    NAN,
    SEEDS,
    assert_same_lse,
    cache,
    ints,
    same_bits,
    shuffled,
)


@over_implementations(
    seed=SEEDS,
    dtype=DTYPES,
    rows=st.integers(0, 3),
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 3, 8, 16]),
    dim=st.sampled_from([16, 64, 80, 128]),
    page_size=st.sampled_from([16, 32, 64]),
    k=st.integers(1, 5),
    per_head=st.booleans(),
    parts=st.sampled_from([1, 2, 5]),
    layout=st.sampled_from(["contiguous", "wide", "columns first"]),
)
def test_partials_merge_to_attention_over_the_listed_tokens(
    operations: Operations, seed: int, dtype: torch.dtype, rows: int, kv_heads: int, group: int, dim: int,
    page_size: int, k: int, per_head: bool, parts: int, layout: str,
) -> None:  # fmt: skip
    """Lists of all lengths, empty ones too, a ragged last page; what was never written is NaN."""
    rng = torch.Generator().manual_seed(seed)
    kv = cache(2 * k, kv_heads, page_size, dim, dtype, rng)
    q = torch.randn(rows, kv_heads * group, dim, generator=rng).to(dtype)
    lists = kv_heads if per_head else 1
    if rows:
        ids, valid = page_lists(rows, lists, k, 2 * k, page_size, rng)
    else:
        ids = valid = torch.zeros(0, lists, k, dtype=torch.int64)
    spoil_beyond(kv, ids, valid)
    listed = ids.masked_fill(valid == 0, 10**6).int()  # must not be followed
    if layout == "wide":
        listed = torch.cat([listed, listed], 2)[..., :k]
    elif layout == "columns first":
        listed = listed.transpose(0, 1).contiguous().transpose(0, 1)
    out, lse = operations.paged_partial(q, kv, listed, valid.sum(-1).int(), dim**-0.5, parts)
    assert out.shape == (rows, kv_heads * group, parts, dim) and lse.shape == out.shape[:3]
    assert out.dtype == lse.dtype == torch.float32
    assert not out[lse == -INF].any(), "a part without tokens is 0"
    out, lse = operations.merge_partials(out, lse)
    expected, expected_lse = reference.paged_attention(q, kv, ids, valid, dim**-0.5)
    assert relative_error(out, expected) < ERROR[dtype]
    assert_same_lse(lse, expected_lse)


@pytest.mark.parametrize("parts", [1, 2])
def test_logits_of_any_size_give_no_nan(operations: Operations, parts: int) -> None:
    rng = torch.Generator().manual_seed(1)
    kv, q = cache(4, 1, 16, 64, torch.float32, rng), torch.ones(1, 2, 64)
    kv[0, 0, 0, 3], kv[1, 0, 0, 5], kv[2, 0, 0] = 1e18, -1e30, -INF

    def attend(pages: list[int], tokens: int) -> tuple[Tensor, Tensor]:
        return operations.merge_partials(
            *operations.paged_partial(q, kv, ints(pages)[None, None], ints([tokens])[None], 1.0, parts)
        )

    out, lse = attend([0, 1], 32)
    assert torch.equal(out, kv[0, 0, 1, 3].expand(1, 2, -1)), "it takes all the weight"
    assert torch.allclose(lse, torch.tensor(64e18))
    out, lse = attend([2], 16)
    assert not out.any() and bool((lse == -INF).all()), "keys that weigh nothing are no keys"
    out, _ = attend([2, 3], 32)
    assert torch.allclose(out, attend([3], 16)[0], atol=1e-6)


def test_a_maximum_that_rises_from_page_to_page_is_followed(operations: Operations) -> None:
    kv = cache(6, 1, 32, 128, torch.float32, torch.Generator().manual_seed(2))
    kv[:, :, 0] += torch.arange(6.0).view(6, 1, 1, 1)
    q = torch.ones(1, 3, 128) * torch.tensor([1.0, 0.5, -1.0])[:, None]
    ids, valid = torch.arange(6)[None, None], torch.full((1, 1, 6), 32)
    out, lse = operations.merge_partials(*operations.paged_partial(q, kv, ids.int(), ints([192])[None], 0.15, 2))
    expected, expected_lse = reference.paged_attention(q, kv, ids, valid, 0.15)
    # A GPU's own exponential: 1.07e-5 on an H200.
    assert relative_error(out, expected) < (2e-5 if ON_GPU else ERROR[torch.float32])
    assert_same_lse(lse, expected_lse)


def test_there_is_at_least_one_part(operations: Operations) -> None:
    for rows, most_tokens, processors in ((1, 65536, 132), (64, 65536, 132), (1, 16, 1), (0, 0, 1)):
        assert operations.parts_for(rows, 8, most_tokens, processors) >= 1


@over_implementations(
    seed=SEEDS,
    rows=st.integers(0, 2),
    parts=st.integers(1, 5),
    dim=st.sampled_from([16, 80]),
    has_other=st.booleans(),
    has_sinks=st.booleans(),
    spread=st.sampled_from([1.0, 100.0, 3e4, 1e30]),
    dtype=DTYPES,
    of=DTYPES,
    other_dtype=DTYPES,
    is_given=st.booleans(),
)
def test_merging_is_attention_over_the_union_and_the_sinks(
    operations: Operations, seed: int, rows: int, parts: int, dim: int, has_other: bool, has_sinks: bool,
    spread: float, dtype: torch.dtype, of: torch.dtype, other_dtype: torch.dtype, is_given: bool,
) -> None:  # fmt: skip
    """Empty partials among the others (the CPU's hold anything), in a row's head nothing but empty ones; LSEs far from
    each other; a head without a sink beside heads with one. The result may go where the only part is."""
    rng, heads = torch.Generator().manual_seed(seed), 3
    out = torch.randn(rows, heads, parts + 1, dim, generator=rng).to(of)
    lse = torch.randn(out.shape[:3], generator=rng) * spread
    lse[torch.rand(lse.shape, generator=rng) < 0.3] = -INF
    lse[:1, 0] = -INF
    out[lse == -INF] = 0
    if not has_other:
        out[:, :, parts], lse[:, :, parts] = 0, -INF
    out[:, :, parts] = out[:, :, parts].to(other_dtype)
    other = (out[:, :, parts].to(other_dtype).contiguous(), lse[:, :, parts].contiguous()) if has_other else None
    sinks = torch.randn(heads, generator=rng) * spread if has_sinks else torch.full((heads,), -INF)
    sinks[1] = -INF
    logits = torch.cat([lse, sinks.expand(rows, -1)[..., None]], 2).double()
    weights = logits.softmax(-1).nan_to_num(0.0)[..., :-1]
    expected, total = (weights[..., None] * out).sum(2), logits.logsumexp(-1)
    if other is not None:
        other[0][other[1] == -INF] = NAN
    into = torch.full((rows, heads, dim), NAN, dtype=dtype) if is_given else None
    mine = out[:, :, :parts].contiguous()
    if is_given and parts == 1 and of == dtype:
        into = mine[:, :, 0]
    merged, found = operations.merge_partials(
        mine, lse[:, :, :parts].contiguous(), other, dtype, sinks if has_sinks else None, into
    )
    assert into is None or merged is into
    assert merged.dtype == dtype and found.dtype == torch.float32
    assert torch.allclose(merged.double(), expected, atol=ERROR[dtype], rtol=ERROR[dtype])
    assert torch.allclose(found.double(), total, atol=1e-5, rtol=1e-6)
    assert not merged[:1, 0].any()


@over_implementations(
    seed=SEEDS,
    dtype=DTYPES,
    kv_heads=st.integers(1, 2),
    group=st.sampled_from([1, 3]),
    dim=st.sampled_from([16, 80]),
    page_size=st.sampled_from([16, 32]),
    alpha=st.sampled_from([0.0, 0.3, 1.0]),
    largest=st.booleans(),
)
def test_moving_averages_take_in_the_weights_of_listed_tokens(
    operations: Operations, seed: int, dtype: torch.dtype, kv_heads: int, group: int, dim: int, page_size: int,
    alpha: float, largest: bool,
) -> None:  # fmt: skip
    chance, rng = random.Random(seed), torch.Generator().manual_seed(seed)
    rows, k, entries = 3, 4, 15
    kv = cache(rows * k, kv_heads, page_size, dim, dtype, rng)
    q = torch.randn(rows, kv_heads * group, dim, generator=rng).to(dtype)
    ids = torch.randperm(rows * k, generator=rng).view(rows, 1, k).repeat(1, 1, 2).int()
    places = torch.randperm(entries, generator=rng)[: rows * k].view(rows, 1, k).repeat(1, 1, 3).int()
    tokens = [chance.randint(1, k * page_size), 0, chance.randint(1, page_size)]
    for row, count in enumerate(tokens):
        for lists in (ids, places):
            lists[row, 0, -(-count // page_size) :] = 10**6  # must not be followed
    average = torch.rand(entries, kv_heads, page_size, generator=rng)
    expected, lse = average.double(), torch.full((rows, kv_heads * group), -INF, dtype=torch.float64)
    for row, head in ((r, h) for r in range(rows) for h in range(kv_heads)):
        mine = slice(head * group, (head + 1) * group)
        at = [(t // page_size, t % page_size) for t in range(tokens[row])]
        if at:
            keys = torch.stack([kv[ids[row, 0, i], head, 0, t] for i, t in at]).double()
            logits = q[row, mine].double() @ keys.T * dim**-0.5
            lse[row, mine] = logits.logsumexp(1)
            shares = logits.softmax(1)
            new = shares.amax(0) if largest else shares.mean(0)
            for (i, t), share in zip(at, new, strict=True):
                place = int(places[row, 0, i]), head, t
                expected[place] = (1 - alpha) * expected[place] + alpha * share
    operations.page_weights(
        q, kv, ids[..., :k], places[..., :k], ints(tokens)[:, None], lse.float(), average, dim**-0.5, alpha, largest
    )
    assert torch.allclose(average.double(), expected, atol=1e-5)


@over_implementations(
    share=0.7,
    seed=SEEDS,
    dtype=DTYPES,
    rows=st.integers(0, 4),
    heads=st.sampled_from([1, 4, 9, 33]),
    dim=st.sampled_from([16, 80]),
    lists=st.integers(1, 3),
    columns=st.sampled_from([1, 20, 1500]),
    is_sampled=st.booleans(),
    is_predicted=st.booleans(),
)
def test_a_sampled_layer_hands_over_what_it_computed_with_and_any_other_writes_nothing(
    operations: Operations, seed: int, dtype: torch.dtype, rows: int, heads: int, dim: int, lists: int, columns: int,
    is_sampled: bool, is_predicted: bool,
) -> None:  # fmt: skip
    """One row's query and pages, the cosines of all; of queries that are zero, too. More boxes than rows."""
    chance, rng = random.Random(seed), torch.Generator().manual_seed(seed)
    k = chance.choice([1, min(7, columns), columns])
    q, predicted = torch.randn(2, rows, heads, dim, generator=rng).to(dtype)
    predicted = (predicted * 0.3 + q).to(dtype)
    if rows and chance.random() < 0.3:
        q[0, 0] = 0
    num_pages = [chance.randint(1, columns) for _ in range(rows)]
    counts = [[chance.randint(0, min(k, pages)) for _ in range(lists)] for pages in num_pages]
    pages = torch.full((rows, lists, k), 10**6, dtype=torch.int32)
    for row, listing in ((r, h) for r in range(rows) for h in range(lists)):
        count = counts[row][listing]
        pages[row, listing, :count] = ints(sorted(shuffled(num_pages[row], chance)[:count]))
    listed = torch.tensor(counts, dtype=torch.int32).view(rows, lists)
    wide = torch.randint(10**6, (rows, columns + 3), generator=rng, dtype=torch.int32)
    table, number = wide[:, :columns], chance.randrange(1, 10**6)
    row = chance.randrange(rows) if rows and is_sampled else None
    box = Sample(
        torch.full((heads, dim), 7, dtype=dtype), *torch.full((1, columns), 7).int(), torch.full((lists, k), 7).int(),
        torch.full((lists,), 7).int(), torch.full((rows + 1, heads), 7.0), torch.zeros(1).int(),
    )  # fmt: skip
    before, arrived = Sample(*(x.clone() for x in box)), torch.zeros(1).int()
    for _ in range(2):  # the second time as the first
        operations.take_sample(
            q, predicted if is_predicted else None, pages, listed, table, ints(num_pages),
            ints([0 if row is None else row + 1]), ints([number]), arrived, box,
        )  # fmt: skip
        assert arrived.tolist() == [0]
        if row is None:
            assert all(same_bits(x, y) for x, y in zip(box, before, strict=True))
            continue
        assert box.number.tolist() == [number] and same_bits(box.q, q[row]) and box.listed.tolist() == counts[row]
        assert box.table[: num_pages[row]].tolist() == table[row, : num_pages[row]].tolist()
        for listing, count in enumerate(counts[row]):
            assert box.pages[listing, :count].tolist() == pages[row, listing, :count].tolist()
        if is_predicted:
            expected = torch.cosine_similarity(predicted.double(), q.double(), dim=-1)
            assert torch.allclose(box.cosines[:rows].double(), expected, atol=1e-5, rtol=0)
        else:
            assert bool(box.cosines[:rows].isnan().all())
        assert box.cosines[rows:].tolist() == before.cosines[rows:].tolist()
