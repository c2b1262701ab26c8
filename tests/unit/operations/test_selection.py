"""Contract of the operations that score and select pages (`kernels.contract.selection`)."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import strategies as st

from hybrid_backend.kernels import byte_digests, codes
from hybrid_backend.kernels.operations import AGGREGATES, Counters, Operations, Reuse, Selection
from tests.unit.implementations import module_of, over_implementations
from tests.unit.operations.cases import (
    DTYPES,
    ERROR,
    INF,
    NAN,
    SEEDS,
    cache,
    entries,
    ints,
    odd_scores,
    shuffled,
)


@over_implementations(
    share=0.5,
    seed=SEEDS,
    dtype=DTYPES,
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 3, 4, 7]),
    shape=st.sampled_from([(16, 64), (32, 64), (16, 80), (48, 128), (16, 16), (16, 192), (32, 256)]),
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
    as_bytes=st.booleans(),
)
def test_page_scores_combine_what_digests_allow(
    operations: Operations, seed: int, dtype: torch.dtype, kv_heads: int, group: int, dim: int, columns: int,
    aggregate: str, per_head: bool, bound: float, as_bytes: bool,
) -> None:  # fmt: skip
    """Against fp64. The native kernels round queries to bytes, too, where digests are in bytes."""
    chance, rng = random.Random(seed), torch.Generator().manual_seed(seed)
    rows, scale = 4, dim**-0.5
    digests = torch.randn(columns + 20, kv_heads, 2, dim, generator=rng).to(dtype).sort(2, descending=True).values
    allowed = digests
    if as_bytes:
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
    error = max(error, 0.02) if as_bytes and operations is module_of("native") else error
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
    share=0.3,
    seed=SEEDS,
    kv_heads=st.integers(1, 3),
    columns=st.sampled_from([3, 20, 70]),
    digest=st.sampled_from(["minmax", "bytes", "codes"]),
    aggregate=st.sampled_from(AGGREGATES),
    per_head=st.booleans(),
    has_frames=st.booleans(),
)
def test_a_row_attends_its_pages_again_until_its_epoch_changes(
    operations: Operations, seed: int, kv_heads: int, columns: int, digest: str, aggregate: str, per_head: bool,
    has_frames: bool,
) -> None:  # fmt: skip
    """Over three steps of other queries and another residency, against the same operations without `Reuse`."""
    chance, rng, (page_size, dim) = random.Random(seed), torch.Generator().manual_seed(seed), (16, 32)
    rows, lists, pool = 4, kv_heads if per_head else 1, columns + 3
    table = torch.stack([torch.randperm(pool, generator=rng)[:columns] for _ in range(rows)]).int()
    num_pages = ints([columns, 0, chance.randint(1, columns), columns])
    seq_lens, requests = num_pages * page_size - (num_pages > 0).int(), ints(shuffled(rows, chance))
    budgets = ints([3, 3, 3, columns])
    digests = {
        "minmax": torch.randn(pool, kv_heads, 2, dim, generator=rng).sort(2, descending=True).values,
        "bytes": byte_digests.encode(torch.randn(pool, kv_heads, 2, dim, generator=rng)),
        "codes": codes.encode(torch.randn(pool, kv_heads, page_size, dim, generator=rng)),
    }[digest]

    def scored(q: torch.Tensor, reuse: Reuse | None) -> torch.Tensor:
        return operations.page_scores(
            q, digests, table, num_pages, budgets, aggregate, per_head, 0.5, dim**-0.5, page_size, reuse=reuse
        )

    def selected(scores: torch.Tensor, frame_of: torch.Tensor, reuse: Reuse | None, count: torch.Tensor) -> Selection:
        return operations.select_pages(
            scores, num_pages, seq_lens, budgets, requests, frame_of if has_frames else None, table, page_size, 1, 1,
            columns, count, reuse=reuse,
        )  # fmt: skip

    reuse = Reuse(
        ints([0] * rows), torch.zeros(rows + 2, lists).int(), torch.full((rows + 2, lists, columns), 10**6).int(),
        torch.full((rows + 2, lists), 10**6).int(), torch.full((rows + 2, lists, columns), NAN),
    )  # fmt: skip
    expected_scores = torch.zeros(rows, lists, columns)
    has_pages = num_pages > 0
    for epochs in ([5, 0, 7, 9], [5, 0, 8, 9], [6, 0, 8, 9]):
        changed = reuse.epochs != ints(epochs)
        reuse.epochs.copy_(ints(epochs))
        q = torch.randn(rows, 2 * kv_heads, dim, generator=rng)
        frame_of = torch.tensor([shuffled(columns, chance) for _ in range(rows)], dtype=torch.int32)
        frame_of[torch.rand(rows, columns, generator=rng) < 0.5] = -1
        for row in range(rows):  # the growing page always has a frame
            frame_of[int(requests[row]), max(int(num_pages[row]) - 1, 0)] = 7
        expected_scores = torch.where(changed[:, None, None], scored(q, None), expected_scores)
        counters, counts = (torch.zeros(len(Counters._fields), dtype=torch.int64) for _ in range(2))
        expected = selected(expected_scores, frame_of, None, counters)
        scores = scored(q, reuse)
        assert scores.data_ptr() == reuse.scores.data_ptr()
        assert torch.equal(scores[has_pages], expected_scores[has_pages])
        # The pages of a row that reuses its selection come from the list and not from the scores.
        misleading = torch.where(changed[:, None, None], scores, -scores)
        found = selected(misleading, frame_of, reuse, counts)
        check_equal_lists(found, expected)
        assert found.pages.data_ptr() == reuse.pages.data_ptr() and torch.equal(counts, counters)
        # A second selection in the same step follows the residency of its call.
        check_equal_lists(
            selected(misleading, frame_of.flip(0), reuse, counts),
            selected(expected_scores, frame_of.flip(0), None, counts),
        )
    assert (reuse.list_epochs[rows:] == 0).all(), "a row that the step does not have"


def check_equal_lists(found: Selection, expected: Selection) -> None:
    assert torch.equal(found.pages_listed, expected.pages_listed)
    assert torch.equal(found.frames_listed, expected.frames_listed)
    assert torch.equal(found.missing_listed, expected.missing_listed)
    assert torch.equal(found.tokens, expected.tokens)
    rows, lists = found.pages_listed.shape
    for row, listing in ((r, h) for r in range(rows) for h in range(lists)):
        for name in ("pages", "frames", "missing", "absent"):
            length = {"pages": "pages_listed", "frames": "frames_listed"}.get(name, "missing_listed")
            assert entries(getattr(found, name), getattr(found, length), row, listing) == entries(
                getattr(expected, name), getattr(expected, length), row, listing
            )


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


def test_extreme_scores_keep_their_order(operations: Operations) -> None:
    scores = torch.tensor([[[0.0, -INF, -1e38, 1e38, INF, -0.0, 1e-30, NAN]]])
    pages, table = ints([8]), ints(range(8))[None]
    for budget, expected in ((4, [3, 4, 6, 7]), (6, [0, 3, 4, 5, 6, 7]), (8, list(range(8)))):
        chosen = operations.select_pages(
            scores, pages, ints([128]), ints([budget]), ints([0]), None, table, 16, 0, 1, 8
        )
        assert entries(chosen.pages, chosen.pages_listed, 0, 0) == expected
