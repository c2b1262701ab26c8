"""Changes of a machine or a load for `hybrid plan --what-if`: more cores, a faster link, more devices."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from hybrid_backend.errors import ConfigError
from hybrid_backend.hardware import Curve, Hardware
from hybrid_backend.hardware.machines import COPIES_AT_ONCE, COPY_SETUP_S, PCIE_EFFICIENCY, PCIE_PEAK
from hybrid_backend.hardware.spec import copies
from hybrid_backend.tools.counts import counted

KEYS = "cores, dram (GB/s), pcie (3 to 6), gpus, context, batch"


@dataclass(frozen=True)
class WhatIf:
    """Changes; None leaves a value as it is. ``dram`` is the read rate of all cores together, in bytes per second."""

    cores: int | None = None
    dram: float | None = None
    pcie: int | None = None
    gpus: int | None = None
    context: int | None = None
    batch: int | None = None

    def apply(self, hardware: Hardware) -> Hardware:
        """Return the machine with these changes.

        More cores than were measured continue the curves of threads at their last slope, up to ``dram`` if that is
        given. A flat curve stays flat, because the memory is the limit. ``dram`` alone scales both curves. ``gpus``
        share cores and host memory; each has a replica of the model and a link of its own.

        Raises:
            ConfigError: a number out of range.
        """
        for key, value in (("cores", self.cores), ("gpus", self.gpus), ("dram", self.dram)):
            if value is not None and value <= 0:
                raise ConfigError(f"what-if: {key}: got {value}, expected more than 0")
        if self.pcie is not None and self.pcie not in PCIE_PEAK:
            raise ConfigError(f"what-if: pcie: got {self.pcie}, expected one of {', '.join(map(str, PCIE_PEAK))}")
        changes: dict[str, object] = {}
        names = [hardware.name]
        read, attention = hardware.host_read_bytes_per_s, hardware.cpu_attention_bytes_per_s
        if self.dram is not None:
            ratio = attention.best / read.best
            read, attention = _limited(read, self.dram, self.cores), _limited(attention, self.dram * ratio, self.cores)
            names.append(f"DRAM {self.dram / 1e9:g} GB/s")
        if self.cores is not None:
            read, attention = _extended(read, self.cores, self.dram), _extended(attention, self.cores, self.dram)
            changes["cores"] = self.cores
            names.append(counted(self.cores, "core"))
        if self.pcie is not None:
            rate, source = (
                PCIE_PEAK[self.pcie] * PCIE_EFFICIENCY,
                f"{PCIE_EFFICIENCY:.0%} of the peak of PCIe {self.pcie} x16",
            )
            changes["host_device_bytes_per_s"] = copies(rate, COPY_SETUP_S / COPIES_AT_ONCE, f"what if: {source}")
            names.append(f"PCIe {self.pcie}")
        if self.gpus is not None:
            changes["gpus"] = self.gpus
            names.append(counted(self.gpus, "device"))
        changes |= {"host_read_bytes_per_s": read, "cpu_attention_bytes_per_s": attention}
        return hardware.replace(name=", ".join(names), **changes)


def _limited(curve: Curve, limit: float, cores: int | None) -> Curve:
    """Return the curve with ``limit`` as the rate of all threads; few threads keep their rate up to that limit."""
    _, rate = curve.points[-1]
    if rate < limit and cores is None:
        return curve.scaled(limit / rate, "what if: other memory")
    points = tuple((x, min(y, limit)) for x, y in curve.points)
    return Curve(points=points, source=f"{curve.source}; what if: at most {limit / 1e9:g} GB/s")


def _extended(curve: Curve, cores: int, limit: float | None) -> Curve:
    """Continue the curve to ``cores`` at its last slope, or at the slope of one thread up to ``limit``."""
    (x1, y1) = curve.points[-1]
    if cores <= x1:
        return curve
    x0, y0 = curve.points[-2] if len(curve.points) > 1 else (0.0, 0.0)
    slope = max(0.0, (y1 - y0) / (x1 - x0)) if limit is None else curve.points[0][1] / curve.points[0][0]
    rate = y1 + slope * (cores - x1)
    rate = rate if limit is None else min(rate, max(limit, y1))
    return Curve(
        points=(*curve.points, (float(cores), rate)), source=f"{curve.source}; what if: {counted(cores, 'core')}"
    )


def parse_what_if(changes: Sequence[str]) -> WhatIf:
    """Read changes such as ``["cores=64", "context=1M,dram=300"]``.

    Raises:
        ConfigError: a change that cannot be read.
    """
    numbers: dict[str, float] = {}
    for change in ",".join(changes).split(","):
        key, equals, text = (part.strip() for part in change.partition("="))
        match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([kKmM]?)", text)
        if key not in WhatIf.__dataclass_fields__ or not equals or not match:
            raise ConfigError(f"what-if: {change!r}: expected KEY=NUMBER, as cores=64 or context=1M; keys: {KEYS}")
        numbers[key] = float(match[1]) * {"": 1, "k": 1024, "m": 1024**2}[match[2].lower()]
    dram = numbers.pop("dram", None)
    for key, value in numbers.items():
        if value != int(value) or value < 1:
            raise ConfigError(f"what-if: {key}: got {value:g}, expected an integer >= 1")
    return WhatIf(dram=None if dram is None else dram * 1e9, **{key: int(value) for key, value in numbers.items()})
