"""What a decode step spends beside the bytes that it moves and the products that it computes, each part by itself.

One GPU has run some of it (docs/simulator.md, "Against a GPU"), after these numbers were chosen. Each says where it
is from, or that it is an estimate; `Overheads.without` switches one part off, so that a reader sees what it costs.
Rates of the machine are in its profile (`hardware`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

PARTS = (
    "matrices", "attention", "digests", "prediction", "engine's kernels", "launches", "gaps", "selection", "bus",
    "copies' share", "waits", "engine",
)  # fmt: skip
"""Of a step (`StepTime.parts`), in the order in which they are printed; they add up to it. "waits": the device for
workers or copies; "engine": between steps, with the device idle."""


class Launches(NamedTuple):
    """Nodes of a captured graph for one layer's attention, the prediction of its query with them."""

    sparse: int
    whole: int  # of a layer that lies on the device whole


ENGINE = 3
"""The engine's own in the same place: K and V stored, attention, the sum of its parts. They are among the profile's
``layer_overhead_s``, and ours come in their stead."""
LAUNCHES: Mapping[str, Launches] = {
    "scout": Launches(14, 4),
    "infinigen": Launches(14, 4),
    "clo": Launches(21, 4),
    "hgca": Launches(10, 4),
    "headinfer": Launches(15, 4),
    "dense": Launches(3, 4),
}
"""As counted in captured graphs on the simulated GPU (tests/engines/vllm/counted_launches.py; docs/cuda.md). The
product of the prediction is one of the 14; its matrix is counted by its size. A layer of clo with persistent heads has
39, headinfer's first layer 142."""


SELECTING = ("scout", "infinigen", "clo")
"""Methods whose sparse layers select pages by their digests."""


@dataclass(frozen=True)
class Overheads:
    """Times in seconds."""

    launches: Mapping[str, Launches] = field(default_factory=lambda: LAUNCHES)
    """Nodes by method; of others as many as the engine has."""
    kernel_s: float = 2e-6
    """Of a launch, the kernel by itself where its bytes take next to nothing. ESTIMATE: the general figure that
    ``layer_overhead_s`` is made of, a few reads of memory one after the other."""
    gap_s: float = 1.3e-6
    """From the end of one node of a graph to the begin of the next. Measured by others: 1.3 us on an H100 (Hazy
    Research, "Look Ma, No Bubbles!", 2025), 0.8 us on a B200 (arXiv 2512.22219)."""
    selection_s: float = 47e-6
    """Of a selection beyond the digests' bytes: shares of all heads' scores, and a search by one program for each row.
    ESTIMATE from reading the kernels: 32 us for the shares, 15 us for four histograms of 2,048 scores."""
    copy_programs: int = 12
    """Processors that a copy keeps from the step while it waits for the bus (`kernels/triton/residency.py`); 0: copies
    cost the step nothing, their bytes in the device's memory either."""
    shares_dram: bool = True
    """Copies and CPU workers read the same host memory (the profile's ``host_read_bytes_per_s``)."""
    flag_s: float = 1.5e-6
    """A flag, or a read, over the bus one way and back. ESTIMATE: a read of host memory by a device on PCIe takes 1 to
    2 us."""
    wake_s: float = 0.0
    """Until workers that sleep are at work, beyond ``cpu_job_overhead_s``, which is of workers that spin. Measured
    here, asleep: 45 us (docs/cpu-kernels.md)."""
    selects_beside: bool = True
    """A selection that is made a layer ahead has a stream of its own: what it takes beyond the digests' bytes passes
    while the layer before computes, and so does the way of the query over the bus."""
    partial_bytes: float = 2.0
    """Of an element of the CPU's partial, which the merge reads over the bus: the model's type."""
    asks: bool = True
    """Query and partial cross the bus while the device waits for them; else they take no time."""

    def beyond_engine(self, method: str, is_whole: bool) -> int:
        """Nodes of a layer that the engine's own step does not have."""
        if method not in self.launches:
            return 0
        return self.launches[method][is_whole] - ENGINE

    def without(self, part: str) -> Overheads:
        """With one of `SWITCHES` off."""
        return replace(self, **SWITCHES[part])


ASLEEP_S = 45e-6
"""`Overheads.wake_s` of workers that do not spin: median of 45 to 52 us (docs/cpu-kernels.md, two busy cores)."""
SWITCHES: Mapping[str, Mapping[str, Any]] = {
    "launches": {"kernel_s": 0.0, "selection_s": 0.0},
    "gaps": {"gap_s": 0.0},
    "contention": {"copy_programs": 0, "shares_dram": False},
    "flags": {"flag_s": 0.0, "wake_s": 0.0},
    "CPU partial": {"partial_bytes": 0.0},
}
"""What of `Overheads` is off where a part is switched off."""
BARE = Overheads(
    launches={}, kernel_s=0.0, gap_s=0.0, selection_s=0.0, copy_programs=0, shares_dram=False, flag_s=0.0, asks=False,
    selects_beside=False,
)  # fmt: skip
"""Bytes, products and waits alone; on a CPU, whose operations are calls."""
