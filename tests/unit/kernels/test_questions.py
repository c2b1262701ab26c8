"""Questions of requests that are answered some steps later: real C++ workers, and the device's kernels (under Triton's
interpreter where there is no GPU)."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from hybrid_backend.errors import WorkerError
from hybrid_backend.kernels import cpu
from hybrid_backend.kernels.cpu.mailbox import question_bytes
from hybrid_backend.kernels.operations import NOWHERE, Counters, RowStates
from hybrid_backend.methods.apex import rows as host_rows

pytest.importorskip("triton", reason="Triton has no wheel for this platform")

from hybrid_backend.kernels.triton import questions
from tests.support.question_stream import (
    CAPACITY,
    DEVICE,
    DIM,
    HEADS,
    KV_HEADS,
    LAYER,
    LAYERS,
    PAGE,
    PAGES,
    REQUESTS,
    SCALE,
    SECOND,
    Question,
    Stream,
    assert_empty,
    assert_right,
    finish,
    held,
    pages_of,
    pass_on,
    question,
)

QUERIES = cpu.QueryShape(HEADS, torch.bfloat16)


@pytest.fixture(scope="module")
def layers() -> dict[int, Tensor]:
    rng = torch.Generator().manual_seed(0)
    return {layer: torch.randn(PAGES, KV_HEADS, 2, PAGE, DIM, generator=rng).bfloat16() for layer in LAYERS}


@pytest.fixture
def boxes(layers: dict[int, Tensor]) -> Iterator[cpu.QuestionBoxes]:
    with cpu.Pool(2) as pool, cpu.QuestionBoxes(pool, layers, QUERIES, REQUESTS, CAPACITY, SCALE) as made:
        yield made


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


@pytest.mark.parametrize("seed", range(8))
def test_what_becomes_of_a_row_is_the_same_by_a_kernel_as_on_the_host(
    boxes: cpu.QuestionBoxes, layers: dict[int, Tensor], seed: int
) -> None:
    """Rows on the device and on the CPU, that wait, park, are parked here or elsewhere; some answers are missing, and
    one cannot be computed."""
    chance, before = random.Random(seed), held(boxes)
    stream, rows = Stream(before), REQUESTS
    asked = {r: question(LAYER, 10 * seed + r, 3) for r in range(rows)}
    asked[4].ids[1] = PAGES  # no such page
    stream.ask(dict(asked), boxes.position[LAYER])
    arrived = [r for r in range(rows) if chance.random() < 0.7]
    for r in arrived:
        pass_on(before, boxes, r)
    while any(int(boxes.answered[r, 0]) != 1 for r in arrived):
        time.sleep(1e-3)
    columns = torch.randint(1, 99, (len(RowStates._fields), rows), dtype=torch.int32)
    states = RowStates(*columns)
    states.parked.copy_(torch.tensor([chance.choice([LAYER, LAYER, 2, NOWHERE]) for _ in range(rows)]))
    states.live.copy_(states.parked == NOWHERE)
    states.on_cpu.copy_(torch.tensor([place >= 0 or chance.random() < 0.7 for place in states.parked.tolist()]))
    states.parks.copy_(states.on_cpu * torch.tensor([chance.random() < 0.5 for _ in range(rows)]))
    states.asks.copy_(states.on_cpu * states.live)
    takes = (states.asks > 0) & (states.parks == 0) | (states.parked == LAYER)
    there = takes & torch.tensor([r in arrived for r in range(rows)])
    broken = torch.arange(rows) == 4
    by_kernel = RowStates(*(x.clone().to(DEVICE) for x in states))
    host_rows.settle(states, LAYER, there & ~broken, there & broken, pages_of(rows).cpu())
    new = torch.zeros(rows, HEADS, DIM, device=DEVICE), torch.zeros(rows, HEADS, device=DEVICE)
    line = torch.zeros(rows, dtype=torch.int64, device=DEVICE)
    questions.take_rows(
        before, LAYER, torch.arange(rows, dtype=torch.int32, device=DEVICE), by_kernel, pages_of(rows), stream.numbers,
        *new, line.clone(), line + SECOND // 50, line.expand(4, -1), line[:1].int(),
        torch.zeros(len(Counters._fields), dtype=torch.int64, device=DEVICE),
    )  # fmt: skip
    finish()
    for name, found, expected in zip(RowStates._fields, by_kernel, states, strict=True):
        assert torch.equal(found.cpu(), expected), name


@pytest.mark.parametrize("has_residual", [True, False])
@pytest.mark.parametrize("whole", [True, False])
def test_inputs_of_parked_rows_are_saved_and_restored_by_a_kernel_as_on_the_host(
    whole: bool, has_residual: bool
) -> None:
    rng, rows, tokens, width = torch.Generator().manual_seed(3), 6, 9, 2500
    states = RowStates(*torch.zeros(len(RowStates._fields), rows, dtype=torch.int32))
    states.parked.copy_(torch.tensor([LAYER, LAYER, 2, -1, -1, -1]))
    states.live.copy_(states.parked == -1)
    states.parks.copy_(torch.tensor([1, 0, 1, 1, 1, 0]))
    slots = torch.tensor([4, 0, 1, 6, 3, 5])
    saved = torch.randn(8, 2, width, generator=rng).bfloat16().float()
    inputs = torch.randn(2, tokens, width, generator=rng).bfloat16()
    places = None if whole else torch.tensor([8, 1, 0, 5, 2, 7])
    results = []
    for module, device in ((host_rows, "cpu"), (questions, DEVICE)):
        hidden, residual, kept = (x.clone().to(device) for x in (*inputs, saved))
        moved = RowStates(*(x.to(device) for x in states))
        where = None if places is None else places.to(device)
        module.move_inputs(moved, LAYER, hidden, residual if has_residual else None, where, slots.to(device), kept)
        finish()
        results.append([x.cpu() for x in (hidden, residual, kept)])
    for by_host, by_kernel in zip(*results, strict=True):
        assert torch.equal(by_host, by_kernel)
    first = 0 if whole else 8
    assert torch.equal(results[1][0][first], saved[4, 0].bfloat16()), "the first row is restored"
    assert torch.equal(results[1][2][6, 0], inputs[0, 3 if whole else 5].float()), "the fourth row is saved"
    assert torch.equal(results[1][2][3, 0] != saved[3, 0], inputs[0, 4 if whole else 2].float() != saved[3, 0])


def test_places_of_rows_are_published_for_their_step() -> None:
    rows, steps = 300, 4
    states = RowStates(*torch.arange(len(RowStates._fields) * rows, dtype=torch.int32).view(-1, rows))
    published = torch.full((steps, rows, 2), -5, dtype=torch.int32, pin_memory=DEVICE == "cuda")
    expected = published.clone()
    number = torch.tensor([6], dtype=torch.int32)
    host_rows.publish(states, number, expected)
    questions.publish(RowStates(*(x.to(DEVICE) for x in states)), number.to(DEVICE), published)
    finish()
    assert torch.equal(published, expected)
    assert torch.equal(published[2, :, 0], states.live) and torch.equal(published[2, :, 1], states.parked)
    assert bool((published[[0, 1, 3]] == -5).all())


@pytest.mark.slow
def test_a_long_question_of_one_request_does_not_change_anothers_answer(layers: dict[int, Tensor]) -> None:
    """A short one that is asked while the long one is computed, and a long one that is asked again meanwhile."""
    again, overlapped = 300, 0
    with cpu.Pool(2) as pool, cpu.QuestionBoxes(pool, layers, QUERIES, 2, again * PAGES, SCALE) as boxes:
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
    with (
        cpu.Pool(1) as pool,
        cpu.QuestionBoxes(pool, pages, cpu.QueryShape(heads, dtype), requests, capacity, SCALE) as boxes,
    ):
        assert boxes.nbytes == question_bytes(requests, capacity, heads, DIM, dtype.itemsize)
        assert boxes.q.shape == (requests, heads, DIM) and boxes.q.dtype == dtype
        assert boxes.ids.shape == (requests, capacity)


def test_shapes_without_a_kernel_are_refused(layers: dict[int, Tensor]) -> None:
    small = torch.zeros(4, KV_HEADS, 2, 8, DIM, dtype=torch.bfloat16)
    with cpu.Pool(1) as pool, pytest.raises(WorkerError, match="page_size"):
        cpu.QuestionBoxes(pool, {0: small}, QUERIES, REQUESTS, CAPACITY, SCALE)


def test_a_server_that_is_gone_answers_nothing_and_holds_up_nothing(boxes: cpu.QuestionBoxes) -> None:
    boxes.close()
    stream = Stream(boxes)
    stream.ask({0: question(2, 1, 3)}, boxes.position[2])
    assert_empty(stream.take({0: True}), 0)
    assert_empty(stream.take({0: True}, 0.05), 0)
