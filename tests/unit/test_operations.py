"""The contract of the operations (`kernels.operations`), over all implementations.

What is expected is computed here, in loops written from the contract: in fp64 where numbers are, and exactly where
pages are chosen or moved. What the contract calls undefined is not compared.
"""

from __future__ import annotations

import inspect
import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from hybrid_backend.kernels import byte_digests, codes, reference
from hybrid_backend.kernels.operations import AGGREGATES, SIMILARITIES, Copies, Counters, Maps, Operations, Sample
from tests.support.cases import page_lists, relative_error, spoil_beyond
from tests.support.gpu import ON_GPU
from tests.unit.implementations import NAMES, implementation, module_of, over_implementations

INF, NAN = float("inf"), float("nan")
ERROR = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}  # of a result, relative
SEEDS, DTYPES = st.integers(0, 2**31), st.sampled_from(list(ERROR))
OPERATIONS = [name for name, value in vars(Operations).items() if inspect.isfunction(value) and name[0] != "_"]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """The tensors are small: threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=NAMES, scope="module")
def operations(request: pytest.FixtureRequest) -> Any:
    return implementation(request.param)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_implementation_has_the_operation_with_this_signature(operation: str, name: str) -> None:
    found = inspect.signature(getattr(module_of(name), operation))
    promised = inspect.signature(getattr(Operations, operation))
    assert str(found) == str(promised).replace("(self, ", "(")


# --- tokens and digests ---


@over_implementations(
    seed=SEEDS,
    dtype=DTYPES,
    rows=st.integers(0, 5),
    kv_heads=st.integers(1, 3),
    page_size=st.sampled_from([16, 32]),
    dim=st.sampled_from([16, 80]),
    with_frames=st.booleans(),
    with_digests=st.booleans(),
    kind=st.sampled_from([torch.int32, torch.int64]),
)
def test_new_tokens_reach_host_page_frame_and_digest_and_nothing_else(
    operations: Operations, seed: int, dtype: torch.dtype, rows: int, kv_heads: int, page_size: int, dim: int,
    with_frames: bool, with_digests: bool, kind: torch.dtype,
) -> None:  # fmt: skip
    chance, rng = random.Random(seed), torch.Generator().manual_seed(seed)
    host, frames = (cache(n, kv_heads, page_size, dim, dtype, rng) for n in (8, 6))
    digests = torch.randn(8, kv_heads, 2, dim, generator=rng).to(dtype)
    # As parts of the projection to queries, keys and values: rows lie apart.
    k, v = torch.randn(rows, 3, kv_heads, dim, generator=rng).to(dtype).unbind(1)[1:]
    columns = 4
    requests, frame_of = shuffled(6, chance)[:rows], torch.full((6, columns), -1, dtype=torch.int32)
    pages, positions = shuffled(8, chance)[:rows], []
    if not with_digests and rows > 1:  # two tokens of one page
        pages[1] = pages[0]
    for row in range(rows):
        offset = row + chance.choice([0, 0, chance.randrange(page_size - rows)])
        positions.append(chance.randrange(columns) * page_size + offset)
        if chance.random() < 0.3:
            pages[row], requests[row] = -1, -1
        elif chance.random() < 0.7:
            frame_of[requests[row], positions[row] // page_size] = row
        if pages[row] >= 0 and offset == 0:
            digests[pages[row]] = NAN  # the page begins: what it held does not matter
    expected = host.clone(), frames.clone(), digests.clone()
    for row in range(rows):
        page, offset = pages[row], positions[row] % page_size
        if page < 0:
            continue
        expected[0][page, :, 0, offset], expected[0][page, :, 1, offset] = k[row], v[row]
        frame = int(frame_of[requests[row], positions[row] // page_size])
        if with_frames and frame >= 0:
            expected[1][frame, :, 0, offset], expected[1][frame, :, 1, offset] = k[row], v[row]
        if with_digests:
            old = expected[2][page].clone() if offset else k[row][:, None].expand(-1, 2, -1)
            expected[2][page, :, 0] = torch.maximum(old[:, 0], k[row])
            expected[2][page, :, 1] = torch.minimum(old[:, 1], k[row])
    where = (frames, ints(requests), frame_of) if with_frames else (None, None, None)
    at = torch.tensor(positions, dtype=kind)
    operations.append_tokens(k, v, host, ints(pages), at, *where, digests if with_digests else None)
    assert all(same_bits(a, b) for a, b in zip((host, frames, digests), expected, strict=True))


@over_implementations(
    seed=SEEDS,
    dtype=DTYPES,
    tokens=st.integers(0, 70),
    kv_heads=st.integers(1, 3),
    page_size=st.sampled_from([16, 32]),
    dim=st.sampled_from([16, 80]),
)
def test_a_prompts_tokens_reach_their_host_pages_and_nothing_else(
    operations: Operations, seed: int, dtype: torch.dtype, tokens: int, kv_heads: int, page_size: int, dim: int
) -> None:
    """Of several sequences, which begin anywhere in a page, with tokens of decoding rows among them."""
    chance, rng = random.Random(seed), torch.Generator().manual_seed(seed)
    host = cache(8, kv_heads, page_size, dim, dtype, rng)
    k, v = torch.randn(2, tokens, kv_heads, dim, generator=rng).to(dtype)
    places = [(page, offset) for page in shuffled_list(range(8), chance) for offset in range(page_size)]
    first = chance.randrange(len(places) - tokens)
    pages, positions = [], []
    expected = host.clone()
    for token, (page, offset) in enumerate(places[first : first + tokens]):
        pages.append(page if chance.random() < 0.9 else -1)
        positions.append(chance.randrange(4) * page_size + offset)
        if pages[-1] >= 0:
            expected[page, :, 0, offset], expected[page, :, 1, offset] = k[token], v[token]
    operations.store_tokens(k, v, host, ints(pages), torch.tensor(positions, dtype=torch.int64))
    assert same_bits(host, expected)


@over_implementations(
    seed=SEEDS,
    dtype=DTYPES,
    before=st.integers(0, 40),
    tokens=st.integers(1, 70),
    kv_heads=st.integers(1, 3),
    page_size=st.sampled_from([16, 48]),
    dim=st.sampled_from([16, 80]),
)
def test_digests_that_a_chunk_of_keys_extends_are_those_of_all_keys_so_far(
    operations: Operations, seed: int, dtype: torch.dtype, before: int, tokens: int, kv_heads: int, page_size: int,
    dim: int,
) -> None:  # fmt: skip
    """Read from a projection to queries, keys and values. What a page held before its first token does not matter."""
    chance, rng = random.Random(seed), torch.Generator().manual_seed(seed)
    total = before + tokens
    keys = torch.randn(total, 3, kv_heads, dim, generator=rng).to(dtype)[:, 1]
    table = shuffled_list(range(10), chance)[: -(-total // page_size)]
    digests = torch.randn(10, kv_heads, 2, dim, generator=rng).to(dtype)
    expected, first = digests.clone(), before // page_size
    for at, page in enumerate(table):
        mine = keys[at * page_size : (at + 1) * page_size]
        expected[page] = torch.stack([mine.amax(0), mine.amin(0)], 1)
        old = keys[at * page_size : min(before, (at + 1) * page_size)]
        if at == first and len(old):
            digests[page] = torch.stack([old.amax(0), old.amin(0)], 1)
        elif at < first:
            digests[page] = expected[page]
        else:
            digests[page] = NAN
    operations.extend_digests(keys[before:], digests, ints(table[first:]), before % page_size, page_size)
    assert same_bits(digests, expected)


@over_implementations(
    seed=SEEDS,
    dtype=DTYPES,
    count=st.integers(0, 6),
    kv_heads=st.integers(1, 3),
    page_size=st.sampled_from([16, 48]),
    dim=st.sampled_from([16, 80]),
)
def test_digests_are_the_extremes_of_the_written_keys(
    operations: Operations, seed: int, dtype: torch.dtype, count: int, kv_heads: int, page_size: int, dim: int
) -> None:
    chance, rng = random.Random(seed), torch.Generator().manual_seed(seed)
    kv = cache(6, kv_heads, page_size, dim, dtype, rng)
    digests = torch.randn(6, kv_heads, 2, dim, generator=rng).to(dtype)
    pages, expected = shuffled(6, chance)[:count], digests.clone()
    tokens = [chance.choice([0, 1, page_size, chance.randrange(page_size)]) for _ in pages]
    for i, (page, written) in enumerate(zip(pages, tokens, strict=True)):
        kv[page, :, :, written:] = NAN  # must not be read
        if chance.random() < 0.3:
            pages[i] = -1
        elif written:
            expected[page] = reference.digest(kv[page], written)
    operations.build_digests(kv, digests, ints(pages), ints(tokens))
    assert same_bits(digests, expected)


def test_a_digest_that_grew_token_by_token_is_the_one_built_anew(operations: Operations) -> None:
    rng = torch.Generator().manual_seed(0)
    kv, written = cache(1, 2, 16, 64, torch.bfloat16, rng), cache(1, 2, 16, 64, torch.bfloat16, rng)
    grown, built = torch.full((1, 2, 2, 64), 99.0).bfloat16(), torch.zeros(1, 2, 2, 64).bfloat16()
    for token in range(11):
        k, v = kv[:, :, 0, token].contiguous(), kv[:, :, 1, token].contiguous()
        operations.append_tokens(k, v, written, ints([0]), ints([token]), digests=grown)
    operations.build_digests(written, built, ints([0]), ints([11]))
    assert same_bits(grown, built) and same_bits(written[:, :, :, :11], kv[:, :, :, :11])


@over_implementations(
    share=0.5,
    seed=SEEDS,
    dtype=DTYPES,
    kv_heads=st.integers(1, 3),
    page_size=st.sampled_from([16, 32, 48]),
    dim=st.sampled_from([64, 80, 128]),
)
def test_codes_are_near_the_keys_of_whole_pages_and_of_no_others(
    operations: Operations, seed: int, dtype: torch.dtype, kv_heads: int, page_size: int, dim: int
) -> None:
    chance, rng = random.Random(seed), torch.Generator().manual_seed(seed)
    kv = cache(6, kv_heads, page_size, dim, dtype, rng)
    kv[:, :, 0] += 3 * torch.randn(kv_heads, 1, dim, generator=rng).to(dtype)
    digests = torch.full((6, kv_heads, 4 * dim), 99, dtype=torch.uint8)
    pages = shuffled(6, chance)
    tokens = [chance.choice([page_size, page_size, page_size - 1, 0]) for _ in pages]
    pages[chance.randrange(6)] = -1
    operations.build_digests(kv, digests, ints(pages), ints(tokens))
    whole = [page for page, written in zip(pages, tokens, strict=True) if page >= 0 and written == page_size]
    assert (digests[[page for page in range(6) if page not in whole]] == 99).all()
    layout, keys = codes.Layout(page_size, dim), kv[whole, :, 0].double()
    middles, spread, scales, levels = (x.double() for x in codes.decode(digests[whole], page_size))
    ends = torch.stack([keys.amax(2), keys.amin(2)])
    assert ((middles - ends.mean(0)).abs() <= ends.mean(0).abs().amax(-1, keepdim=True) / 253).all()
    assert relative_error(spread, ((ends[0] - ends[1]) / 2).square().mean(-1).sqrt()) <= 1e-5 if whole else True
    residual = keys - middles[:, :, None]
    coded = (scales[..., None] * levels) @ codes.rotation(dim).double().T
    lost = float((residual - coded).square().sum() / residual.square().sum()) if whole else 0.0
    assert lost <= 1.1 * layout.distortion


@over_implementations(
    share=0.5,
    seed=SEEDS,
    dtype=DTYPES,
    kv_heads=st.integers(1, 3),
    page_size=st.sampled_from([16, 48]),
    dim=st.sampled_from([16, 80, 128]),
)
def test_bytes_are_the_rounded_extremes_of_whole_pages_and_of_no_others(
    operations: Operations, seed: int, dtype: torch.dtype, kv_heads: int, page_size: int, dim: int
) -> None:
    chance, rng = random.Random(seed), torch.Generator().manual_seed(seed)
    kv = cache(6, kv_heads, page_size, dim, dtype, rng) * 10 ** chance.uniform(-3, 3)
    digests = torch.full((6, kv_heads, byte_digests.row(dim)), 99, dtype=torch.uint8)
    pages = shuffled(6, chance)
    tokens = [chance.choice([page_size, page_size, page_size - 1, 0]) for _ in pages]
    pages[chance.randrange(6)] = -1
    operations.build_digests(kv, digests, ints(pages), ints(tokens))
    whole = [page for page, written in zip(pages, tokens, strict=True) if page >= 0 and written == page_size]
    assert (digests[[page for page in range(6) if page not in whole]] == 99).all()
    for page in whole:
        extremes = reference.digest(kv[page].double(), page_size)  # [kv_heads, 2, dim]
        step = extremes.abs().amax(-1, keepdim=True) / 127
        assert ((byte_digests.decode(digests[page]).double() - extremes).abs() <= 0.5001 * step).all()


WHOLE = {"codes": lambda dim: 4 * dim, "bytes": byte_digests.row}
"""Bytes of a row, of the kinds of digests that only whole pages have."""


@pytest.mark.parametrize("kind", WHOLE)
@pytest.mark.parametrize("has_frames", [False, True])
def test_the_digest_of_a_page_that_grew_whole_token_by_token_is_the_one_built_anew(
    operations: Operations, kind: str, has_frames: bool
) -> None:
    rng = torch.Generator().manual_seed(0)
    kv = cache(2, 2, 32, 64, torch.bfloat16, rng)
    written = torch.full_like(kv, NAN)
    frames, frame_of = torch.full_like(kv, NAN), ints([-1, -1, 1, -1])[None]
    where = (frames, ints([0, 0]), frame_of) if has_frames else (None, None, None)
    grown, built = torch.full((2, 2, 2, WHOLE[kind](64)), 99, dtype=torch.uint8)
    for token in range(32):
        k, v = kv[:, :, 0, token].contiguous(), kv[:, :, 1, token].contiguous()
        assert (grown == 99).all(), "of whole pages only"
        # The second row is one of padding.
        operations.append_tokens(k, v, written, ints([1, -1]), ints([64 + token, 5]), *where, digests=grown)
    operations.build_digests(written, built, ints([1]), ints([32]))
    assert same_bits(grown[1], built[1]) and (grown[0] == 99).all()
    assert not has_frames or same_bits(frames[1], kv[0])


@over_implementations(
    share=0.5,
    seed=SEEDS,
    dtype=DTYPES,
    kind=st.sampled_from(sorted(WHOLE)),
    count=st.integers(0, 4),
    kv_heads=st.integers(1, 3),
    page_size=st.sampled_from([16, 48]),
    dim=st.sampled_from([64, 80]),
)
def test_digests_of_a_chunk_that_fills_its_pages_are_those_of_the_pages(
    operations: Operations, seed: int, dtype: torch.dtype, kind: str, count: int, kv_heads: int, page_size: int,
    dim: int,
) -> None:  # fmt: skip
    """Read from a projection to queries, keys and values."""
    chance, rng = random.Random(seed), torch.Generator().manual_seed(seed)
    keys = torch.randn(count * page_size, 3, kv_heads, dim, generator=rng).to(dtype)[:, 1]
    extended, built = torch.full((2, 6, kv_heads, WHOLE[kind](dim)), 99, dtype=torch.uint8)
    table = shuffled_list(range(6), chance)[:count]
    kv = torch.full((6, kv_heads, 2, page_size, dim), NAN, dtype=dtype)
    for at, page in enumerate(table):
        kv[page, :, 0] = keys[at * page_size : (at + 1) * page_size].transpose(0, 1)
    operations.build_digests(kv, built, ints(table), ints([page_size] * count))
    operations.extend_digests(keys, extended, ints(table), 0, page_size)
    assert same_bits(extended, built)


@pytest.mark.parametrize("value", [0.0, 1e-42, 3e38, NAN, INF])
def test_codes_and_bytes_of_odd_keys_are_finite(operations: Operations, value: float) -> None:
    kv = torch.zeros(2, 1, 2, 16, 64)
    kv[0] = value
    kv[1, 0, 0, 3, 5] = value
    coded, rounded = (torch.zeros(2, 1, row(64), dtype=torch.uint8) for row in (WHOLE["codes"], WHOLE["bytes"]))
    for digests in (coded, rounded):
        operations.build_digests(kv, digests, ints([0, 1]), ints([16, 16]))
    assert all(x.isfinite().all() for x in codes.decode(coded, 16))
    assert byte_digests.decode(rounded).isfinite().all()


# --- scores and selection ---


@over_implementations(
    share=0.5,
    seed=SEEDS,
    dtype=DTYPES,
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 3, 4, 7]),
    shape=st.sampled_from([(16, 64), (32, 64), (16, 80), (48, 128), (16, 16)]),
    columns=st.sampled_from([1, 5, 70]),
    aggregate=st.sampled_from(AGGREGATES),
    per_head=st.booleans(),
)
def test_page_scores_by_codes_are_what_their_keys_add_up_to(
    operations: Operations, seed: int, dtype: torch.dtype, kv_heads: int, group: int, shape: tuple[int, int],
    columns: int, aggregate: str, per_head: bool,
) -> None:  # fmt: skip
    """Against fp64 over the keys that the codes stand for. The native kernels round queries to bytes, and sums of their
    channels to the 42nd part of the widest: errors up to 0.028, of shares 0.040, in thousands of examples."""
    chance, rng, (page_size, dim) = random.Random(seed), torch.Generator().manual_seed(seed), shape
    rows, scale = 3, dim**-0.5
    keys = torch.randn(columns + 4, kv_heads, page_size, dim, generator=rng)
    digests = codes.encode(keys + torch.randn(kv_heads, 1, dim, generator=rng))
    q = torch.randn(rows, kv_heads * group, dim, generator=rng).to(dtype)
    wide = torch.stack([torch.randperm(columns + 4, generator=rng) for _ in range(rows)]).int()
    num_pages = [columns, 0, chance.randint(1, columns)]
    expected = torch.full((rows, kv_heads if per_head else 1, columns), -INF, dtype=torch.float64)
    for row, pages in enumerate(num_pages):
        wide[row, pages:] = 10**6  # must not be followed
        rowed = digests[wide[row, :pages].long()].transpose(0, 1)  # [kv_heads, pages, row]
        middles, _, scales, levels = (x.double() for x in codes.decode(rowed, page_size))
        coded = middles[:, :, None] + (scales[..., None] * levels) @ codes.rotation(dim).double().T
        heads = q[row].double().view(kv_heads, group, dim)
        logits = scale * torch.einsum("hgd,hptd->hgpt", heads, coded)
        noise = codes.Layout(page_size, dim).distortion * scale**2 * heads.square().sum(-1)[..., None, None]
        found = (logits + noise * scales.square()[:, None] / 2).logsumexp(-1) / scale
        if aggregate == "softmax":
            shares = (found[..., :-1] * scale).softmax(-1)
            found = torch.cat([shares, torch.zeros_like(found[..., :1])], -1)
        per_kv_head = found.amax(1) if aggregate == "max" else found.sum(1)
        expected[row, :, :pages] = per_kv_head if per_head else per_kv_head.sum(0)
    scores = operations.page_scores(
        q, digests, wide[:, :columns], ints(num_pages), ints([0, 0, 0]), aggregate, per_head, 0.5, scale, page_size
    )
    some = expected > -INF
    assert torch.equal(scores > -INF, some)
    error = (0.08 if aggregate == "softmax" else 0.05) if operations is module_of("native") else 1e-5
    assert float((scores[some] - expected[some]).norm()) <= error * float(expected[some].norm())


@over_implementations(
    seed=SEEDS,
    dtype=DTYPES,
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 3, 4]),
    dim=st.sampled_from([16, 64, 80]),
    columns=st.sampled_from([1, 5, 70, 150]),
    aggregate=st.sampled_from(AGGREGATES),
    per_head=st.booleans(),
    bound=st.sampled_from([0.1, 0.5, 1.0]),
    in_bytes=st.booleans(),
)
def test_page_scores_combine_what_digests_allow(
    operations: Operations, seed: int, dtype: torch.dtype, kv_heads: int, group: int, dim: int, columns: int,
    aggregate: str, per_head: bool, bound: float, in_bytes: bool,
) -> None:  # fmt: skip
    """Against fp64. The native kernels round queries to bytes, too, where digests are in bytes."""
    chance, rng = random.Random(seed), torch.Generator().manual_seed(seed)
    rows, scale = 4, dim**-0.5
    digests = torch.randn(columns + 20, kv_heads, 2, dim, generator=rng).to(dtype).sort(2, descending=True).values
    allowed = digests
    if in_bytes:
        digests = byte_digests.encode(digests)
        allowed = byte_digests.decode(digests)
    q = torch.randn(rows, kv_heads * group, dim, generator=rng).to(dtype)
    wide = torch.stack([torch.randperm(len(digests), generator=rng) for _ in range(rows)]).int()
    num_pages = [columns, chance.randint(1, columns), 0, chance.randint(1, columns)]
    budgets = [chance.randrange(columns), chance.randrange(num_pages[1]), 3, num_pages[3] + chance.randint(0, 2)]
    expected = torch.full((rows, kv_heads if per_head else 1, columns), -INF, dtype=torch.float64)
    summed = 0.0  # squares of what is added up, which may cancel
    for row, pages in enumerate(num_pages):
        wide[row, pages if budgets[row] < pages else 0 :] = 10**6  # must not be followed
        expected[row, :, :pages] = 0
        if budgets[row] < pages:
            d = allowed[wide[row, :pages].long()].double().transpose(0, 1)  # [kv_heads, pages, 2, dim]
            heads = q[row].double().view(kv_heads, group, dim)
            middle, half = (d[:, :, 0] + d[:, :, 1]) / 2, (d[:, :, 0] - d[:, :, 1]) / 2
            found = heads @ middle.mT + bound * (heads.abs() @ half.mT)  # [kv_heads, group, pages]
            if aggregate == "softmax":
                shares = (found[..., :-1] * scale).softmax(-1)
                found = torch.cat([shares, torch.zeros_like(found[..., :1])], -1)
            else:
                summed += float((heads**2 @ (middle**2 + (bound * half) ** 2).mT).sum())
            per_kv_head = found.amax(1) if aggregate == "max" else found.sum(1)
            expected[row, :, :pages] = per_kv_head if per_head else per_kv_head.sum(0)
    scores = operations.page_scores(
        q, digests, wide[:, :columns], ints(num_pages), ints(budgets), aggregate, per_head, bound, scale
    )
    assert scores.dtype == torch.float32 and scores.shape == expected.shape and scores.is_contiguous()
    some = expected > -INF
    assert torch.equal(scores > -INF, some)
    assert not scores[3, :, : num_pages[3]].any(), "a row that may take all of its pages is not scored"
    error = ERROR[dtype] * (5 if aggregate == "softmax" else 1)  # of the logits, which shares are exponentials of
    error = max(error, 0.02) if in_bytes and operations is module_of("native") else error
    size = max(float(expected[some].norm()), summed**0.5)
    assert float((scores[some] - expected[some]).norm()) <= error * size


@over_implementations(seed=SEEDS, group=st.integers(1, 4), dim=st.sampled_from([16, 64]))
def test_a_score_with_the_whole_bound_is_never_below_the_largest_logit(
    operations: Operations, seed: int, group: int, dim: int
) -> None:
    """Quest's promise: a page that matters is not overlooked."""
    rng = torch.Generator().manual_seed(seed)
    kv = cache(6, 2, 16, dim, torch.float32, rng)
    q, digests = torch.randn(1, 2 * group, dim, generator=rng), torch.zeros(6, 2, 2, dim)
    operations.build_digests(kv, digests, ints(range(6)), ints([16] * 6))
    scores = operations.page_scores(q, digests, ints(range(6))[None], ints([6]), ints([1]), "max", True, 1.0, 1.0)
    logits = torch.einsum("hgd,phtd->hgpt", q.view(2, group, dim), kv[:, :, 0])
    assert bool((logits.amax((1, 3)) <= scores[0] + 1e-4).all())


