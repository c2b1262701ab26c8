"""A stream of the device that asks questions of requests and takes their answers, with the device's own kernels."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybrid_backend.kernels import cpu, reference
from hybrid_backend.kernels.operations import FAILED, NOWHERE, Counters, RowStates
from hybrid_backend.kernels.triton import questions
from tests.support.cases import relative_error

PAGES, KV_HEADS, GROUP, DIM, PAGE, REQUESTS, CAPACITY = 64, 2, 3, 64, 16, 5, 9
SCALE, HEADS = DIM**-0.5, KV_HEADS * GROUP
LAYERS = (2, 3, 7)  # of a model whose other layers ask nothing
LAYER = 3
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SECOND = 10**9


class Question(NamedTuple):
    """What a request asks."""

    layer: int
    q: Tensor  # [heads, head_dim]
    ids: Tensor  # [pages]


class Answers(NamedTuple):
    """Of each row."""

    out: Tensor
    lse: Tensor
    ready: list[int]
    waited: list[int]
    left: list[int]


class Stream:
    """Asks and takes as a stream of the device does. ``boxes``: the server's, or what stands before it."""

    def __init__(self, boxes: cpu.RequestBoxes) -> None:
        self.boxes = boxes
        self.numbers = torch.zeros(boxes.ids.shape[0], dtype=torch.int32, device=DEVICE)

    def ask(self, asked: dict[int, Question | None], position: int) -> None:
        """A row for each request, which asks nothing if its question is None; all are about one layer."""
        width = max([1, *(len(x.ids) for x in asked.values() if x)])
        table = torch.full((len(asked), width + 3), PAGES + 1, dtype=torch.int32)
        q = torch.zeros(len(asked), *self.boxes.q.shape[1:], dtype=self.boxes.q.dtype)
        listed, wanted = torch.zeros(2, len(asked), dtype=torch.int32)
        for row, question in enumerate(asked.values()):
            if question is not None:
                table[row, : len(question.ids)] = question.ids
                q[row], listed[row], wanted[row] = question.q, len(question.ids), 1
        requests = torch.tensor([r if x else -1 for r, x in asked.items()], dtype=torch.int32)
        questions.ask_rows(
            self.boxes, q.to(DEVICE), table.to(DEVICE)[:, :width], listed.to(DEVICE), requests.to(DEVICE),
            wanted.to(DEVICE), position, self.numbers,
        )  # fmt: skip
        finish()

    def take(self, wanted: dict[int, bool], seconds: float | None = None) -> Answers:
        """A row for each request; nobody waits if ``seconds`` is None."""
        rows, (heads, dim) = len(wanted), self.boxes.q.shape[1:]
        requests = torch.tensor([r if x else -1 for r, x in wanted.items()], dtype=torch.int32, device=DEVICE)
        out = torch.full((rows, heads, dim), float("nan"), device=DEVICE)
        lse = torch.full((rows, heads), float("nan"), device=DEVICE)
        waited = torch.full((rows,), 11, device=DEVICE)
        left = torch.full((rows,), round((seconds or 0) * SECOND), device=DEVICE)
        states = row_states(list(wanted.values()), parks=seconds is None)
        counts = torch.arange(4 * (rows + 1), device=DEVICE).view(4, rows + 1)[:, :rows]
        arrived = torch.zeros(1, dtype=torch.int32, device=DEVICE)
        counters = torch.zeros(len(Counters._fields), dtype=torch.int64, device=DEVICE)
        # Rows on the CPU that wait at LAYER since an earlier step.
        questions.take_rows(
            self.boxes, LAYER, requests, states, pages_of(rows), self.numbers, out, lse, waited, left, counts, arrived,
            counters,
        )  # fmt: skip
        finish()
        places = zip((states.on_cpu * states.live).tolist(), states.parked.tolist(), strict=True)
        ready = [1 if is_live else -1 if place == FAILED else 0 for is_live, place in places]
        taken = torch.tensor([x == 1 for x in ready])
        assert counters.tolist() == [*(counts.cpu() * taken).sum(1).tolist(), 0, 0, 0, max(waited.tolist()), 0, 0]
        assert not arrived.any()
        return Answers(out.cpu(), lse.cpu(), ready, waited.tolist(), left.tolist())


def row_states(on_cpu: list[bool], parks: bool, seed: int = 0) -> RowStates:
    """States of rows that are parked at LAYER if they are on the CPU, and live if they are not."""
    is_there = torch.tensor(on_cpu)
    columns = torch.randint(1, 99, (len(RowStates._fields), len(on_cpu)), generator=torch.Generator().manual_seed(seed))
    states = RowStates(*columns.int().to(DEVICE))
    for state, values in (
        (states.on_cpu, is_there), (states.parks, is_there * parks), (states.live, ~is_there),
        (states.asks, torch.zeros_like(is_there)),
        (states.parked, torch.where(is_there, LAYER, NOWHERE)),
    ):  # fmt: skip
        state.copy_(values)
    return states


def pages_of(rows: int) -> Tensor:
    return torch.arange(100, 100 + rows, dtype=torch.int32, device=DEVICE)


def finish() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def held(boxes: cpu.QuestionBoxes) -> cpu.RequestBoxes:
    """The same boxes, but what is asked reaches the workers only when `pass_on` says so."""
    tensors: dict[str, Any] = {field.name: getattr(boxes, field.name) for field in fields(cpu.RequestBoxes)}
    return cpu.RequestBoxes(**tensors | {"asked_flag": torch.zeros_like(boxes.asked_flag, pin_memory=DEVICE == "cuda")})


def pass_on(before: cpu.RequestBoxes, boxes: cpu.QuestionBoxes, request: int) -> None:
    boxes.asked_flag[request, 0] = int(before.asked_flag[request, 0])


def question(layer: int, seed: int, pages: int | None = None) -> Question:
    rng = torch.Generator().manual_seed(seed)
    count = int(torch.randint(CAPACITY + 1, (1,), generator=rng)) if pages is None else pages
    return Question(
        layer, torch.randn(HEADS, DIM, generator=rng).bfloat16(), torch.randint(PAGES, (count,), generator=rng)
    )


def assert_right(answers: Answers, row: int, asked: Question, layers: dict[int, Tensor]) -> None:
    ids = asked.ids[None, None]
    out, lse = reference.paged_attention(asked.q[None], layers[asked.layer], ids, torch.full_like(ids, PAGE), SCALE)
    assert answers.ready[row] == 1
    assert relative_error(answers.out[row], out[0]) < 1e-2
    assert torch.allclose(answers.lse[row].double(), lse[0], atol=1e-3, rtol=0)


def assert_empty(answers: Answers, row: int, ready: int = 0) -> None:
    assert answers.ready[row] == ready
    assert not answers.out[row].any() and bool((answers.lse[row] == float("-inf")).all())
