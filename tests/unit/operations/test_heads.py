"""Contract of the operations that plan copies of pages of single KV heads (`kernels.contract.heads`)."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from hybrid_backend.kernels import reference
from hybrid_backend.kernels.operations import Operations, Selection, StreamPlan
from tests.support.cases import page_lists, relative_error
from tests.unit.implementations import NAMES, implementation, over_implementations
from tests.unit.operations.cases import (
    DTYPES,
    ERROR,
    INF,
    SEEDS,
    assert_same_lse,
    cache,
    ints,
    same_bits,
    shuffled,
)

PAGE = 16


@over_implementations(
    seed=SEEDS, lists=st.integers(0, 5), loaded=st.integers(1, 5), first=st.integers(0, 2), spare=st.integers(0, 3)
)
def test_a_list_that_has_selected_loads_its_pages_and_notes_them(
    operations: Operations, seed: int, lists: int, loaded: int, first: int, spare: int
) -> None:
    """Other lists load nothing and keep what they had."""
    chance, k = random.Random(seed), first + loaded + spare
    pages, host = (torch.randint(1000, (lists, 1, k), dtype=torch.int32) for _ in range(2))
    number = torch.full((lists, 1), k, dtype=torch.int32)
    chosen = Selection(pages, number, host, number, number, host, host, number)
    to_select, entries = ints(chance.choice([0, 0, 3, 9]) for _ in range(lists)), ints(shuffled(lists + 2, chance))
    entries = entries[:lists]
    frames, cached = torch.arange(lists * loaded).int().view(lists, loaded), torch.full((lists + 2, loaded), -7).int()
    host_pages, frame_ids = operations.plan_load(chosen, to_select, entries, frames, first, cached)
    assert host_pages.dtype == frame_ids.dtype == torch.int32
    expected = torch.full_like(cached, -7)
    for row in range(lists):
        if to_select[row]:
            expected[entries[row]] = pages[row, 0, first : first + loaded]
            assert torch.equal(host_pages[row], host[row, 0, first : first + loaded])
            assert torch.equal(frame_ids[row], frames[row])
        else:
            assert bool((frame_ids[row] == -1).all())
    assert torch.equal(cached, expected)


@over_implementations(
    seed=SEEDS,
    rows=st.integers(1, 4),
    kv_heads=st.integers(1, 4),
    group=st.integers(1, 4),
    pieces=st.integers(0, 3),
    capacity=st.integers(1, 9),
    edges=st.sampled_from([(0, 1, False), (1, 2, True), (2, 3, True)]),
)
def test_every_token_of_a_head_is_streamed_or_attended_where_it_lies(
    operations: Operations, seed: int, rows: int, kv_heads: int, group: int, pieces: int, capacity: int,
    edges: tuple[int, int, bool],
) -> None:  # fmt: skip
    """Each head page in one place of one piece of its group; a group with too few pieces leaves its last pages in the
    host pool. Padding rows, resident heads and heads that keep their first and last pages alone stream nothing."""
    chance, (first, last, is_framed) = random.Random(seed), edges
    columns = 8
    seq_lens = [chance.choice([0, chance.randint(1, columns * PAGE)]) for _ in range(rows)]
    num_pages = [-(-tokens // PAGE) for tokens in seq_lens]
    table = torch.randint(1000, (rows, columns + 3), dtype=torch.int32)[:, :columns]
    ranks, streamed = [], 0
    for _ in range(kv_heads):
        ranks.append(chance.choice([-1, -2, streamed, streamed]))
        streamed += ranks[-1] >= 0
    groups = -(-streamed // group)
    plan = operations.plan_stream(
        table, ints(num_pages), ints(seq_lens), ints(ranks), groups, group, pieces, capacity, PAGE, *edges
    )
    assert all(x.dtype == torch.int32 for x in plan)
    assert plan.pages.shape == plan.places.shape == (groups * pieces, capacity)
    assert plan.begins.shape == plan.ends.shape == (groups * pieces, rows, kv_heads)
    placed = plan.places >= 0
    used = [0] * groups  # places of each group
    for row, (pages, tokens) in enumerate(zip(num_pages, seq_lens, strict=True)):
        middle = max(0, pages - first - last)
        for head, rank in enumerate(ranks):
            found, count = [], 0
            for piece in range(groups * pieces):
                begin, end = int(plan.begins[piece, row, head]), int(plan.ends[piece, row, head])
                assert begin % PAGE == end % PAGE == 0 and 0 <= begin <= end <= capacity * PAGE
                assert begin == end or piece // pieces == rank // group
                buffer = torch.full((capacity,), -1)
                buffer[plan.places[piece][placed[piece]].long()] = plan.pages[piece][placed[piece]].long()
                found += buffer[begin // PAGE : end // PAGE].tolist()
                count += (end - begin) // PAGE
            expected = [int(table[row, first + nth]) * kv_heads + head for nth in range(middle if rank >= 0 else 0)]
            assert found == expected[:count]
            if rank >= 0:
                assert count == min(middle, max(0, pieces * capacity - used[rank // group])), "a piece has room left"
                used[rank // group] += count
            rest = int(plan.rest_begins[row, head]), int(plan.rest_ends[row, head])
            beyond = (first + middle) * PAGE if is_framed else tokens
            assert rest == (((first + count) * PAGE, beyond) if rank >= 0 else (0, 0))
            assert plan.resident[row, head] == (tokens if rank == -1 else 0)
            assert plan.framed[row, head] == (tokens - middle * PAGE if is_framed and rank != -1 else 0)
    assert int(placed.sum()) == sum(used), "nothing else is copied"


@pytest.mark.parametrize("name", [param for param in NAMES if param.values != ("oracle",)])
def test_a_stream_of_more_lists_than_a_program_counts_at_once_is_the_oracle_s(name: str) -> None:
    """Rows 85 and later lie behind the first 256 lists, which the GPU's kernel counts in one piece."""
    rows, ranks, groups, group, pieces, capacity = 90, ints([0, -1, 1]), 1, 2, 2, 40
    table = torch.arange(rows * 3, dtype=torch.int32).view(rows, 3)
    seq_lens = ints(17 if row in (0, 40, 84, 86, 89) else 1 for row in range(rows))
    num_pages = (seq_lens + PAGE - 1) // PAGE
    plans = [
        operations.plan_stream(table, num_pages, seq_lens, ranks, groups, group, pieces, capacity, PAGE, 0, 1, False)
        for operations in (implementation("oracle"), implementation(name))
    ]
    for field, expected, planned in zip(StreamPlan._fields, *map(_meaning, plans), strict=True):
        assert torch.equal(expected, planned), field


