"""Contract of the operations that write tokens and digests (`kernels.contract.tokens`)."""

from __future__ import annotations

import random
import threading
import time

import pytest
import torch
from hypothesis import strategies as st

from hybrid_backend.kernels import byte_digests, codes, reference
from hybrid_backend.kernels.digest_format import CODES, MINMAX_INT8
from hybrid_backend.kernels.operations import AwaitedPages, Operations
from tests.support.cases import relative_error
from tests.support.gpu import ON_GPU
from tests.unit.implementations import MODULES, over_implementations
from tests.unit.operations.cases import (
    DTYPES,
    INF,
    NAN,
    SEEDS,
    cache,
    ints,
    same_bits,
    shuffled,
    shuffled_list,
)


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


def waiting_rows(operations: Operations, expected: list[int], awaited: AwaitedPages) -> tuple[bool, list[int]]:
    """Append a token of each request whose page is on its way; return whether all frames have it, and who was late."""
    rows, rng = len(expected) + 1, torch.Generator().manual_seed(1)
    host, frames = (cache(rows, 2, 16, 16, torch.float32, rng) for _ in range(2))
    k, v = torch.randn(2, rows, 2, 16, generator=rng)
    requests = ints([*range(len(expected)), 0])
    pages = ints([*range(len(expected)), -1])  # the last row is padding
    table = torch.arange(len(expected), dtype=torch.int32)[:, None]
    operations.append_tokens(k, v, host, pages, torch.full((rows,), 3), frames, requests, table, awaited=awaited)
    late = awaited.late.nonzero().tolist()
    assert all(step == int(awaited.number) % len(awaited.late) for step, _ in late)
    assert all(int(awaited.late[step, request]) == int(awaited.number) for step, request in late)
    return same_bits(frames[: rows - 1, :, 0, 3], k[: rows - 1]), [request for _, request in late]


def waits(expected: list[int], arrived: int, milliseconds: int, number: int = 13) -> AwaitedPages:
    left = torch.tensor([milliseconds * 10**6])
    return AwaitedPages(ints(expected), ints([arrived]), ints([number]), torch.zeros(8, len(expected)).int(), left)


@over_implementations(arrived=st.integers(0, 3), milliseconds=st.sampled_from([0, 3]))
def test_rows_whose_pages_do_not_arrive_are_late_and_no_others(
    operations: Operations, arrived: int, milliseconds: int
) -> None:
    expected = [2, 0, 3, 1]
    awaited = waits(expected, arrived, milliseconds)
    stored, late = waiting_rows(operations, expected, awaited)
    assert stored and late == [request for request, copy in enumerate(expected) if copy > arrived]
    assert int(awaited.time_left) == (0 if late else milliseconds * 10**6)


@over_implementations(names=[name for name in MODULES if name != "triton" or not ON_GPU])
def test_a_row_waits_until_its_pages_have_arrived(operations: Operations) -> None:
    """A GPU reads copies of the tensors, which no thread changes. tests/slow/test_awaited_fills.py runs there."""
    awaited, seconds = waits([4, 5], 3, milliseconds=20_000), time.perf_counter()
    timers = [threading.Timer(0.05 * copy, awaited.arrived.fill_, [3 + copy]) for copy in (1, 2)]
    for timer in timers:
        timer.start()
    stored, late = waiting_rows(operations, [4, 5], awaited)
    seconds = time.perf_counter() - seconds
    assert stored and not late and seconds > 0.1
    assert 0 < 20 - int(awaited.time_left) / 1e9 <= seconds
    for timer in timers:
        timer.join()


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
def test_byte_digests_are_the_rounded_extremes_of_whole_pages_and_of_no_others(
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


WHOLE = {digest_format.name: digest_format for digest_format in (CODES, MINMAX_INT8)}
"""Formats of digests that only whole pages have."""


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
    grown, built = torch.full((2, *WHOLE[kind].shape(2, 2, 64)), 99, dtype=torch.uint8)
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
    extended, built = torch.full((2, *WHOLE[kind].shape(6, kv_heads, dim)), 99, dtype=torch.uint8)
    table = shuffled_list(range(6), chance)[:count]
    kv = torch.full((6, kv_heads, 2, page_size, dim), NAN, dtype=dtype)
    for at, page in enumerate(table):
        kv[page, :, 0] = keys[at * page_size : (at + 1) * page_size].transpose(0, 1)
    operations.build_digests(kv, built, ints(table), ints([page_size] * count))
    operations.extend_digests(keys, extended, ints(table), 0, page_size)
    assert same_bits(extended, built)


@pytest.mark.parametrize("value", [0.0, 1e-42, 3e38, NAN, INF])
def test_codes_and_byte_digests_of_odd_keys_are_finite(operations: Operations, value: float) -> None:
    kv = torch.zeros(2, 1, 2, 16, 64)
    kv[0] = value
    kv[1, 0, 0, 3, 5] = value
    coded, rounded = (torch.zeros(x.shape(2, 1, 64), dtype=torch.uint8) for x in (CODES, MINMAX_INT8))
    for digests in (coded, rounded):
        operations.build_digests(kv, digests, ints([0, 1]), ints([16, 16]))
    assert all(x.isfinite().all() for x in codes.decode(coded, 16))
    assert byte_digests.decode(rounded).isfinite().all()
