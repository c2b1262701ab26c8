"""Contract of `match_labels`, the lookup of cached selections (`kernels.contract.selection`)."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from hybrid_backend.kernels.operations import SIMILARITIES, Counters, Operations
from tests.unit.implementations import over_implementations
from tests.unit.operations.cases import (
    DTYPES,
    ERROR,
    INF,
    NAN,
    SEEDS,
    ints,
    same_bits,
    shuffled,
)


@over_implementations(
    seed=SEEDS,
    dtype=DTYPES,
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 3, 4]),
    dim=st.sampled_from([16, 80]),
    aggregate=st.sampled_from(SIMILARITIES),
    size=st.sampled_from([1.0, 1e-30, 1e30]),
    counted=st.booleans(),
)
def test_heads_whose_query_has_turned_from_its_label_miss_and_take_it_as_their_label(
    operations: Operations, seed: int, dtype: torch.dtype, kv_heads: int, group: int, dim: int, aggregate: str,
    size: float, counted: bool,
) -> None:  # fmt: skip
    """Rows of padding, rows that fit, heads that are not looked up; labels and counters change by misses alone."""
    chance, rng = random.Random(seed), torch.Generator().manual_seed(seed)
    rows, heads = 6, kv_heads * group
    q = torch.randn(rows, heads, dim, generator=rng)
    requests = shuffled(rows + 1, chance)[:rows]
    labels = torch.randn(rows + 1, heads, dim, generator=rng)
    turn = torch.rand(rows, heads, 1, generator=rng) * chance.choice([0.3, 3.0])
    labels[requests] = chance.choice([-0.1, 1.0]) * q + turn * labels[requests]
    scale = 1.0 if dtype == torch.float16 else size
    q, labels = (q * scale).to(dtype), (labels * scale).to(dtype)
    weights = torch.tensor([chance.choice([0.0, 0.1, 0.7, 1.0]) for _ in range(heads)])
    num_pages = [9, 9, 0, 9, 4, 9]
    budgets = [3, 8, 0, 9, 5, 3]
    requests[2] = -1
    found = {
        (row, head): combined(aggregate, similarities(q[row], labels[requests[row]], head, group), weights, head)
        for row in range(rows) for head in range(kv_heads) if budgets[row] < num_pages[row]
    }  # fmt: skip
    thresholds = torch.tensor(
        [found[chance.choice([0, 1, 5]), head] + chance.choice([-1e-4, 1e-4, -0.2, 0.2]) for head in range(kv_heads)]
    )
    if chance.random() < 0.3:
        thresholds[0] = -INF
    expected, kept = torch.zeros(rows, kv_heads, dtype=torch.int32), labels.clone()
    counters = torch.arange(len(Counters._fields))
    lookups = hits = 0
    missed = operations.match_labels(
        q, labels, weights, thresholds, ints(requests), ints(num_pages), ints(budgets), aggregate,
        counters if counted else None,
    )  # fmt: skip
    assert missed.dtype == torch.int32 and missed.shape == expected.shape
    for (row, head), similarity in found.items():
        if thresholds[head] == -INF:
            continue
        lookups += 1
        near = abs(similarity - float(thresholds[head])) < 3e-5  # rounding may decide
        expected[row, head] = int(missed[row, head] > 0) if near else int(similarity < thresholds[head])
        if expected[row, head]:
            mine = slice(head * group, (head + 1) * group)
            kept[requests[row], mine] = q[row, mine]
        else:
            hits += 1
    assert torch.equal(missed, expected * ints(num_pages)[:, None]), "what a head that missed selects from"
    assert same_bits(labels, kept)
    more = {"lookups": lookups * counted, "hits": hits * counted}
    assert counters.tolist() == [i + more.get(name, 0) for i, name in enumerate(Counters._fields)]


def similarities(q: Tensor, label: Tensor, head: int, group: int) -> list[float]:
    """Cosines of a KV head's query heads in fp64."""
    mine = range(head * group, (head + 1) * group)
    return [float(q[i].double() @ label[i].double() / q[i].double().norm() / label[i].double().norm()) for i in mine]


def combined(aggregate: str, similar: list[float], weights: Tensor, head: int) -> float:
    """CLO's Eq. 10, or the smallest one."""
    s = weights.double().view(-1, len(similar))[head].tolist()
    s = s if any(s) else [1.0] * len(s)
    pairs = [(weight, x) for weight, x in zip(s, similar, strict=True) if weight > 0]
    lowest = min(x for _, x in pairs)
    if aggregate == "min" or lowest <= 0:
        return lowest
    return sum(weight for weight, _ in pairs) / sum(weight / x for weight, x in pairs)


def hits_at(
    operations: Operations, similar: list[float], weights: list[float], threshold: float, aggregate: str
) -> bool:
    """Whether one KV head, whose query heads have these similarities to their labels, hits at the threshold."""
    q, labels = torch.zeros(2, 1, len(similar), 16)
    labels[..., 3] = 2.0
    for i, cosine in enumerate(similar):
        q[0, i, 3], q[0, i, 7] = 5 * cosine, 5 * math.sqrt(1 - cosine**2)
    found = operations.match_labels(
        q, labels, torch.tensor(weights), torch.tensor([threshold]), ints([0]), ints([2]),
        ints([1]), aggregate,
    )  # fmt: skip
    return not found.item()


