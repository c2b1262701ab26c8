"""Choice of the fastest kernel on this CPU among the variants of an operation (``src/dispatch.h``).

An instruction is not faster because it is newer: ``vdpbf16ps`` makes bf16 prompts 1.8 times as fast on AMD's Zen 4, and
slower on Intel's Emerald Rapids. So the order in which variants are tried depends on the CPU model:

1. where `KNOWN` has a rule for the model and the operation, by that rule;
2. else by a measurement, which is made once and kept in ``~/.cache/hybrid_backend/kernels``.

Variants differ in rounding. So all servers on one machine must choose alike, also after a restart. A rule guarantees
that; of two processes that measure at the same time, the first one's result is kept. A measurement on a busy machine is
made again by the next start (`measured_orders`). A variant moves ahead of those before it in the default order only if
it is faster by more than `CLEARLY`.

`HYBRID_KERNELS` takes a variant by force: ``HYBRID_KERNELS=prompt=avx512,codes=vnni``.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from hybrid_backend.errors import ConfigError, WorkerError
from hybrid_backend.kernels.cpu.measured_orders import Orders, keep_orders, measure_orders, read_orders

VARIABLE = "HYBRID_KERNELS"
CLEARLY = 1.1
"""Ratio of times above which the faster variant moves ahead."""
PASSES, ROUNDS = 3, 2
"""Passes over all cases at a start, and timings of each variant in a pass. So another process that takes the core for
some milliseconds disturbs one pass of a variant, not all."""

Reason = Literal["only", "known", "measured", "forced"]
DTYPES = ("bfloat16", "float16", "float32")
"""Element types, numbered as ElementType of src/isa.h."""
HEAD_DIMS = (64, 128, 256)
"""Largest head_dim of each class of shapes (`hb_set_variant_order`); the last class has no limit."""
GROUPS = (1, 2, 4, 8)
"""Largest group of each class of shapes; the last class has no limit."""
PAGE_SIZE = 32
"""Page size of a measurement's job."""


class Case(NamedTuple):
    """An operation on one class of shapes, for which one variant is chosen."""

    operation: str
    dtype: str
    head_dim: int
    group: int

    def __str__(self) -> str:
        return f"{self.operation} {self.dtype} {self.head_dim}x{self.group}"


class CpuModel(NamedTuple):
    """Vendor, family and model of an x86 CPU, as CPUID names them; of an Arm CPU implementer, architecture and part."""

    vendor: str
    family: int
    model: int


@dataclass(frozen=True)
class Choice:
    """Variants of a case that run on this CPU, in the order in which they are tried."""

    case: Case
    order: tuple[str, ...]
    reason: Reason


def _is_bf16_prompt(case: Case) -> bool:
    return (case.operation, case.dtype) == ("prompt", "bfloat16")


_PAIRS = ("avx512_bf16",)
_TILES = ("amx", "avx512")
"""Pairs of bf16 are slower than fp32 FMA on these CPUs, so that AVX-512 is the best choice where AMX cannot be used."""
KNOWN: tuple[tuple[str, str, int, range, tuple[str, ...]], ...] = (
    ("Zen 4", "AuthenticAMD", 0x19, range(0x10, 0x20), _PAIRS),
    ("Zen 4", "AuthenticAMD", 0x19, range(0x60, 0x80), _PAIRS),
    ("Zen 4", "AuthenticAMD", 0x19, range(0xA0, 0xB0), _PAIRS),
    ("Zen 5", "AuthenticAMD", 0x1A, range(0x100), _PAIRS),
    ("Sapphire Rapids", "GenuineIntel", 6, range(0x8F, 0x90), _TILES),
    ("Emerald Rapids", "GenuineIntel", 6, range(0xCF, 0xD0), _TILES),
)
"""Name, vendor, family, models, and the variants to try first for bf16 prompts, by measurements of whole prompts
(docs/lab/cpu-kernels.md, "Which kernel"). A measurement decides on all else."""


def this_cpu(cpuinfo: Path = Path("/proc/cpuinfo")) -> CpuModel:
    """Read the CPU's model from Linux; empty and zeros where Linux does not report it."""
    try:
        lines = cpuinfo.read_text().partition("\n\n")[0].splitlines()
    except OSError:
        lines = []
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}

    def number(name: str) -> int:
        try:
            return int(fields.get(name, ""), 0)
        except ValueError:
            return 0

    if "CPU implementer" in fields:
        return CpuModel(fields["CPU implementer"], number("CPU architecture"), number("CPU part"))
    return CpuModel(fields.get("vendor_id", ""), number("cpu family"), number("model"))


