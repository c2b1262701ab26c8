"""Contract of the operations that change which pages frames hold (`kernels.contract.residency`)."""

from __future__ import annotations

import math
import random

import torch
from hypothesis import strategies as st
from torch import Tensor

from hybrid_backend.kernels.operations import Copies, Counters, Maps, Operations
from tests.unit.implementations import over_implementations
from tests.unit.operations.cases import (
    DTYPES,
    INF,
    NAN,
    SEEDS,
    assert_same_maps,
    cache,
    entries,
    ints,
    number,
    odd_scores,
    random_maps,
    same_bits,
    shuffled,
    shuffled_list,
)


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
            is_reserved = page < 0 and maps.importance[0, frame] == INF
            found.importance[0, frame] = INF if is_reserved else -INF if page < 0 else INF if forced else best
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
