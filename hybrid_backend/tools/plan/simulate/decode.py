"""``decode_step``: seconds, idle time and bytes of one decode step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from hybrid_backend.config import HybridConfig
from hybrid_backend.errors import ConfigError
from hybrid_backend.hardware import Hardware
from hybrid_backend.model import ModelShape
from hybrid_backend.tools.plan.simulate import apex, pipelines
from hybrid_backend.tools.plan.simulate.costs import Costs
from hybrid_backend.tools.plan.simulate.overheads import BARE, PARTS, Overheads
from hybrid_backend.tools.plan.simulate.pipelines import Machine, Pipeline

SCOUT_SHARE = 0.082
"""ScoutAttention: 8.2 % of the selected blocks are computed on the CPU on average, at a threshold of 12 %. Measured
here: 8.7 % at budget 2048 (docs/measurements.md)."""
WITHOUT_RECALL = 20.5 / 10.4
"""How much larger the share is without recall: measured over 256 steps (docs/measurements.md, budget 1024)."""
INFINIGEN_SHARE = 0.088
"""Selected pages that were not selected the step before: measured, pages of 32, budget 2048, SmolLM2-135M (8.8 %;
13.5 % at budget 1024). ScoutAttention reports less than 15 %."""
HGCA_SHARE = 0.52
"""Attended tokens that the CPU attends at beta 1 and a quarter of the context on the device: measured
(docs/measurements.md, HGCA)."""
CLO_HITS = 0.7922
"""CLO: lookups that need no load, mean of its Table 4 (section 6.2; 65 to 90 % by model, batch and length)."""


@dataclass(frozen=True)
class StepTime:
    """One decode step of ``batch`` sequences, the mean over a cycle of recalls.

    Times are seconds, of one device where several share the host; bytes are of one device too. ``device_busy`` counts
    kernels only; ``device_idle`` is the rest of the step: waits for workers or copies, and the step's own overhead.
    ``cpu_busy``: of the worker pool as a whole. Where the device tier is the CPU itself all work is ``device_busy``.
    ``cpu_rows`` of the batch take ``cpu_token_steps`` steps for a token (inf: they wait), the others one step.
    ``parts``: of ``seconds``, by the names of `overheads.PARTS`; those that take no time are left out. Of ``apex`` all
    that is not waited for counts as matrices.
    """

    seconds: float
    device_busy: float
    device_idle: float
    cpu_busy: float
    pcie_busy: float
    pcie_bytes: float
    cpu_bytes: float
    batch: int
    cpu_rows: int = 0
    cpu_token_steps: float = 1.0
    parts: Mapping[str, float] = field(default_factory=dict)

    @property
    def tokens_per_s(self) -> float:
        """Of all devices together."""
        return (self.batch - self.cpu_rows + self.cpu_rows / self.cpu_token_steps) / self.seconds

    @property
    def idle_share(self) -> float:
        return self.device_idle / self.seconds


@dataclass(frozen=True)
class _Simulated:
    """A method's pipeline and what it leaves off the device where nobody says otherwise."""

    pipeline: Pipeline
    share: Callable[[bool], float]
    only_beyond_frames: bool = False  # dense on the device while the context fits the frames
    is_resident_on_cpu: bool = False  # on a CPU every page is attended where it lies
    splits: bool = False  # some rows are attended by the CPU, the others by the device


def _nothing(recall: bool) -> float:
    return 0.0


_METHODS = {
    "stock": _Simulated(pipelines.stock, _nothing),
    "dense": _Simulated(pipelines.read_over_link, _nothing, is_resident_on_cpu=True),
    "quest": _Simulated(pipelines.in_place, _nothing),
    "scout": _Simulated(pipelines.scout, lambda recall: SCOUT_SHARE * (1.0 if recall else WITHOUT_RECALL), True),
    "infinigen": _Simulated(pipelines.infinigen, lambda recall: INFINIGEN_SHARE, True),
    "clo": _Simulated(pipelines.clo, _nothing, True),
    "hgca": _Simulated(pipelines.hgca, lambda recall: HGCA_SHARE),
    "headinfer": _Simulated(pipelines.streamed, _nothing),
    "apex": _Simulated(apex.served, _nothing, splits=True),
    **{
        f"apex_{name}": _Simulated(pipeline, _nothing, splits=True)
        for name, pipeline in (
            ("gpu", apex.gpu_only),
            ("lockstep", apex.lockstep),
            ("pipeline", apex.pipeline),
            ("overlap", apex.overlap),
            ("parked", apex.parked),
            ("parked_apart", apex.parked_apart),
        )
    },
}