def known_order(cpu: CpuModel, case: Case, variants: Sequence[str]) -> tuple[str, ...] | None:
    """Order the variants by the rule for a CPU model; None if there is no rule for this case.

    Args:
        cpu: the model.
        case: what is to be computed.
        variants: those that run on the machine, in the default order.
    """
    _, first = _known(cpu)
    return _ahead(first, variants) if first and _is_bf16_prompt(case) else None


def microarchitecture(cpu: CpuModel) -> str:
    """Return the name of a CPU's microarchitecture; empty where `KNOWN` lacks the model."""
    return _known(cpu)[0]


def _known(cpu: CpuModel) -> tuple[str, tuple[str, ...]]:
    """Return the name of a CPU model and its first variants for bf16 prompts; both are empty where `KNOWN` lacks it."""
    for name, vendor, family, models, first in KNOWN:
        if (cpu.vendor, cpu.family) == (vendor, family) and cpu.model in models:
            return name, first
    return "", ()


def _ahead(first: Sequence[str], variants: Sequence[str]) -> tuple[str, ...]:
    """Move the variants named ``first`` ahead of the others; names that are not among the variants are skipped."""
    return (*(name for name in first if name in variants), *(name for name in variants if name not in first))


def fastest_order(seconds: Mapping[str, float]) -> tuple[str, ...]:
    """Order variants by their measured times.

    Args:
        seconds: time of each variant, in the default order.
    """
    left = dict(seconds)
    order: list[str] = []
    while left:
        limit = CLEARLY * min(left.values())
        order.append(next(name for name, time in left.items() if time <= limit))
        del left[order[-1]]
    return tuple(order)