@over_implementations(
    seed=SEEDS,
    lists=st.integers(1, 3),
    columns=st.integers(1, 30),
    sinks=st.integers(0, 2),
    recent=st.integers(0, 3),
    has_frames=st.booleans(),
    counted=st.booleans(),
    spare=st.integers(0, 9),
    has_mailbox=st.booleans(),
)
def test_the_best_pages_are_selected_and_split_by_residency(
    operations: Operations, seed: int, lists: int, columns: int, sinks: int, recent: int, has_frames: bool,
    counted: bool, spare: int, has_mailbox: bool,
) -> None:  # fmt: skip
    """Scores with many equals, infinities and NaN; budgets below and above what a row has."""
    chance = random.Random(seed)
    always = sinks + max(recent, 1)
    num_pages = [columns, 0, chance.randint(1, columns), chance.randint(1, columns)]
    budgets = [chance.randint(always, max(always, columns)) for _ in num_pages]
    check_selection(
        operations, chance, num_pages, budgets, lists, columns, sinks, recent, has_frames, counted, spare, has_mailbox
    )


@pytest.mark.parametrize("columns", [2500, 5000])
def test_sequences_of_thousands_of_pages_are_selected_from(operations: Operations, columns: int) -> None:
    chance = random.Random(6)
    check_selection(operations, chance, [columns, 2049, 20], [24, 24, 24], 2, columns, 1, 2, True, True, 0, True)


