"""Other hardware than the one that was measured: more cores, a faster link, more devices."""

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
    """What is to be different; None stays as it is. ``dram``: bytes per second that all cores together can read."""

    cores: int | None = None
    dram: float | None = None
    pcie: int | None = None
    gpus: int | None = None
    context: int | None = None
    batch: int | None = None

    def apply(self, hardware: Hardware) -> Hardware:
        """The same machine with these parts changed.

        More cores than were measured continue the curves of threads at their last slope, up to ``dram`` where it is
        given; a curve that was flat stays flat, because its memory is the limit. ``dram`` alone scales both curves.
        ``gpus`` share cores and host memory, each with a replica of the model and a link of its own.

        Raises:
            ConfigError: a number out of range.
        """
        for name, value in (("cores", self.cores), ("gpus", self.gpus), ("dram", self.dram)):
            if value is not None and value <= 0:
                raise ConfigError(f"what-if: {name}: got {value}, expected more than 0")
        changes: dict[str, object] = {}
        name = hardware.name
        read, attention = hardware.host_read_bytes_per_s, hardware.cpu_attention_bytes_per_s
        if self.dram is not None:
            ratio = attention.best / read.best
            read, attention = _limited(read, self.dram, self.cores), _limited(attention, self.dram * ratio, self.cores)
            name += f", DRAM {self.dram / 1e9:g} GB/s"
        if self.cores is not None:
            read, attention = _extended(read, self.cores, self.dram), _extended(attention, self.cores, self.dram)
            changes["cores"] = self.cores
            name += f", {counted(self.cores, 'core')}"
        changes |= {"host_read_bytes_per_s": read, "cpu_attention_bytes_per_s": attention}
        if self.pcie is not None:
            if self.pcie not in PCIE_PEAK:
                raise ConfigError(f"what-if: pcie: got {self.pcie}, expected one of {', '.join(map(str, PCIE_PEAK))}")
            source = f"what if: PCIe {self.pcie} x16, {PCIE_EFFICIENCY:.0%} of its peak"
            changes["host_device_bytes_per_s"] = copies(
                PCIE_PEAK[self.pcie] * PCIE_EFFICIENCY, COPY_SETUP_S / COPIES_AT_ONCE, source
            )
            name += f", PCIe {self.pcie}"
        if self.gpus is not None:
            changes["gpus"] = self.gpus
            name += f", {counted(self.gpus, 'device')}"
        return hardware.replace(name=name, **changes)


def _limited(curve: Curve, limit: float, cores: int | None) -> Curve:
    """All threads together reach ``limit``; few threads are as fast as before unless that is more than ``limit``."""
    _, rate = curve.points[-1]
    if rate < limit and cores is None:
        return curve.scaled(limit / rate, "what if: other memory")
    points = tuple((x, min(y, limit)) for x, y in curve.points)
    return Curve(points=points, source=f"{curve.source}; what if: at most {limit / 1e9:g} GB/s")


def _extended(curve: Curve, cores: int, limit: float | None) -> Curve:
    """The curve up to ``cores``, at its last slope; at the slope of one thread if memory was given as the limit."""
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
    """``["cores=64", "pcie=5", "context=1M", "gpus=8", "dram=300"]``; ConfigError names what cannot be read."""
    found: dict[str, float] = {}
    for change in ",".join(changes).split(","):
        key, equals, text = (part.strip() for part in change.partition("="))
        match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([kKmM]?)", text)
        if key not in WhatIf.__dataclass_fields__ or not equals or not match:
            raise ConfigError(f"what-if: {change!r}: expected KEY=NUMBER, as cores=64 or context=1M; keys: {KEYS}")
        found[key] = float(match[1]) * {"": 1, "k": 1024, "m": 1024**2}[match[2].lower()]
    dram = found.pop("dram", None)
    broken = [key for key, value in found.items() if value != int(value) or value < 1]
    if broken:
        raise ConfigError(f"what-if: {broken[0]}: got {found[broken[0]]:g}, expected an integer >= 1")
    return WhatIf(dram=None if dram is None else dram * 1e9, **{key: int(value) for key, value in found.items()})
