"""Simulated traffic of docs/lab/simulator.md: stock, and `scout` with both ways of a prompt's KV.

    make simulate-traffic                             # takes minutes
    python -m bench.simulate_traffic [TITLE ...]      # such as "Qwen3-14B on an H200"

Nothing of these tables was measured. The rows of stock and of the shipped way are those of `hybrid plan --traffic`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping

from bench.simulate_step import Rows, text
from hybrid_backend.config import resolve_config
from hybrid_backend.hardware import find_hardware
from hybrid_backend.tools.plan.model import find_shape
from hybrid_backend.tools.plan.report import Request
from hybrid_backend.tools.plan.traffic.prompts import KERNEL_SHARE, PromptPath
from hybrid_backend.tools.plan.traffic.report import Side, Traffic, simulate_traffic
from hybrid_backend.tools.plan.traffic.workload import Slo, Workload

MACHINES: Mapping[str, tuple[str, str]] = {
    "Qwen3-14B on an A100-80": ("qwen3-14b", "a100-80"),
    "Qwen3-14B on an H200": ("qwen3-14b", "h200"),
    "Qwen3-14B on an L40S": ("qwen3-14b", "l40s"),
    "Qwen3-8B on an L40S": ("qwen3-8b", "l40s"),
}
"""Model and machine of each table."""
PROMPTS, ANSWERS = (16, 32, 64, 128), (200, 1000)
"""Thousands (1,024) of tokens of a prompt, and tokens of an answer."""
SLO, LOOSE = Slo(), Slo(10, 0.2)
LOOSE_CASES = (
    ("qwen3-14b", "a100-80", 32, 1000), ("qwen3-14b", "h200", 32, 1000), ("qwen3-14b", "h200", 32, 4000),
    ("qwen3-14b", "l40s", 32, 1000), ("qwen3-8b", "l40s", 32, 1000),
)  # fmt: skip
HEAD = (
    "prompt:answer", "server", "holds", "alone TTFT, s", "alone TPOT, ms", "requests/s", "times stock", "tokens/s",
    "TTFT p50", "p99", "TPOT p50", "p99", "full, tokens/s", "limited by",
)  # fmt: skip


def traffic(
    model: str,
    machine: str,
    prompt: int,
    answer: int,
    path: PromptPath,
    slo: Slo,
    kernel_share: float = KERNEL_SHARE,
    stock: Side | None = None,
) -> Traffic:
    """Simulate one workload; ``prompt`` is in thousands of tokens, ``stock`` is of an earlier simulation of it."""
    workload, config = Workload(1024 * prompt, answer), resolve_config(model, None, {}, ("method=scout",))[0]
    request = Request(find_shape(model), config, workload.context, 1, None, None, find_hardware(machine))
    return simulate_traffic(request, workload, slo, path=path, kernel_share=kernel_share, stock_side=stock)


def case(model: str, machine: str, prompt: int, answer: int, slo: Slo = SLO) -> Rows:
    """Return the four rows of one workload."""
    load = model, machine, prompt, answer
    streamed = traffic(*load, PromptPath.STREAMED, slo)
    on_device = traffic(*load, PromptPath.ON_DEVICE, slo, stock=streamed.stock)
    as_fast = traffic(*load, PromptPath.ON_DEVICE, slo, 1.0, streamed.stock)
    name = f"{prompt}k:{answer}"
    return [
        row(name, "stock", streamed.stock, None),
        row(name, "streamed", streamed.hybrid, streamed.ratio),
        row(name, "on the device", on_device.hybrid, on_device.ratio),
        row(name, "and attention as stock's", as_fast.hybrid, as_fast.ratio),
    ]


def row(name: str, server: str, side: Side, ratio: float | None) -> tuple[str, ...]:
    load, dash = side.load, "-"
    alone = [dash, dash] if side.ttft is None or side.tpot is None else [f"{side.ttft:.2f}", f"{1e3 * side.tpot:.1f}"]
    goodput = [f"{side.goodput:.3g}" if side.goodput else "0", dash if ratio is None else f"{ratio:.2f}"]
    times = [dash] * 5 if load is None else [
        f"{load.tokens_per_s:.3g}", f"{load.ttft_p50:.2f}", f"{load.ttft_p99:.2f}", f"{1e3 * load.tpot_p50:.1f}",
        f"{1e3 * load.tpot_p99:.1f}",
    ]  # fmt: skip
    full = dash if side.full is None else f"{side.full.tokens_per_s:.3g}"
    return name, server, str(side.holds), *alone, *goodput, *times, full, side.limit.replace("%", " %")


def table(title: str) -> Iterator[tuple[str, ...]]:
    """Yield the rows of one table, its head first."""
    yield HEAD
    for prompt in PROMPTS:
        for answer in ANSWERS:
            yield from case(*MACHINES[title], prompt, answer)


def loose_table() -> Rows:
    """Return goodputs within `LOOSE`."""
    rows: Rows = [("model", "machine", "prompt:answer", "server", "requests/s", "times stock", "limited by")]
    for model, machine, prompt, answer in LOOSE_CASES:
        rows += [
            (model, machine, name, server, goodput, ratio, limit)
            for name, server, _, _, _, goodput, ratio, *_, limit in case(model, machine, prompt, answer, LOOSE)
        ]
    return rows


def main() -> None:
    for title in sys.argv[1:] or MACHINES:
        print(f"{title}:\n\n{text(list(table(title)))}", flush=True)
    if not sys.argv[1:]:
        print(f"Within 10 times stock's TTFT, and 200 ms:\n\n{text(loose_table())}")


if __name__ == "__main__":
    main()