def check_selection(
    operations: Operations, chance: random.Random, num_pages: list[int], budgets: list[int], lists: int, columns: int,
    sinks: int, recent: int, has_frames: bool, counted: bool, spare: int, has_mailbox: bool,
) -> None:  # fmt: skip
    rows, page_size = len(num_pages), 16
    scores = odd_scores((rows, lists, columns), chance)
    seq_lens = [max(0, pages * page_size - chance.randrange(page_size)) if pages else 0 for pages in num_pages]
    table = torch.tensor([shuffled(columns + 9, chance) for _ in range(rows)], dtype=torch.int32)[:, :columns]
    requests = [r if pages else -1 for r, pages in zip(shuffled(rows, chance), num_pages, strict=True)]
    frame_of = torch.tensor([shuffled(columns, chance) for _ in range(rows)], dtype=torch.int32)
    frame_of[torch.tensor([[chance.random() < 0.5 for _ in range(columns)] for _ in range(rows)])] = -1
    for request, pages in zip(requests, num_pages, strict=True):
        if pages:  # the growing page always has a frame
            frame_of[request, pages - 1] = 7
    most = max(min(b, p) for b, p in zip(budgets, num_pages, strict=True)) + spare
    counters, counts = torch.arange(len(Counters._fields)), [0] * 4
    mailbox = torch.full((rows + 1, lists, most), 5).int(), torch.full((rows + 1, lists), 5).int()
    found = operations.select_pages(
        scores, ints(num_pages), ints(seq_lens), ints(budgets), ints(requests), frame_of if has_frames else None, table,
        page_size, sinks, recent, most, counters if counted else None, mailbox if has_mailbox else None,
    )  # fmt: skip
    if has_mailbox:
        assert found.missing.data_ptr() == mailbox[0].data_ptr()
        assert torch.equal(mailbox[1][:rows], found.missing_listed)
        assert (mailbox[0][rows] == 5).all() and (mailbox[1][rows] == 5).all(), "a row that the step does not have"
    assert all(x.dtype == torch.int32 and x.is_contiguous() for x in found)
    assert all(getattr(found, x).shape == (rows, lists, most) for x in ("pages", "frames", "missing", "absent"))
    for row, listing in ((r, h) for r in range(rows) for h in range(lists)):
        pages, request = num_pages[row], requests[row]

        def order(page: int, at: int = row, of: int = listing, pages: int = pages) -> tuple[int, float, int]:
            score = float(scores[at, of, page])
            forced = page < sinks or page >= pages - max(recent, 1)
            return -int(forced), INF if math.isnan(score) else -score, page

        chosen = sorted(sorted(range(pages), key=order)[: budgets[row]])
        frames = [int(frame_of[request, p]) if has_frames else int(table[row, p]) for p in chosen]
        resident = [f for f in frames if f >= 0]
        absent = [p for p, f in zip(chosen, frames, strict=True) if f < 0]
        tokens = len(resident) * page_size - (pages * page_size - seq_lens[row]) if pages else 0
        assert entries(found.pages, found.pages_listed, row, listing) == chosen
        assert entries(found.frames, found.frames_listed, row, listing) == resident
        assert entries(found.absent, found.missing_listed, row, listing) == absent
        assert entries(found.missing, found.missing_listed, row, listing) == [int(table[row, p]) for p in absent]
        assert int(found.tokens[row, listing]) == tokens
        for i, more in enumerate((len(resident), len(absent), tokens, len(absent) * page_size)):
            counts[i] += more if counted else 0
    assert counters.tolist() == [i + more for i, more in enumerate([*counts, 0, 0, 0, 0, 0, 0])]


