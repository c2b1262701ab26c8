"""Event-driven simulation of one device's engine: vLLM's scheduler over the prices of `StepPrices`.

A step has at most ``chunk_tokens`` tokens. Running requests come first, in the order of their admission, then waiting
ones. A waiting request is admitted when the free blocks hold its whole prompt (vLLM 0.32, v1/core/sched/scheduler.py,
``scheduler_reserve_full_isl``). When blocks run out, the request that was admitted last gives up its blocks and
computes its tokens again later. The prefix cache is not simulated: all prompts differ.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

from hybrid_backend.tools.plan.traffic.prices import StepParts, StepPrices, bucket_end
from hybrid_backend.tools.plan.traffic.prompts import Chunk

MARK = len(StepParts._fields)
"""Place in a request's sums of the seconds in which the first waiting request was refused for lack of memory."""


class Timing(NamedTuple):
    """Times of one request.

    Attributes:
        arrival: second of arrival.
        first_token: second of the first token.
        finish: second of the last token.
        tokens: tokens of the answer.
        first_parts: the `StepParts` of all steps from arrival to first token, then the seconds refused for memory.
        later_parts: the same from the first to the last token.
    """

    arrival: float
    first_token: float
    finish: float
    tokens: int
    first_parts: tuple[float, ...]
    later_parts: tuple[float, ...]

    @property
    def ttft(self) -> float:
        """Seconds from arrival to the first token."""
        return self.first_token - self.arrival

    @property
    def tpot(self) -> float:
        """Mean seconds per token after the first."""
        return (self.finish - self.first_token) / (self.tokens - 1) if self.tokens > 1 else 0.0


@dataclass(frozen=True)
class Run:
    """Result of one simulation.

    Attributes:
        timings: times of all requests, in the order of arrival.
        seconds: second of the last token.
        busy_parts: sums of the parts of all steps.
        idle_seconds: time without any request.
        preemptions: times that a request gave up its blocks.
        most_blocks: most blocks that were taken at once.
        most_running: most requests that ran at once.
    """

    timings: tuple[Timing, ...]
    seconds: float
    busy_parts: StepParts
    idle_seconds: float
    preemptions: int
    most_blocks: int
    most_running: int

    @property
    def tokens_per_s(self) -> float:
        """Tokens of answers per second."""
        return sum(timing.tokens for timing in self.timings) / self.seconds


@dataclass(eq=False)
class _Request:
    number: int
    arrival: float
    prompt: int
    answer: int
    first_sums: tuple[float, ...]
    computed: int = 0
    generated: int = 0
    blocks: int = 0
    resident: int = 0
    first_token: float = 0.0
    token_sums: tuple[float, ...] = ()
    has_frames: bool = False

    @property
    def target(self) -> int:
        """Tokens that must be in the KV cache before the next token is sampled."""
        return self.prompt + self.generated

    @property
    def decodes(self) -> bool:
        return self.generated > 0 and self.target - self.computed == 1


