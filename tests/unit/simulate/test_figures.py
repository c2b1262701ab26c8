"""How far the simulator is from published and from measured numbers (`make simulate`).

Only workloads that the paper names are held to a number; for the others it is checked that the table says what was
assumed, and why a number is off.
"""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest

from bench import paper_numbers, simulate_figures
from bench import simulate_apex as apex
from bench import simulate_clo as clo
from bench import simulate_paper as paper
from bench.simulate_runs import QWEN3_RUNS, SMOLLM2_RUNS, own_runs, validation_error
from hybrid_backend.hardware import Curve, find_hardware
from hybrid_backend.tools.plan.simulate import StepTime, decode_step

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("method", "batch", "today"),
    [("scout", 16, 0.047), ("scout", 32, 0.037), ("hgca", 16, 0.106), ("infinigen", 16, 0.127)],
)
def test_throughput_grows_with_the_batch_as_in_figure_9(method: str, batch: int, today: float) -> None:
    """32k tokens, 16 to 32 and 32 to 64 sequences: all of the load is named. ``today``: the error as it is."""
    published = paper_numbers.GROWTH[method, batch]
    assert paper.growth(method, batch) == pytest.approx(published, rel=today + 0.005)


@pytest.mark.parametrize("context", paper.CONTEXTS)
def test_infinigen_waits_at_batch_40_as_the_paper_says_whatever_the_length(context: int) -> None:
    """61 %; the length is not named. Simulated 60 % (8k) to 52 % (64k), so -15 % at worst."""
    assert paper.idle(paper.step("infinigen", context, 40)) == pytest.approx(61, rel=0.16)


def test_hgca_waits_at_batch_40_as_the_paper_says_at_some_length() -> None:
    """57 %; the length is not named. The GPU's window grows with it, what the CPU attends does not: 81 to 42 %."""
    idle = [paper.idle(paper.step("hgca", context, 40)) for context in paper.CONTEXTS]
    assert all(longer < shorter for shorter, longer in pairwise(idle))
    assert idle[-1] < 57 < idle[0]


@pytest.mark.parametrize("context", paper.CONTEXTS)
def test_scout_waits_for_a_fraction_of_what_the_others_wait_for(context: int) -> None:
    """The paper: 6 % against 57 and 61 %."""
    scout, *others = (paper.idle(paper.step(m, context, 40)) for m in ("scout", "hgca", "infinigen"))
    assert scout < 6 / 57 * min(others)


def test_the_machine_is_the_papers() -> None:
    """Sections 2.3 and 3.2: 800 MB/s by token, 15 GB/s by page, 100 GB/s of attention on 36 cores, 1.9 TB/s, 80 GB."""
    machine = paper.paper_machine()
    assert machine.link_achieved(paper.QWEN3_14B.token_bytes) == 0.8e9
    assert machine.link_achieved(paper.QWEN3_14B.page_bytes(32)) == 15e9
    assert (machine.cores, machine.cpu_attention_achieved) == (36, 100e9)
    assert machine.hbm_bytes_per_s.value == pytest.approx(1.9e12, rel=0.02)
    assert machine.device_memory_bytes.value == 80 * 2**30


@pytest.mark.parametrize("batch", [16, 32, 40])
def test_infinigen_waits_for_the_link_and_hgca_for_the_workers(batch: int) -> None:
    """Twice the link helps the one and not the other, twice the CPU the other way round."""
    machine = paper.paper_machine()
    link = Curve(points=tuple((x, 2 * y) for x, y in paper.LINK), source="twice")
    cores = Curve(points=((36.0, 2 * paper.CPU_RATE),), source="twice")
    memory = machine.host_read_bytes_per_s.scaled(2, "twice")

    def stall(method: str, **changes: Curve) -> float:
        changed, window = machine.replace(**changes), paper.window_of(paper.LENGTH)
        share = {"hgca": paper.BUDGET / (paper.BUDGET + window)}.get(method)
        config = paper.paper_config(window)
        return paper.idle(
            decode_step(changed, paper.QWEN3_14B, config, method, paper.LENGTH, batch, cpu_share=share,
                        overheads=paper.OVERHEADS)
        )  # fmt: skip

    faster_cpu = {"cpu_attention_bytes_per_s": cores, "host_read_bytes_per_s": memory}
    for method, helps, does_not in (
        ("infinigen", {"host_device_bytes_per_s": link}, faster_cpu),
        ("hgca", faster_cpu, {"host_device_bytes_per_s": link}),
    ):
        now = stall(method)
        assert stall(method, **helps) < 0.8 * now
        assert stall(method, **does_not) == pytest.approx(now)


@pytest.mark.parametrize("context", paper.CONTEXTS)
def test_hgca_attends_a_quarter_of_the_context_on_the_gpu_and_the_budget_on_the_cpu(context: int) -> None:
    shape = paper.QWEN3_14B
    here, twice = (paper.step("hgca", n, 16) for n in (context, 2 * context))
    assert here.cpu_bytes == pytest.approx(2048 * shape.token_bytes * shape.layers * 16)
    quarter = context / 4 * shape.token_bytes * shape.layers * 16 / paper.paper_machine().hbm_achieved
    assert twice.device_busy - here.device_busy == pytest.approx(quarter)


