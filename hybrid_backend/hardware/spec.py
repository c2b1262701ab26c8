"""The hardware profile: numbers with their sources, as JSON.

Rates are bytes per second, times seconds, sizes bytes; 1 GB/s is 1e9 bytes per second.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from hybrid_backend.config.paths import user_path
from hybrid_backend.config.reading import parse_json, read_text, reading
from hybrid_backend.config.rules import show
from hybrid_backend.errors import ConfigError

_FIX = "write one with 'hybrid profile --hardware'"
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Text = Annotated[str, Field(min_length=1)]


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Number(_Frozen):
    """A number and its source: a data sheet, a measurement, a paper."""

    value: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    source: Text

    def times(self, factor: float, reason: str) -> Number:
        """Return the number multiplied by ``factor``; its source says why."""
        return Number(value=self.value * factor, source=f"{self.source}; {reason}")


class Curve(_Frozen):
    """A rate as a function of a size or a count: linear between the points, flat beyond them."""

    points: Annotated[tuple[tuple[Positive, Positive], ...], Field(min_length=1)]
    """``(x, rate)``, x rising."""
    source: Text

    @model_validator(mode="after")
    def _rising(self) -> Curve:
        xs = [x for x, _ in self.points]
        if any(a >= b for a, b in itertools.pairwise(xs)):
            raise ValueError(f"the points' first numbers must rise, got {xs}")
        return self

    def at(self, x: float) -> float:
        """Return the rate at ``x``."""
        xs = [point[0] for point in self.points]
        i = bisect.bisect_right(xs, x)
        if i == 0:
            return self.points[0][1]
        if i == len(xs):
            return self.points[-1][1]
        (x0, y0), (x1, y1) = self.points[i - 1], self.points[i]
        return y0 + (y1 - y0) * (x - x0) / (x1 - x0)

    def best_until(self, x: float) -> float:
        """Return the best rate at ``x`` or below, because fewer threads than allowed may be used."""
        return max([self.at(x), *(rate for point, rate in self.points if point <= x)])

    def times(self, factor: float) -> Curve:
        """Return the curve with every rate multiplied by ``factor``."""
        points = tuple((x, rate * factor) for x, rate in self.points)
        return Curve(points=points, source=f"{self.source}; times {factor:.3g}")

    def extended(self, x: float) -> Curve:
        """Return the curve continued to ``x`` at its last slope; a flat curve stays flat."""
        (x1, y1) = self.points[-1]
        if x <= x1:
            return self
        x0, y0 = self.points[-2] if len(self.points) > 1 else (0.0, 0.0)
        rate = y1 + max(0.0, (y1 - y0) / (x1 - x0)) * (x - x1)
        return Curve(points=(*self.points, (float(x), rate)), source=f"{self.source}; continued to {x:g}")


class Hardware(_Frozen):
    """A machine: a device, the link to it, and the host that a model server uses."""

    name: Text
    device: Literal["gpu", "cpu"] = "gpu"
    """cpu: the device tier is the CPU itself, so device and workers share cores and memory."""
    device_memory_bytes: Number
    hbm_bytes_per_s: Number
    """Peak bandwidth of the device's own memory."""
    hbm_efficiency: Number
    """Share of the peak memory bandwidth that memory-bound decode kernels reach."""
    bf16_flops_per_s: Number
    """Dense bf16 (fp16 where there is no bf16) matrix multiplication, without sparsity."""
    flops_efficiency: Number
    """Share of the peak FLOP/s that large matrix multiplications reach."""
    linear_bytes_per_s: Curve | None = None
    """Measured: bytes of weights per second, all matrices of a layer, by rows (sequences). None: the roofline."""
    device_attention_bytes_per_s: Curve | None = None
    """Measured: bytes of K and V that device attention reads per second, by rows. None: the roofline."""
    stock_attention_bytes_per_s: Curve | None = None
    """Measured: the same of the stock engine's own attention. None: as device attention."""
    host_device_bytes_per_s: Curve
    """Achieved rate of copies from host to device, by bytes of one contiguous piece (a page)."""
    host_ram_bytes: Number
    host_read_bytes_per_s: Curve
    """Rate of sequential reads of host memory, by number of threads."""
    cpu_attention_bytes_per_s: Curve
    """Bytes of K and V that CPU attention over scattered pages reads per second, by threads."""
    emulates_bf16: bool = False
    """The CPU has no instructions for products in bf16; ``bf16_flops_per_s`` is then its rate in fp32."""
    layer_overhead_s: Number
    """Time of the device per layer beyond bandwidth and FLOP/s: launches and small kernels."""
    step_overhead_s: Number
    """Time of a step in which the device is idle: scheduling, sampling, inputs and outputs."""
    cpu_job_overhead_s: Number
    """Time per layer from the device's request to the answer, without the attention: flags and waking threads."""
    cores: Annotated[int, Field(ge=1)]
    """Physical cores that workers may use."""
    processors: Annotated[int, Field(ge=1)] | None = None
    """Streaming multiprocessors of the device. None: not known; then copies take none from a step."""
    gpus: Annotated[int, Field(ge=1)] = 1
    """Devices that share this host, each with a replica of the model and its share of cores and host memory."""

    @field_validator("hbm_bytes_per_s", "hbm_efficiency", "bf16_flops_per_s", "flops_efficiency")
    @classmethod
    def _above_zero(cls, number: Number) -> Number:
        """Refuse a rate of 0, because sizes are divided by rates."""
        if not number.value > 0:
            raise ValueError(f"got {number.value:g}, expected a number > 0")
        return number

    @property
    def hbm_achieved(self) -> float:
        """Memory bandwidth in bytes/s that kernels reach."""
        return self.hbm_bytes_per_s.value * self.hbm_efficiency.value

    @property
    def flops_achieved(self) -> float:
        """FLOP/s that matrix multiplications reach."""
        return self.bf16_flops_per_s.value * self.flops_efficiency.value

    @property
    def threads(self) -> int:
        """Worker threads of one device."""
        return max(1, self.cores // self.gpus)

    @property
    def cpu_attention_achieved(self) -> float:
        """Bytes per second of CPU attention for one device while all devices ask."""
        curve = self.cpu_attention_bytes_per_s
        return min(curve.best_until(self.threads), curve.best_until(self.cores) / self.gpus)

    @property
    def host_read_achieved(self) -> float:
        """Share of one device in the host memory's bandwidth."""
        return self.host_read_bytes_per_s.best_until(self.cores) / self.gpus

    def link_achieved(self, piece_bytes: float) -> float:
        """Return the bytes per second from host to device in contiguous pieces of that size."""
        return min(self.host_device_bytes_per_s.at(piece_bytes), self.host_read_achieved)

    def with_cores(self, cores: int) -> Hardware:
        """Return the machine with that many cores; more than were measured continue the curves of threads.

        The cores of a CPU server are its device, so its device's rates follow: products by the number of cores, reads
        of weights and of K and V as the curves of threads do.
        """
        reads, attention = self.host_read_bytes_per_s.extended(cores), self.cpu_attention_bytes_per_s.extended(cores)
        machine = self.replace(cores=cores, host_read_bytes_per_s=reads, cpu_attention_bytes_per_s=attention)
        if self.device == "gpu" or cores == self.cores:
            return machine
        read = reads.best_until(cores) / reads.best_until(self.cores)
        attend = attention.best_until(cores) / attention.best_until(self.cores)
        return machine.replace(
            hbm_efficiency=self.hbm_efficiency.times(read, f"{cores} of {self.cores} cores"),
            bf16_flops_per_s=self.bf16_flops_per_s.times(cores / self.cores, f"{cores} of {self.cores} cores"),
            linear_bytes_per_s=self.linear_bytes_per_s and self.linear_bytes_per_s.times(read),
            device_attention_bytes_per_s=self.device_attention_bytes_per_s
            and self.device_attention_bytes_per_s.times(attend),
            stock_attention_bytes_per_s=self.stock_attention_bytes_per_s
            and self.stock_attention_bytes_per_s.times(attend),
        )

    def to_json(self) -> str:
        """Return the profile as JSON."""
        return self.model_dump_json(indent=1, exclude_none=True) + "\n"

    def replace(self, **changes: Any) -> Hardware:
        """Return a validated copy with some fields changed."""
        return Hardware.model_validate({**self.model_dump(), **changes})


def hardware_from_json(text: str, source: str) -> Hardware:
    """Return the profile in a JSON text.

    Raises:
        ConfigError: the profile is not valid. The message names ``source``, the key, the value and what is expected.
    """
    data = parse_json(text, source, _FIX)
    if not isinstance(data, dict):
        raise ConfigError(f"{source}: got {type(data).__name__}, expected an object with a hardware profile's keys")
    with reading(source, _FIX):
        try:
            return Hardware.model_validate(data)
        except ValidationError as error:
            raise ConfigError(f"{source}: {_explain(error)}") from None


def _explain(error: ValidationError) -> str:
    items = error.errors(include_url=False)
    first = items[0]
    key = ".".join(str(part) for part in first["loc"]) or "profile"
    if first["type"] == "missing":
        problem = f"{key}: missing; write the profile anew with 'hybrid profile --hardware'"
    elif first["type"] == "extra_forbidden":
        problem = f"{key}: unknown key; remove it"
    else:
        problem = f"{key}: got {show(first['input'])}, {first['msg']}"
    more = len(items) - 1
    return problem + (f" (and {more} more problem{'s' if more > 1 else ''})" if more else "")


def read_hardware(path: str | Path) -> Hardware:
    """Return the profile in a JSON file."""
    return hardware_from_json(read_text(path, _FIX), str(user_path(path)))


def saturating(counts: Sequence[int], one: float, all_of_them: float, source: str) -> Curve:
    """Return a curve by threads: each thread adds ``one`` bytes per second up to ``all_of_them``."""
    knee = all_of_them / one
    xs = sorted({*counts, max(1, math.ceil(knee))})
    return Curve(points=tuple((float(x), min(x * one, all_of_them)) for x in xs), source=source)


def copies(peak: float, setup_s: float, source: str, sizes: Sequence[int] = ()) -> Curve:
    """Return a curve by the size of a piece: each piece takes ``setup_s`` and its bytes at ``peak`` per second."""
    sizes = sizes or [2**n for n in range(12, 27)]
    return Curve(points=tuple((float(n), n / (setup_s + n / peak)) for n in sizes), source=source)
