"""Columns, layers and readings that the tests of the judgements are made of."""

from __future__ import annotations

from typing import Any

from hybrid_backend.tools.status.glance import Glance, judge
from hybrid_backend.tools.status.model import Column, Layer, Rates
from hybrid_backend.tools.status.reading import LayerCounts, Reading

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


def column(time: float = 1, running: float | None = None, **rates: Any) -> Column:
    """A column of two seconds; ``rates`` are those of the last 15."""
    return Column(
        time=time, seconds=2, running=running, waiting=None, pool_fill=None, frames_in_use=None, resident_requests=None,
        rates=Rates(**NO_RATES | {"running": running} | rates), attended=(), residency=(), cpu_ratio=(),
    )  # fmt: skip


def layer(index: int, mass: float | None, cpu: float | None = None, **more: float) -> Layer:
    values: dict[str, Any] = {
        "attended": None, "residency": None, "attended_tokens_per_second": 0, "recalled_per_second": 0,
        "wait_share": 0, "lead_share": 0, "attention_share": None, "query_cosine": None,
    }  # fmt: skip
    return Layer(layer=index, cpu_ratio=cpu, mass_recall=mass, **{**values, **more})


def in_place(**more: Any) -> Reading:
    """A reading of a server that attends in place."""
    counts = LayerCounts(selected_tokens=3, context_tokens=10, attention_seconds=1)
    return Reading(**{"time": 1, "running": 2, "waiting": 0, "layers": (counts,), "gauges": IN_PLACE} | more)


def told(
    last: Reading, *columns: Column, layers: tuple[Layer, ...] = (), **more: Any
) -> dict[str, tuple[str, str, str]]:
    """Verdict, level and text by the last word of the question: faithful, fast, back."""
    judged = judge(last, columns or (column(),), layers, **more)
    return {a.question.rstrip("?").split()[-1]: (a.verdict, a.level, a.text) for a in judged.answers}


def advised(last: Reading, *columns: Column, mass: float = 0.99, cpu: float = 0.25) -> list[str]:
    """The recommended change with its problem, then the other ways, then what comes after."""
    judged: Glance = judge(last, columns or (column(),), (layer(0, mass, cpu=cpu),))
    return [text for change in judged.changes for text in (f"{change.problem}: {change.change}", *change.others)]
