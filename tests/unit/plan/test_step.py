"""Our step by its parts (`make simulate`): the parts add up, the documentation has today's tables, and what is promised
is what is simulated. NOT a measurement: no GPU has run any of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import simulate_step as steps
from hybrid_backend.hardware import find_hardware
from hybrid_backend.tools.plan.simulate import PARTS, Overheads, decode_step
from hybrid_backend.tools.plan.simulate.overheads import BARE, ENGINE, LAUNCHES, SWITCHES

TEXT = (Path(__file__).parents[3] / "docs" / "cuda.md").read_text()
CLAIMED = {
    ("times stock", "a100-80"): 6,
    ("times stock", "l40s"): 5.1,
    ("idle, %", "a100-80"): 6,
    ("idle, %", "l40s"): 6,
}
"""Targets that docs/cuda.md says are met."""


@pytest.mark.parametrize("title", list(steps.columns()))
def test_the_parts_add_up_to_the_step(title: str) -> None:
    _, at = steps.columns()[title]
    assert set(at.parts) <= set(PARTS)
    assert sum(at.parts.values()) == pytest.approx(at.seconds, rel=1e-9)
    assert at.parts["waits"] + at.parts["engine"] == pytest.approx(at.device_idle)


@pytest.mark.parametrize("table", list(steps.TABLES))
def test_the_documentation_has_todays_tables(table: str) -> None:
    for row in steps.TABLES[table]():
        assert "| " + " | ".join(row) + " |" in TEXT, row


@pytest.mark.parametrize(("what", "machine"), CLAIMED)
def test_targets_that_are_claimed_are_met(what: str, machine: str) -> None:
    target = next(t for t in steps.targets() if (t.what, t.machine) == (what, machine))
    assert target.wanted == CLAIMED[what, machine]
    assert target.is_met, target


def test_targets_that_are_missed_are_told() -> None:
    missed = {(target.what, target.machine) for target in steps.targets() if not target.is_met}
    assert missed == {("idle, %", "h200")}
    assert not missed & set(CLAIMED)


def test_a_48_gb_card_runs_what_the_code_at_start_chooses() -> None:
    """Whole layers are as large as the host pool: one of 32 sequences leaves no room for them."""
    large, chosen = steps.served("l40s", 32), steps.chosen("l40s")
    assert (large.whole, large.requests) == (0, 21)
    assert (chosen.whole, chosen.requests, chosen.pool) == (2, 12, 12)
    assert chosen.frames > chosen.config.automatic_frames  # of free memory


@pytest.mark.parametrize("part", list(SWITCHES))
@pytest.mark.parametrize("name", list(steps.MACHINES))
def test_without_a_part_no_step_is_slower(name: str, part: str) -> None:
    assert steps.step(steps.chosen(name), Overheads().without(part)).seconds <= steps.now(name).seconds


def test_launches_and_gaps_by_hand() -> None:
    """38 sparse layers of 14 nodes and two whole ones of 4, less what the engine has in their place."""
    beyond = 38 * (14 - ENGINE) + 2 * (4 - ENGINE)
    parts = steps.now("a100-80").parts
    assert parts["launches"] == pytest.approx(beyond * Overheads().kernel_s)
    assert parts["gaps"] == pytest.approx(beyond * Overheads().gap_s)


def test_what_crosses_the_bus_by_hand() -> None:
    """Partials and their logsumexp in, and a flag; queries go out beside the step."""
    at, usual, link = steps.chosen("a100-80"), Overheads(), find_hardware("a100-80").host_device_bytes_per_s.best
    values = 32 * 40 * 128
    for size in (4.0, 2.0):
        found = steps.step(at, Overheads(partial_bytes=size)).parts["bus"]
        layer = (size * values + 4 * 32 * 40) / link + usual.flag_s
        assert found == pytest.approx(38 * layer)


def test_copies_keep_twelve_processors_while_they_last() -> None:
    machine = find_hardware("a100-80")
    at = steps.now("a100-80")
    copied = 38 * 32 * 0.082 * 2048 * 4096 / 8
    link = machine.link_achieved(32 * 4096)
    assert at.parts["copies' share"] == pytest.approx(copied / link * 12 / 108 + copied / machine.hbm_achieved)


def test_workers_that_sleep_answer_later_by_as_much() -> None:
    """Where the answer is waited for: without looking ahead."""
    at = steps.chosen("a100-80")
    awake, asleep = (
        decode_step(
            at.machine, steps.QWEN3_14B, at.config, "scout", steps.CONTEXT, 32, lookahead=False, recall=False,
            cpu_share=0.9, overheads=Overheads(wake_s=wake_s),
        )
        for wake_s in (0.0, 45e-6)
    )  # fmt: skip
    assert asleep.seconds - awake.seconds == pytest.approx(38 * 45e-6)


def test_a_step_without_overheads_has_none() -> None:
    at = steps.chosen("h200")
    parts = steps.step(at, BARE).parts
    assert set(parts) == {"matrices", "attention", "digests", "prediction", "engine's kernels", "waits", "engine"}
    assert {name for name in LAUNCHES if Overheads().beyond_engine(name, is_whole=False) < 0} == set()
