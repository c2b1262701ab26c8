"""The native worker pool: results, deadlines, errors, generations, many submitters."""

from __future__ import annotations

import gc
import os
import threading
from itertools import product

import pytest
import torch

from hybrid_backend.errors import DeadlineError, WorkerError
from hybrid_backend.kernels import cpu
from tests.support import cases

pytestmark = pytest.mark.skipif(not cpu.available(), reason=str(cpu.why_unavailable()))


@pytest.fixture(scope="module")
def pool():
    with cpu.Pool(3) as made:
        yield made


def job(seed: int, rows: int = 3, k: int = 40, per_head: bool = False, dtype: torch.dtype = torch.bfloat16):
    rng = torch.Generator().manual_seed(seed)
    layer = torch.randn(64, 2, 2, 32, 64, generator=rng).to(dtype)
    q = torch.randn(rows, 6, 64, generator=rng).to(dtype)
    ids, valid = cases.page_lists(rows, 2 if per_head else 1, k, 64, 32, rng)
    return q, layer, ids, valid, 0.125


def same(a, b, isa=None, dtype=torch.bfloat16):
    """Splitting a list changes the order of summation, nothing else. All kernels sum in fp32, whatever the inputs are:
    of the largest element of a head's output, at most 3e-6 was measured. AMX alone rounds the weights to bf16, after
    scaling them by the largest of the part; its LSE is of unrounded weights."""
    rounds = dtype == torch.bfloat16 and (isa or cpu.isas()[0]) == "amx"
    (out, lse), (expected, expected_lse) = a, b
    error = (out - expected).abs() / expected.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    return bool((error <= (1e-2 if rounds else 1e-5)).all()) and torch.allclose(lse, expected_lse, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("isa", cpu.isas() if cpu.available() else ["generic"])
def test_what_is_split_and_merged_differs_by_the_order_of_summation_only(isa, dtype):
    with cpu.Pool(3, isa=isa) as pool:
        for seed, (rows, per_head, help_) in enumerate(product([1, 3, 17], [False, True], [False, True])):
            arguments = job(seed, rows, per_head=per_head, dtype=dtype)
            ticket = pool.submit(*arguments)
            assert same(ticket.wait(20, help=help_), cpu.partial(*arguments, isa=isa), isa, dtype)


def test_the_value_of_one_token_is_no_order_of_summation():
    """Of 1,280 equally attended tokens, one that is read wrongly is beyond the limit."""
    q, layer, ids, valid, _ = job(0)
    scale = 1e-3  # all weigh alike
    ids, valid = torch.arange(40).expand_as(ids).contiguous(), torch.full_like(valid, 32)
    whole = cpu.partial(q, layer, ids, valid, scale)
    layer[ids[0, 0, -1], :, 1, -1] = 0
    wrong = cpu.partial(q, layer, ids, valid, scale)
    assert not same((wrong[0][:1], wrong[1][:1]), (whole[0][:1], whole[1][:1]), isa="generic")


@pytest.mark.parametrize("help_", [False, True])
def test_a_job_is_timed_and_can_be_waited_for_twice(pool, help_):
    for seed in range(10):
        ticket = pool.submit(*job(seed))
        ticket.wait(20, help=help_)
        started, ended = ticket.span()
        assert 0 < started <= ended
        assert ticket.wait(0) is not None


def test_empty_job(pool):
    q, layer, ids, valid, scale = job(0)
    out, lse = pool.submit(q, layer, ids, torch.zeros_like(valid), scale).wait(5)
    assert (out == 0).all() and (lse == float("-inf")).all()
    out, _ = pool.submit(q[:0], layer, ids[:0], valid[:0], scale).wait(5)
    assert out.shape == (0, 6, 64)


def test_deadline(pool):
    arguments = job(1)
    pool.pause()
    try:
        ticket = pool.submit(*arguments, what="layer 7")
        with pytest.raises(DeadlineError, match=r"layer 7 within workers.deadline_seconds=0.05"):
            ticket.wait(0.05)
    finally:
        pool.resume()
    assert same(pool.submit(*arguments).wait(20), cpu.partial(*arguments))


def test_caller_can_do_it_all(pool):
    arguments = job(2)
    pool.pause()
    try:
        assert same(pool.submit(*arguments).wait(20, help=True), cpu.partial(*arguments))
    finally:
        pool.resume()


def test_a_worker_error_reaches_the_waiter(pool):
    q, layer, ids, valid, scale = job(3)
    ids[0, 0, 0], valid[0, 0, 0] = 64, 1
    ticket = pool.submit(q, layer, ids, valid, scale, what="layer 3")
    with pytest.raises(WorkerError, match="layer 3: page id 64 of row 0 is beyond the cache's 64 pages"):
        ticket.wait(20)
    arguments = job(3)
    assert same(pool.submit(*arguments).wait(20), cpu.partial(*arguments))


def test_stale_rows_are_dropped(pool):
    q, layer, ids, valid, scale = job(4)
    ids, valid = ids.abs(), valid.clamp(min=1)
    current = torch.tensor([5, 6, 7, 8])
    regions, generations = torch.tensor([3, 0, 1]), torch.tensor([8, 4, 6])
    out, lse = pool.submit(
        q, layer, ids, valid, scale, requests=regions, generations=generations, current=current
    ).wait(20)
    expected = cpu.partial(q, layer, ids, valid, scale)
    assert (out[1] == 0).all() and (lse[1] == float("-inf")).all()
    for row in (0, 2):
        assert same((out[row], lse[row]), (expected[0][row], expected[1][row]))


def test_freed_while_waiting(pool):
    """The generation moves on between submission and work."""
    q, layer, ids, valid, scale = job(5)
    current, rows = torch.zeros(3, dtype=torch.int64), torch.arange(3)
    pool.pause()
    try:
        ticket = pool.submit(
            q, layer, ids, valid, scale, requests=rows, generations=torch.zeros(3, dtype=torch.int64), current=current
        )
        current += 1
    finally:
        pool.resume()
    out, lse = ticket.wait(20)
    assert (out == 0).all() and (lse == float("-inf")).all()


def test_abandoned_tickets_keep_their_memory(pool):
    for seed in range(50):
        ticket = pool.submit(*job(seed, rows=8))
        if seed % 2:
            ticket.abandon()
        del ticket
        gc.collect(0)
    arguments = job(6)
    assert same(pool.submit(*arguments).wait(20), cpu.partial(*arguments))


def test_eight_submitters(pool):
    jobs = [job(seed, rows=1 + seed % 5) for seed in range(16)]
    expected = [cpu.partial(*arguments) for arguments in jobs]
    wrong: list[object] = []

    def submitter(me: int) -> None:
        rng = torch.Generator().manual_seed(me)
        for _ in range(60):
            index = int(torch.randint(0, len(jobs), (1,), generator=rng))
            ticket = pool.submit(*jobs[index])
            dice = int(torch.randint(0, 4, (1,), generator=rng))
            if dice == 0:
                ticket.abandon()
            elif not same(ticket.wait(30, help=dice == 1), expected[index]):
                wrong.append((me, index))

    threads = [threading.Thread(target=submitter, args=(me,)) for me in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not wrong


@pytest.mark.parametrize("threads", [200, 384])
def test_as_many_threads_as_large_servers_have_cores(threads):
    """Far more than this machine's; partials, and a decode layer that they share with its caller."""
    with cpu.Pool(threads) as many:
        arguments = job(1, rows=24)
        expected = cpu.partial(*arguments)
        for help_ in (False, True):
            assert same(many.submit(*arguments).wait(60, help=help_), expected)
        q, layer, _, _, scale = arguments
        table = torch.stack([torch.randperm(64) for _ in range(len(q))])
        lengths = torch.randint(1, 64 * 32 + 1, (len(q),))
        outs = []
        for team in (many, "caller"):
            decoder = cpu.Decoder([layer], {}, 6, scale, team=team)
            decoder.begin(table, lengths, torch.full_like(lengths, -1))
            outs.append(torch.empty_like(q))
            decoder.layer(0, q, None, None, outs[-1])
        assert torch.allclose(outs[0].float(), outs[1].float(), atol=1e-2)


def test_closes_with_work_in_flight():
    made = cpu.Pool(2, sorted(os.sched_getaffinity(0))[:1] * 2)
    tickets = [made.submit(*job(seed, rows=8)) for seed in range(8)]
    for ticket in tickets:
        ticket.abandon()
    made.close()
    with pytest.raises(WorkerError, match="closed"):
        made.submit(*job(0))
