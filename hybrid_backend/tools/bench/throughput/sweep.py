"""All endpoints at all rates, taking turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from hybrid_backend.tools.bench.client import Endpoint, in_turn
from hybrid_backend.tools.bench.throughput.point import Point, Workload, point_from

Run = Callable[[Endpoint, Workload, float, int], Mapping[str, Any]]
WARM_UP = 3  # prompts


def turns(
    endpoints: Sequence[Endpoint], rates: Sequence[float], repeats: int, seed: int
) -> Iterator[tuple[int, float, int, Endpoint]]:
    """``(repeat, rate, seed, endpoint)``: endpoints share a seed, thus prompts and arrivals; no other turn has it."""
    for repeat in range(repeats):
        for index, rate in enumerate(rates):
            turn = repeat * len(rates) + index
            for endpoint in in_turn(endpoints, turn):
                yield repeat, rate, seed + 1 + turn, endpoint


def sweep(
    endpoints: Sequence[Endpoint],
    rates: Sequence[float],
    repeats: int,
    workload: Workload,
    run: Run,
    seed: int = 0,
    tell: Callable[[Point], None] = print,
) -> list[Point]:
    """Every point, after a warm-up of each endpoint that is not counted."""
    for endpoint in endpoints:
        run(endpoint, workload.model_copy(update={"prompts": WARM_UP}), float("inf"), seed)
    points = []
    for repeat, rate, turn_seed, endpoint in turns(endpoints, rates, repeats, seed):
        result = run(endpoint, workload, rate, turn_seed)
        points.append(point_from(result, endpoint.name, rate, repeat, workload))
        tell(points[-1])
    return points
