"""Histories of servers in each of the states that the page tells apart."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from hybrid_backend.errors import EngineError
from hybrid_backend.tools.status.sampler import Sampler
from tests.unit.status.server_stand import Clock, MetricsStand

INTERVALS = 60
IN_PLACE = {
    "hybrid_host_pool_pages": 29794.0, "hybrid_frame_bytes": 0.0, "hybrid_page_tokens": 16.0,
    "hybrid_budget_tokens": 2048.0, "hybrid_host_pool_bytes": 11e9, "hybrid_digest_bytes": 942e6,
    "hybrid_max_requests": 8.0, "hybrid_worker_threads": 2.0, "hybrid_worker_cpus": 2.0,
}  # fmt: skip
Interval = Callable[[MetricsStand, int], None]


def in_place() -> MetricsStand:
    """Return a server as a CPU serves by default."""
    stand = MetricsStand()
    stand.gauges = dict(IN_PLACE)
    return stand


def decode_in_place(stand: MetricsStand, tokens: int, attention: float, seconds_per_token: float) -> None:
    """Pass an interval in which every layer attends a share of its context, and all take ``attention`` seconds."""
    for index, layer in enumerate(stand.stats.layers):
        stand.stats.attended(index, (1500 + 80 * (index * 7 % 30)) * tokens, 0)
        stand.stats.saw_contexts([index], 4000 * tokens)
        layer.attention_seconds += attention / len(stand.stats.layers)
        layer.saw_mass(0.985 - 0.002 * index)
    stand.tokens.inc(tokens)
    for _ in range(tokens):
        stand.token_gap.observe(seconds_per_token)


def read_prompts(stand: MetricsStand, tokens: int) -> None:
    """Pass an interval in which prompts are read, a tenth of them out of the prefix cache."""
    stand.prompts.inc(tokens)
    stand.looked_up.inc(tokens)
    stand.hits.inc(tokens // 10)
    stand.first_token.observe(1.8)


def history_of(stand: MetricsStand, interval: Interval, intervals: int = INTERVALS) -> tuple[Sampler, Clock]:
    """Return the sampler of a server that lived through ``intervals`` of two seconds, and its clock."""
    clock = Clock()
    sampler = Sampler(stand.source, "http://localhost:8000/metrics", interval=2.0, clock=clock)
    for number in range(intervals):
        interval(stand, number)
        clock.now += 2.0
        asyncio.run(sampler.refresh())
    return sampler, clock


def idle() -> Sampler:
    """Return a server that decoded before and has nothing to do."""
    stand = in_place()

    def interval(stand: MetricsStand, number: int) -> None:
        if number < 20:
            decode_in_place(stand, 60, 0.4, 0.12)

    stand.running.set(0)
    return history_of(stand, interval)[0]


def prompts_only() -> Sampler:
    """Return a server that reads the prompts of three requests."""
    stand = in_place()
    stand.running.set(3)
    stand.fill.set(0.08)
    return history_of(stand, lambda stand, _: read_prompts(stand, 620), 10)[0]


def decoding_well() -> Sampler:
    """Return a server in place whose requests decode faster than one reads."""
    stand = in_place()
    stand.running.set(4)
    stand.fill.set(0.21)

    def interval(stand: MetricsStand, number: int) -> None:
        if number % 15 == 3:
            read_prompts(stand, 150)
        decode_in_place(stand, 60 + 8 * (number * 5 % 7), 0.35, 0.118)

    return history_of(stand, interval)[0]


def slowed_by_prompts() -> Sampler:
    """Return a server in place whose four requests get one token a second while prompts are read."""
    stand = in_place()
    stand.running.set(4)
    stand.fill.set(0.34)

    def interval(stand: MetricsStand, _: int) -> None:
        read_prompts(stand, 500)
        decode_in_place(stand, 8, 0.1, 0.95)

    return history_of(stand, interval)[0]


def out_of_memory() -> Sampler:
    """Return a server with separate tiers that keeps too little attention mass and whose host pool is full."""
    stand = MetricsStand()
    stand.gauges |= {"hybrid_host_pool_bytes": 3.0 * 2**30, "hybrid_recall_interval": 8.0, "hybrid_device_bytes": 3e8}
    stand.running.set(12)
    stand.waiting.set(9)
    stand.fill.set(0.97)

    def interval(stand: MetricsStand, number: int) -> None:
        stand.decode(cpu=lambda layer: layer / 60, resident=lambda layer: 1 - layer / 40)
        for layer in stand.stats.layers:
            layer.saw_mass(0.82)
        for _ in range(20):
            stand.token_gap.observe(0.25)
        if number % 10 == 0:
            read_prompts(stand, 200)

    return history_of(stand, interval)[0]


def gone() -> Sampler:
    """Return a server in place that decoded well and does not answer any more."""
    stand = in_place()
    stand.running.set(4)
    stand.fill.set(0.21)
    is_alive = [True]

    async def source() -> str:
        if not is_alive[0]:
            raise EngineError("http://localhost:8000/metrics cannot be read: Connection refused")
        return stand.text()

    clock = Clock()
    sampler = Sampler(source, "http://localhost:8000/metrics", interval=2.0, clock=clock)
    for number in range(INTERVALS):
        if number < 46:
            decode_in_place(stand, 60, 0.35, 0.118)
        is_alive[0] = number < 46
        clock.now += 2.0
        asyncio.run(sampler.refresh())
    return sampler


def separate_tiers() -> Sampler:
    """Return a server with frames and CPU workers that wait for nothing."""
    stand = MetricsStand()
    stand.gauges |= {"hybrid_recall_interval": 8.0, "hybrid_device_bytes": 3e8, "hybrid_digest_bytes": 4e7}
    stand.running.set(3)
    stand.fill.set(0.4)

    def interval(stand: MetricsStand, number: int) -> None:
        stand.decode(cpu=lambda layer: layer / 60, resident=lambda layer: 1 - layer * (number % 5 + 1) / 200)
        for index, layer in enumerate(stand.stats.layers):
            layer.saw_mass(0.97)
            layer.saw_cosine(0.99 - index / 400)
        for _ in range(40):
            stand.token_gap.observe(0.06)
        if number % 12 == 0:
            read_prompts(stand, 90)

    return history_of(stand, interval)[0]


STATES = {
    "idle": idle,
    "prompts": prompts_only,
    "well": decoding_well,
    "slowed": slowed_by_prompts,
    "memory": out_of_memory,
    "gone": gone,
    "separate": separate_tiers,
}