def test_the_steps_own_overhead_is_not_idle() -> None:
    """Figure 11: stalls for the CPU or for copies. With nothing to wait for there are none."""
    assert paper.idle(paper.step("scout", 32768, 40, share=0.0)) == pytest.approx(0, abs=1e-9)
    assert paper.idle(StepTime(1.0, 0.5, 0.5, 0, 0, 0, 0, 1)) == pytest.approx(49.8)


def test_sizes_are_the_papers_to_the_byte() -> None:
    exact = [claim for claim in paper.claims() if claim.source in ("1", "2.3")]
    assert [claim.error for claim in exact] == [0, 0, 0, 0]


def test_what_the_paper_says_of_every_length_and_of_figure_9_holds() -> None:
    held = {s.what: s.holds for s in paper.statements() if s.source in ("4.3, Fig. 8", "4.3, Fig. 9")}
    assert len(held) == 5 and all(held.values()), held


@pytest.mark.parametrize("source", [paper, clo, apex])
def test_whatever_disagrees_says_why(source: ModuleType) -> None:
    silent = [claim.what for claim in source.claims() if not claim.agrees and not claim.why]
    silent += [statement.what for statement in source.statements() if not statement.holds and not statement.why]
    assert not silent


def test_whatever_the_paper_leaves_open_is_named() -> None:
    assert {claim.what for claim in paper.claims() if not claim.assumed} == {
        "KV cache of a request, GB",
        "scout, batch 32 over 16",
        "scout, batch 64 over 32",
    }


def test_every_number_of_clo_that_was_promised_has_a_row() -> None:
    """Layer times as they follow from the text's percentages, Table 3, and the ablation of section 6.5."""
    rows = {claim.what: claim.paper for claim in clo.claims()}
    assert rows.pop("a layer, full attention, ms") == pytest.approx(1.490, abs=0.0005)
    assert rows.pop("a layer, CLO, ms") == pytest.approx(0.970, abs=0.0025)
    assert rows.pop("CLO over full attention, layer time") == pytest.approx(1.37 / 2.1)
    caches = {f"cache on the GPU, {n}K tokens, GiB": size for n, size in ((32, 0.53), (64, 1.09), (128, 2.62))}
    steps = (("T", -35.2), ("T + G", -48.0), ("T + G + P", -56.9))
    assert rows == caches | {f"step latency, {what} against baseline, %": less for what, less in steps}


def test_clos_machine_is_the_papers() -> None:
    """Section 6.1: 48 GB, 149.7 TFLOPS fp16, PCIe 4 x16; section 6.5: 21.21 GB/s, whatever the piece."""
    machine = clo.clo_machine()
    assert (machine.bf16_flops_per_s.value, machine.hbm_bytes_per_s.value) == (149.7e12, 696e9)
    assert machine.link_achieved(512) == machine.link_achieved(1 << 26) == 21.21e9
    a40 = find_hardware("a40")
    assert (machine.hbm_efficiency, machine.flops_efficiency) == (a40.hbm_efficiency, a40.flops_efficiency)
    assert a40.hbm_efficiency == find_hardware("h100").hbm_efficiency  # general figures, fitted to nothing


def test_a_layer_of_clo_takes_as_long_as_in_the_paper_and_waits_for_nothing() -> None:
    """970 us at 128K, batch 1 and the hit ratio of Table 4: all of the load is named."""
    assert clo.layer_ms("clo") == pytest.approx(clo.CLO_MS, rel=0.01)
    assert [statement.holds for statement in clo.statements()] == [True, True]


def test_our_own_runs_are_predicted_as_well_as_is_said() -> None:
    """Mean error below 12 %; single rows up to 40 % (two rows at 16k and 32k, whose own spread is as wide)."""
    mean, worst = validation_error(own_runs())
    assert mean < 0.12
    assert worst < 0.40


def test_hybrid_rows_are_never_fitted() -> None:
    assert not any(run.fitted for run in own_runs() if run.method == "scout")


def test_the_runs_are_those_of_the_documentation() -> None:
    text = (ROOT / "docs" / "measurements.md").read_text()
    for context, batch, stock, hybrid in (*SMOLLM2_RUNS, *QWEN3_RUNS):
        assert f"| {context} | {batch} | {stock} | {hybrid} |" in text


@pytest.mark.parametrize("source", [paper, clo, apex])
def test_the_documentation_has_todays_table(source: ModuleType) -> None:
    text = (ROOT / "docs" / "simulator.md").read_text()
    for claim in source.claims():
        row = f"{claim.what} | {claim.paper:.3g} | {claim.simulated:.3g} | {100 * claim.error:+.0f} % |"
        assert row in text, row
    agree = sum(claim.agrees for claim in source.claims())
    assert f"**{agree} of {len(source.claims())} numbers are within 15 %.**" in text


@pytest.mark.slow
def test_one_command_writes_the_table_and_the_plots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["simulate_figures", "--out", str(tmp_path)])
    simulate_figures.main()
    report = json.loads((tmp_path / "simulate_figures.json").read_text())
    assert len(report["claims"]) == len(paper.claims())
    for name, source in (("clo", clo), ("apex", apex)):
        assert {row["what"]: row["paper"] for row in report[name]["claims"]} == {
            c.what: c.paper for c in source.claims()
        }
    assert (tmp_path / "simulate_figures.png").read_bytes().startswith(b"\x89PNG")
