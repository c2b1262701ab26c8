"""Rows whose KV is not on the device tier: each asks the CPU workers in every layer, and waits for the answer there, or
is *parked*: it rides along in the engine's batch for nothing until the layer comes round in a later step (asynchronous
overlap: APEX, arXiv 2506.03296, section 3.3).

Engines run the layers of a step in lockstep, so a row cannot wait inside one, but from one step to the next it can. At
the input of layer l its hidden state and residual are saved; its K and V are appended, its question is asked, its
output is 0, and what follows in this step for it is void. When the next step comes to layer l, the pair is restored,
attention returns the answer, and the row goes on to layer l + 1, where it parks again. If the answer is not there, the
row is void for another step. A row yields its token in the step in which it gets through the last layer; until then the
engine is told that it is unfinished. Rows that wait inside the layers go through all of them in one step.

What a row does is decided by data on the device tier, so that a CUDA graph holds it.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from hybrid_backend.batch import DecodeRows, sent
from hybrid_backend.config import HybridConfig
from hybrid_backend.errors import DeadlineError, WorkerError
from hybrid_backend.kernels.cpu import STEPS
from hybrid_backend.kernels.operations import Counters
from hybrid_backend.methods.apex.questions import Answers, Questions
from hybrid_backend.tiers import Tiers
from hybrid_backend.tiers.state import StepInputs

_NOWHERE, _FAILED = -1, -2  # instead of a layer: not parked; its answer failed, and it goes nowhere any more
_WAITED = Counters._fields.index("waited")
_COUNTED = ("resident_pages", "missing_pages", "resident_tokens", "missing_tokens")
assert Counters._fields[: len(_COUNTED)] == _COUNTED


def parking_bytes(rows: int, hidden: int) -> int:
    """What `Parking` keeps on the device tier for so many requests."""
    return rows * (7 * 4 + 5 * 8) + STEPS * rows * 2 * 4 + (rows + 1) * 2 * hidden * 4


class Parking:
    """The rows of a step that are on the CPU. Row buffers are of as many rows as requests may run at once; ``hidden``:
    width of the decoder layers' input, 0: no row ever parks."""

    def __init__(self, config: HybridConfig, tiers: Tiers, questions: Questions, hidden: int) -> None:
        rows, device = tiers.frames.requests, tiers.device
        self.questions = questions
        self.late_rows = 0  # of steps in which an answer was looked for and not there, since start
        self.is_idle = True  # no row of the open step is on the CPU
        self.may_park = False  # rows of the open step may park, or are parked
        self._deadline, self._page = config.workers.deadline_seconds, config.page_size
        self._columns = torch.zeros(7, rows, dtype=torch.int32, device=device)
        self.on_cpu, self.parks, self.parked, self.live, self.whole, self.tail, self.held = self._columns
        self._wide = torch.zeros(1 + len(_COUNTED), rows, dtype=torch.int64, device=device)
        self._slots, self._counts = self._wide[0], self._wide[1:]
        # Of each request, and one that nobody reads: what decoder layers begin with. fp32 holds every dtype's values.
        self._saved = torch.zeros(rows + 1, 2, hidden, device=device)
        # (live, parked) of each row after the last layer, of the last steps: the host may be behind.
        self._ended = torch.zeros(STEPS, rows, 2, dtype=torch.int32, device=device)
        self._published = torch.zeros_like(self._ended, device="cpu")
        if device.type == "cuda":
            self._published = self._published.pin_memory()
        self._asked = self._wanted = torch.zeros(0, dtype=torch.bool)
        self._layer_of: dict[int, int] = {}  # by request, where it is parked
        self._since: dict[int, float] = {}  # by request, when it was parked there

    @property
    def device_bytes(self) -> int:
        buffers = self._columns.nbytes + self._wide.nbytes + self._saved.nbytes + self._ended.nbytes
        return buffers + self.questions.device_bytes

    @property
    def host_bytes(self) -> int:
        return self.questions.host_bytes

    @property
    def parked_rows(self) -> int:
        """Requests that wait in a layer."""
        return len(self._layer_of)

    def gauges(self) -> dict[str, float]:
        return {"hybrid_parked_rows": self.parked_rows, "hybrid_late_rows": self.late_rows}

    def is_settled(self, request: int) -> bool:
        """Whether the request is between two tokens."""
        return request not in self._layer_of

    # --- between steps, on the host ---

    def begin(self, rows: DecodeRows, indices: list[int], on_cpu: Tensor, parks: bool) -> None:
        """``on_cpu``: ``[rows]`` bool of the host; ``parks``: those rows overlap, else they wait inside the layers."""
        count, capacity = rows.count, self._columns.shape[1]
        self.is_idle = not bool(on_cpu.any())
        whole = (rows.seq_lens - 1) // self._page  # the growing page is the device's
        tail = rows.seq_lens - whole * self._page
        parked = torch.tensor([self._layer_of.get(index, _NOWHERE) for index in indices])
        self.may_park = bool((on_cpu * parks).any() or (parked != _NOWHERE).any())
        columns = torch.zeros(7, capacity, dtype=torch.int32)
        columns[:, :count] = torch.stack(
            [on_cpu.long(), on_cpu.long() * parks, parked, (parked == _NOWHERE).long(), on_cpu * whole, on_cpu * tail,
             ~on_cpu * rows.seq_lens]
        ).int()  # fmt: skip
        wide = torch.zeros(len(self._wide), capacity, dtype=torch.int64)
        wide[0] = capacity
        wide[:, :count] = torch.stack([torch.tensor(indices), torch.ones_like(whole), whole, tail, whole * self._page])
        self.questions.begin()
        self._columns.copy_(sent(columns, self._columns.device))
        self._wide.copy_(sent(wide, self._wide.device))

    def idle(self) -> None:
        """All rows are padding."""
        self._columns.zero_()
        self._wide.zero_()
        self._slots.fill_(self._columns.shape[1])

    def unfinished(self, number: int, rows: DecodeRows, indices: list[int]) -> list[int]:
        """Rows of the step of this number, in which some `may_park`, that yield no token. Waits for the device."""
        if self._columns.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        found = []
        for r, (live, parked) in enumerate(self._published[number % STEPS, : rows.count].tolist()):
            index = indices[r]
            if live:
                self._layer_of.pop(index, None)
                continue
            found.append(r)
            if self._layer_of.get(index) == parked:
                self.late_rows += 1
            else:
                self._layer_of[index], self._since[index] = parked, time.monotonic()
        return found

    def failures(self, number: int, indices: list[int | None]) -> dict[int, WorkerError]:
        """Rows of the step of this number, which the device has passed, that waited for longer than any may, or whose
        question failed. ``indices``: of the rows' requests, None: it is gone, but not what it wrote."""
        found: dict[int, WorkerError] = {}
        for r, (live, parked) in enumerate(self._published[number % STEPS, : len(indices)].tolist()):
            if live:
                continue
            request, now = indices[r], time.monotonic()
            waits = 0.0 if request is None else now - self._since.get(request, now)
            if parked == _FAILED:
                gone = WorkerError("a CPU worker failed on a question of a request that is gone")
                found[r] = gone if request is None else self.questions.failure(request)
            elif parked == _NOWHERE or waits > self._deadline:
                found[r] = DeadlineError(
                    f"CPU workers did not answer a request on the CPU within workers.deadline_seconds={self._deadline}"
                )
        return found

    def release(self, request: int) -> None:
        self._layer_of.pop(request, None)
        self._since.pop(request, None)
        self.questions.forget(request)

    def close(self) -> None:
        self.questions.close()

    # --- the step, layer by layer ---

    def layer_input(self, layer: int, rows: DecodeRows, hidden: Tensor, residual: Tensor | None) -> None:
        """Restore the rows that parked at this layer in an earlier step, save those that park there now. ``hidden``,
        ``residual``: ``[tokens, hidden]`` of the batch, changed in place."""
        count = rows.count
        if not self._saved.shape[2]:
            return  # no row ever parks
        restores = (self.parked[:count] == layer)[:, None]
        saves = (self.live[:count] * self.parks[:count] > 0)[:, None]
        slots = self._slots[:count]
        saved = self._saved[slots]
        parts = []
        for part, x in enumerate((hidden, residual)):
            if x is None:
                parts.append(saved[:, part])
                continue
            mine = rows.gather(x)
            parts.append(torch.where(saves, mine.float(), saved[:, part]))
            restored = torch.where(restores, saved[:, part].to(x.dtype), mine)
            if rows.whole_batch:
                x[:count] = restored
            else:
                x.index_copy_(0, rows.tokens.to(x.device), restored)
        self._saved.index_copy_(0, slots, torch.stack(parts, 1))

    def stored(self, pages: Tensor) -> Tensor:
        """``[rows]`` int32 pages of the rows' tokens, -1 in void rows: what they computed must never be stored."""
        return torch.where(self.live[: len(pages)] > 0, pages, -1)

    def ask(self, layer: int, q: Tensor, now: StepInputs) -> None:
        """The rows on the CPU that came to this layer ask. ``q``: ``[rows, heads, head_dim]``."""
        count = len(q)
        self._asked = self.live[:count] * self.on_cpu[:count] > 0
        self._wanted = self._asked & (self.parks[:count] == 0) | (self.parked[:count] == layer)
        self.questions.ask(layer, q, self._asked, self.whole[:count], now)

    def take(self, layer: int, now: StepInputs, counters: Tensor) -> Answers:
        """Answers of those that wait, and of those that parked here in an earlier step. The rows that have theirs go on
        with the next layer."""
        count = len(self._asked)
        parks, on_cpu, parked, live = (x[:count] for x in (self.parks, self.on_cpu, self.parked, self.live))
        answers = self.questions.take(layer, self._wanted, self._wanted & (parks == 0), now)
        ready = answers.ready.int()
        stays = torch.where(self._asked & (parks > 0), layer, torch.where(answers.failed, _FAILED, parked))
        parked.copy_(torch.where(answers.ready, _NOWHERE, stays))
        live.copy_(torch.where(on_cpu > 0, ready, live))
        counters[: len(_COUNTED)] += (self._counts[:, :count] * ready).sum(1)
        counters[_WAITED] += answers.waited
        return answers

    def end(self, number: Tensor) -> None:
        """After the last layer: where the rows are. ``number``: `StepInputs.number`."""
        ended = torch.stack([self.live, self.parked], 1)[None]
        self._ended.index_copy_(0, (number % STEPS).long(), ended)
        self._published.copy_(self._ended, non_blocking=True)