@dataclass
class _Step:
    rows: list[_Request] = field(default_factory=list)
    chunks: list[tuple[_Request, Chunk]] = field(default_factory=list)
    is_refused: bool = False
    has_preempted: bool = False

    @property
    def context(self) -> int:
        """Mean tokens that a decode row attends, its own included."""
        return -(-sum(request.target for request in self.rows) // len(self.rows)) if self.rows else 1


class Engine:
    """Engine of one device, for one simulation."""

    def __init__(self, prices: StepPrices) -> None:
        """Begin without requests."""
        self._prices, self._server = prices, prices.server
        self._blocks_of = cache(self._server.blocks_of)
        self._alone: dict[tuple[int, int], StepParts] = {}
        """Parts of several chunks of a prompt that is computed alone, by its first token and the number of chunks."""
        self._running: list[_Request] = []
        self._waiting: deque[_Request] = deque()
        self._free = self._server.pool_blocks
        self._time = 0.0
        self._sums = [0.0] * (MARK + 1)
        self._idle, self._preemptions, self._most_blocks, self._most_running = 0.0, 0, 0, 0
        self._timings: dict[int, Timing] = {}
        self._may_stop: Callable[[Timing], bool] | None = None
        self._is_stopped = False

    def run(
        self, arrivals: Sequence[float], prompt: int, answer: int, may_stop: Callable[[Timing], bool] | None = None
    ) -> Run:
        """Serve requests of equal lengths, and return their times.

        Args:
            arrivals: second of each request's arrival, in order.
            prompt: tokens of a prompt.
            answer: tokens of an answer.
            may_stop: called with each request that has ended; if it returns True, the simulation ends early, and the
                result has the requests that have ended.

        Raises:
            ValueError: a single request does not fit the server.
        """
        if not self._server.holds(prompt + answer):
            raise ValueError(f"{self._server.method}: the server holds no request of {prompt + answer} tokens")
        upcoming, self._may_stop = deque(enumerate(arrivals)), may_stop
        step_begin, step_sums = 0.0, tuple(self._sums)
        while not self._is_stopped and (upcoming or self._waiting or self._running):
            while upcoming and upcoming[0][1] <= self._time:
                number, arrival = upcoming.popleft()
                sums = self._sums_at(arrival, step_begin, step_sums)
                self._waiting.append(_Request(number, arrival, prompt, answer, sums))
            if not self._waiting and not self._running:
                self._idle += upcoming[0][1] - self._time
                self._time = upcoming[0][1]
                step_begin, step_sums = self._time, tuple(self._sums)
                continue
            step_begin, step_sums = self._time, tuple(self._sums)
            self._do(self._schedule(), upcoming[0][1] if upcoming else None)
        timings = tuple(self._timings[number] for number in sorted(self._timings))
        busy = StepParts(*self._sums[:MARK])
        return Run(timings, self._time, busy, self._idle, self._preemptions, self._most_blocks, self._most_running)

    # --- one step ---

    def _schedule(self) -> _Step:
        """Choose the tokens of a step as vLLM does, and allocate their blocks."""
        step, budget, index = _Step(), self._server.chunk_tokens, 0
        while index < len(self._running) and budget > 0:
            request = self._running[index]
            tokens = min(request.target - request.computed, budget)
            if not self._allocate_or_preempt(request, tokens, step):
                break
            self._add(step, request, tokens)
            budget -= tokens
            index += 1
        while self._waiting and budget > 0 and not step.has_preempted:
            request = self._waiting[0]
            fits = self._blocks_of(request.target) <= self._free
            if not fits or len(self._running) >= self._server.max_requests:
                step.is_refused = True
                break
            self._waiting.popleft()
            self._running.append(request)
            tokens = min(request.target, budget)
            self._allocate(request, tokens)
            self._add(step, request, tokens)
            budget -= tokens
        self._most_running = max(self._most_running, len(self._running))
        return step

    def _add(self, step: _Step, request: _Request, tokens: int) -> None:
        if request.decodes:
            step.rows.append(request)
        else:
            step.chunks.append((request, Chunk(request.computed, tokens)))

    def _allocate(self, request: _Request, tokens: int) -> None:
        blocks = self._blocks_of(request.computed + tokens)
        self._free -= blocks - request.blocks
        request.blocks = blocks
        assert self._free >= 0
        self._most_blocks = max(self._most_blocks, self._server.pool_blocks - self._free)

    def _allocate_or_preempt(self, request: _Request, tokens: int, step: _Step) -> bool:
        """Allocate blocks; preempt requests from the end until enough are free. False: the request itself went."""
        while self._blocks_of(request.computed + tokens) - request.blocks > self._free:
            victim = self._running.pop()
            self._free += victim.blocks
            victim.blocks = victim.computed = victim.resident = 0
            victim.has_frames = False
            self._waiting.appendleft(victim)
            self._preemptions += 1
            step.has_preempted = True
            if victim is request:
                return False
        self._allocate(request, tokens)
        return True

    def _do(self, step: _Step, next_arrival: float | None) -> None:
        """Run a scheduled step. Steps in which nothing else happens are run together."""
        chunks = self._with_frames(step)
        beginning = [request for request in step.rows if not request.has_frames]
        admission = sum(self._prices.prompt_times.admission(request.target, request.resident) for request in beginning)
        for request in beginning:
            request.has_frames = True
        price = self._prices.step(len(step.rows), step.context, chunks, admission)
        count = 1
        is_steady = step.is_refused or not self._waiting
        if is_steady and not (chunks or beginning or step.has_preempted):
            count = self._repeats(step, price.seconds, next_arrival)
        self._spend(price, count, step.is_refused)
        for request, chunk in step.chunks:
            request.computed += chunk.tokens
            if request.computed == request.target:
                self._sample(request, 1)
        for request in step.rows:
            request.computed += count
            self._sample(request, count)
        if len(self._running) == 1 and not self._running[0].decodes:
            self._compute_alone(self._running[0])

    def _compute_alone(self, request: _Request) -> None:
        """Compute the prompt of the only running request up to its last chunk.

        Each of these chunks takes all tokens of a step, so that no waiting request can join.
        """
        tokens = self._server.chunk_tokens
        count = (request.target - request.computed - 1) // tokens
        blocks = self._blocks_of(request.computed + count * tokens)
        if count < 1 or blocks - request.blocks > self._free:
            return
        key = request.computed, count
        if key not in self._alone:
            chunks = [Chunk(request.computed + number * tokens, tokens) for number in range(count)]
            steps = [self._prices.step(0, 1, self._with_frames(_Step(chunks=[(request, chunk)]))) for chunk in chunks]
            self._alone[key] = StepParts(*map(sum, zip(*steps, strict=True)))
        self._allocate(request, count * tokens)
        request.computed += count * tokens
        self._spend(self._alone[key], 1, is_refused=False)

    def _with_frames(self, step: _Step) -> list[Chunk]:
        """Return the step's chunks with the earlier tokens that free frames hold, first come first served."""
        free = (self._server.max_requests - len(step.rows)) * self._server.frame_tokens
        chunks = []
        for request, chunk in step.chunks:
            resident = min(free, chunk.earlier)
            request.resident = min(free, chunk.earlier + chunk.tokens)
            free -= request.resident
            chunks.append(Chunk(chunk.earlier, chunk.tokens, resident))
        return chunks

    def _repeats(self, step: _Step, seconds: float, next_arrival: float | None) -> int:
        """Return how many decode steps in a row are equal: no arrival, no end, no lack of blocks, the same price.

        The blocks of all these steps are allocated.
        """
        rows = step.rows
        most = min(request.answer - request.generated for request in rows)
        most = min(most, bucket_end(step.context) - step.context + 1)
        if next_arrival is not None and not self._waiting:
            most = min(most, max(1, -int(-(next_arrival - self._time) // seconds)))
        while most > 1 and self._missing(rows, most) > self._free:
            most //= 2
        for request in rows:
            self._allocate(request, most)
        return most

    def _missing(self, rows: Sequence[_Request], steps: int) -> int:
        return sum(self._blocks_of(request.computed + steps) - request.blocks for request in rows)

    def _spend(self, price: StepParts, count: int, is_refused: bool) -> None:
        for index, seconds in enumerate(price):
            self._sums[index] += count * seconds
        self._sums[MARK] += count * price.seconds * is_refused
        self._time += count * price.seconds

    def _sample(self, request: _Request, count: int) -> None:
        """Give a request ``count`` tokens at the end of the step; end it after its last one."""
        if not request.generated:
            request.first_token, request.token_sums = self._time, tuple(self._sums)
        request.generated += count
        if request.generated < request.answer:
            return
        self._running.remove(request)
        self._free += request.blocks
        first = tuple(b - a for a, b in zip(request.first_sums, request.token_sums, strict=True))
        later = tuple(b - a for a, b in zip(request.token_sums, self._sums, strict=True))
        timing = Timing(request.arrival, request.first_token, self._time, request.answer, first, later)
        self._timings[request.number] = timing
        if self._may_stop is not None and self._may_stop(timing):
            self._is_stopped = True

    def _sums_at(self, arrival: float, begin: float, begin_sums: tuple[float, ...]) -> tuple[float, ...]:
        """Return the sums at an arrival within the last step, which spends its parts evenly."""
        if self._time <= begin:
            return tuple(self._sums)
        share = (arrival - begin) / (self._time - begin)
        return tuple(a + share * (b - a) for a, b in zip(begin_sums, self._sums, strict=True))