@over_implementations(
    seed=SEEDS, rows=st.integers(1, 3), lists=st.integers(1, 4), k=st.integers(1, 7), columns=st.integers(1, 40)
)
def test_the_union_holds_each_absent_page_once(
    operations: Operations, seed: int, rows: int, lists: int, k: int, columns: int
) -> None:
    chance = random.Random(seed)
    scores = odd_scores((rows, lists, columns), chance)
    counts = [[chance.randint(0, min(k, columns)) for _ in range(lists)] for _ in range(rows)]
    absent = torch.full((rows, lists, k), 10**6, dtype=torch.int32)
    for row, listing in ((r, h) for r in range(rows) for h in range(lists)):
        count = counts[row][listing]
        absent[row, listing, :count] = ints(sorted(shuffled(columns, chance)[:count]))
    pages, listed, best = operations.union_pages(absent, torch.tensor(counts, dtype=torch.int32), scores)
    assert pages.shape == (rows, 1, min(lists * k, columns)) and listed.shape == (rows, 1)
    assert pages.dtype == listed.dtype == torch.int32
    assert torch.equal(best, scores.nan_to_num(-INF, INF, -INF).amax(1, keepdim=True))
    for row in range(rows):
        union = {p for h in range(lists) for p in absent[row, h, : counts[row][h]].tolist()}
        assert entries(pages, listed, row, 0) == sorted(union)


