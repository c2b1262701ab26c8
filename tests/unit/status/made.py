"""Columns, layers and readings that the tests of the judgements are made of."""

from __future__ import annotations

from typing import Any

from hybrid_backend.hardware import Hardware
from hybrid_backend.tools.status.glance import Glance, judge
from hybrid_backend.tools.status.model import Layer, Rates
from hybrid_backend.tools.status.reading import LayerCounts, Reading
from hybrid_backend.tools.status.speed import Load

NO_RATES: dict[str, Any] = dict.fromkeys(Rates.model_fields) | {
    "seconds": 15,
    "recalled_per_second": 0,
    "wait_share": 0,
}
SERVED = {
    "hybrid_budget_tokens": 1024.0, "hybrid_page_tokens": 32.0, "hybrid_frames_per_request": 67.0,
    "hybrid_frame_bytes": 8.0 * 2**20, "hybrid_recall_interval": 8.0, "hybrid_host_pool_pages": 4000.0,
    "hybrid_host_pool_bytes": 3.0 * 2**30, "hybrid_max_requests": 12.0, "hybrid_worker_threads": 2.0,
    "hybrid_worker_cpus": 4.0,
}  # fmt: skip
BUS = {"hybrid_bus_bytes_per_second": 50e9}
IN_PLACE = {"hybrid_budget_tokens": 1024.0, "hybrid_page_tokens": 32.0, "hybrid_frame_bytes": 0.0}


def rates_of(running: float | None = None, **more: Any) -> Rates:
    """Make the rates of the last 15 seconds."""
    return Rates(**NO_RATES | {"running": running, "most_running": running} | more)


def layer(index: int, mass: float | None, cpu: float | None = None, **more: float) -> Layer:
    values: dict[str, Any] = {
        "attended": None, "residency": None, "attended_tokens_per_second": 0, "recalled_per_second": 0,
        "wait_share": 0, "lead_share": 0, "attention_share": None, "query_cosine": None,
    }  # fmt: skip
    return Layer(layer=index, cpu_ratio=cpu, mass_recall=mass, **{**values, **more})


def in_place(**more: Any) -> Reading:
    """Make a reading of a server that attends in place."""
    counts = LayerCounts(selected_tokens=3, context_tokens=10, attention_seconds=1)
    return Reading(**{"time": 1, "running": 2, "waiting": 0, "layers": (counts,), "gauges": IN_PLACE} | more)


def judged_of(
    last: Reading, rates: Rates | None = None, layers: tuple[Layer, ...] = (), machine: Hardware | None = None
) -> Glance:
    """Judge a server; without ``rates`` nothing was measured but the running requests."""
    return judge(Load(last, rates or rates_of(last.running), layers, machine))


def told(
    last: Reading, rates: Rates | None = None, layers: tuple[Layer, ...] = (), machine: Hardware | None = None
) -> dict[str, tuple[str, str, str]]:
    """Return verdict, level and text by the last word of the question: faithful, fast, back."""
    judged = judged_of(last, rates, layers, machine)
    return {a.question.rstrip("?").split()[-1]: (a.verdict, a.level, a.text) for a in judged.answers}


def advised(last: Reading, rates: Rates | None = None, mass: float = 0.99, cpu: float = 0.25) -> list[str]:
    """Return the recommended change with its problem, then the other ways, then what comes after."""
    judged = judged_of(last, rates, (layer(0, mass, cpu=cpu),))
    return [text for change in judged.changes for text in (f"{change.problem}: {change.change}", *change.others)]
