"""Traffic of stock beside a method: latencies, goodput, and what limits each side."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hybrid_backend.errors import ConfigError
from hybrid_backend.tools.plan.report import Request, make_plan
from hybrid_backend.tools.plan.simulate import simulated_methods
from hybrid_backend.tools.plan.traffic.engine import MARK, Engine, Run, Timing
from hybrid_backend.tools.plan.traffic.prices import StepPrices
from hybrid_backend.tools.plan.traffic.prompts import KERNEL_SHARE, PromptPath, shipped_path
from hybrid_backend.tools.plan.traffic.server import Server, servers
from hybrid_backend.tools.plan.traffic.workload import ATTAINMENT, Slo, Workload

LEAST_RATE = 1e-6
"""Smallest rate that is simulated, in requests per second."""
PRECISION = 1.02
"""Ratio of two rates at which the search for the goodput ends."""
LOWEST = 1e-3
"""Lowest rate of that search, relative to the rate of a server that is always full."""
FULL_TIMES, LEAST_FULL = 8, 100
"""Requests that arrive at once at a server that is always full: for each that it holds, and at least."""
BEYOND = 1.1
"""Rate at which the limit of a server is looked for, relative to its goodput."""
NOT_SIMULATED = ("stock", "apex", "quest")
"""Methods whose steps depend on more than rows and contexts, or that no GPU runs."""
CAUSES = ("prefill compute", "bus", "decode", "workers", "engine", "memory")
"""Names of the parts of `StepParts`, and of the wait for memory, in the order of `Timing.first_parts`."""


@dataclass(frozen=True)
class Load:
    """Latencies at one rate. Rates and tokens per second are those of all devices together; times are in seconds.

    Attributes:
        rate: requests per second; None: all requests arrive at once.
        tokens_per_s: tokens of answers.
        attainment: share of the requests that meet the SLO.
        most_running: most requests of one device that ran at once.
        preemptions: times that a request gave up its blocks.
    """

    rate: float | None
    tokens_per_s: float
    ttft_p50: float
    ttft_p99: float
    tpot_p50: float
    tpot_p99: float
    attainment: float
    most_running: int
    preemptions: int


@dataclass(frozen=True)
class Side:
    """A server under the workload.

    Attributes:
        name: ``stock`` or the method.
        holds: requests of the workload that one device's server runs at once.
        ttft: seconds to the first token of a single request; None if the server holds none.
        tpot: seconds per token of a single request; None if the server holds none.
        goodput: greatest rate at which `ATTAINMENT` of the requests meet the SLO, in requests per second; None if a
            rate was given.
        load: latencies at the goodput, or at the given rate; None if the server does not reach the SLO at any rate.
        full: latencies if all requests arrive at once.
        limit: what limits the server.
    """

    name: str
    holds: int
    ttft: float | None
    tpot: float | None
    goodput: float | None
    load: Load | None
    full: Load | None
    limit: str


@dataclass(frozen=True)
class Traffic:
    """Stock beside a method. Its fields are the keys of the JSON (docs/reference/plan.md).

    Attributes:
        prompt_path: way of a prompt's KV (`PromptPath`).
        ttft_limit: seconds that the SLO gives the first token.
        ratio: goodput of the method over stock's; None without a search, or if stock's is 0.
    """

    model: str
    machine: str
    workload: Workload
    slo: Slo
    prompt_path: str
    ttft_limit: float
    stock: Side
    hybrid: Side
    ratio: float | None


def simulate_traffic(
    request: Request,
    workload: Workload,
    slo: Slo,
    *,
    rate: float | None = None,
    max_requests: int | None = None,
    path: PromptPath | None = None,
    kernel_share: float = KERNEL_SHARE,
    stock_side: Side | None = None,
) -> Traffic:
    """Simulate stock and the method of the request under the same arrivals.

    Args:
        request: machine, model and configuration; ``methods`` may name one method.
        workload: lengths and arrivals.
        slo: objective of the latencies.
        rate: requests per second on all devices; None: search the greatest that meets the SLO.
        max_requests: requests that run at once on all devices; None: as many as fit.
        path: way of a prompt's KV; None: that of the shipped code.
        kernel_share: rate of our attention of prompts, relative to the stock engine's.
        stock_side: stock's results in an earlier simulation of the same workload and SLO; None: simulate them.

    Raises:
        ConfigError: the machine or the method cannot be simulated, or a number is out of range.
    """
    hardware = request.hardware
    method = _method(request, workload)
    assert hardware is not None
    if rate is not None and not LEAST_RATE <= rate <= 1 / LEAST_RATE:
        bounds = f"{LEAST_RATE:g} to {1 / LEAST_RATE:g}"
        raise ConfigError(f"--rate: got {rate:g}, expected requests per second from {bounds}, such as 0.5")
    if max_requests is not None and max_requests < 1:
        raise ConfigError(f"--batch: got {max_requests}, expected an integer >= 1")
    request = replace(request, context=workload.context, methods=())
    most = None if max_requests is None else -(-max_requests // hardware.gpus)
    stock, hybrid = servers(request, method, most)
    path = path or shipped_path()
    # The SLO refers to stock's own time, which a card too small for the request would take if it held the request.
    unlimited = StepPrices(replace(stock, pool_blocks=stock.blocks_of(workload.context), max_requests=1), path)
    alone = Engine(unlimited).run([0.0], workload.prompt, workload.answer).timings[0]
    limits = Limits(slo.ttft_times * alone.ttft, slo.tpot_seconds)
    stock_side = stock_side or _Simulation(StepPrices(stock, path), workload, limits, alone).side(rate)
    side = _Simulation(StepPrices(hybrid, path, kernel_share), workload, limits, alone).side(rate)
    ratio = side.goodput / stock_side.goodput if stock_side.goodput and side.goodput is not None else None
    return Traffic(request.shape.name, hardware.name, workload, slo, path.value, limits.ttft, stock_side, side, ratio)


def _method(request: Request, workload: Workload) -> str:
    """Return the method to simulate.

    Raises:
        ConfigError: there is no GPU, there are no rates, or the method cannot be simulated under traffic.
    """
    hardware = request.hardware
    if hardware is None:
        raise ConfigError("--traffic: needs the machine's rates, which are not known; add --machine, such as a100")
    if hardware.device == "cpu":
        raise ConfigError(f"--traffic: {hardware.name} is a CPU server, whose traffic is not simulated; name a GPU")
    if len(request.methods) > 1:
        raise ConfigError(f"--method: got {', '.join(request.methods)}, expected one method with --traffic; name one")
    plan = make_plan(replace(request, context=workload.context, batch=hardware.gpus))
    method = request.methods[0] if request.methods else plan.configured
    if refused := plan.row(method).refused:
        raise ConfigError(refused)
    able = [name for name in simulated_methods() if name not in NOT_SIMULATED]
    if method not in able:
        choices = ", ".join(sorted(able))
        raise ConfigError(f"method: got {method!r}, whose traffic is not simulated; add --method with one of {choices}")
    return method


@dataclass(frozen=True)
class Limits:
    """Longest times of the SLO in seconds."""

    ttft: float
    tpot: float

    def meets(self, timing: Timing) -> bool:
        """Tell whether a request meets both."""
        return timing.ttft <= self.ttft and timing.tpot <= self.tpot

    def attainment(self, run: Run) -> float:
        """Return the share of the requests that meet both."""
        return sum(map(self.meets, run.timings)) / len(run.timings)


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least ``share`` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


@dataclass(frozen=True)
class _Simulation:
    """A server under the workload.

    Attributes:
        prices: prices of the server's steps.
        workload: lengths and arrivals.
        limits: the SLO.
        stock_alone: stock's times of a single request.
    """

    prices: StepPrices
    workload: Workload
    limits: Limits
    stock_alone: Timing

    @property
    def server(self) -> Server:
        return self.prices.server

    @property
    def gpus(self) -> int:
        return self.server.hardware.gpus

    def side(self, rate: float | None) -> Side:
        """Return the results at ``rate``, or at the goodput if it is None."""
        server, workload = self.server, self.workload
        if not server.holds(workload.context):
            goodput = 0.0 if rate is None else None
            limit = f"memory: holds no request of {workload.context:,} tokens"
            return Side(server.method, 0, None, None, goodput, None, None, limit)
        holds = min(server.max_requests, server.pool_blocks // server.blocks_of(workload.context))
        alone = Engine(self.prices).run([0.0], workload.prompt, workload.answer).timings[0]
        full = self._full(holds)
        goodput = self._goodput(alone, full) if rate is None else None
        shown = goodput if rate is None else rate
        if shown:
            run = self.run(shown)
            load = self._load(run, shown)
            limit = self._limit(run if rate is not None else self.run(BEYOND * shown), alone)
        else:
            load, limit = None, self._limit_alone(alone)
        return Side(server.method, holds, alone.ttft, alone.tpot, goodput, load, self._load(full, None), limit)

    def run(self, rate: float, may_stop: Callable[[Timing], bool] | None = None) -> Run:
        """Simulate one of the devices, which gets its share of ``rate``."""
        arrivals = self.workload.arrivals(rate / self.gpus)
        return Engine(self.prices).run(arrivals, self.workload.prompt, self.workload.answer, may_stop)

    def _full(self, holds: int) -> Run:
        """Simulate a device at which all requests arrive at once: several for each that the server holds."""
        count = min(self.workload.requests, max(LEAST_FULL, FULL_TIMES * holds))
        return Engine(self.prices).run([0.0] * count, self.workload.prompt, self.workload.answer)

    def _goodput(self, alone: Timing, full: Run) -> float:
        """Return the greatest rate, in steps of `PRECISION`, at which `ATTAINMENT` of the requests meet the SLO."""
        if not self.limits.meets(alone):
            return 0.0
        high = self.gpus * len(full.timings) / full.seconds
        low = LOWEST * high
        if not self._meets(low):
            return 0.0
        while high / low > PRECISION:
            middle = math.sqrt(low * high)
            low, high = (middle, high) if self._meets(middle) else (low, middle)
        return low

    def _meets(self, rate: float) -> bool:
        """Tell whether enough requests meet the SLO at ``rate``. The simulation ends when too many do not."""
        missed, most = 0, self.workload.requests - math.ceil(ATTAINMENT * self.workload.requests)

        def is_too_much(timing: Timing) -> bool:
            nonlocal missed
            missed += not self.limits.meets(timing)
            return missed > most

        self.run(rate, is_too_much)
        return missed <= most

    def _load(self, run: Run, rate: float | None) -> Load:
        ttft, tpot = [x.ttft for x in run.timings], [x.tpot for x in run.timings]
        return Load(
            rate=rate,
            tokens_per_s=self.gpus * run.tokens_per_s,
            ttft_p50=percentile(ttft, 0.5),
            ttft_p99=percentile(ttft, 0.99),
            tpot_p50=percentile(tpot, 0.5),
            tpot_p99=percentile(tpot, 0.99),
            attainment=self.limits.attainment(run),
            most_running=run.most_running,
            preemptions=run.preemptions,
        )

    def _limit_alone(self, alone: Timing) -> str:
        """Tell why even a request without others misses the SLO."""
        if alone.ttft > self.limits.ttft:
            extra = [a - b for a, b in zip(alone.first_parts, self.stock_alone.first_parts, strict=True)]
            cause = CAUSES[extra.index(max(extra))]
            return f"{cause}: a prompt without load takes {alone.ttft:.3g} s, the SLO is {self.limits.ttft:.3g} s"
        cause = CAUSES[alone.later_parts.index(max(alone.later_parts))]
        milliseconds = f"{1e3 * alone.tpot:.3g} ms, the SLO is {1e3 * self.limits.tpot:g} ms"
        return f"{cause}: a token without load takes {milliseconds}"

    def _limit(self, run: Run, alone: Timing) -> str:
        """Tell what the requests that miss the SLO wait for, beyond what a request without load takes."""
        late = [timing for timing in run.timings if timing.ttft > self.limits.ttft]
        slow = [timing for timing in run.timings if timing.tpot > self.limits.tpot]
        if not late and not slow:
            return "nothing at this rate: every request meets the SLO"
        if len(late) >= len(slow):
            extra = _extra([timing.first_parts for timing in late], alone.first_parts)
            what = "late first tokens wait"
        else:
            extra = _extra([timing.later_parts for timing in slow], alone.later_parts)
            what = "slow tokens wait"
        total, memory = sum(extra[:MARK]), extra[MARK]
        if 2 * memory > total:
            return f"memory: {what} for {self._room()}"
        share = max(extra[:MARK]) / total if total > 0 else 1.0
        cause = CAUSES[extra.index(max(extra[:MARK]))]
        return f"{cause}: {share:.0%} of what {what} for"

    def _room(self) -> str:
        """Name what holds back the first waiting request."""
        server = self.server
        if server.pool_blocks // server.blocks_of(self.workload.prompt) >= server.max_requests:
            return f"one of {server.max_requests} requests at once (--max-num-seqs)"
        return f"{'host' if server.is_hybrid else 'device'} memory, which holds few prompts at once"


def _extra(sums: Sequence[Sequence[float]], own: Sequence[float]) -> list[float]:
    """Return the mean of the requests' ``sums`` beyond ``own``, for each part of a step."""
    means = [sum(column) / len(sums) for column in zip(*sums, strict=True)]
    return [max(0.0, mean - alone) for mean, alone in zip(means, own, strict=True)]
