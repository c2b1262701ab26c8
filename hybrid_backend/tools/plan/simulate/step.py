"""Simulated time of one decode step: the device, the CPU workers and the host link are queues that serve in order."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from hybrid_backend.config import HybridConfig
from hybrid_backend.errors import ConfigError
from hybrid_backend.hardware import Hardware
from hybrid_backend.methods.apex.rule import cpu_hides, judge
from hybrid_backend.model import ModelShape
from hybrid_backend.tools.plan.simulate.costs import Costs
from hybrid_backend.tools.plan.simulate.layers import METHODS, LayerWork, layer_works

PARTS = (
    "matrices", "attention", "digests", "prediction", "engine's kernels", "launches", "gaps", "selection", "bus",
    "copies' share", "waits", "engine",
)  # fmt: skip
"""Parts of a step in the order in which they are printed. "waits": the device waits for workers or copies;
"engine": scheduling and sampling between two steps."""


@dataclass(frozen=True)
class StepTime:
    """A decode step of ``batch`` sequences. Times, bytes and parts are those of one device.

    Attributes:
        part_seconds: seconds by the names of `PARTS`; their sum is the step.
        pcie_bytes: bytes that cross the host link.
        cpu_bytes: bytes of K and V that the CPU workers attend.
        batch: sequences on all devices together.
        cpu_rows: sequences of the batch that the CPU attends (apex).
        cpu_token_steps: steps that one token of such a sequence takes.
    """

    part_seconds: Mapping[str, float]
    pcie_bytes: float
    cpu_bytes: float
    batch: int
    cpu_rows: int = 0
    cpu_token_steps: float = 1.0

    @property
    def seconds(self) -> float:
        """Length of the step."""
        return sum(self.part_seconds.values())

    @property
    def idle_share(self) -> float:
        """Share of the step in which the device computes nothing."""
        return (self.part_seconds["waits"] + self.part_seconds["engine"]) / self.seconds

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all devices together."""
        return (self.batch - self.cpu_rows + self.cpu_rows / self.cpu_token_steps) / self.seconds


@dataclass
class _Step:
    """Timeline of the device. ``part_seconds`` contains all its time so far, so their sum is the present time."""

    has_own_workers: bool
    part_seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    free: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    @property
    def time(self) -> float:
        return sum(self.part_seconds.values())

    def spend(self, part_seconds: Mapping[str, float]) -> None:
        """Let the device work on these parts of the step."""
        for part, seconds in part_seconds.items():
            self.part_seconds[part] += seconds

    def wait(self, until: float) -> None:
        """Let the device wait until the time ``until`` of the step."""
        self.part_seconds["waits"] += max(0.0, until - self.time)

    def begin_fetch(self, layer: LayerWork, is_ahead: bool = False) -> float:
        """Select the pages or tokens that the layer must fetch and queue the fetch; return the time of arrival."""
        self.spend(layer.choose)
        if not is_ahead:
            self.spend({"selection": layer.select, "bus": layer.ask})
        if layer.fetch == "workers" and not self.has_own_workers:
            self.part_seconds["attention"] += layer.fetch_seconds
            return self.time
        begin = self.time + (layer.select + layer.ask) * is_ahead
        return self.queue(layer.fetch, layer.fetch_seconds, begin) if layer.fetch_seconds and layer.fetch else begin

    def queue(self, resource: str, seconds: float, begin: float) -> float:
        """Queue a task of a resource that serves in order; return when the task ends."""
        self.free[resource] = max(self.free[resource], begin) + seconds
        return self.free[resource]