# --- samples ---


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


# --- cached selections ---


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
        expected[row, head] = missed[row, head] if near else int(similarity < thresholds[head])
        if expected[row, head]:
            mine = slice(head * group, (head + 1) * group)
            kept[requests[row], mine] = q[row, mine]
        else:
            hits += 1
    assert torch.equal(missed, expected)
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
    assert operations.match_labels(q, labels, torch.ones(4), low, *lines, "harmonic").tolist() == [[1, 0]]
    assert same_bits(labels[1], torch.cat([q[0, :2], -q[0, 2:]])) and not labels[0].any()
    assert operations.match_labels(q, labels, torch.ones(4), low, *lines, "harmonic").tolist() == [[0, 0]]


@pytest.mark.parametrize("aggregate", SIMILARITIES)
def test_a_zero_vector_is_like_nothing_and_nan_never_hits(operations: Operations, aggregate: str) -> None:
    def missed(q: Tensor, labels: Tensor, weights: list[float], threshold: float) -> int:
        lines = ints([0]), ints([3]), ints([2])
        s = torch.tensor(weights)
        at = torch.tensor([threshold])
        return int(operations.match_labels(q.clone(), labels.clone(), s, at, *lines, aggregate).item())

    ones, zero_head, odd = torch.ones(3, 1, 2, 16)
    zero_head[0, 0], odd[0, 0, 5] = 0, NAN
    for a, b in ((zero_head, ones), (ones, zero_head)):
        assert missed(a, b, [1.0, 1.0], 0.0) == 0 and missed(a, b, [1.0, 1.0], 1e-6) == 1
        assert missed(a, b, [0.0, 1.0], 0.9) == 0
    assert missed(0 * ones, ones, [1.0, 1.0], 0.0) == 0 and missed(0 * ones, ones, [1.0, 1.0], 1e-6) == 1
    for a, b in ((odd, ones), (ones, odd), (odd, zero_head), (ones * INF, ones)):
        for weights in ([1.0, 1.0], [0.0, 1.0]):
            assert missed(a, b, weights, -2.0) == 1


# --- attention ---


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


# --- residency ---


@over_implementations(
    seed=SEEDS, lists=st.integers(1, 3), columns=st.integers(2, 20), size=st.integers(1, 9), sinks=st.integers(0, 2)
)
def test_importance_is_the_latest_score_of_rows_under_pressure(
    operations: Operations, seed: int, lists: int, columns: int, size: int, sinks: int
) -> None:
    chance, recent, requests = random.Random(seed), 2, 4
    num_pages = [columns, 0, chance.randint(1, columns), chance.randint(1, columns)]
    owners = [r if pages else -1 for r, pages in zip(shuffled(requests, chance), num_pages, strict=True)]
    maps = random_maps(chance, 1, requests, columns, size, dict(zip(owners, num_pages, strict=True)))
    scores = odd_scores((4, lists, columns), chance)
    budgets = [chance.randrange(columns), 3, num_pages[2], chance.randint(0, columns)]
    expected = noted(maps, scores, num_pages, budgets, owners, sinks, recent)
    operations.note_scores(maps.of(0), scores, ints(num_pages), ints(budgets), ints(owners), sinks, recent)
    assert_same_maps(maps, expected)


def noted(
    maps: Maps, scores: Tensor, num_pages: list[int], budgets: list[int], owners: list[int], sinks: int, recent: int
) -> Maps:
    """The maps of one layer with the importance that the scores give its frames."""
    found, count = Maps(*(x.clone() for x in maps)), maps.frame_of.shape[1]
    for row, (pages, budget, request) in enumerate(zip(num_pages, budgets, owners, strict=True)):
        for frame in range(request, found.page_of.shape[1], count) if budget < pages else ():
            page = int(maps.page_of[0, frame])
            best = max((-INF if math.isnan(x) else x for x in scores[row, :, page].tolist()), default=-INF)
            forced = page < sinks or page >= pages - recent
            found.importance[0, frame] = -INF if page < 0 else INF if forced else best
    return found