def _meaning(plan: StreamPlan) -> StreamPlan:
    """Return the plan with the numbers that nobody reads replaced: pages without a place, and bounds of empty parts."""
    is_placed, is_read = plan.places >= 0, plan.begins < plan.ends
    return plan._replace(
        pages=plan.pages.where(is_placed, -1), begins=plan.begins.where(is_read, -1), ends=plan.ends.where(is_read, -1)
    )


@over_implementations(
    seed=SEEDS,
    dtype=DTYPES,
    rows=st.integers(1, 3),
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 3]),
    parts=st.sampled_from([1, 3]),
    one_list=st.booleans(),
    of_heads=st.booleans(),
    is_given=st.booleans(),
    in_order=st.booleans(),
)
def test_a_list_may_begin_at_any_page_and_hold_head_pages(
    operations: Operations, seed: int, dtype: torch.dtype, rows: int, kv_heads: int, group: int, parts: int,
    one_list: bool, of_heads: bool, is_given: bool, in_order: bool,
) -> None:  # fmt: skip
    """The result goes to some of the parts of a larger tensor, and to no others."""
    rng, dim, k = torch.Generator().manual_seed(seed), 64, 5
    kv = cache(2 * k, 1 if of_heads else kv_heads, PAGE, dim, dtype, rng)
    q = torch.randn(rows, kv_heads * group, dim, generator=rng).to(dtype)
    ids, valid = page_lists(rows, kv_heads, k, 2 * k, PAGE, rng)
    if one_list:  # the same pages, of which each head attends as many as it says
        ids, valid = (x[:, :1].expand(-1, kv_heads, -1) for x in (ids, valid))
    if in_order:  # the list is the store's own order
        ids = torch.arange(k).expand_as(ids).masked_fill(valid == 0, -1)
    skipped = (torch.rand(valid.shape[:2], generator=rng) * ((valid > 0).sum(-1) + 1)).long()
    attended = valid.masked_fill(torch.arange(k) < skipped[..., None], 0)
    listed = (ids[:, :1] if one_list else ids).masked_fill((valid[:, :1] if one_list else valid) == 0, 10**6).int()
    begins = torch.minimum(skipped * PAGE, valid.sum(-1)).int()
    into, before = None, torch.full((rows, kv_heads * group, parts + 2, dim), 7.0)
    if is_given:
        whole = before.clone(), before[..., 0].clone()
        into = whole[0][:, :, 1 : 1 + parts], whole[1][:, :, 1 : 1 + parts]
    out, lse = operations.paged_partial(
        q, kv, None if in_order else listed, valid.sum(-1).int(), dim**-0.5, parts, begins=begins, into=into
    )
    if is_given:
        assert out is into[0] and lse is into[1]  # type: ignore[index]
        assert all(bool((x[:, :, [0, -1]] == 7).all()) for x in whole)
    out, lse = operations.merge_partials(out.contiguous(), lse.contiguous())
    by_head = kv.expand(-1, kv_heads, -1, -1, -1) if of_heads else kv
    expected, expected_lse = reference.paged_attention(q, by_head, ids, attended, dim**-0.5)
    assert relative_error(out, expected) < ERROR[dtype]
    assert_same_lse(lse, expected_lse)


@over_implementations(seed=SEEDS, dtype=DTYPES, kv_heads=st.integers(1, 4))
def test_chosen_heads_of_a_token_reach_a_store_of_these_heads(
    operations: Operations, seed: int, dtype: torch.dtype, kv_heads: int
) -> None:
    chance, rng, rows = random.Random(seed), torch.Generator().manual_seed(seed), 3
    heads = sorted(shuffled(kv_heads, chance)[: chance.randint(1, kv_heads)])
    store = cache(4, len(heads), PAGE, 32, dtype, rng)
    k, v = torch.randn(2, rows, kv_heads, 32, generator=rng).to(dtype)
    positions, pages = [3, 40, 63], [2, -1, 0]
    expected = store.clone()
    for row, page in enumerate(pages):
        if page >= 0:
            expected[page, :, :, positions[row] % PAGE] = torch.stack([k[row, heads], v[row, heads]], 1)
    operations.append_tokens(k, v, store, ints(pages), ints(positions), heads=torch.tensor(heads))
    assert same_bits(store, expected)


@pytest.mark.parametrize("parts", [1, 2])
def test_a_list_that_begins_at_its_end_is_empty(operations: Operations, parts: int) -> None:
    kv, q = torch.ones(3, 1, 2, PAGE, 32), torch.ones(1, 1, 32)
    tokens: Tensor = ints([32])[None]
    out, lse = operations.paged_partial(q, kv, ints([0, 2])[None, None], tokens, 1.0, parts, begins=tokens)
    assert not out.any() and bool((lse == -INF).all())
