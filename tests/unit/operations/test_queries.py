"""Contract of rows with several queries (``query_start``): the oracle takes them, the kernels take one per row."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hybrid_backend.kernels import oracle, reference
from hybrid_backend.kernels.digest_format import CODES, MINMAX, MINMAX_INT8, DigestFormat
from hybrid_backend.kernels.operations import AGGREGATES, Operations
from tests.support.cases import relative_error
from tests.unit.operations.cases import ERROR, assert_same_lse, cache, ints

COUNTS = [1, 3, 0, 2]
"""Queries of each row."""
QUERY_START = ints([0, 1, 4, 4, 6])
KV_HEADS, GROUP, DIM, SIZE = 2, 3, 64, 16
SCALE = DIM**-0.5


def queries(rng: torch.Generator) -> Tensor:
    return torch.randn(sum(COUNTS), KV_HEADS * GROUP, DIM, generator=rng)


@pytest.mark.parametrize("lists", [1, KV_HEADS])
def test_each_query_attends_its_own_tokens_of_its_rows_lists(lists: int) -> None:
    rng = torch.Generator().manual_seed(0)
    kv, q = cache(12, KV_HEADS, SIZE, DIM, torch.float32, rng), queries(rng)
    ids = torch.stack([torch.randperm(12, generator=rng)[:3] for _ in range(4 * lists)]).view(4, lists, 3)
    tokens = ints([48, 33, 34, 35, 0, 16])[:, None].repeat(1, lists)  # a row's later queries attend more tokens
    out, lse = oracle.paged_partial(q, kv, ids.int(), tokens, SCALE, query_start=QUERY_START)
    of_queries = ids.repeat_interleave(torch.tensor(COUNTS), 0)
    valid = (tokens[..., None] - torch.arange(3) * SIZE).clamp(0, SIZE)
    expected, expected_lse = reference.paged_attention(q, kv, of_queries, valid, SCALE)
    assert relative_error(out[:, :, 0], expected) < ERROR[torch.float32]
    assert_same_lse(lse[:, :, 0], expected_lse)


@pytest.mark.parametrize("digest_format", [MINMAX, MINMAX_INT8, CODES], ids=lambda x: x.name)
@pytest.mark.parametrize("aggregate", AGGREGATES)
@pytest.mark.parametrize("per_head", [False, True])
def test_queries_of_a_row_select_like_more_heads_of_a_group(
    digest_format: DigestFormat, aggregate: str, per_head: bool
) -> None:
    rng = torch.Generator().manual_seed(1)
    q, digests = queries(rng), digest_format.encode(torch.randn(9, KV_HEADS, SIZE, DIM, generator=rng))
    table = torch.stack([torch.randperm(9, generator=rng) for _ in COUNTS]).int()
    num_pages, budgets = ints([9, 7, 0, 8]), ints([2, 2, 2, 2])
    how = (aggregate, per_head, 0.5, SCALE, SIZE)
    scores = oracle.page_scores(q, digests, table, num_pages, budgets, *how, query_start=QUERY_START)
    for row, count in enumerate(COUNTS):
        one = slice(row, row + 1)
        mine = q[QUERY_START[row] : QUERY_START[row + 1]].unflatten(1, (KV_HEADS, GROUP))
        heads = mine.transpose(0, 1).reshape(1, KV_HEADS * GROUP * count, DIM)
        if count:
            expected = oracle.page_scores(heads, digests, table[one], num_pages[one], budgets[one], *how)
            torch.testing.assert_close(scores[one], expected)
        else:
            assert (scores[row] == float("-inf")).all()


def test_one_query_per_row_may_be_said_and_more_are_refused_where_they_are_not_computed(operations: Operations) -> None:
    rng = torch.Generator().manual_seed(2)
    kv, q = cache(4, KV_HEADS, SIZE, DIM, torch.float32, rng), queries(rng)[:2]
    digests, table = MINMAX.encode(kv[:, :, 0]), ints([[0, 1], [2, 3]])
    attended = (q, kv, table[:, None], ints([[20], [32]]), SCALE, 1)
    scored = (q, digests, table, ints([2, 2]), ints([1, 1]), "sum", False, 0.5, SCALE, SIZE)
    starts = ints([0, 1, 2])
    for found, expected in (
        (operations.paged_partial(*attended, query_start=starts)[0], operations.paged_partial(*attended)[0]),
        (operations.page_scores(*scored, query_start=starts), operations.page_scores(*scored)),
    ):
        assert torch.equal(found, expected)
    if operations is oracle:
        return
    for operation, arguments in ((operations.paged_partial, attended), (operations.page_scores, scored)):
        with pytest.raises(ValueError, match=r"one query per row, not \[2, 0\]"):
            operation(*arguments, query_start=ints([0, 2, 2]))  # type: ignore[operator]
