"""Servers of Qwen3-14B that the tests of simulated traffic share."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from hybrid_backend.config import resolve_config
from hybrid_backend.hardware import find_hardware
from hybrid_backend.tools.plan.model import find_shape
from hybrid_backend.tools.plan.report import Request
from hybrid_backend.tools.plan.traffic.engine import Engine, Run
from hybrid_backend.tools.plan.traffic.prices import StepPrices
from hybrid_backend.tools.plan.traffic.prompts import PromptPath
from hybrid_backend.tools.plan.traffic.server import Server, servers

QWEN3_14B = find_shape("qwen3-14b")


def request(machine: str = "a100-80", context: int = 33000) -> Request:
    config = resolve_config("qwen3-14b", None, {}, ("method=scout",))[0]
    return Request(QWEN3_14B, config, context, 1, None, None, find_hardware(machine))


@cache
def pair(machine: str = "a100-80", context: int = 33000) -> tuple[Server, Server]:
    """Return stock and `scout`."""
    return servers(request(machine, context), "scout", None)


@cache
def prices(name: str, machine: str = "a100-80", path: PromptPath = PromptPath.STREAMED, **changes: Any) -> StepPrices:
    server = pair(machine)[name != "stock"]
    return StepPrices(replace(server, **changes), path)


def run(step_prices: StepPrices, arrivals: list[float], prompt: int, answer: int) -> Run:
    return Engine(step_prices).run(arrivals, prompt, answer)
