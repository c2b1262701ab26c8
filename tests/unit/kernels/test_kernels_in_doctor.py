"""Kernels that were chosen, as ``hybrid doctor`` shows them."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from hybrid_backend.cli import app
from hybrid_backend.errors import ConfigError, WorkerError
from hybrid_backend.kernels import cpu
from hybrid_backend.kernels.cpu import library
from hybrid_backend.kernels.cpu.variants import Case, Choice, CpuModel, Reason
from hybrid_backend.tools.doctor.machine import check_kernel_choice

EMERALD_RAPIDS = CpuModel("GenuineIntel", 6, 0xCF)


def choices(operation: str, first: dict[tuple[str, int, int], str], reason: Reason) -> list[Choice]:
    return [Choice(Case(operation, *shape), (kernel, "generic"), reason) for shape, kernel in first.items()]


def test_the_kernel_of_each_operation_is_named_with_its_reason() -> None:
    prompts = {("bfloat16", 64, 1): "avx512", ("float16", 64, 1): "avx2", ("float32", 64, 1): "avx512"}
    partials = {(dtype, 64, group): "avx512" for dtype in ("bfloat16", "float16", "float32") for group in (1, 2, 4)}
    partials["bfloat16", 64, 1] = "avx2"
    chosen = [*choices("prompt", prompts, "known"), *choices("partial", partials, "measured")]
    told = {finding.check: finding.text for finding in check_kernel_choice(lambda: chosen, EMERALD_RAPIDS)}
    assert told == {
        "prompt kernels": "bfloat16, float32: avx512; float16: avx2 (known to be the fastest on Emerald Rapids)",
        "partial kernels": (
            "bfloat16: avx512, avx2; float16, float32: avx512 (measured to be the fastest on this CPU)"
        ),
    }


def test_a_forced_kernel_that_is_unknown_is_a_problem_and_a_missing_library_is_another_check_s() -> None:
    def refuse(error: Exception) -> list[Choice]:
        raise error

    wrong = ConfigError("HYBRID_KERNELS: 'prompt=quick': this machine's variants of prompt are avx2, generic")
    (finding,) = check_kernel_choice(lambda: refuse(wrong), EMERALD_RAPIDS)
    assert (finding.state, finding.text) == ("problem", str(wrong))
    assert not check_kernel_choice(lambda: refuse(WorkerError("not built")), EMERALD_RAPIDS)


@pytest.mark.skipif(not cpu.available(), reason=str(cpu.why_unavailable()))
def test_doctor_names_the_kernels_of_this_machine() -> None:
    told = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "300"}).stdout
    for choice in library.kernel_choices():
        line = next(line for line in told.splitlines() if line.startswith(f"{choice.case.operation} kernels "))
        assert choice.order[0] in line
