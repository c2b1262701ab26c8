"""Soak of the native worker pool: random jobs and aborts from many threads, checked, with memory watched.

    python -m bench.soak [--minutes 10] [--submitters 8] [--threads 2] [--seed 0]

Submitters give one pool jobs of random shapes. Some are abandoned, before or while they run, and their tensors dropped
at once; some belong to regions whose generation is out of date, or moves on while they run. Of a sample one row is
compared with the fp64 oracle. It fails on a wrong result, on a job that misses a long deadline (a deadlock), on an
error of a worker, and when memory grows. Memory is read while everybody rests: what the oracle needs for a moment is
not a leak.
"""

from __future__ import annotations

import argparse
import ctypes as C
import gc
import math
import random
import resource
import statistics
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from hybrid_backend.kernels import cpu, reference
from tests.support import cases

DEADLINE = 120.0
CHECKED = 0.2  # of the results
ROUNDING = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-4}
SHAPES = [  # kv_heads, group, page_size, head_dim, dtype
    (3, 3, 32, 64, torch.bfloat16),
    (8, 4, 32, 128, torch.bfloat16),
    (2, 8, 16, 128, torch.float16),
    (1, 16, 64, 256, torch.bfloat16),
    (4, 1, 128, 96, torch.float32),
    (2, 5, 48, 80, torch.float32),
]
PAGES = 256
ROWS = [1, 1, 2, 3, 8, 17]
LENGTHS = [1, 5, 30, 64]
SAMPLES = 30  # of memory
SPARES = 64  # finished jobs that a pool keeps (pool.cpp)


def resident_mb() -> float:
    """Return the MB of resident memory, after all free memory was given back."""
    gc.collect()
    C.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


class SoakError(Exception):
    """The soak found a fault."""


