"""Questions of requests that are answered some steps later: real C++ workers, and the device's kernels (under Triton's
interpreter where there is no GPU)."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator
from dataclasses import fields
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from hybrid_backend.errors import WorkerError
from hybrid_backend.kernels import cpu, reference
from hybrid_backend.kernels.cpu.mailbox import question_bytes
from tests.support.cases import relative_error

pytest.importorskip("triton", reason="Triton has no wheel for this platform")

from hybrid_backend.kernels.triton import questions

PAGES, KV_HEADS, GROUP, DIM, PAGE, REQUESTS, CAPACITY = 64, 2, 3, 64, 16, 5, 9
SCALE, HEADS = DIM**-0.5, KV_HEADS * GROUP
LAYERS = (2, 3, 7)  # of a model whose other layers ask nothing
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
        ready = torch.full((rows,), 7, dtype=torch.int32, device=DEVICE)
        waited = torch.full((rows,), 11, device=DEVICE)
        left = torch.full((rows,), round((seconds or 0) * SECOND), device=DEVICE)
        flags = torch.tensor(list(wanted.values()), dtype=torch.int32, device=DEVICE)
        questions.take_rows(
            self.boxes, requests, flags, self.numbers, out, lse, ready, waited, left, seconds is not None
        )
        finish()
        return Answers(out.cpu(), lse.cpu(), ready.tolist(), (waited - 11).tolist(), left.tolist())


def finish() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def held(boxes: cpu.QuestionBoxes) -> cpu.RequestBoxes:
    """The same boxes, but what is asked reaches the workers only when `pass_on` says so."""
    tensors: dict[str, Any] = {field.name: getattr(boxes, field.name) for field in fields(cpu.RequestBoxes)}
    return cpu.RequestBoxes(**tensors | {"asked_flag": torch.zeros_like(boxes.asked_flag, pin_memory=DEVICE == "cuda")})


def pass_on(before: cpu.RequestBoxes, boxes: cpu.QuestionBoxes, request: int) -> None:
    boxes.asked_flag[request, 0] = int(before.asked_flag[request, 0])


@pytest.fixture(scope="module")
def layers() -> dict[int, Tensor]:
    rng = torch.Generator().manual_seed(0)
    return {layer: torch.randn(PAGES, KV_HEADS, 2, PAGE, DIM, generator=rng).bfloat16() for layer in LAYERS}


@pytest.fixture
def boxes(layers: dict[int, Tensor]) -> Iterator[cpu.QuestionBoxes]:
    with cpu.Pool(2) as pool, cpu.QuestionBoxes(pool, layers, HEADS, REQUESTS, CAPACITY, SCALE) as made:
        yield made


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


def test_questions_about_any_layer_are_answered_right_in_whatever_order_they_are_taken(
    boxes: cpu.QuestionBoxes, layers: dict[int, Tensor]
) -> None:
    chance, stream = random.Random(1), Stream(boxes)
    assert boxes.position == {2: 0, 3: 1, 7: 2}
    asked: dict[int, Question] = {}  # under way
    for turn in range(40):
        layer = chance.choice(LAYERS)
        rows = chance.sample(range(REQUESTS), REQUESTS)
        new = {r: question(layer, 100 * turn + r) if r not in asked and chance.random() < 0.7 else None for r in rows}
        stream.ask(new, boxes.position[layer])
        asked |= {request: x for request, x in new.items() if x}
        wanted = {r: r in asked and chance.random() < 0.6 for r in chance.sample(range(REQUESTS), REQUESTS)}
        answers = stream.take(wanted, 20.0)
        for row, (request, is_wanted) in enumerate(wanted.items()):
            if is_wanted:
                assert_right(answers, row, asked.pop(request), layers)
                assert answers.left[row] == 20 * SECOND - answers.waited[row] <= 20 * SECOND
            else:
                assert_empty(answers, row)
                assert answers.waited[row] == 0 and answers.left[row] == 20 * SECOND
    numbers = stream.numbers.tolist()
    assert not boxes.failed.any()
    assert boxes.served == sum(numbers) - len([r for r in asked if int(boxes.answered[r, 0]) != numbers[r]])
    assert sum(numbers) > 80


def test_what_is_not_there_is_not_waited_for_and_comes_later(
    boxes: cpu.QuestionBoxes, layers: dict[int, Tensor]
) -> None:
    before, asked = held(boxes), {1: question(3, 1, 4), 4: question(3, 2, 9)}
    stream = Stream(before)
    stream.ask(dict(asked), boxes.position[3])
    for _ in range(3):
        answers = stream.take({4: True, 1: True})
        assert_empty(answers, 0)
        assert_empty(answers, 1)
        assert answers.waited == [0, 0]
    pass_on(before, boxes, 4)
    answers = stream.take({4: True}, 20.0)
    assert_right(answers, 0, asked[4], layers)
    both = stream.take({1: True, 4: True})
    assert_empty(both, 0)
    assert_right(both, 1, asked[4], layers)  # it stays until the next question
    pass_on(before, boxes, 1)
    assert_right(stream.take({1: True}, 20.0), 0, asked[1], layers)


def test_an_answer_to_an_earlier_question_is_never_taken(boxes: cpu.QuestionBoxes, layers: dict[int, Tensor]) -> None:
    before, old, new = held(boxes), question(2, 1, 5), question(7, 2, 6)
    stream = Stream(before)
    stream.ask({3: old}, boxes.position[2])
    pass_on(before, boxes, 3)
    assert_right(stream.take({3: True}, 20.0), 0, old, layers)
    stream.ask({3: new}, boxes.position[7])  # in the box there still is the answer to the old one
    assert_empty(stream.take({3: True}), 0)
    assert_empty(stream.take({3: True}, 0.05), 0)
    pass_on(before, boxes, 3)
    assert_right(stream.take({3: True}, 20.0), 0, new, layers)


def test_questions_over_unanswered_ones_leave_the_last_ones_answer(
    boxes: cpu.QuestionBoxes, layers: dict[int, Tensor]
) -> None:
    """At any moment of the old job, which may read half of each."""
    chance, stream = random.Random(2), Stream(boxes)
    for turn in range(30):
        for again in range(chance.choice((2, 3))):
            layer = chance.choice(LAYERS)
            last = {r: question(layer, 1000 * turn + 10 * again + r) for r in (0, 2)}
            stream.ask(dict(last), boxes.position[layer])
            time.sleep(chance.choice((0, 1e-4, 1e-3)))
        answers = stream.take({0: True, 2: True}, 20.0)
        for row, asked in enumerate(last.values()):
            assert_right(answers, row, asked, layers)
    assert not boxes.failed.any()


def test_a_wait_ends_with_the_rows_own_time(boxes: cpu.QuestionBoxes, layers: dict[int, Tensor]) -> None:
    before, asked = held(boxes), question(2, 1, 3)
    stream = Stream(before)
    stream.ask({0: asked, 1: question(2, 2, 3)}, boxes.position[2])
    pass_on(before, boxes, 0)
    assert_right(stream.take({0: True}, 20.0), 0, asked, layers)
    began = time.monotonic()
    answers = stream.take({1: True, 0: True, 2: False}, 0.2)
    assert time.monotonic() - began >= 0.2
    assert_empty(answers, 0)
    assert answers.left[0] == 0 and answers.waited[0] >= 0.2 * SECOND
    assert_right(answers, 1, asked, layers)
    assert answers.left[1:] == [SECOND // 5] * 2 and answers.waited[1:] == [0, 0]


@pytest.mark.parametrize(
    ("what", "word"),
    [("layer", "layer id 3 is beyond the 3 layers"), ("page", f"page id {PAGES} "), ("count", "room for 9")],
)
def test_a_question_that_cannot_be_computed_is_answered_empty_and_told(
    boxes: cpu.QuestionBoxes, layers: dict[int, Tensor], what: str, word: str
) -> None:
    """Of that request and no other."""
    stream, good, bad = Stream(boxes), question(3, 1, 6), question(3, 2, CAPACITY + (what == "count"))
    stream.ask({2: good}, boxes.position[3])
    if what == "page":
        bad.ids[4] = PAGES
    stream.ask({1: bad}, len(LAYERS) if what == "layer" else boxes.position[3])
    answers = stream.take({1: True, 2: True}, 20.0)
    assert_empty(answers, 0, ready=-1)
    assert_right(answers, 1, good, layers)
    why = boxes.failure(1)
    assert word in why and "request 1" in why
    stream.ask({1: good}, boxes.position[3])
    assert_right(stream.take({1: True}, 20.0), 0, good, layers)


@pytest.mark.slow
def test_a_long_question_of_one_request_does_not_change_anothers_answer(layers: dict[int, Tensor]) -> None:
    """A short one that is asked while the long one is computed, and a long one that is asked again meanwhile."""
    again, overlapped = 300, 0
    with cpu.Pool(2) as pool, cpu.QuestionBoxes(pool, layers, HEADS, 2, again * PAGES, SCALE) as boxes:
        stream = Stream(boxes)
        for turn in range(200):  # five, or until a busy machine lets one overlap
            asked, short = question(2, turn, PAGES), question(7, turn, 5)
            long = asked._replace(ids=asked.ids.repeat(again))  # the same mean, of so much more weight
            stream.ask({0: long._replace(q=-long.q)}, boxes.position[2])
            stream.ask({1: short}, boxes.position[7])
            overlapped += int(boxes.answered[0, 0]) < int(stream.numbers[0])
            stream.ask({0: long}, boxes.position[2])
            answers = stream.take({1: True, 0: True}, 60.0)
            assert_right(answers, 0, short, layers)
            answers.lse[1] -= math.log(again)
            assert_right(answers, 1, asked, layers)
            if turn >= 4 and overlapped:
                break
    assert overlapped, "no question was asked while another was computed: this test shows nothing"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("requests", "capacity", "heads"), [(1, 1, 2), (7, 33, 6)])
def test_the_size_is_known_before_anything_is_allocated(
    dtype: torch.dtype, requests: int, capacity: int, heads: int
) -> None:
    pages = {0: torch.zeros(4, 2, 2, PAGE, DIM, dtype=dtype)}
    with cpu.Pool(1) as pool, cpu.QuestionBoxes(pool, pages, heads, requests, capacity, SCALE) as boxes:
        assert boxes.nbytes == question_bytes(requests, capacity, heads, DIM, dtype.itemsize)
        assert boxes.q.shape == (requests, heads, DIM) and boxes.q.dtype == dtype
        assert boxes.ids.shape == (requests, capacity)


def test_shapes_without_a_kernel_are_refused(layers: dict[int, Tensor]) -> None:
    small = torch.zeros(4, KV_HEADS, 2, 8, DIM, dtype=torch.bfloat16)
    with cpu.Pool(1) as pool, pytest.raises(WorkerError, match="page_size"):
        cpu.QuestionBoxes(pool, {0: small}, HEADS, REQUESTS, CAPACITY, SCALE)


def test_a_server_that_is_gone_answers_nothing_and_holds_up_nothing(boxes: cpu.QuestionBoxes) -> None:
    boxes.close()
    stream = Stream(boxes)
    stream.ask({0: question(2, 1, 3)}, boxes.position[2])
    assert_empty(stream.take({0: True}), 0)
    assert_empty(stream.take({0: True}, 0.05), 0)
