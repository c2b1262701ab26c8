"""What all pools of workers promise of a ticket, and where worker threads run."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from hybrid_backend.attention.partial import PageList, Partial
from hybrid_backend.config import WorkersConfig
from hybrid_backend.errors import ConfigError, DeadlineError, WorkerError
from hybrid_backend.kernels import cpu, reference
from hybrid_backend.workers import NativePool, Ticket, WorkerPool, make_pool, resolve_kernel
from hybrid_backend.workers.cpus import Topology
from hybrid_backend.workers.ipex import IpexPool
from hybrid_backend.workers.pool import TorchPool
from tests.support import cases

CPUS = sorted(os.sched_getaffinity(0))
IPEX_STAND_IN = [sys.executable, str(Path(__file__).with_name("ipex_stand_in.py"))]

Job = tuple[Tensor, Tensor, PageList, float]


class Held(NamedTuple):
    """A pool, and a context in which it answers nothing."""

    pool: WorkerPool
    hold: Callable[[], AbstractContextManager[None]]


def native() -> Held:
    pool = NativePool(2, CPUS)

    @contextmanager
    def hold() -> Iterator[None]:
        pool.native.pause()
        try:
            yield
        finally:
            pool.native.resume()

    return Held(pool, hold)


def torch_threads() -> Held:
    gate, kernel = threading.Event(), resolve_kernel("torch")
    gate.set()

    def run(q: Tensor, layer: Tensor, pages: PageList, scale: float) -> Partial:
        gate.wait()
        return kernel(q, layer, pages, scale)

    @contextmanager
    def hold() -> Iterator[None]:
        gate.clear()
        try:
            yield
        finally:
            gate.set()

    return Held(TorchPool(2, CPUS, run), hold)


def ipex() -> Held:
    pool = IpexPool(2, CPUS, IPEX_STAND_IN)

    @contextmanager
    def hold() -> Iterator[None]:
        os.kill(pool.process_id, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pool.process_id, signal.SIGCONT)

    return Held(pool, hold)


POOLS: dict[str, Callable[[], Held]] = {
    "native": native,
    "torch": torch_threads,
    "ipex-stand-in": ipex,
}


@pytest.fixture(scope="module", params=POOLS)
def held(request: pytest.FixtureRequest) -> Iterator[Held]:
    if request.param == "native" and not cpu.available():
        pytest.skip(str(cpu.why_unavailable()))
    made = POOLS[request.param]()
    yield made
    made.pool.close()


def job(seed: int) -> Job:
    rng = torch.Generator().manual_seed(seed)
    layer = torch.randn(40, 2, 2, 32, 64, generator=rng)
    q = torch.randn(3, 6, 64, generator=rng)
    return q, layer, PageList(*cases.page_lists(3, 1, 20, 40, 32, rng)), 0.125


def assert_right(found: Partial, asked: Job) -> None:
    q, layer, pages, scale = asked
    out, lse = reference.paged_attention(q, layer, pages.ids, pages.valid, scale)
    assert cases.relative_error(found.out, out) < 1e-5 and torch.allclose(found.lse.double(), lse, atol=2e-5)


def soon_done(ticket: Ticket) -> bool:
    until = time.monotonic() + 30
    while not ticket.done() and time.monotonic() < until:
        time.sleep(1e-3)
    return ticket.done()


def test_a_ticket_says_whether_its_answer_is_there_and_keeps_it(held: Held) -> None:
    asked = job(0)
    with held.hold():
        ticket = held.pool.submit(*asked, "layer 1")
        for _ in range(20):
            assert not ticket.done()
            time.sleep(1e-3)
    assert soon_done(ticket) and ticket.done()
    for _ in range(2):
        assert_right(ticket.wait(0), asked)
        assert ticket.done()


def test_a_failed_job_is_done_and_its_error_stays(held: Held) -> None:
    q, layer, (ids, valid), scale = job(1)
    ids[0, 0, 0], valid[0, 0, 0] = 40, 1
    ticket = held.pool.submit(q, layer, PageList(ids, valid), scale, "layer 3")
    assert soon_done(ticket)
    for _ in range(2):
        with pytest.raises(WorkerError, match="failed on layer 3: "):
            ticket.wait(0)
        assert ticket.done()


@pytest.mark.parametrize("how", ["abandoned", "waited for too long"])
def test_a_job_that_was_given_up_is_done_without_an_answer(held: Held, how: str) -> None:
    with held.hold():
        ticket = held.pool.submit(*job(2), "layer 2")
        if how == "abandoned":
            ticket.abandon()
        else:
            with pytest.raises(DeadlineError, match=r"layer 2 within workers\.deadline_seconds=0\.01"):
                ticket.wait(0.01)
        assert ticket.done()
        with pytest.raises(WorkerError, match="layer 2 was abandoned"):
            ticket.wait(30)
        assert ticket.done()
    with pytest.raises(WorkerError, match="layer 2 was abandoned"):
        ticket.wait(30)
    asked = job(3)
    assert_right(held.pool.submit(*asked, "layer 2").wait(30), asked)


@pytest.mark.skipif(not Path("/sys/devices/system/node/node0").exists(), reason="this kernel shows no NUMA nodes")
def test_workers_stay_on_the_numa_node_that_was_asked_for() -> None:
    allowed = os.sched_getaffinity(0) | os.sched_getaffinity(os.getppid())
    node, cpus = next((node, cpus) for node, cpus in Topology.read().nodes.items() if allowed & cpus)
    pool = make_pool(WorkersConfig(numa=node))
    try:
        assert pool.cpus and set(pool.cpus) <= allowed & cpus
    finally:
        pool.close()


def test_a_numa_node_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"workers\.numa: .* 4711"):
        make_pool(WorkersConfig(numa=4711))


def test_threads_that_start_after_the_workers_have_the_engines_openmp_threads() -> None:
    before = torch.get_num_threads()
    torch._C.set_num_threads(2)
    pool = TorchPool(1, sorted(os.sched_getaffinity(0)), resolve_kernel("torch"))
    one = torch.zeros(1, 1, 1, dtype=torch.int64)
    pool.submit(torch.randn(1, 2, 16), torch.randn(2, 1, 2, 16, 16), PageList(one, one + 1), 0.1, "x").wait(5)
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    pool.close()
    torch._C.set_num_threads(before)
    assert found == [2]