@over_implementations(
    seed=SEEDS,
    lists=st.integers(1, 3),
    columns=st.integers(3, 20),
    size=st.integers(1, 9),
    most=st.integers(1, 6),
    interval=st.sampled_from([1, 3, 8]),
    phase=st.integers(0, 7),
    counted=st.booleans(),
)
def test_a_due_row_recalls_its_most_important_absent_pages_over_its_least_important_frames(
    operations: Operations, seed: int, lists: int, columns: int, size: int, most: int, interval: int, phase: int,
    counted: bool,
) -> None:  # fmt: skip
    chance, requests, rows = random.Random(seed), 5, 4
    owners = shuffled(requests, chance)[:rows]
    num_pages = [chance.randint(1, columns) for _ in owners]
    num_pages[2] = 0
    owners[2] = -1
    ages = [0, chance.randrange(20), 0, chance.choice([interval * 2 - phase % interval, chance.randrange(20)])]
    budgets = [chance.randint(0, pages) for pages in num_pages]
    sinks, recent = chance.randrange(2), chance.randrange(3)
    maps = random_maps(chance, 1, requests, columns, size, dict(zip(owners, num_pages, strict=True)))
    scores = odd_scores((rows, 1, columns), chance)
    table = torch.tensor([shuffled(columns + 5, chance) for _ in owners], dtype=torch.int32)[:, :columns]
    generations = [chance.randrange(9) for _ in owners]
    selected = torch.full((rows, lists, size + 1), 10**6, dtype=torch.int32), torch.zeros(rows, lists).int()
    absent = torch.full((rows, 1, columns), 10**6, dtype=torch.int32), torch.zeros(rows, 1).int()
    for row, request in enumerate(owners):
        if not num_pages[row]:
            continue
        mine = range(request, requests * size, requests)
        held = [int(page) for page in maps.page_of[0, request::requests]]
        for listing in range(lists):
            kept = [frame for frame, page in zip(mine, held, strict=True) if page >= 0 and chance.random() < 0.3]
            selected[0][row, listing, : len(kept)], selected[1][row, listing] = ints(kept), len(kept)
        lacks = [page for page in range(num_pages[row]) if page not in held and chance.random() < 0.7]
        absent[0][row, 0, : len(lacks)], absent[1][row, 0] = ints(lacks), len(lacks)
    copies = Copies(
        *(torch.full((1, rows + 1, most), 7, dtype=torch.int32) for _ in range(3)), torch.ones(1, rows + 1, most),
        torch.zeros(1, rows + 1, dtype=torch.int32), torch.zeros(1, rows + 1, dtype=torch.int64),
    )  # fmt: skip
    counters, begun = torch.arange(len(Counters._fields)), 0
    expected = noted(maps, scores, num_pages, budgets, owners, sinks, max(recent, 1))
    importance, pairs = expected.importance[0].clone(), [list[tuple[int, int]]() for _ in owners]
    for row, request in enumerate(owners):
        if num_pages[row] and (ages[row] == 0 or (ages[row] + phase) % interval == 0):
            kept = {f for h in range(lists) for f in entries(*selected, row, h)}
            mine = range(request, requests * size, requests)
            victims = sorted((float(importance[f]), f) for f in mine if f not in kept and importance[f] < INF)
            best = [(number(scores[row, 0, page]), i, page) for i, page in enumerate(entries(*absent, row, 0))]
            wanted = sorted(best, reverse=True)
            pairs[row] = [(f, page) for (_, f), (_, _, page) in zip(victims, wanted, strict=False)][:most]
            begun += len(pairs[row])
        for frame, _ in pairs[row]:
            page = int(expected.page_of[0, frame])
            if page >= 0:
                expected.frame_of[0, request, page] = -1
            expected.page_of[0, frame], expected.importance[0, frame] = -1, -INF
    keep = torch.full((rows + 1, size), 5, dtype=torch.int32)
    operations.plan_recall(
        maps.of(0), copies.of(0), scores, table, selected, absent, ints(num_pages), ints(budgets), ints(owners),
        ints(generations), ints(ages), sinks, recent, interval, phase, keep, counters if counted else None,
    )  # fmt: skip
    assert_same_maps(maps, expected)
    for row, request in enumerate(owners):
        paired, count = pairs[row], len(pairs[row])
        assert copies.frames[0, row].tolist() == [frame for frame, _ in paired] + [-1] * (most - count)
        assert copies.pages[0, row, :count].tolist() == [page for _, page in paired]
        assert copies.host_pages[0, row, :count].tolist() == [int(table[row, page]) for _, page in paired]
        assert copies.importance[0, row, :count].tolist() == [number(scores[row, 0, page]) for _, page in paired]
        if paired:
            assert (int(copies.requests[0, row]), int(copies.started[0, row])) == (request, generations[row])
    assert copies.frames[0, rows].tolist() == [7] * most, "a row that the step does not have"
    assert counters.tolist() == [i + begun * (counted and i == 4) for i in range(len(counters))]


def test_nan_counts_as_the_lowest_score_where_scores_are_kept(operations: Operations) -> None:
    """Else the order of frames would depend on who compares them."""
    maps = Maps(torch.full((1, 4), -1, dtype=torch.int32), ints([-1] * 4), torch.full((4,), -INF))
    none, one = ints([0])[None], ints([1])
    copies = Copies(*(ints([-1] * 4)[None] for _ in range(3)), torch.full((1, 4), NAN), one, torch.zeros(1).long())
    scores = torch.tensor([[[NAN, -1e10, NAN, 0.0]]])
    operations.plan_recall(
        maps, copies, scores, ints(range(4))[None], (none[None], none), (ints([0, 1, 3])[None, None], ints([3])[None]),
        ints([4]), ints([4]), ints([0]), one, none[0], 0, 1, 8, 0, none.expand(1, 4).contiguous(),
    )  # fmt: skip
    assert copies.pages[0, :3].tolist() == [3, 1, 0] and copies.importance[0, :3].tolist() == [0.0, -1e10, -INF]
    maps.frame_of[0, 0], maps.page_of[1] = 1, 0
    operations.note_scores(maps, scores, ints([4]), one, ints([0]), 0, 1)
    assert maps.importance.tolist() == [-INF] * 4
    _, _, best = operations.union_pages(none[None], none, scores)
    assert best.tolist() == [[[-INF, -1e10, -INF, 0.0]]]