@dataclass
class Summary:
    """Counts of a soak; ``memory`` is in MB of resident memory at rest, at even intervals."""

    counts: Counter[str] = field(default_factory=Counter)
    memory: list[float] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def growth(self) -> float:
        """Return the MB between the median memory of the last third and that of the first, after the first fifth."""
        settled = self.memory[len(self.memory) // 5 :]
        third = max(1, len(settled) // 3)
        return statistics.median(settled[-third:]) - statistics.median(settled[:third])

    def __str__(self) -> str:
        jobs = self.counts["jobs"]
        told = ", ".join(f"{self.counts[name]} {name}" for name in ("checked", "abandoned", "stale", "freed", "helped"))
        return (
            f"soak: {self.seconds:.0f} s, {jobs} jobs ({jobs / max(self.seconds, 1e-9):.0f}/s), {told}; "
            f"resident memory {self.memory[len(self.memory) // 5]:.0f} -> {self.memory[-1]:.0f} MB, "
            f"grew by {self.growth:+.1f} MB"
        )


class Soak:
    """A run over one pool."""

    def __init__(self, submitters: int = 8, threads: int = 2, seed: int = 0, growth_limit: float = 32.0) -> None:
        """Set up a soak in which memory may grow by ``growth_limit`` MB.

        Allocators take minutes to settle over so many shapes.
        """
        self._submitters = submitters
        self._threads = threads
        self._seed = seed
        self._growth_limit = growth_limit
        rng = torch.Generator().manual_seed(seed)
        self._layers = [
            torch.randn(PAGES, kv_heads, 2, page_size, dim, generator=rng).to(dtype)
            for kv_heads, _, page_size, dim, dtype in SHAPES
        ]
        self._go, self._stop = threading.Event(), threading.Event()
        self._busy = [threading.Lock() for _ in range(submitters)]  # held by a submitter while it has a job
        self._faults: list[str] = []
        self._lock = threading.Lock()
        self.summary = Summary()

    def run(self, seconds: float) -> Summary:
        """Run the soak; SoakError with the first fault if there is one."""
        with cpu.Pool(self._threads) as pool:
            self._fill_spares(pool)
            began = time.monotonic()
            threads = [
                threading.Thread(target=self._submit_jobs, args=(pool, me), daemon=True)
                for me in range(self._submitters)
            ]
            for thread in threads:
                thread.start()
            self._go.set()
            while time.monotonic() - began < seconds and not self._stop.wait(seconds / SAMPLES):
                self.summary.memory.append(self._memory_at_rest())
            self._stop.set()
            until = time.monotonic() + DEADLINE + 30  # beyond the deadline of the jobs
            for thread in threads:
                thread.join(max(0.0, until - time.monotonic()))
                if thread.is_alive():
                    raise SoakError("a submitter hangs")
        self.summary.seconds = time.monotonic() - began
        if self._faults:
            raise SoakError(f"{len(self._faults)} faults, the first: {self._faults[0]}")
        if self.summary.growth > self._growth_limit:
            raise SoakError(f"memory still grows after the warm-up: {self.summary}")
        return self.summary

    def _fill_spares(self, pool: cpu.Pool) -> None:
        """Run the largest job as often as there are buffers, which finished jobs keep for the next ones."""
        rows, k = max(ROWS), max(LENGTHS)
        for layer, (kv_heads, group, _, dim, dtype) in zip(self._layers, SHAPES, strict=True):
            ids = torch.arange(k).expand(rows, kv_heads, k).contiguous()
            q = torch.zeros(rows, kv_heads * group, dim, dtype=dtype)
            pool.pause()
            tickets = [pool.submit(q, layer, ids, torch.ones_like(ids), 1.0) for _ in range(SPARES)]
            pool.resume()
            for ticket in tickets:
                ticket.wait(DEADLINE)

    def _memory_at_rest(self) -> float:
        """MB, between two jobs of every submitter.

        Raises:
            SoakError: a submitter does not come to rest.
        """
        self._go.clear()
        for lock in self._busy:
            if not lock.acquire(timeout=DEADLINE + 30):
                raise SoakError("a submitter hangs")
        resident = resident_mb()
        for lock in self._busy:
            lock.release()
        self._go.set()
        return resident

    def _submit_jobs(self, pool: cpu.Pool, me: int) -> None:
        dice = random.Random(f"{self._seed}.{me}")
        rng = torch.Generator().manual_seed(1000 * self._seed + me)
        counts: Counter[str] = Counter()
        try:
            while not self._stop.is_set():
                self._go.wait()
                with self._busy[me]:
                    self._one_job(pool, dice, rng, counts)
        except Exception as error:
            self._fault(f"{type(error).__name__}: {error}")
        with self._lock:
            self.summary.counts += counts

    def _one_job(self, pool: cpu.Pool, dice: random.Random, rng: torch.Generator, counts: Counter[str]) -> None:
        which = dice.randrange(len(SHAPES))
        kv_heads, group, page_size, dim, dtype = SHAPES[which]
        rows, k = dice.choice(ROWS), dice.choice(LENGTHS)
        ids, valid = cases.page_lists(rows, dice.choice([1, kv_heads]), k, PAGES, page_size, rng)
        q = torch.randn(rows, kv_heads * group, dim, generator=rng).to(dtype)
        counts["jobs"] += 1
        # What the job's owners do: nothing, be gone from the start, go while it runs.
        fate = dice.choices(["none", "live", "stale", "freed"], [4, 2, 1, 1])[0]
        owners: dict[str, Tensor] = {}
        if fate != "none":
            current = torch.full((rows + 2,), 7)
            generations = torch.full((rows,), 6 if fate == "stale" else 7)
            owners = {"requests": torch.arange(rows) + 1, "generations": generations, "current": current}
        ticket = pool.submit(q, self._layers[which], ids, valid, dim**-0.5, what=f"shape {which}", **owners)
        if fate == "freed":
            owners["current"] += 1
        counts[fate] += 1
        if dice.random() < 0.2:
            if dice.random() < 0.5:
                time.sleep(dice.random() * 1e-3)  # perhaps it runs by now
            ticket.abandon()
            counts["abandoned"] += 1
            return
        if dice.random() < 0.05:
            return  # forgotten: its finalizer abandons it
        helps = dice.random() < 0.3
        counts["helped"] += helps
        out, lse = ticket.wait(DEADLINE, help=helps)
        if fate == "stale" and not bool((lse == -math.inf).all() and (out == 0).all()):
            self._fault(f"a stale row of shape {which} was computed")
        if dice.random() < CHECKED:
            counts["checked"] += 1
            self._check(which, q, ids, valid, out, lse, dice.randrange(rows), fate)

    def _check(
        self, which: int, q: Tensor, ids: Tensor, valid: Tensor, out: Tensor, lse: Tensor, row: int, fate: str
    ) -> None:
        """One row against the oracle; KV heads of a row that was freed while it ran are whole or empty."""
        kv_heads, group, _, dim, dtype = SHAPES[which]
        part = slice(row, row + 1)
        right, right_lse = reference.paged_attention(q[part], self._layers[which], ids[part], valid[part], dim**-0.5)
        for head in range(kv_heads):
            mine = slice(head * group, (head + 1) * group)
            if fate in ("stale", "freed") and bool((lse[row, mine] == -math.inf).all() and (out[row, mine] == 0).all()):
                continue
            error = cases.relative_error(out[row, mine], right[0, mine])
            off = (lse[row, mine].double() - right_lse[0, mine]).nan_to_num(0.0).abs().max()
            same_empty = bool(((lse[row, mine] == -math.inf) == (right_lse[0, mine] == -math.inf)).all())
            if error > ROUNDING[dtype] or off > 1e-3 or not same_empty:
                self._fault(f"shape {which}, row {row}, KV head {head}: wrong by {error:.2g}, its LSE by {off:.2g}")

    def _fault(self, text: str) -> None:
        with self._lock:
            self._faults.append(text)
        self._stop.set()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--submitters", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(Soak(options.submitters, options.threads, options.seed).run(60 * options.minutes))


if __name__ == "__main__":
    main()
