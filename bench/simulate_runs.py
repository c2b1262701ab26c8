"""Our own measured runs and the simulation of them (docs/lab/simulator.md).

CPU: docs/lab/measurements.md, "Whole engine", on two shared cores. The machine's rates are taken from the stock rows
alone; the hybrid rows are predicted. GPU: docs/lab/cuda.md, "On an H200". The CPU's share and rate are
those of the runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bench.model_configs import SHAPES
from hybrid_backend.config import HybridConfig, resolve_config
from hybrid_backend.hardware import Curve, Hardware, Number, find_hardware
from hybrid_backend.model import ModelShape, shape_from_config
from hybrid_backend.tools.plan.model import find_shape
from hybrid_backend.tools.plan.simulate import decode_step

# https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct/blob/main/config.json
SMOLLM2: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
QWEN3_06B = SHAPES["qwen3-0.6b"]
Row = tuple[int, int, float, float]  # context, batch, tokens/s of stock and of hybrid
SMOLLM2_RUNS: tuple[Row, ...] = (
    (200, 1, 26.3, 29.4), (200, 4, 49.3, 49.6), (200, 8, 70.6, 74.8),
    (2000, 1, 19.8, 23.7), (2000, 4, 36.8, 43.6), (2000, 8, 52.7, 64.5),
    (7500, 1, 15.4, 20.3), (7500, 4, 21.2, 35.0), (7500, 8, 29.0, 49.9),
)  # fmt: skip
QWEN3_RUNS: tuple[Row, ...] = (
    (200, 1, 8.6, 8.8), (200, 2, 12.3, 12.6), (16000, 1, 3.9, 8.0), (16000, 2, 4.3, 7.1), (32000, 1, 2.3, 4.9),
)  # fmt: skip
NATIVE_OVER_STOCK = 1.82
"""Our dense decode kernel against vLLM's operator, one layer, mean of four shapes (docs/lab/cpu-kernels.md)."""


@dataclass(frozen=True)
class Run:
    """A measured rate and the simulated one, in tokens/s.

    ``fitted`` says that the machine's rates were taken from this row.
    """

    model: str
    context: int
    batch: int
    method: str
    measured: float
    simulated: float
    fitted: bool

    @property
    def error(self) -> float:
        return self.simulated / self.measured - 1.0


def own_machine(shape: ModelShape, rows: tuple[Row, ...]) -> Hardware:
    """Return a machine of two shared cores with the rates that the STOCK rows show.

    All but attention follows from the shortest context, by batch; the stock kernel's rate from the longest context with
    one sequence. No rate is taken from the hybrid rows.
    """
    shortest, longest = rows[0][0], rows[-1][0]
    first = {batch: batch / stock for context, batch, stock, _ in rows if context == shortest}
    stock = next(stock for context, batch, stock, _ in rows if context == longest and batch == 1)
    kv = (longest - shortest) * shape.token_bytes * shape.layers
    attention = kv / (1 / stock - first[1])
    weights = shape.layers * shape.layer_weight_bytes + shape.head_weight_bytes
    small = shortest * shape.token_bytes * shape.layers / attention

    def number(value: float) -> Number:
        return Number(value=value, source="docs/lab/measurements.md, stock rows")

    def curve(*points: tuple[float, float], by: str = "stock rows") -> Curve:
        return Curve(points=points, source=f"docs/lab/measurements.md, {by}")

    return Hardware(
        name="two shared cores",
        device="cpu",
        device_memory_bytes=number(23e9),
        host_ram_bytes=number(23e9),
        hbm_bytes_per_s=number(15e9),
        hbm_efficiency=number(1),
        bf16_flops_per_s=number(1e11),
        flops_efficiency=number(1),
        linear_bytes_per_s=curve(*((float(b), weights / (t - b * small)) for b, t in sorted(first.items()))),
        stock_attention_bytes_per_s=curve((1.0, attention)),
        device_attention_bytes_per_s=curve((1.0, attention * NATIVE_OVER_STOCK), by="docs/lab/cpu-kernels.md"),
        host_device_bytes_per_s=curve((1.0, 1e10)),
        host_read_bytes_per_s=curve((1.0, 15e9)),
        cpu_attention_bytes_per_s=curve((1.0, 1e10)),
        layer_overhead_s=number(0),
        step_overhead_s=number(0),
        cpu_job_overhead_s=number(0),
        cores=2,
    )


def own_runs() -> list[Run]:
    """Return the measured and simulated rates of every row of the two tables."""
    results = []
    models: tuple[tuple[str, dict[str, Any], tuple[Row, ...], Mapping[str, Any]], ...] = (
        ("smollm2-135m", SMOLLM2, SMOLLM2_RUNS, {"page_size": 16, "exact_layers": (0, 1, 2, 7, 8)}),
        ("qwen3-0.6b shape", QWEN3_06B, QWEN3_RUNS, {"exact_layers": (0, 1, 2)}),
    )
    for name, keys, rows, changes in models:
        shape = shape_from_config(keys, name)
        # They ran when every step looked at all pages.
        config = HybridConfig.model_validate({**changes, "selection": {"interval": 1}})
        machine = own_machine(shape, rows)
        for context, batch, stock, hybrid in rows:
            is_fitted = context == rows[0][0] or (context, batch) == (rows[-1][0], 1)
            for method, measured in (("stock", stock), ("quest", hybrid)):
                simulated = decode_step(machine, shape, config, method, context, batch).tokens_per_s
                fitted = is_fitted and measured is stock
                results.append(Run(name, context, batch, method, measured, simulated, fitted))
    return results


def validation_error(runs: list[Run]) -> tuple[float, float]:
    """Return the mean and the largest relative error of the rows to which nothing was fitted."""
    errors = [abs(run.error) for run in runs if not run.fitted]
    return sum(errors) / len(errors), max(errors)


GPU_RUNS: tuple[tuple[str, int, float | None, float], ...] = (
    ("stock", 2, None, 11.5), ("stock", 8, None, 17.2), ("scout", 2, 0.627, 11.2), ("scout", 8, 0.627, 19.9),
    ("scout", 14, 0.627, 33.0), ("stock", 8, None, 18.9), ("scout", 19, 0.112, 16.9), ("scout", 19, 0.215, 23.4),
)  # fmt: skip
"""Method, sequences of 32,768 tokens, share of the CPU, measured milliseconds. The last three are the second run."""


def gpu_table() -> list[tuple[str, ...]]:
    """Return the rows of the table of docs/lab/simulator.md, "Against a GPU"."""
    rate = Curve(points=((16.0, 83e9),), source="docs/lab/cuda.md: 16 cores together")
    machine = find_hardware("h200").replace(cores=16, cpu_attention_bytes_per_s=rate)
    config = resolve_config("qwen3-14b", None, {}, ())[0].model_copy(update={"frames_per_request": 142})
    rows = [("step", "measured, ms", "simulated, ms", "of that waits", "error")]
    for method, batch, share, measured in GPU_RUNS:
        step = decode_step(machine, find_shape("qwen3-14b"), config, method, 32768, batch, cpu_share=share)
        name = f"`{method}`, {batch}" if share is None else f"`{method}`, {batch}, share {share:g}"
        simulated, waits = 1e3 * step.seconds, 1e3 * step.part_seconds["waits"]
        rows.append(
            (name, f"{measured}", f"{simulated:.1f}", f"{waits:.1f}", f"{100 * (simulated / measured - 1):+.0f} %")
        )
    return rows