def decode_step(
    hardware: Hardware,
    shape: ModelShape,
    config: HybridConfig,
    method: str,
    context: int,
    batch: int,
    *,
    cpu_share: float | None = None,
    cpu_rows: int = 0,
) -> StepTime:
    """Simulate one decode step of ``batch`` sequences with ``context`` tokens each.

    Args:
        hardware: the machine. With ``gpus`` > 1 each device runs a replica with its share of the batch and the host.
        shape: the model.
        config: budget, page size, frames, exact layers, recall and lookahead.
        method: one of `simulated_methods`. Whether the memory suffices is not checked.
        context: tokens of each sequence.
        batch: sequences on all devices together.
        cpu_share: share of a sparse layer's attended tokens that is not on the device; None: published or measured.
        cpu_rows: sequences of the batch that the CPU attends, for apex with a device tier of its own.

    Raises:
        ConfigError: an unknown method, or a number out of range.
    """
    if method not in simulated_methods():
        raise ConfigError(f"method {method!r}: cannot be simulated; write one of {', '.join(simulated_methods())}")
    for name, value in (("context", context), ("batch", batch)):
        if value < 1:
            raise ConfigError(f"{name}: got {value}, expected an integer >= 1")
    if cpu_share is not None and not 0.0 <= cpu_share < 1.0:
        raise ConfigError(f"cpu_share: got {cpu_share}, expected a number from 0 to below 1")
    if cpu_rows > batch or (cpu_rows and shape.full_layers < shape.layers):
        raise ConfigError(f"cpu_rows: got {cpu_rows}, expected up to {batch}, or 0 if a layer does not attend in full")
    config = config.for_layers(shape.attention_windows)
    is_cpu = hardware.device == "cpu"
    cpu_rows = cpu_rows if METHODS[method].splits else 0
    step_costs = Costs(hardware, shape, config, context, -(-(batch - cpu_rows) // hardware.gpus))
    if cpu_rows:
        return replace(_apex(step_costs, -(-cpu_rows // hardware.gpus)), batch=batch, cpu_rows=cpu_rows)
    layers = list(layer_works(step_costs, method, is_cpu, cpu_share))
    return _run(step_costs, step_costs, layers, batch)


def simulated_methods() -> tuple[str, ...]:
    """Names of the methods that `decode_step` accepts."""
    return tuple(METHODS)


def _run(device_costs: Costs, matrix_costs: Costs, layers: list[LayerWork], batch: int) -> StepTime:
    """Run the layers through the queues.

    Args:
        device_costs: for the sequences that the device attends.
        matrix_costs: for the sequences in the matrix products, which include those that the CPU attends.
        layers: of the model, in order.
        batch: sequences on all devices together.
    """
    step = _Step(has_own_workers=device_costs.hardware.device != "cpu")
    arrivals: dict[int, float] = {}
    later_layers = {index - layer.layers_ahead: index for index, layer in enumerate(layers) if layer.layers_ahead}
    for index, layer in enumerate(layers):
        if (later := later_layers.get(index)) is not None:
            arrivals[later] = step.begin_fetch(layers[later], is_ahead=True)
        step.part_seconds["matrices"] += matrix_costs.projections
        if index not in arrivals:
            arrivals[index] = step.begin_fetch(layer)
        step.part_seconds["attention"] += layer.attended
        step.wait(arrivals[index])
        step.spend({"attention": layer.merged, "bus": layer.bus, "matrices": matrix_costs.after_attention})
        step.part_seconds["engine's kernels"] += matrix_costs.kernels
        if layer.copied:
            step.queue("link", device_costs.copy(layer.copied), step.time)
            step.part_seconds["copies' share"] += device_costs.copy_share(layer.copied)
    step.spend({"matrices": matrix_costs.head, "engine": device_costs.hardware.step_overhead_s.value})
    if any(layer.copied for layer in layers):
        step.wait(step.free["link"])  # The next step begins when recalled pages are on the device.
    return StepTime(
        {
            part: step.part_seconds[part]
            for part in PARTS
            if step.part_seconds[part] > 1e-12 or part in ("waits", "engine")
        },
        sum(layer.pcie_bytes + layer.copied for layer in layers),
        sum(layer.cpu_bytes for layer in layers),
        batch,
    )


def _apex(device_costs: Costs, cpu_rows: int) -> StepTime:
    """Simulate apex: the device attends its own sequences, the CPU attends ``cpu_rows`` more, of the same length."""
    config, shape, rows = device_costs.config, device_costs.shape, device_costs.rows
    strategy, tokens = config.apex.strategy, rows * device_costs.context
    if strategy == "auto":
        verdict = judge(device_costs.times, rows, tokens, cpu_rows)
        hides = cpu_hides(device_costs.times, rows, tokens, cpu_rows * device_costs.context)
        strategy = "lockstep" if verdict.strategy == "pipeline" and hides else "overlap"
    cpu_costs, all_costs = replace(device_costs, rows=cpu_rows), replace(device_costs, rows=rows + cpu_rows)
    attended = device_costs.attention(device_costs.kv(device_costs.context))
    cpu_kv = cpu_costs.kv(cpu_costs.context)
    if strategy == "gpu":
        work = LayerWork(fetch="link", fetch_seconds=cpu_costs.pull(cpu_kv), pcie_bytes=cpu_kv, merged=attended)
        return _run(device_costs, all_costs, [work] * shape.layers, 0)
    answer = cpu_costs.cpu_attention(cpu_kv)
    parked = LayerWork(attended, pcie_bytes=cpu_costs.answer_bytes, cpu_bytes=cpu_kv)
    if strategy == "lockstep":
        work = replace(parked, fetch="workers", fetch_seconds=answer)
        return _run(device_costs, all_costs, [work] * shape.layers, 0)
    # Parked rows are all at one layer. They move on when the device returns to that layer and the answer has arrived,
    # and the first layer of the next token comes one step after the last layer of this one.
    step = _run(device_costs, all_costs, [parked] * shape.layers, 0)
    if device_costs.hardware.device == "cpu":  # The workers share the cores, and answer one layer in each step.
        attention = step.part_seconds["attention"] + answer
        step = replace(step, part_seconds={**step.part_seconds, "attention": attention})
    token_steps = shape.layers * max(1, math.ceil(answer / step.seconds)) + 1.0
    return replace(
        step,
        pcie_bytes=step.pcie_bytes / token_steps,
        cpu_bytes=step.cpu_bytes / token_steps,
        cpu_token_steps=token_steps,
    )