def forced_variants(value: str, variants: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Parse `HYBRID_KERNELS`: the variant to take by operation.

    Args:
        value: ``operation=variant``, separated by commas; may be empty.
        variants: of each operation, those that run on this machine.

    Raises:
        ConfigError: a name that is unknown on this machine.
    """
    forced = {}
    for part in filter(None, (part.strip() for part in value.split(","))):
        operation, _, variant = (piece.strip() for piece in part.partition("="))
        if operation not in variants:
            raise ConfigError(f"{VARIABLE}: {part!r} is not operation=variant; operations: {', '.join(variants)}")
        if variant not in variants[operation]:
            raise ConfigError(
                f"{VARIABLE}: {part!r}: this machine's variants of {operation} are {', '.join(variants[operation])}"
            )
        forced[operation] = variant
    return forced


class Variants:
    """Variants in a loaded library."""

    def __init__(self, library: ctypes.CDLL, model_type: Any) -> None:
        self._library, self._model_type = library, model_type
        self._names = {
            library.hb_operation_name(operation).decode(): [
                library.hb_variant_name(operation, variant).decode()
                for variant in range(library.hb_variant_count(operation))
            ]
            for operation in range(library.hb_operation_count())
        }
        self._operations = list(self._names)
        self._running: dict[Case, list[str]] = {}

    def cases(self) -> list[Case]:
        """List all cases: each operation for each dtype, head_dim and group size for which variants are timed."""
        return [Case(*case) for case in itertools.product(self._operations, DTYPES, HEAD_DIMS, GROUPS)]

    def running(self, case: Case) -> list[str]:
        """List the variants for a case that run on this CPU, in the default order."""
        if case not in self._running:
            operation, model = self._operations.index(case.operation), ctypes.byref(self._model(case))
            names = enumerate(self._names[case.operation])
            self._running[case] = [
                name for index, name in names if self._library.hb_variant_runs(operation, index, model)
            ]
        return self._running[case]

    def running_anywhere(self) -> dict[str, list[str]]:
        """List the variants of each operation that run on this CPU for some case."""
        cases = self.cases()
        return {
            operation: [
                name
                for name in names
                if any(name in self.running(case) for case in cases if case.operation == operation)
            ]
            for operation, names in self._names.items()
        }

    def measure(self, case: Case, rounds: int = ROUNDS, left_out: Sequence[str] = ()) -> dict[str, float]:
        """Time the variants for a case that run on this CPU, in seconds.

        Args:
            case: what to compute.
            rounds: how often each variant is timed at most; its shortest time counts.
            left_out: variants that are not timed.

        Raises:
            WorkerError: the library refused.
        """
        names = self._names[case.operation]
        seconds = (ctypes.c_double * len(names))(*(math.nan if name in left_out else 0.0 for name in names))
        operation, model = self._operations.index(case.operation), self._model(case)
        if self._library.hb_measure_variants(operation, ctypes.byref(model), rounds, seconds):
            raise WorkerError(f"native CPU kernel: {self._library.hb_last_error().decode()}")
        return {name: time for name, time in zip(names, seconds, strict=True) if not math.isnan(time)}

    def take(self, case: Case, order: Sequence[str]) -> None:
        """Have the library try the variants of a case in this order. Variants that are not named follow."""
        names = self._names[case.operation]
        numbers = [names.index(name) for name in _ahead(order, names)]
        model = self._model(case)
        self._library.hb_set_variant_order(
            self._operations.index(case.operation), ctypes.byref(model), (ctypes.c_int * len(names))(*numbers)
        )

    def _model(self, case: Case) -> Any:
        dtype, scale = DTYPES.index(case.dtype), case.head_dim**-0.5
        return self._model_type(dtype, 1, case.group, case.head_dim, PAGE_SIZE, scale, 1.0)


def choose(variants: Variants, cpu: CpuModel, value: str, library: Path, folder: Path | None) -> list[Choice]:
    """Choose the order of the variants for every case.

    Args:
        variants: the library's.
        cpu: this machine's.
        value: `HYBRID_KERNELS`.
        library: the library's file; a measurement is not kept for another one.
        folder: where measurements are kept; None: nowhere.

    Raises:
        ConfigError: ``value`` has a name that is unknown on this machine.
    """
    forced = forced_variants(value, variants.running_anywhere()) if value else {}
    choices, unknown = [], []
    for case in variants.cases():
        running = variants.running(case)
        order = known_order(cpu, case, running)
        if len(running) == 1:
            choices.append(Choice(case, tuple(running), "only"))
        elif forced.get(case.operation) in running:
            choices.append(Choice(case, _ahead([forced[case.operation]], running), "forced"))
        elif order is not None:
            choices.append(Choice(case, order, "known"))
        else:
            unknown.append(case)
    if unknown:
        orders = _measured_orders(variants, cpu, library, folder, {_representative(case) for case in unknown})
        choices += [Choice(case, orders[_representative(case)], "measured") for case in unknown]
    return choices


def _representative(case: Case) -> Case:
    """Return the case whose measurement stands for this one, so that nothing is measured that makes no difference."""
    if case.operation == "prompt":
        return case._replace(group=4)  # The work per block does not depend on the group size.
    if case.operation == "shares":
        return case._replace(dtype="bfloat16", head_dim=64, group=4)
    if case.operation == "weights":
        return case._replace(head_dim=128)
    if case.operation in ("bytes", "codes"):
        return case._replace(dtype="bfloat16")
    return case


def _measured_orders(
    variants: Variants, cpu: CpuModel, library: Path, folder: Path | None, cases: set[Case]
) -> dict[Case, tuple[str, ...]]:
    """Measure the cases, or read what an earlier start measured with the same library on the same CPU model."""
    running = {str(case): variants.running(case) for case in sorted(cases)}
    if folder is None:
        return _measure_orders(variants, cases)
    digest = hashlib.sha256(library.read_bytes() + repr(running).encode()).hexdigest()[:16]
    path = folder / f"{cpu.vendor or 'cpu'}-{cpu.family}-{cpu.model}-{digest}.json"
    earlier = read_orders(path, running)
    if earlier is not None and earlier.is_final:
        orders = earlier.orders
    else:

        def measure() -> Orders:
            return {str(case): order for case, order in _measure_orders(variants, cases).items()}

        orders = keep_orders(path, measure_orders(measure), running)
    return {case: orders[str(case)] for case in cases}


def _measure_orders(variants: Variants, cases: set[Case]) -> dict[Case, tuple[str, ...]]:
    """Measure all variants but the portable one, which is several times slower than the others.

    The shortest time of a variant in all passes counts.
    """
    shortest: dict[Case, dict[str, float]] = {case: {} for case in sorted(cases)}
    for _ in range(PASSES):
        for case, times in shortest.items():
            for name, seconds in variants.measure(case, left_out=["generic"]).items():
                times[name] = min(seconds, times.get(name, seconds))
    return {case: _ahead(fastest_order(times), variants.running(case)) for case, times in shortest.items()}
