"""The kernel that each operation takes on this machine is its fastest one."""

from __future__ import annotations

import pytest

from hybrid_backend.kernels.cpu import library
from hybrid_backend.kernels.cpu.variants import CLEARLY, Case, Choice, Variants, microarchitecture, this_cpu

REPETITIONS = 3
ROUNDS = 9

Times = dict[str, float]


def is_beaten(choice: Choice, seconds: Times) -> bool:
    """Tell whether another variant was faster than the chosen one by more than 10 %."""
    return seconds[choice.order[0]] > CLEARLY * min(seconds.values())


def measure(variants: Variants, choice: Choice) -> tuple[bool, Times]:
    """Time the variants of a case; again where the chosen one is beaten, as other processes disturb a measurement."""
    seconds: Times = {}
    for _ in range(REPETITIONS):
        seconds = variants.measure(choice.case, ROUNDS)
        if not is_beaten(choice, seconds):
            return False, seconds
    return True, seconds


def row(case: Case, choice: Choice, seconds: Times) -> str:
    times = ", ".join(f"{name} {1e6 * time:.1f}" for name, time in seconds.items())
    return f"| {case.operation} | {case.dtype} | {case.head_dim} x {case.group} | {choice.order[0]} | {times} |"


def test_no_variant_is_clearly_faster_than_the_chosen_one(capsys: pytest.CaptureFixture[str]) -> None:
    variants = library.library_variants()
    beaten, table = [], []
    for choice in library.kernel_choices():
        if len(choice.order) == 1:
            continue
        is_slow, seconds = measure(variants, choice)
        table.append(row(choice.case, choice, seconds))
        if is_slow:
            beaten.append(table[-1])
    with capsys.disabled():
        print(f"\n{this_cpu()} {microarchitecture(this_cpu())}, {', '.join(library.isas())}; microseconds")
        print("| operation | dtype | head_dim x group | chosen | times |\n| --- | --- | --- | --- | --- |")
        print("\n".join(table))
    assert not beaten, "another variant is faster:\n" + "\n".join(beaten)
