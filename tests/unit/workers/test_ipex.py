"""The IPEX worker: the pools' contract, and that its process never outlives its owner.

Everything runs twice: with IPEX where ``HYBRID_IPEX_PYTHON`` names an environment that has it (`make ipex`), and
everywhere with a stand-in for IPEX's operator in the same child program.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hybrid_backend.attention.partial import PageList, Partial
from hybrid_backend.config import WorkersConfig
from hybrid_backend.errors import ConfigError, WorkerError
from hybrid_backend.kernels import reference
from hybrid_backend.workers import Owners, kernel_names, make_pool, resolve_kernel
from hybrid_backend.workers.ipex import IpexPool
from tests.support import cases

pytestmark = pytest.mark.slow

STAND_IN = [sys.executable, str(Path(__file__).with_name("ipex_stand_in.py"))]
NO_IPEX = "HYBRID_IPEX_PYTHON is not set: run `make ipex` and set it to .venv-ipex/bin/python"
CPUS = sorted(os.sched_getaffinity(0))
SCALE = 0.125

Start = Callable[[], IpexPool]


def command_of(kind: str) -> list[str] | None:
    if kind == "ipex" and not os.environ.get("HYBRID_IPEX_PYTHON"):
        pytest.skip(NO_IPEX)
    return STAND_IN if kind == "stand-in" else None


@pytest.fixture(scope="module", params=["stand-in", "ipex"])
def start(request: pytest.FixtureRequest) -> Start:
    """Starts a pool of two threads."""
    command = command_of(request.param)
    return lambda: IpexPool(2, CPUS, command)


@pytest.fixture(scope="module")
def pool(start: Start) -> Iterator[IpexPool]:
    made = start()
    yield made
    made.close()


def job(
    seed: int,
    rows: int = 3,
    k: int = 20,
    per_head: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    page_size: int = 32,
    dim: int = 64,
) -> tuple[Tensor, Tensor, PageList, float]:
    rng = torch.Generator().manual_seed(seed)
    layer = torch.randn(40, 2, 2, page_size, dim, generator=rng).to(dtype)
    q = torch.randn(rows, 6, dim, generator=rng).to(dtype)
    ids, valid = cases.page_lists(rows, 2 if per_head else 1, k, 40, page_size, rng)
    cases.spoil_beyond(layer, ids, valid)
    return q, layer, PageList(ids, valid), SCALE


def assert_right(result: Partial, arguments: tuple[Tensor, Tensor, PageList, float]) -> None:
    q, layer, pages, scale = arguments
    out, lse = reference.paged_attention(q, layer, pages.ids, pages.valid, scale)
    assert result.out.dtype == result.lse.dtype == torch.float32
    rounding = {torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float32: 1e-5}[q.dtype]
    assert cases.relative_error(result.out, out) < rounding
    empty = lse == float("-inf")
    assert (result.lse[empty] == float("-inf")).all() and (result.out[empty] == 0).all()
    # The LSE is fp32 whatever the cache holds.
    assert torch.allclose(result.lse[~empty].double(), lse[~empty], atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize(("page_size", "dim"), [(16, 64), (32, 128), (48, 96)])
def test_equals_the_oracle(pool: IpexPool, dtype: torch.dtype, per_head: bool, page_size: int, dim: int) -> None:
    for seed in range(3):
        arguments = job(seed, 4, per_head=per_head, dtype=dtype, page_size=page_size, dim=dim)
        ticket = pool.submit(*arguments, "layer 1")
        assert_right(ticket.wait(30), arguments)
        assert 0 < ticket.submit_time <= time.perf_counter()
        assert_right(ticket.wait(0), arguments)  # waiting twice is fine


def test_empty_jobs(pool: IpexPool) -> None:
    q, layer, (ids, valid), scale = job(0)
    out, lse = pool.submit(q, layer, PageList(ids, torch.zeros_like(valid)), scale, "a job").wait(10)
    assert out.shape == q.shape and (out == 0).all() and (lse == float("-inf")).all()
    out, _ = pool.submit(q[:0], layer, PageList(ids[:0], valid[:0]), scale, "a job").wait(10)
    assert out.shape == (0, 6, 64)
    out, _ = pool.submit(q, layer, PageList(ids[:, :, :0], valid[:, :, :0]), scale, "a job").wait(10)
    assert (out == 0).all()


def test_several_jobs_at_once_of_growing_size(pool: IpexPool) -> None:
    jobs = [job(seed, rows=1 + 5 * seed, k=1 + 3 * seed) for seed in range(8)]
    tickets = [pool.submit(*arguments, f"job {i}") for i, arguments in enumerate(jobs)]
    for ticket, arguments in reversed(list(zip(tickets, jobs, strict=True))):
        assert_right(ticket.wait(60), arguments)


def test_several_submitters(pool: IpexPool) -> None:
    wrong: list[BaseException] = []

    def submitter(me: int) -> None:
        try:
            for turn in range(5):
                arguments = job(10 * me + turn, rows=1 + me)
                ticket = pool.submit(*arguments, f"{me}.{turn}")
                if turn % 3 == 1:
                    ticket.abandon()
                else:
                    assert_right(ticket.wait(60), arguments)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=submitter, args=(me,)) for me in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    assert not wrong


def test_stale_rows_are_dropped(pool: IpexPool) -> None:
    q, layer, _, scale = job(4)
    layer = layer.nan_to_num()
    pages = PageList(torch.tensor([[[5, 1]], [[2, 3]], [[0, 7]]]), torch.tensor([[[32, 9]]]).expand(3, 1, 2))
    arguments = (q, layer, pages, scale)
    owners = Owners(torch.tensor([3, 0, 1]), torch.tensor([8, 4, 6]), torch.tensor([5, 6, 6, 8]))
    out, lse = pool.submit(*arguments, "a job", owners).wait(30)
    assert (out[1] == 0).all() and (lse[1] == float("-inf")).all()
    for row in (0, 2):
        part = slice(row, row + 1)
        mine = (q[part], layer, PageList(pages.ids[part], pages.valid[part]), scale)
        assert_right(Partial(out[part], lse[part]), mine)


def test_freed_while_the_process_works(pool: IpexPool) -> None:
    """The generation moves on after the pages were staged."""
    zero = torch.zeros(3, dtype=torch.int64)
    owners = Owners(torch.arange(3), zero, zero.clone())
    os.kill(pool.process_id, signal.SIGSTOP)
    try:
        ticket = pool.submit(*job(5), "a job", owners)
        time.sleep(0.3)
        owners.current.add_(1)
    finally:
        os.kill(pool.process_id, signal.SIGCONT)
    out, lse = ticket.wait(30)
    assert (out == 0).all() and (lse == float("-inf")).all()


def test_errors_reach_the_waiter(pool: IpexPool) -> None:
    q, layer, (ids, valid), scale = job(3)
    bad = PageList(ids.clone(), valid.clone())
    bad.ids[0, 0, 0], bad.valid[0, 0, 0] = 40, 1
    with pytest.raises(WorkerError, match="layer 3: page id 40 is beyond the cache's 40 pages"):
        pool.submit(q, layer, bad, scale, "layer 3").wait(30)
    ragged = PageList(torch.tensor([[[0, 1]]]), torch.tensor([[[5, 32]]]))
    with pytest.raises(WorkerError, match="only the last page of a list may be partly filled"):
        pool.submit(q[:1], layer, ragged, scale, "layer 3").wait(30)
    with pytest.raises(ValueError, match="do not fit K and V"):
        pool.submit(q, layer.new_zeros(4, 2, 2, 32, 128), PageList(ids, valid), scale, "layer 3")
    arguments = job(3)
    assert_right(pool.submit(*arguments, "a job").wait(30), arguments)


def test_a_dead_process_fails_its_jobs(start: Start) -> None:
    made = start()
    try:
        os.kill(made.process_id, signal.SIGSTOP)
        running = made.submit(*job(1), "layer 1")
        time.sleep(0.2)
        os.kill(made.process_id, signal.SIGKILL)
        with pytest.raises(WorkerError, match="layer 1: the IPEX process was ended by signal 9"):
            running.wait(30)
        for _ in range(5):
            with pytest.raises(WorkerError, match="layer 2: the IPEX process was ended by signal 9"):
                made.submit(*job(2), "layer 2").wait(30)
    finally:
        made.close()


def test_close_leaves_nothing_behind_even_of_a_process_that_hangs(start: Start) -> None:
    files, maps = staging_files(), staging_maps()
    made = start()
    arguments = job(1)
    assert_right(made.submit(*arguments, "a job").wait(30), arguments)
    assert len(staging_files()) > len(files) and len(staging_maps()) > len(maps)
    os.kill(made.process_id, signal.SIGSTOP)
    tickets = [made.submit(*job(seed), "layer 2") for seed in range(5)]
    made.close()
    made.close()
    for ticket in tickets:
        with pytest.raises(WorkerError, match="layer 2: the worker was closed"):
            ticket.wait(0)
    with pytest.raises(WorkerError, match="closed"):
        made.submit(*arguments, "a job")
    assert not is_running(made.process_id)
    gc.collect()
    assert (staging_files(), staging_maps()) == (files, maps)


@pytest.mark.parametrize("kind", ["stand-in", "ipex"])
def test_the_process_dies_with_its_parent(kind: str) -> None:
    program = (
        "import os, signal, sys\n"
        "from hybrid_backend.workers.ipex import IpexPool\n"
        f"pool = IpexPool(1, {CPUS}, {command_of(kind)})\n"
        "if os.fork() == 0:\n"  # holds the parent's end of the socket
        "    signal.pause()\n"
        "print(pool.process_id, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    run = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[3],
        start_new_session=True,
    )
    assert run.stdout is not None
    child = int(run.stdout.readline())
    run.wait(30)
    try:
        deadline = time.monotonic() + 10
        while is_running(child):
            assert time.monotonic() < deadline
            time.sleep(0.1)
    finally:
        os.killpg(run.pid, signal.SIGKILL)


def test_the_environment_must_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "ipex" not in kernel_names()  # those can be called in this process
    monkeypatch.delenv("HYBRID_IPEX_PYTHON", raising=False)
    for ask in (lambda: resolve_kernel("ipex"), lambda: make_pool(WorkersConfig(kernel="ipex"))):
        with pytest.raises(ConfigError, match=r"make ipex.*HYBRID_IPEX_PYTHON"):
            ask()
    monkeypatch.setenv("HYBRID_IPEX_PYTHON", "/nowhere/bin/python")
    with pytest.raises(ConfigError, match="HYBRID_IPEX_PYTHON=/nowhere/bin/python is not a program"):
        resolve_kernel("ipex")


def test_an_environment_without_ipex_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRID_IPEX_PYTHON", sys.executable)
    resolve_kernel("ipex")  # there is a Python; what is in it shows when it starts
    before = staging_files()
    with pytest.raises(ConfigError, match=r"does not start .*No module named 'intel_extension_for_pytorch'.*make ipex"):
        make_pool(WorkersConfig(kernel="ipex"))
    assert staging_files() == before


def staging_files() -> list[str]:
    """Descriptors of this process that are staging areas."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(entry)
        except FileNotFoundError:
            continue
        if "hybrid-ipex" in target:
            found.append(entry.name)
    return found


def staging_maps() -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "hybrid-ipex" in line]


def is_running(pid: int) -> bool:
    """Whether a process exists and is not merely waiting to be collected."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
