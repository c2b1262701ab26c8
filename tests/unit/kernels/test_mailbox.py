"""The flag protocol between a device and the CPU workers: real C++ workers, the device played by this thread."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid_backend.errors import WorkerError
from hybrid_backend.kernels import cpu, reference
from hybrid_backend.kernels.operations import Counters
from tests.support.cases import relative_error

pytestmark = pytest.mark.slow

PAGES, KV_HEADS, GROUP, DIM, PAGE, LAYERS, ROWS, CAPACITY = 64, 2, 3, 64, 16, 3, 4, 8
SCALE = DIM**-0.5

QUERIES = cpu.QueryShape(KV_HEADS * GROUP, torch.bfloat16)


@pytest.fixture(scope="module")
def layers() -> list[Tensor]:
    rng = torch.Generator().manual_seed(0)
    return [torch.randn(PAGES, KV_HEADS, 2, PAGE, DIM, generator=rng).bfloat16() for _ in range(LAYERS)]


@pytest.fixture
def current() -> Tensor:
    return torch.zeros(ROWS, dtype=torch.int64)


@pytest.fixture
def mail(layers: list[Tensor], current: Tensor) -> Iterator[cpu.Mailboxes]:
    with (
        cpu.Pool(2) as pool,
        cpu.Mailboxes(
            pool, numbered(layers), QUERIES, ROWS, numbered([(1, CAPACITY)] * LAYERS), SCALE, current=current
        ) as boxes,
    ):
        boxes.requests.copy_(torch.arange(ROWS))
        yield boxes


def numbered(items: list[Any]) -> dict[int, Any]:
    """By layer."""
    return dict(enumerate(items))


def write(mail: cpu.Mailboxes, layer: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """A random question; returns what it asks."""
    rng = torch.Generator().manual_seed(seed)
    letters = mail.layers[layer]
    letters.q.copy_(torch.randn(letters.q.shape, generator=rng))
    letters.ids.copy_(torch.randint(PAGES, letters.ids.shape, generator=rng))
    letters.counts.copy_(torch.randint(CAPACITY + 1, letters.counts.shape, generator=rng))
    return letters.q.clone(), letters.ids.long(), letters.counts.long()


def ask(mail: cpu.Mailboxes, layer: int, number: int) -> None:
    mail.layers[layer].asked_flag[0] = number


def answer(mail: cpu.Mailboxes, layer: int, number: int, deadline: float = 20.0) -> bool:
    until = time.monotonic() + deadline
    while int(mail.layers[layer].answered[0]) < number:
        if time.monotonic() > until:
            return False
        time.sleep(0)
    return True


def expected(layer: Tensor, q: Tensor, ids: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    valid = (torch.arange(CAPACITY) < counts[..., None]) * PAGE
    return reference.paged_attention(q, layer, ids.masked_fill(valid == 0, -1), valid, SCALE)


def taken(box: cpu.Mailbox) -> Tensor:
    """``out`` as a merge takes it: nothing where ``lse`` says that there is nothing."""
    return box.out.masked_fill((box.lse == float("-inf"))[..., None], 0.0)


def assert_right(mail: cpu.Mailboxes, layers: list[Tensor], layer: int, asked: tuple[Tensor, Tensor, Tensor]) -> None:
    out, lse = expected(layers[layer], *asked)
    assert relative_error(taken(mail.layers[layer]), out) < 1e-2
    assert torch.allclose(mail.layers[layer].lse.double(), lse, atol=1e-3, rtol=0)


def test_ten_thousand_rounds_are_answered_each_and_right(mail: cpu.Mailboxes, layers: list[Tensor]) -> None:
    """Layers in turn, sometimes several at once, with pauses of random length; every 200th answer is checked."""
    chance = random.Random(1)
    rounds = 0
    for step in range(1, 10000):
        at_once = chance.sample(range(LAYERS), chance.choice((1, 1, 1, 3)))
        is_checked = step % 200 == 0
        asked = {layer: write(mail, layer, step) if is_checked else None for layer in at_once}
        for layer in at_once:
            ask(mail, layer, step)
        if chance.random() < 0.01:
            time.sleep(chance.random() * 0.01)  # now and then long enough for the server to fall asleep
        for layer in at_once:
            assert answer(mail, layer, step), f"step {step}, layer {layer}: no answer"
            rounds += 1
            if (question := asked[layer]) is not None:
                assert_right(mail, layers, layer, question)
        assert mail.failure(step) is None
        if rounds >= 10000:
            break
    assert mail.served == rounds >= 10000


def test_rows_of_requests_that_are_gone_get_the_empty_partial(
    mail: cpu.Mailboxes, layers: list[Tensor], current: Tensor
) -> None:
    asked = write(mail, 0, 5)
    mail.layers[0].counts.fill_(CAPACITY)
    current[2] += 1  # released after the device wrote its generation
    ask(mail, 0, 1)
    assert answer(mail, 0, 1)
    out, _ = expected(layers[0], asked[0], asked[1], torch.full_like(asked[2], CAPACITY))
    found = mail.layers[0]
    assert bool((found.lse[2] == float("-inf")).all())
    kept = [0, 1, 3]
    assert relative_error(found.out[kept], out[kept]) < 1e-2


def test_only_rows_that_attend_something_are_written(
    mail: cpu.Mailboxes, layers: list[Tensor], current: Tensor
) -> None:
    """Whatever the lists of the others hold: a graph asks about all rows that it was captured with."""
    box = mail.layers[0]
    for step, live in enumerate([(1,), (0, 3), (), (2, 1)], 1):
        q, ids, counts = write(mail, 0, step)
        counts.fill_(CAPACITY)
        dead = [row for row in range(ROWS) if row not in live]
        for row, how in zip(dead, (CAPACITY + 7, -3, 0), strict=False):  # beyond its room; nonsense; none
            counts[row] = how
        box.ids[dead] = PAGES + 5
        box.counts.copy_(counts)
        mail.generations.copy_(current)
        mail.generations[[row for row in dead if counts[row] != 0]] = -1
        box.out.fill_(float("nan"))
        box.lse.fill_(float("nan"))
        ask(mail, 0, step)
        assert answer(mail, 0, step) and mail.failure(step) is None
        assert bool((box.lse[dead] == float("-inf")).all()) and bool(box.out[dead].isnan().all())
        rows = list(live)
        out, lse = expected(layers[0], q[rows], ids[rows], counts[rows])
        assert torch.allclose(box.lse[rows].double(), lse, atol=1e-3, rtol=0)
        assert not rows or relative_error(box.out[rows], out) < 1e-2


def test_requests_that_go_at_any_moment_never_give_another_answer(
    mail: cpu.Mailboxes, layers: list[Tensor], current: Tensor
) -> None:
    """What a row's KV head gets is its own answer or the empty one, whenever the row's request moves on."""
    stop = threading.Event()

    def release() -> None:
        chance = random.Random(2)
        while not stop.is_set():
            current[chance.randrange(ROWS)] += 1
            time.sleep(chance.random() * 2e-4)

    thread = threading.Thread(target=release)
    thread.start()
    empty = 0
    try:
        for step in range(1, 300):
            q, ids, counts = write(mail, 1, step)
            mail.generations.copy_(current)
            ask(mail, 1, step)
            assert answer(mail, 1, step)
            out, lse = expected(layers[1], q, ids, counts)
            found = mail.layers[1]
            for row, head in itertools.product(range(ROWS), range(KV_HEADS)):
                mine = (row, slice(head * GROUP, (head + 1) * GROUP))
                if bool((found.lse[mine] == float("-inf")).all()):
                    empty += int(counts[row, 0] > 0)
                else:
                    assert relative_error(found.out[mine], out[mine]) < 1e-2
                    assert torch.allclose(found.lse[mine].double(), lse[mine], atol=1e-3, rtol=0)
    finally:
        stop.set()
        thread.join()
    assert empty > 0, "no row was ever dropped: this test shows nothing"


@pytest.mark.parametrize(("what", "word"), [("page", "page id 64"), ("count", "room for 8")])
def test_a_job_that_cannot_be_computed_is_answered_empty_and_told(mail: cpu.Mailboxes, what: str, word: str) -> None:
    write(mail, 0, 1)
    if what == "page":
        mail.layers[0].counts.fill_(CAPACITY)
        mail.layers[0].ids[1, 0, 3] = PAGES
    else:
        mail.layers[0].counts[3, 0] = CAPACITY + 1
    ask(mail, 0, 7)
    assert answer(mail, 0, 7)
    assert bool((mail.layers[0].lse == float("-inf")).all())
    write(mail, 0, 2)
    ask(mail, 0, 8)
    assert answer(mail, 0, 8)  # the host looks when the device is a step further
    assert word in str(mail.failure(7)) and mail.failure(8) is None


def test_shapes_without_a_kernel_are_refused(layers: list[Tensor]) -> None:
    with cpu.Pool(1) as pool, pytest.raises(WorkerError, match="lists"):
        lists = numbered([(5, CAPACITY)] * LAYERS)
        cpu.Mailboxes(pool, numbered(layers), QUERIES, ROWS, lists, SCALE)


def test_lists_that_the_host_keeps_are_those_of_the_rows_requests(layers: list[Tensor], current: Tensor) -> None:
    """Tokens of each KV head in the part of the layer that the request owns, whatever row it has and whatever the host
    changes between steps; or whole pages of other memory, where the host says so. Beside a layer whose lists the device
    writes. Nothing for a request that is gone."""
    chance, each = random.Random(3), PAGES // ROWS
    tokens, whole = torch.zeros(ROWS, KV_HEADS, dtype=torch.int32), torch.zeros(ROWS, dtype=torch.int32)
    host, whole_pages = layers[1][: PAGES // 2].clone(), torch.zeros(ROWS, each, dtype=torch.int32)
    with (
        cpu.Pool(2) as pool,
        cpu.Mailboxes(
            pool, numbered(layers), QUERIES, ROWS, numbered([(0, 0), *[(1, CAPACITY)] * (LAYERS - 1)]), SCALE,
            current=current, host_lists={0: cpu.HostLists(tokens, whole, whole_pages, host)},
        ) as mail,
    ):  # fmt: skip
        found = mail.layers[0]
        for step in range(1, 60):
            requests = chance.sample(range(ROWS), ROWS)
            mail.requests.copy_(torch.tensor(requests))
            mail.generations.copy_(current[requests])
            for of_a_head in tokens.view(-1):
                of_a_head.fill_(chance.choice([0, 1, PAGE, chance.randrange(each * PAGE + 1)]))
            for of_a_request in whole:
                of_a_request.fill_(chance.choice([0, 0, 1, each]))
            whole_pages.copy_(torch.tensor([chance.sample(range(len(host)), each) for _ in range(ROWS)]))
            current[requests[0]] += step % 3 == 0  # released after the device wrote its generation
            other = write(mail, 1, step)
            found.q.copy_(other[0])
            ask(mail, 0, step)
            ask(mail, 1, step)
            assert answer(mail, 0, step) and answer(mail, 1, step)
            listed = tokens[requests].long()
            listed[whole[requests] > 0] = 0
            listed[0] *= step % 3 != 0
            valid = (listed[..., None] - PAGE * torch.arange(each)).clamp(0, PAGE)
            ids = (torch.tensor(requests)[:, None, None] * each + torch.arange(each)).masked_fill(valid == 0, -1)
            out, lse = reference.paged_attention(found.q, layers[0], ids, valid, SCALE)
            counts = whole[requests, None, None] * torch.tensor([step % 3 != 0, *[True] * (ROWS - 1)])[:, None, None]
            valid = torch.where(torch.arange(each) < counts, PAGE, 0)
            ids = whole_pages[requests, None].long().masked_fill(valid == 0, -1)
            whole_out, whole_lse = reference.paged_attention(found.q, host, ids, valid, SCALE)
            out, lse = out.where(whole_lse[..., None] == -torch.inf, whole_out), lse.maximum(whole_lse)
            assert relative_error(taken(found), out) < 1e-2
            assert torch.allclose(found.lse.double(), lse, atol=1e-3, rtol=0)
            if step % 3:
                assert_right(mail, layers, 1, other)
        whole.zero_()
        tokens[1, 1] = each * PAGE + 1
        ask(mail, 0, 60)
        assert answer(mail, 0, 60) and "room for 16" in str(mail.failure(60))
        tokens.zero_()
        whole[1], whole_pages[1, 0] = 1, len(host)
        ask(mail, 0, 62)
        assert answer(mail, 0, 62) and f"beyond the cache's {len(host)} pages" in str(mail.failure(62))
        mail.requests[2] = ROWS
        ask(mail, 0, 63)
        assert answer(mail, 0, 63) and f"request {ROWS}" in str(mail.failure(63))


def test_lists_that_the_host_keeps_need_the_rows_requests(layers: list[Tensor]) -> None:
    with cpu.Pool(1) as pool, pytest.raises(WorkerError, match="requests"):
        tokens = torch.zeros(ROWS, KV_HEADS, dtype=torch.int32)
        kept = cpu.HostLists(tokens, tokens[:, 0].clone(), tokens.clone(), layers[0])
        cpu.Mailboxes(pool, {0: layers[0]}, QUERIES, ROWS, {0: (0, 0)}, SCALE, host_lists={0: kept})


def test_the_devices_own_kernels_ask_and_wait(mail: cpu.Mailboxes, layers: list[Tensor]) -> None:
    """Triton's kernels (under its interpreter where there is no GPU) against the same workers."""
    signal = pytest.importorskip("hybrid_backend.kernels.triton.signal", reason="Triton has no wheel here")
    number, arrived = torch.zeros(2, 1, dtype=torch.int32)
    timed_out, time_left = torch.zeros(cpu.STEPS, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    if torch.cuda.is_available():
        number, arrived, timed_out, time_left = number.cuda(), arrived.cuda(), timed_out.pin_memory(), time_left.cuda()
    for step in range(1, 20):
        number.fill_(step)
        time_left.fill_(10**10)
        asked = write(mail, step % LAYERS, step)
        letters = mail.layers[step % LAYERS]
        # The query comes from the device, in rows that lie apart.
        q = torch.stack([letters.q] * 2, 1).to(number.device)[:, 1]
        letters.q.fill_(float("nan"))
        signal.ask(q, letters.q, letters.asked_flag, number, arrived)
        signal.await_answer(letters.answered, number, timed_out, time_left)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        assert not timed_out.any()
        assert_right(mail, layers, step % LAYERS, asked)


def test_a_server_that_never_answers_makes_the_step_time_out_and_does_not_hang(mail: cpu.Mailboxes) -> None:
    """All layers' waits together take no longer than one may; the steps before and after it did not time out."""
    signal = pytest.importorskip("hybrid_backend.kernels.triton.signal", reason="Triton has no wheel here")
    mail.close()
    step = cpu.STEPS + 3
    number, timed_out = torch.full((1,), step, dtype=torch.int32), torch.zeros(cpu.STEPS, dtype=torch.int32)
    time_left = torch.full((1,), 5 * 10**8)  # nanoseconds
    if torch.cuda.is_available():
        number, timed_out, time_left = number.cuda(), timed_out.pin_memory(), time_left.cuda()
    for layer in range(LAYERS):
        letters = mail.layers[layer]
        signal.ask(letters.q.clone().to(number.device), letters.q, letters.asked_flag, number, torch.zeros_like(number))
        before = time.monotonic()
        signal.await_answer(mail.layers[layer].answered, number, timed_out, time_left)
        assert int(time_left) == 0
        if layer == 0:
            first = time.monotonic() - before
        elif not torch.cuda.is_available():
            assert time.monotonic() - before < first / 3
    assert timed_out.nonzero().flatten().tolist() == [3] and int(timed_out[3]) == step


def test_the_devices_kernels_count_how_long_they_waited_and_how_early_they_asked(mail: cpu.Mailboxes) -> None:
    """By one clock; a question about no page is not counted as asked early."""
    signal = pytest.importorskip("hybrid_backend.kernels.triton.signal", reason="Triton has no wheel here")
    mail.close()  # the answer comes from here, late
    device = "cuda" if torch.cuda.is_available() else "cpu"
    timed_out, letters = torch.zeros(cpu.STEPS, dtype=torch.int32, pin_memory=device == "cuda"), mail.layers[0]
    counters = torch.zeros(len(Counters._fields), dtype=torch.int64, device=device)
    counted, time_left = [], torch.full((1,), 10**10, device=device)
    nothing = torch.zeros(1, dtype=torch.int32, device=device)
    # Compiled before it is timed.
    signal.await_answer(letters.answered, nothing, timed_out, time_left, counters.clone())
    for step, pages in ((1, 3), (2, 0)):
        number = torch.full((1,), step, dtype=torch.int32, device=device)
        listed = torch.full((ROWS, 1), pages, dtype=torch.int32, device=device)
        q = letters.q.clone().to(device)
        signal.ask(q, letters.q, letters.asked_flag, number, torch.zeros_like(number), listed, counters)
        if device == "cuda":
            torch.cuda.synchronize()
        time.sleep(0.02)
        answered = threading.Timer(0.2, letters.answered.fill_, (step,))
        answered.start()
        time_left = torch.full((1,), 10**10, device=device)
        signal.await_answer(letters.answered, number, timed_out, time_left, counters)
        counted.append(Counters(*counters.tolist()))
        answered.join()
    assert not timed_out.any()
    assert 0.04e9 < counted[0].waited < counted[1].waited - 0.04e9 < 20e9
    assert 0.02e9 <= counted[0].ahead == counted[1].ahead < 20e9