@pytest.mark.parametrize("aggregate", SIMILARITIES)
@pytest.mark.parametrize("similarity", [1.0, 0.8, 1e-3, 0.0, -1e-3, -0.6, -1.0])
def test_equal_similarities_give_that_similarity_back(
    operations: Operations, similarity: float, aggregate: str
) -> None:
    for weights in ([0.2, 0.0, 0.9], [0.0, 0.0, 0.0], [1.0, 1.0, 1.0]):
        assert hits_at(operations, [similarity] * 3, weights, similarity - 1e-5, aggregate)
        assert not hits_at(operations, [similarity] * 3, weights, similarity + 1e-5, aggregate)


@pytest.mark.parametrize(
    ("similar", "weights", "aggregate", "expected"),
    [
        ([0.5, 1.0], [1.0, 1.0], "harmonic", 2 / 3),
        ([0.5, 1.0], [3.0, 1.0], "harmonic", 4 / 7),
        ([0.5, 1.0], [0.0, 0.0], "harmonic", 2 / 3),  # all 0: equal
        ([0.5, 1.0], [1.0, 1.0], "min", 0.5),
        ([0.5, 1.0], [0.0, 1.0], "min", 1.0),
        ([0.5, 1.0], [0.0, 0.0], "min", 0.5),
        ([-0.25, 1.0], [0.1, 1.0], "harmonic", -0.25),
        ([-0.25, -0.5, 1.0], [1.0, 0.2, 1.0], "harmonic", -0.5),
        ([0.0, 1.0], [0.1, 1.0], "harmonic", 0.0),
        ([1e-4, 1.0], [1.0, 1.0], "harmonic", 2 / 10001),  # so it is continuous at 0
        ([-0.25, 0.5], [0.0, 1.0], "harmonic", 0.5),  # a head that does not count
        ([0.0, 0.5], [0.0, 1.0], "harmonic", 0.5),
    ],
)
def test_similarities_of_query_heads_combine_by_their_weights(
    operations: Operations, similar: list[float], weights: list[float], aggregate: str, expected: float
) -> None:
    assert hits_at(operations, similar, weights, expected - 1e-5, aggregate)
    assert not hits_at(operations, similar, weights, expected + 1e-5, aggregate)


@pytest.mark.parametrize("dtype", ERROR)
def test_a_query_that_is_its_label_hits_even_at_a_threshold_of_one(operations: Operations, dtype: torch.dtype) -> None:
    q = torch.randn(3, 6, 80, generator=torch.Generator().manual_seed(4)).to(dtype)
    s, ones, lines = torch.arange(6) / 7, torch.ones(2), (ints([2, 0, 1]), ints([9] * 3), ints([2] * 3))
    labels = torch.empty_like(q)
    labels[[2, 0, 1]] = q
    for aggregate in SIMILARITIES:
        assert not operations.match_labels(q, labels, s, ones, *lines, aggregate).any()


def test_a_head_misses_without_a_label_and_keeps_it_from_then_on(operations: Operations) -> None:
    q = torch.randn(1, 4, 16, generator=torch.Generator().manual_seed(5)).bfloat16()
    labels = torch.zeros(2, 4, 16).bfloat16()
    labels[1, 2:] = -q[0, 2:]
    labels[1, 0] = -0.0
    low, lines = torch.tensor([-2.0, -2.0]), (ints([1]), ints([3]), ints([2]))
    assert operations.match_labels(q, labels, torch.ones(4), low, *lines, "harmonic").tolist() == [[3, 0]]
    assert same_bits(labels[1], torch.cat([q[0, :2], -q[0, 2:]])) and not labels[0].any()
    assert operations.match_labels(q, labels, torch.ones(4), low, *lines, "harmonic").tolist() == [[0, 0]]


@pytest.mark.parametrize("aggregate", SIMILARITIES)
def test_a_zero_vector_is_like_nothing_and_nan_never_hits(operations: Operations, aggregate: str) -> None:
    def missed(q: Tensor, labels: Tensor, weights: list[float], threshold: float) -> int:
        lines = ints([0]), ints([3]), ints([2])
        s = torch.tensor(weights)
        at = torch.tensor([threshold])
        return int(operations.match_labels(q.clone(), labels.clone(), s, at, *lines, aggregate).item()) // 3

    ones, zero_head, odd = torch.ones(3, 1, 2, 16)
    zero_head[0, 0], odd[0, 0, 5] = 0, NAN
    for a, b in ((zero_head, ones), (ones, zero_head)):
        assert missed(a, b, [1.0, 1.0], 0.0) == 0 and missed(a, b, [1.0, 1.0], 1e-6) == 1
        assert missed(a, b, [0.0, 1.0], 0.9) == 0
    assert missed(0 * ones, ones, [1.0, 1.0], 0.0) == 0 and missed(0 * ones, ones, [1.0, 1.0], 1e-6) == 1
    for a, b in ((odd, ones), (ones, odd), (odd, zero_head), (ones * INF, ones)):
        for weights in ([1.0, 1.0], [0.0, 1.0]):
            assert missed(a, b, weights, -2.0) == 1
