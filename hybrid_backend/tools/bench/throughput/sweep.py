"""A sweep of request rates over endpoints that take turns, and the points that it measures."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hybrid_backend.tools.bench.client import BenchError, Endpoint, rotated
from hybrid_backend.tools.counts import counted

WARM_UP = 3
"""Prompts that warm an endpoint up."""


class Workload(BaseModel):
    """Requests of one run.

    Lengths are in tokens. ``goodput`` has the limits of a good request, in milliseconds by ttft, tpot or e2el.
    ``tokenizer`` is a folder or hub id; empty: the model's name.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    prompts: int = Field(gt=0)
    input_length: int = Field(gt=0)
    output_length: int = Field(gt=1)
    goodput: Mapping[str, float]
    tokenizer: str = ""


Run = Callable[[Endpoint, Workload, float, int], Mapping[str, Any]]
"""Runs an engine's client with an endpoint, a workload, a request rate and a seed; returns the client's result."""


class Point(BaseModel):
    """Figures of a client's run, read from its result; both engines' clients use the names that are aliases here.

    Times are in milliseconds, throughputs per second. ``rate`` is None where all requests are sent at once.
    """

    model_config = ConfigDict(frozen=True, allow_inf_nan=False, validate_by_name=True, validate_by_alias=True)
    endpoint: str
    rate: float | None
    repeat: int
    completed: int
    failed: int
    seconds: float = Field(alias="duration")
    requests_per_second: float = Field(alias="request_throughput")
    good_requests_per_second: float = Field(alias="request_goodput")
    output_tokens_per_second: float = Field(alias="output_throughput")
    ttft_median: float = Field(alias="median_ttft_ms")
    ttft_p99: float = Field(alias="p99_ttft_ms")
    tpot_median: float = Field(alias="median_tpot_ms")
    tpot_p99: float = Field(alias="p99_tpot_ms")
    itl_p99: float = Field(alias="p99_itl_ms")


def point_from(result: Mapping[str, Any], endpoint: str, rate: float, repeat: int, workload: Workload) -> Point:
    """Return the point that a client's result describes.

    Raises:
        BenchError: the result lacks a figure, or answers have another number of tokens than the workload's.
    """
    run = {"endpoint": endpoint, "rate": None if math.isinf(rate) else rate, "repeat": repeat}
    try:
        completed, tokens = int(result["completed"]), int(result["total_output_tokens"])
        point = Point.model_validate({**result, **run, "failed": workload.prompts - completed})
    except (KeyError, ValidationError) as error:
        raise BenchError(f"{endpoint}: the client's result lacks a figure: {error}") from error
    if completed and tokens != completed * workload.output_length:
        raise BenchError(
            f"{endpoint}: {counted(tokens, 'token')} in {counted(completed, 'answer')}, not {workload.output_length} "
            "in each: the endpoint ignores ignore_eos, and its rates cannot be compared"
        )
    return point


def turns(
    endpoints: Sequence[Endpoint], rates: Sequence[float], repeats: int, seed: int
) -> Iterator[tuple[int, float, int, Endpoint]]:
    """Yield ``(repeat, rate, seed, endpoint)`` of each run.

    The endpoints of one turn share a seed, so that they get the same prompts and arrival times. No other turn has it.
    """
    for repeat in range(repeats):
        for index, rate in enumerate(rates):
            turn = repeat * len(rates) + index
            for endpoint in rotated(endpoints, turn):
                yield repeat, rate, seed + 1 + turn, endpoint


def sweep(
    endpoints: Sequence[Endpoint],
    rates: Sequence[float],
    repeats: int,
    workload: Workload,
    run: Run,
    seed: int,
    tell: Callable[[Point], None],
) -> list[Point]:
    """Return the points of all runs, ordered by endpoint, after a warm-up of each endpoint.

    A rate of infinity sends all requests at once. ``tell`` gets each point as soon as it is measured.
    """
    for endpoint in endpoints:
        run(endpoint, workload.model_copy(update={"prompts": WARM_UP}), float("inf"), seed)
    points = []
    for repeat, rate, turn_seed, endpoint in turns(endpoints, rates, repeats, seed):
        points.append(point_from(run(endpoint, workload, rate, turn_seed), endpoint.name, rate, repeat, workload))
        tell(points[-1])
    order = [endpoint.name for endpoint in endpoints]
    return sorted(points, key=lambda point: order.index(point.endpoint))