def simulated_methods() -> tuple[str, ...]:
    """The methods that `decode_step` knows."""
    return tuple(_METHODS)


def decode_step(
    hardware: Hardware,
    shape: ModelShape,
    config: HybridConfig,
    method: str,
    context: int,
    batch: int,
    *,
    cpu_share: float | None = None,
    lookahead: bool | None = None,
    recall: bool | None = None,
    hit_ratio: float | None = None,
    persistent_heads: Sequence[int] | None = None,
    cpu_rows: int = 0,
    overheads: Overheads | None = None,
) -> StepTime:
    """Simulate decoding ``batch`` sequences of ``context`` tokens each.

    Args:
        hardware: with ``gpus`` > 1 every device runs a replica, takes its part of the batch and of the host.
        shape: the model.
        config: budget, page size, frames, exact layers, recall intervals and the like.
        method: one of `simulated_methods`; "stock" keeps K and V in the device's memory. Whether everything fits there
            is not checked.
        context: tokens of each sequence.
        batch: sequences, over all devices.
        cpu_share: share of a sparse layer's attended tokens that are not on the device; None: as published or measured.
        lookahead: None: as the configuration says (auto: yes where tiers are separate).
        recall: None: as the configuration says.
        hit_ratio: of clo: share of its lookups after which nothing is loaded, 0 to 1; None: as published.
        persistent_heads: of clo: of each layer, KV heads whose pages are all on the device; None: all heads of the
            first full-attention layer, which no layer can load for (CLO, section 3.3), and none of the others.
        cpu_rows: of apex: sequences of the batch that the CPU attends, over all devices, 0 to batch. Where tiers
            are unified there is no other place, and all sequences decode alike.
        overheads: launches, gaps and the like; None: those of our step. None are reckoned with where the device tier is
            a CPU, and of apex, whose paper has none.

    Returns:
        The step's times and bytes.

    Raises:
        ConfigError: an unknown method or a number out of range.
    """
    if method not in _METHODS:
        raise ConfigError(f"method {method!r}: cannot be simulated; write one of {', '.join(_METHODS)}")
    for name, value in (("context", context), ("batch", batch)):
        if value < 1:
            raise ConfigError(f"{name}: got {value}, expected an integer >= 1")
    if cpu_share is not None and not 0.0 <= cpu_share < 1.0:
        raise ConfigError(f"cpu_share: got {cpu_share}, expected a number from 0 to below 1")
    if hit_ratio is not None and not 0.0 <= hit_ratio <= 1.0:
        raise ConfigError(f"hit_ratio: got {hit_ratio}, expected a number from 0 to 1")
    if not 0 <= cpu_rows <= batch:
        raise ConfigError(f"cpu_rows: got {cpu_rows}, expected an integer from 0 to batch {batch}")
    if cpu_rows and shape.full_layers < shape.layers:
        raise ConfigError(f"cpu_rows: got {cpu_rows}, but not all layers of {shape.name} attend in full; write 0")
    config.validate_for(len(shape.attention_windows))
    config = _renumbered(config, shape)
    entry = _METHODS[method]
    is_cpu = hardware.device == "cpu"
    if not entry.splits:
        cpu_rows = 0
    extra = BARE if is_cpu or entry.splits else overheads or Overheads()
    costs = Costs(hardware, shape, config, context, -(-(batch - cpu_rows) // hardware.gpus), extra)
    recalls = config.recall.enabled if recall is None else recall
    machine = Machine(
        costs,
        share=entry.share(recalls) if cpu_share is None else cpu_share,
        lookahead=config.lookahead.enabled if lookahead is None else lookahead,
        recall=recalls,
        workers="device" if is_cpu else "workers",
        hit_ratio=CLO_HITS if hit_ratio is None else hit_ratio,
        persistent=_persistent(shape, persistent_heads),
        cpu_rows=-(-cpu_rows // hardware.gpus),
    )
    is_resident = (entry.only_beyond_frames and costs.fits) or (entry.is_resident_on_cpu and is_cpu)
    pipeline = pipelines.resident if is_resident else entry.pipeline
    return replace(_run(machine, pipeline, batch), cpu_rows=cpu_rows, cpu_token_steps=machine.cpu_token_steps)


def _persistent(shape: ModelShape, heads: Sequence[int] | None) -> tuple[int, ...]:
    """Checked, or the default of `decode_step`."""
    if heads is None:
        first = shape.windows.index(None) if None in shape.windows else -1
        return tuple(shape.kv_heads if layer == first else 0 for layer in range(shape.layers))
    if len(heads) != shape.layers or not all(0 <= count <= shape.kv_heads for count in heads):
        raise ConfigError(
            f"persistent_heads: got {list(heads)}, expected {shape.layers} numbers from 0 to {shape.kv_heads}, one for "
            "each layer"
        )
    return tuple(heads)


def _renumbered(config: HybridConfig, shape: ModelShape) -> HybridConfig:
    """Per-layer keys by the shape's layers, where the configuration counts those with attention only."""
    attends = [layer for layer, window in enumerate(shape.windows) if window != 0]
    if len(attends) == shape.layers:
        return config

    def there(layers: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(attends[index] for index in layers)

    whole, intervals = config.whole_layers, config.recall.intervals
    if not isinstance(intervals, int):
        by_layer = dict(zip(attends, intervals, strict=True))
        intervals = tuple(by_layer.get(layer, 1) for layer in range(shape.layers))
    return config.model_copy(
        update={
            "exact_layers": there(config.exact_layers),
            "whole_layers": whole if whole == "auto" else there(whole),
            "lookahead": config.lookahead.model_copy(update={"skip_layers": there(config.lookahead.skip_layers)}),
            "recall": config.recall.model_copy(update={"intervals": intervals}),
        }
    )


def _run(machine: Machine, pipeline: Pipeline, batch: int) -> StepTime:
    """Steps until the first one's cold start is over, then one cycle of recalls."""
    costs, time = machine.costs, machine.time
    overhead = costs.hardware.step_overhead_s.value
    intervals = costs.config.recall.intervals
    cycle = min(intervals if isinstance(intervals, int) else max(intervals), 16)
    begun = _state(machine)
    for step in range(cycle + 1):
        pipeline(machine, step)
        machine.device(costs.head)
        # Scheduling and sampling: the device waits, workers and copies go on.
        time.pass_idle("device", overhead)
        if step == 0:
            begun = _state(machine)
    mean = {key: (now - begun.get(key, 0.0)) / cycle for key, now in _state(machine).items()}
    seconds, busy = mean["seconds"], mean["device"]
    idle = max(0.0, seconds - busy)
    waits = idle - overhead if idle - overhead > 1e-9 * seconds else 0.0  # else rounding
    parts = {part: mean[part] for part in PARTS if mean.get(part)} | {"waits": waits, "engine": overhead}
    return StepTime(
        seconds, busy, idle, mean["workers"], mean["link"], mean["pcie bytes"], mean["cpu bytes"], batch, parts=parts
    )


def _state(machine: Machine) -> dict[str, float]:
    """What has passed, been worked and moved so far."""
    time = machine.time
    return {
        "seconds": time.free("device"),
        "device": time.busy("device"),
        "workers": time.busy("workers"),
        "link": time.busy("link"),
        "pcie bytes": machine.pcie_bytes,
        "cpu bytes": machine.cpu_bytes,
        **machine.spent,
    }
