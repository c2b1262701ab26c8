"""Contract of all operations together (`kernels.operations`), over all implementations.

The modules of this folder compute what is expected in loops written from the contract: in fp64 where numbers are, and
exactly where pages are chosen or moved. What the contract calls undefined is not compared.
"""

from __future__ import annotations

import inspect
import random
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from hybrid_backend.kernels.operations import Copies, Counters, Maps, Operations, Reuse
from hybrid_backend.step.epochs import SelectionEpochs
from tests.unit.implementations import NAMES, implementation, module_of, over_implementations
from tests.unit.operations.cases import (
    INF,
    SEEDS,
    assert_same_maps,
    entries,
    ints,
    same_bits,
    shuffled,
    shuffled_list,
)

OPERATIONS = [name for name in dir(Operations) if inspect.isfunction(getattr(Operations, name)) and name[0] != "_"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_implementation_has_the_operation_with_this_signature(operation: str, name: str) -> None:
    found = inspect.signature(getattr(module_of(name), operation))
    promised = inspect.signature(getattr(Operations, operation))
    assert str(found) == str(promised).replace("(self, ", "(")


SEQUENCES: dict[str, Any] = {
    "seed": SEEDS,
    "per_head": st.booleans(),
    "interval": st.sampled_from([1, 3]),
    "lasts": st.sampled_from([1, 3]),
}


# Triton's, under the interpreter, take as long as everything else here: tests/slow/test_operations.py.
@over_implementations(0.2, names=["oracle", "native"], **SEQUENCES)
def test_sequences_of_steps_leave_the_oracles_maps_and_frames(
    operations: Operations, seed: int, per_head: bool, interval: int, lasts: int
) -> None:
    check_sequence(operations, seed, per_head, interval, lasts)


def check_sequence(operations: Operations, seed: int, per_head: bool, interval: int, lasts: int) -> None:
    steps = [Steps(each, seed, per_head, interval, lasts) for each in (operations, implementation("oracle"))]
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

    def __init__(self, operations: Operations, seed: int, per_head: bool, interval: int, lasts: int) -> None:
        """``lasts``: steps in which a request attends one selection."""
        self.operations, self.per_head, self.interval = operations, per_head, interval
        self.epochs = SelectionEpochs(lasts, self.REQUESTS)
        self.number = 0
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
        lists = self.KV_HEADS if per_head else 1
        listed = (self.LAYERS, rows, lists)
        self.reuse = Reuse(
            torch.zeros(rows, dtype=torch.int32), torch.zeros(listed, dtype=torch.int32),
            torch.zeros((*listed, self.SIZE), dtype=torch.int32), torch.zeros(listed, dtype=torch.int32),
            torch.zeros(*listed, self.COLUMNS),
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
        self.epochs.end(request)
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
        self.number += 1
        of_rows = [x[:-1].long() for x in (requests, seq_lens, num_pages, budgets)]
        self.reuse.epochs[: rows - 1] = self.epochs.of_rows(self.number, *of_rows)
        self.reuse.epochs[rows - 1] = 0
        run.commit_pages(self.maps, self.copies, self.generations)
        run.open_pages(self.maps, requests, written, positions, self.PAGE, self.SINKS)
        selections = []
        for layer in range(self.LAYERS):
            maps, copies, counters = self.maps.of(layer), self.copies.of(layer), self.counters[layer]
            reuse = self.reuse.of(layer)
            k, v = self.integers(2, rows, self.KV_HEADS, self.DIM)
            q = self.integers(rows, self.KV_HEADS * self.GROUP, self.DIM)
            run.append_tokens(
                k, v, self.host[layer], written, positions, self.frames[layer], requests, maps.frame_of,
                self.digests[layer],
            )  # fmt: skip
            scores = run.page_scores(
                q,
                self.digests[layer],
                table,
                num_pages,
                budgets,
                "sum",
                self.per_head,
                0.5,
                self.DIM**-0.5,
                reuse=reuse,
            )
            chosen = run.select_pages(
                scores, num_pages, seq_lens, budgets, requests, maps.frame_of, table, self.PAGE, self.SINKS,
                self.RECENT, self.SIZE, counters, reuse=reuse,
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
