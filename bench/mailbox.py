"""The CPU's side of a GPU's questions: what a mailbox costs beside the attention, and how soon a worker begins.

    python -m bench.mailbox [--rows 284] [--rounds 2000] [--gap 300]

A question has as many rows as the captured graph, most of them empty; the device is played by this thread. A worker's
latency is from before a partial is submitted until its first worker has begun, with a pause before as between two
layers of a GPU's step: a pool that sleeps at once, and one that spins first. Who asks and who answers have a CPU each:
on one they would wait for each other. Times are of this machine in this minute: run it several times, alone.
"""

from __future__ import annotations

import argparse
import ctypes as C
import os
import time
from collections.abc import Sequence

import torch

from hybrid_backend.kernels import cpu

HEADS, KV_HEADS, DIM, PAGE, PAGES, CAPACITY = 40, 8, 128, 32, 512, 64
DEADLINE = 60.0


def percentiles(seconds: Sequence[float]) -> str:
    """Write the 1st, 50th and 99th percentile in microseconds."""
    ordered = sorted(seconds)
    return " ".join(f"{ordered[int(part * (len(ordered) - 1))] * 1e6:9.1f}" for part in (0.01, 0.5, 0.99))


def two_cpus() -> list[int]:
    """Return the CPUs of this process, at least two: one to ask from, one to answer on."""
    found = sorted(os.sched_getaffinity(0))
    return found if len(found) > 1 else found * 2


def wait_for(seconds: float) -> None:
    """Wait without giving the core away."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


def flag(numbers: torch.Tensor) -> C.c_uint32:
    """Return a tensor's first element as memory: reading the tensor costs more than some answers."""
    return C.c_uint32.from_address(numbers.data_ptr())


def questions(
    cpus: list[int], layer: torch.Tensor, rows: int, live: int, pages: int, rounds: int, gap: float
) -> list[float]:
    """Return the seconds from question to answer, where ``live`` rows of a question attend ``pages`` pages each."""
    current, queries = torch.zeros(rows, dtype=torch.int64), cpu.QueryShape(HEADS, layer.dtype)
    with (
        cpu.Pool(1, cpus[:1], server_cpu=cpus[-1]) as pool,
        cpu.Mailboxes(pool, {0: layer}, queries, rows, {0: (1, CAPACITY)}, DIM**-0.5, current=current) as mail,
    ):
        box = mail.layers[0]
        box.q.normal_()
        box.ids.copy_(torch.randint(PAGES, box.ids.shape))
        box.counts.fill_(pages)
        mail.requests.copy_(torch.arange(rows))
        mail.generations[live:] = -1
        asked, answered, taken = flag(box.asked_flag), flag(box.answered), []
        for number in range(1, rounds + 1):
            wait_for(gap)
            began = time.perf_counter()
            asked.value = number
            while answered.value != number:
                if time.perf_counter() > began + DEADLINE:
                    raise SystemExit("no answer")
            taken.append(time.perf_counter() - began)
        if (why := mail.failure(rounds)) is not None:
            raise SystemExit(why)
        return taken[rounds // 10 :]


def beginnings(cpus: list[int], layer: torch.Tensor, spin: float, rounds: int, gap: float) -> list[float]:
    """Return the seconds from submitting a small partial until a worker has begun with it."""
    q = torch.randn(1, HEADS, DIM).to(layer.dtype)
    ids, valid = torch.zeros(1, 1, 1, dtype=torch.int64), torch.full((1, 1, 1), PAGE)
    taken = []
    with cpu.Pool(1, cpus[-1:], spin_seconds=spin) as pool:
        for _ in range(rounds):
            wait_for(gap)
            began = time.perf_counter()
            ticket = pool.submit(q, layer, ids, valid, DIM**-0.5)
            ticket.wait(DEADLINE)
            taken.append(ticket.span()[0] - began)
    return taken[rounds // 10 :]


def main() -> None:
    parser = argparse.ArgumentParser(description="What a mailbox costs, and how soon workers begin.")
    parser.add_argument("--rows", type=int, default=284, help="of a question")
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--gap", type=float, default=300.0, help="microseconds between two jobs")
    options = parser.parse_args()
    rounds, gap, every = options.rounds, options.gap * 1e-6, two_cpus()
    layer = torch.randn(PAGES, KV_HEADS, 2, PAGE, DIM).bfloat16()
    print(f"microseconds of {rounds} rounds {options.gap:g} us apart: 1st, 50th and 99th percentile")
    os.sched_setaffinity(0, every[:1])
    for live, pages in ((0, 1), (4, 1), (4, 8), (options.rows, 1)):
        taken = questions(every, layer, options.rows, live, pages, rounds, gap)
        print(f"question of {options.rows} rows, {live:3} with {pages} pages {percentiles(taken)}")
    for spin in (0.0, 1e-3):
        taken = beginnings(every, layer, spin, rounds, gap)
        print(f"first worker begins, spinning {spin * 1e3:g} ms {percentiles(taken)}")


if __name__ == "__main__":
    main()
