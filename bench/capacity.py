"""What every method holds and how fast it then decodes: one machine, one model, one length (docs/lab/methods.md).

    make capacity

Memory is the planner's, to the page; times are simulated, with the inputs of docs/lab/simulator.md. Each method decodes
as many requests as fit. Every request has its pages in host memory; APEX attends as many requests on the device as
stock holds there, and the others by the CPU, parked (what its rule chooses here).
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace

from rich.console import Console
from rich.table import Table

from hybrid_backend.config import HybridConfig
from hybrid_backend.hardware import find_hardware
from hybrid_backend.hardware.times import LayerTimes
from hybrid_backend.methods.apex.rule import judge
from hybrid_backend.tools.plan.model import find_shape
from hybrid_backend.tools.plan.report import Plan, Request, make_plan
from hybrid_backend.tools.plan.simulate import StepTime, decode_step
from hybrid_backend.tools.plan.table import size

CONTEXT = 32768
LLAMA3_8B = find_shape("llama-3.1-8b")
REQUEST = Request(LLAMA3_8B, HybridConfig(), CONTEXT, 1, None, None, find_hardware("h100"))
EXACT = {
    "stock": "always",
    "dense": "always",
    "headinfer": "always",
    "hgca": "while it fits sinks and window",
    "infinigen": "while it fits the frames",
    "clo": "while it fits the frames",
    "scout": "while it fits the frames",
}
OURS = ("digests", "frames", "staging", "method, device", "KV cache")
"""What lies on the device beside weights and the engine's own."""


@dataclass(frozen=True)
class Row:
    """One line of the table, as it is printed."""

    method: str
    exact: str
    per_request: str  # device bytes
    in_total: str
    requests: str  # that fit, and what is full
    tokens_per_s: str
    device_ms: str  # per token of a request
    cpu_ms: str


def rows() -> list[Row]:
    plan = make_plan(replace(REQUEST, methods=tuple(name for name in EXACT if name != "stock")))
    return [*(_row(plan, name) for name in EXACT), *_apex(plan)]


def _device(plan: Plan, name: str) -> int:
    return sum(item.bytes for item in plan.row(name).items if item.place == "device" and item.name in OURS)


def _row(plan: Plan, name: str) -> Row:
    """``plan``: any that has the method."""
    methods = () if name == "stock" else (name,)
    most = plan.row(name).max_batch
    half, full, over = (make_plan(replace(REQUEST, batch=n, methods=methods)) for n in (most // 2, most, most + 1))
    each = (_device(full, name) - _device(half, name)) // (most - most // 2)
    step_ms, why = full.row(name).step_ms, over.row(name).why_not
    assert step_ms is not None and why is not None
    return Row(
        name, EXACT[name], size(each), size(_device(full, name) - most * each), f"{most} ({why.split(':')[0]})",
        f"{1e3 * most / step_ms:,.0f}", f"{step_ms:,.0f}", "-",
    )  # fmt: skip


def _apex(plan: Plan) -> list[Row]:
    """Return the row of apex, with as many requests on the CPU as are answered within an iteration."""
    here, most = plan.row("stock").max_batch, plan.row("dense").max_batch
    assert REQUEST.hardware is not None
    hardware = REQUEST.hardware
    assert judge(LayerTimes.of(hardware, LLAMA3_8B), here, here * CONTEXT, most - here).strategy == "overlap"

    def step(cpu_rows: int) -> StepTime:
        return decode_step(hardware, LLAMA3_8B, REQUEST.config, "apex", CONTEXT, here + cpu_rows, cpu_rows=cpu_rows)

    in_time = max(n for n in range(1, most - here + 1) if step(n).cpu_token_steps == LLAMA3_8B.layers + 1)
    request = CONTEXT * LLAMA3_8B.token_bytes * LLAMA3_8B.layers
    at = step(in_time)
    return [
        Row("apex", "always", f"{size(request)}; by the CPU: 0", size(_device(plan, "dense")),
            f"{here} + {in_time} (CPU's time)", f"{at.tokens_per_s:,.0f}", f"{1e3 * at.seconds:,.0f}",
            f"{1e3 * at.seconds * at.cpu_token_steps:,.0f}")
    ]  # fmt: skip


def main() -> None:
    table = Table(
        "method", "exact", "device, each", "device, all", "requests", "tokens/s", "ms per token", "by the CPU",
        title=f"{LLAMA3_8B.name}, {CONTEXT:,} tokens, {REQUEST.hardware.name if REQUEST.hardware else ''}",
    )  # fmt: skip
    for row in rows():
        table.add_row(*astuple(row))
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
