"""Random inputs of operations, and comparisons of their results."""

from __future__ import annotations

import math
import random
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from hybrid_backend.kernels.operations import Maps

INF, NAN = float("inf"), float("nan")
ERROR = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}  # of a result, relative
SEEDS, DTYPES = st.integers(0, 2**31), st.sampled_from(list(ERROR))


def ints(values: Any) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int32)


def shuffled(count: int, chance: random.Random) -> list[int]:
    return chance.sample(range(count), count)


def shuffled_list(values: list[int], chance: random.Random) -> list[int]:
    return chance.sample(values, len(values))


def cache(pages: int, kv_heads: int, page_size: int, dim: int, dtype: torch.dtype, rng: torch.Generator) -> Tensor:
    return torch.randn(pages, kv_heads, 2, page_size, dim, generator=rng).to(dtype)


def number(score: Tensor) -> float:
    """NaN counts as -inf."""
    return -INF if math.isnan(score) else float(score)


def odd_scores(shape: tuple[int, ...], chance: random.Random) -> Tensor:
    """Some lists of unlike numbers, some of many equals, infinities and NaN."""
    odd = [-INF, -1e30, -3.5, -0.0, 0.0, 0.5, 2.0, 1e30, INF, NAN]
    rows = [
        [chance.gauss(0, 9) if unlike else chance.choice(odd) for _ in range(shape[-1])]
        for unlike in (chance.random() < 0.5 for _ in range(math.prod(shape[:-1])))
    ]
    return torch.tensor(rows).view(shape)


def random_maps(
    chance: random.Random, layers: int, requests: int, columns: int, size: int, num_pages: dict[int, int]
) -> Maps:
    """Each request holds some of its pages, in any of its frames; equal importances, and some that are infinite. Some
    empty frames are reserved."""
    frame_of = torch.full((layers, requests, columns), -1, dtype=torch.int32)
    page_of = torch.full((layers, requests * size), -1, dtype=torch.int32)
    importance = torch.full((layers, requests * size), -INF)
    for layer, request in ((x, r) for x in range(layers) for r in range(requests)):
        pages = shuffled(num_pages.get(request, 0), chance)[: chance.choice([size, chance.randint(0, size)])]
        for page, i in zip(pages, shuffled(size, chance), strict=False):
            frame = request + i * requests
            frame_of[layer, request, page], page_of[layer, frame] = frame, page
            importance[layer, frame] = chance.choice([INF, -5.0, 0.0, -0.0, 2.0, 2.0, 1e30, chance.gauss(0, 9)])
        for i in range(size):
            if page_of[layer, request + i * requests] < 0 and chance.random() < 0.2:
                importance[layer, request + i * requests] = INF
    return Maps(frame_of, page_of, importance)


def entries(lists: Tensor, listed: Tensor, row: int, listing: int) -> list[int]:
    return lists[row, listing, : int(listed[row, listing])].tolist()


def same_bits(a: Tensor, b: Tensor) -> bool:
    kind = torch.int32 if a.dtype == torch.float32 else torch.int16
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))


def assert_same_maps(found: Maps, expected: Maps) -> None:
    for name, a, b in zip(Maps._fields, found, expected, strict=True):
        assert torch.equal(a, b), name


def assert_same_lse(found: Tensor, expected: Tensor) -> None:
    assert torch.equal(found == -INF, expected == -INF)
    assert torch.allclose(found.double(), expected, atol=1e-3, rtol=1e-6)