@over_implementations(seed=SEEDS, dtype=DTYPES, shape=st.sampled_from([(0,), (5,), (2, 3)]))
def test_whole_pages_are_copied_into_the_frames_chosen_for_them(
    operations: Operations, seed: int, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    chance, rng = random.Random(seed), torch.Generator().manual_seed(seed)
    host, frames = (cache(n, 2, 16, 80, dtype, rng) for n in (9, 7))
    host[3, 0, 1, 4] = NAN
    count = math.prod(shape)
    chosen = [frame if chance.random() < 0.7 else -1 for frame in shuffled(7, chance)[:count]]
    pages = [chance.randrange(9) if frame >= 0 else 10**6 for frame in chosen]
    expected = frames.clone()
    for page, frame in zip(pages, chosen, strict=True):
        if frame >= 0:
            expected[frame] = host[page]
    operations.copy_pages(host, frames, ints(pages).view(shape), ints(chosen).view(shape))
    assert same_bits(frames, expected)


@over_implementations(
    seed=SEEDS, layers=st.integers(1, 3), columns=st.integers(2, 12), size=st.integers(1, 6), most=st.integers(1, 4)
)
def test_copied_pages_show_once_and_only_to_the_request_that_they_were_copied_for(
    operations: Operations, seed: int, layers: int, columns: int, size: int, most: int
) -> None:
    chance, requests, rows = random.Random(seed), 3, 3
    maps = random_maps(chance, layers, requests, columns, size, {r: columns for r in range(requests)})
    generations = torch.tensor([chance.randrange(5) for _ in range(requests)])
    copies = Copies(
        torch.full((layers, rows, most), -1, dtype=torch.int32), *torch.full((2, layers, rows, most), 10**6).int(),
        torch.full((layers, rows, most), NAN), torch.zeros(layers, rows).int(), torch.zeros(layers, rows).long(),
    )  # fmt: skip
    expected = Maps(*(x.clone() for x in maps))
    for layer in range(layers):
        for row, request in enumerate(shuffled(requests, chance)):
            is_current = chance.random() < 0.7
            copies.requests[layer, row] = request
            copies.started[layer, row] = int(generations[request]) - (0 if is_current else 1)
            empty = [f for f in range(request, requests * size, requests) if maps.page_of[layer, f] < 0]
            lacks = [page for page in range(columns) if maps.frame_of[layer, request, page] < 0]
            for i, (frame, page) in enumerate(zip(empty[:most], shuffled_list(lacks, chance), strict=False)):
                score = chance.choice([-2.0, 0.5, 7.0, -INF])
                copies.frames[layer, row, i], copies.pages[layer, row, i] = frame, page
                copies.importance[layer, row, i] = score
                if is_current:
                    expected.page_of[layer, frame], expected.importance[layer, frame] = page, score
                    expected.frame_of[layer, request, page] = frame
    for _ in range(2):
        operations.commit_pages(maps, copies, generations)
        assert_same_maps(maps, expected)
        assert bool((copies.frames == -1).all())


@over_implementations(
    seed=SEEDS,
    layers=st.integers(1, 3),
    size=st.integers(1, 9),
    page_size=st.sampled_from([16, 32]),
    sinks=st.integers(0, 8),
)
def test_a_page_that_begins_takes_the_least_important_frame_in_every_layer(
    operations: Operations, seed: int, layers: int, size: int, page_size: int, sinks: int
) -> None:
    chance, requests, columns = random.Random(seed), 4, 12
    num_pages = [chance.randrange(columns) for _ in range(requests)]
    maps = random_maps(chance, layers, requests, columns, size, dict(enumerate(num_pages)))
    owners = shuffled(requests, chance)
    positions = [num_pages[r] * page_size + chance.choice([0, 0, 0, 5]) for r in owners]
    pages = [chance.choice([-1, 3, 4, 5]) for _ in owners]
    owners = [r if page >= 0 else -1 for r, page in zip(owners, pages, strict=True)]
    expected = Maps(*(x.clone() for x in maps))
    for layer in range(layers):
        for request, host_page, position in zip(owners, pages, positions, strict=True):
            page = position // page_size
            if host_page < 0 or position % page_size:
                continue
            mine = range(request, requests * size, requests)
            frame = min(mine, key=lambda f, at=layer: (float(expected.importance[at, f]), f))
            old = int(expected.page_of[layer, frame])
            if old >= 0:
                expected.frame_of[layer, request, old] = -1
            expected.page_of[layer, frame], expected.importance[layer, frame] = page, INF if page < sinks else page
            expected.frame_of[layer, request, page] = frame
    for _ in range(2):  # the second time the pages have their frames
        operations.open_pages(maps, ints(owners), ints(pages), ints(positions), page_size, sinks)
        assert_same_maps(maps, expected)


# --- all of them ---


SEQUENCES: dict[str, Any] = {"seed": SEEDS, "per_head": st.booleans(), "interval": st.sampled_from([1, 3])}


# Triton's, under the interpreter, take as long as everything else here: tests/slow/test_operations.py.
@over_implementations(0.2, names=["oracle", "native"], **SEQUENCES)
def test_sequences_of_steps_leave_the_oracles_maps_and_frames(
    operations: Operations, seed: int, per_head: bool, interval: int
) -> None:
    check_sequence(operations, seed, per_head, interval)


def check_sequence(operations: Operations, seed: int, per_head: bool, interval: int) -> None:
    steps = Steps(operations, seed, per_head, interval), Steps(implementation("oracle"), seed, per_head, interval)
    for _ in range(8):
        found, expected = (each.step() for each in steps)
        assert found == expected
        mine, theirs = steps
        assert_same_maps(mine.maps, theirs.maps)
        assert torch.equal(mine.counters, theirs.counters)
        for name in ("host", "frames", "digests"):
            assert all(same_bits(a, b) for a, b in zip(getattr(mine, name), getattr(theirs, name), strict=True)), name
        mine.check()


class Steps:
    """Requests that begin, grow and end, decoded step by step; what the host does between steps is in plain torch.

    K and q are small integers and scores are sums, so that they are exact: all implementations select the same pages.
    """

    LAYERS, REQUESTS, SIZE, COLUMNS, PAGE, KV_HEADS, GROUP, DIM = 2, 3, 5, 12, 16, 2, 2, 16
    SINKS, RECENT, BUDGET, POOL = 1, 1, 4, 40

    def __init__(self, operations: Operations, seed: int, per_head: bool, interval: int) -> None:
        self.operations, self.per_head, self.interval = operations, per_head, interval
        self.chance, self.rng = random.Random(seed), torch.Generator().manual_seed(seed)
        shape = (self.KV_HEADS, 2, self.PAGE, self.DIM)
        self.host = [torch.zeros(self.POOL, *shape) for _ in range(self.LAYERS)]
        self.frames = [torch.zeros(self.REQUESTS * self.SIZE, *shape) for _ in range(self.LAYERS)]
        self.digests = [torch.zeros(self.POOL, self.KV_HEADS, 2, self.DIM) for _ in range(self.LAYERS)]
        self.maps = Maps(
            torch.full((self.LAYERS, self.REQUESTS, self.COLUMNS), -1, dtype=torch.int32),
            torch.full((self.LAYERS, self.REQUESTS * self.SIZE), -1, dtype=torch.int32),
            torch.full((self.LAYERS, self.REQUESTS * self.SIZE), -INF),
        )
        rows = self.REQUESTS + 1
        self.copies = Copies(
            *torch.full((3, self.LAYERS, rows, 3), -1, dtype=torch.int32), torch.zeros(self.LAYERS, rows, 3),
            torch.zeros(self.LAYERS, rows, dtype=torch.int32), torch.zeros(self.LAYERS, rows, dtype=torch.int64),
        )  # fmt: skip
        self.generations = torch.zeros(self.REQUESTS, dtype=torch.int64)
        self.counters = torch.zeros(self.LAYERS, len(Counters._fields), dtype=torch.int64)
        self.free = shuffled(self.POOL, self.chance)
        self.running: dict[int, tuple[list[int], int, int]] = {}  # index: host pages, tokens, age

    def integers(self, *shape: int) -> Tensor:
        return torch.randint(-4, 5, shape, generator=self.rng).float()

    def begin(self, request: int) -> None:
        """A prompt in host pages; its first and last pages in frames."""
        tokens = self.chance.randint(1, 9 * self.PAGE)
        count = -(-tokens // self.PAGE)
        pages, self.free = self.free[:count], self.free[count:]
        self.running[request] = pages, tokens, 0
        held = list(range(count)) if count <= self.SIZE else [0, *range(count - self.SIZE + 1, count)]
        frames = [request + i * self.REQUESTS for i in range(len(held))]
        written = [min(self.PAGE, tokens - i * self.PAGE) for i in range(count)]
        for layer in range(self.LAYERS):
            self.host[layer][pages] = self.integers(count, *self.host[layer].shape[1:])
            self.operations.build_digests(self.host[layer], self.digests[layer], ints(pages), ints(written))
            there = ints([pages[page] for page in held])
            self.operations.copy_pages(self.host[layer], self.frames[layer], there, ints(frames))
        self.maps.frame_of[:, request, held] = ints(frames)
        self.maps.page_of[:, frames] = ints(held)
        self.maps.importance[:, frames] = torch.tensor([INF if page < self.SINKS else float(page) for page in held])

    def end(self, request: int) -> None:
        self.generations[request] += 1
        self.free += self.running.pop(request)[0]
        mine = slice(request, None, self.REQUESTS)
        self.maps.frame_of[:, request], self.maps.page_of[:, mine] = -1, -1
        self.maps.importance[:, mine] = -INF

    def step(self) -> list[list[int]]:
        """Returns the lists of what was selected."""
        for request in range(self.REQUESTS):
            if request in self.running and self.chance.random() < 0.2:
                self.end(request)  # copies for it may be under way
            if request not in self.running and self.chance.random() < 0.7:
                self.begin(request)
        owners = shuffled_list(list(self.running), self.chance)
        for request in owners:
            pages, tokens, age = self.running[request]
            if tokens % self.PAGE == 0:
                pages = [*pages, self.free.pop(0)]
            self.running[request] = pages, tokens + 1, age + 1
        return self.launch(owners)

    def launch(self, owners: list[int]) -> list[list[int]]:
        """The step's operations; its last row is one of padding."""
        run = self.operations
        running = [self.running[request] for request in owners]
        rows = len(owners) + 1
        table = torch.zeros(rows, self.COLUMNS, dtype=torch.int32)
        for row, (pages, _, _) in enumerate(running):
            table[row, : len(pages)] = ints(pages)
        requests, positions = ints([*owners, 0]), ints([tokens - 1 for _, tokens, _ in running] + [0])
        num_pages, seq_lens = ints([len(pages) for pages, _, _ in running] + [0]), positions + 1
        seq_lens[-1] = 0
        ages = ints([age - 1 for _, _, age in running] + [0])
        written = ints([pages[-1] for pages, _, _ in running] + [-1])
        budgets = torch.where(num_pages > self.SIZE, self.BUDGET, num_pages)
        generations = self.generations[requests.long()].int()
        run.commit_pages(self.maps, self.copies, self.generations)
        run.open_pages(self.maps, requests, written, positions, self.PAGE, self.SINKS)
        selections = []
        for layer in range(self.LAYERS):
            maps, copies, counters = self.maps.of(layer), self.copies.of(layer), self.counters[layer]
            k, v = self.integers(2, rows, self.KV_HEADS, self.DIM)
            q = self.integers(rows, self.KV_HEADS * self.GROUP, self.DIM)
            run.append_tokens(
                k, v, self.host[layer], written, positions, self.frames[layer], requests, maps.frame_of,
                self.digests[layer],
            )  # fmt: skip
            scores = run.page_scores(
                q, self.digests[layer], table, num_pages, budgets, "sum", self.per_head, 0.5, self.DIM**-0.5
            )
            chosen = run.select_pages(
                scores, num_pages, seq_lens, budgets, requests, maps.frame_of, table, self.PAGE, self.SINKS,
                self.RECENT, self.SIZE, counters,
            )  # fmt: skip
            for row, listing in ((r, h) for r in range(rows) for h in range(scores.shape[1])):
                selections.append(entries(chosen.pages, chosen.pages_listed, row, listing))
                selections.append(entries(chosen.frames, chosen.frames_listed, row, listing))
                selections.append(entries(chosen.missing, chosen.missing_listed, row, listing))
            absent = chosen.absent, chosen.missing_listed
            if self.per_head:
                *absent, scores = run.union_pages(*absent, scores)
            run.plan_recall(
                maps, copies, scores, table, (chosen.frames, chosen.frames_listed), tuple(absent), num_pages, budgets,
                requests, generations, ages, self.SINKS, self.RECENT, self.interval, layer,
                torch.zeros(rows, self.SIZE, dtype=torch.int32), counters,
            )  # fmt: skip
            run.copy_pages(self.host[layer], self.frames[layer], copies.host_pages[:rows], copies.frames[:rows])
        return selections

    def check(self) -> None:
        """The maps are each other's inverses, and a frame holds what its page holds."""
        for layer, request in ((x, r) for x in range(self.LAYERS) for r in range(self.REQUESTS)):
            mine = range(request, self.SIZE * self.REQUESTS, self.REQUESTS)
            held = {int(self.maps.page_of[layer, frame]): frame for frame in mine}
            held.pop(-1, None)
            frame_of = self.maps.frame_of[layer, request].tolist()
            assert held == {page: frame for page, frame in enumerate(frame_of) if frame >= 0}
            pages, tokens, _ = self.running.get(request, ([], 0, 0))
            assert not held or len(pages) - 1 in held, "the growing page is resident"
            for page, frame in held.items():
                n = min(self.PAGE, tokens - page * self.PAGE)
                host, copy = self.host[layer][pages[page], :, :, :n], self.frames[layer][frame, :, :, :n]
                assert torch.equal(host, copy)


# --- making and comparing ---


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
    """Each request holds some of its pages, in any of its frames; equal importances, and some that are infinite."""
    frame_of = torch.full((layers, requests, columns), -1, dtype=torch.int32)
    page_of = torch.full((layers, requests * size), -1, dtype=torch.int32)
    importance = torch.full((layers, requests * size), -INF)
    for layer, request in ((x, r) for x in range(layers) for r in range(requests)):
        pages = shuffled(num_pages.get(request, 0), chance)[: chance.choice([size, chance.randint(0, size)])]
        for page, i in zip(pages, shuffled(size, chance), strict=False):
            frame = request + i * requests
            frame_of[layer, request, page], page_of[layer, frame] = frame, page
            importance[layer, frame] = chance.choice([INF, -5.0, 0.0, -0.0, 2.0, 2.0, 1e30, chance.gauss(0, 9)])
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
