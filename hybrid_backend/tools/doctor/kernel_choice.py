"""Check of the kernel that was chosen for each operation (`kernels.cpu.variants`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from operator import attrgetter

from hybrid_backend.errors import ConfigError, WorkerError
from hybrid_backend.kernels.cpu.variants import DTYPES, VARIABLE, Choice, CpuModel, microarchitecture
from hybrid_backend.tools.doctor.finding import Finding


def check_kernel_choice(choices: Callable[[], Sequence[Choice]], cpu: CpuModel) -> list[Finding]:
    """Name the kernel of each operation and the reason for it.

    Args:
        choices: returns the choices of this process (`kernels.cpu.library.kernel_choices`).
        cpu: this machine's model.
    """
    try:
        chosen = sorted(choices(), key=attrgetter("case.operation"))
    except ConfigError as error:
        return [Finding("kernel choice", "problem", str(error), f"correct {VARIABLE}, or unset it")]
    except WorkerError:
        return []  # The check of the native kernels reports a missing library.
    reasons = {
        "known": f"known to be the fastest on {microarchitecture(cpu)}",
        "measured": "measured to be the fastest on this CPU",
        "forced": f"forced by {VARIABLE}",
        "only": "no other one runs here",
    }
    findings = []
    for operation, group in groupby(chosen, key=attrgetter("case.operation")):
        members = list(group)
        why = [text for reason, text in reasons.items() if any(choice.reason == reason for choice in members)]
        findings.append(Finding(f"{operation} kernels", "ok", f"{_kernels(members)}: {', or '.join(why)}"))
    return findings


def _kernels(choices: Sequence[Choice]) -> str:
    """Name the kernels of one operation by dtype, with the shapes for which another kernel is faster."""
    by_dtype: dict[str, list[str]] = {}
    for dtype in DTYPES:
        shapes: dict[str, list[str]] = {}
        for choice in choices:
            if choice.case.dtype == dtype:
                shapes.setdefault(choice.order[0], []).append(f"{choice.case.head_dim}x{choice.case.group}")
        usual, *rest = sorted(shapes, key=lambda kernel: -len(shapes[kernel]))
        exceptions = [f"{kernel} for head_dim x group {', '.join(shapes[kernel])}" for kernel in rest]
        by_dtype.setdefault(", ".join([usual, *exceptions]), []).append(dtype)
    if len(by_dtype) == 1:
        return next(iter(by_dtype))
    return "; ".join(f"{', '.join(dtypes)}: {kernels}" for kernels, dtypes in by_dtype.items())
