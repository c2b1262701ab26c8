"""What `hybrid plan` says first, in 80 columns."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.model_configs import SHAPES
from hybrid_backend.config import HybridConfig, resolve_config
from hybrid_backend.hardware import find_hardware
from hybrid_backend.tools.plan.answer import answer, bound, faster, headline, meaning
from hybrid_backend.tools.plan.model import find_shape
from hybrid_backend.tools.plan.report import Plan, Request, make_plan
from tests.unit.plan.test_report import run

GIB = 2**30
QWEN3_14B = find_shape("qwen3-14b")
CONFIG = HybridConfig(exact_layers=(0, 1))


def plan(machine: str | None = "a100-80", **changes: Any) -> Plan:
    """32 sequences of 64k of Qwen3-14B."""
    hardware = find_hardware(machine) if machine else None
    asked = {
        "shape": QWEN3_14B, "config": CONFIG, "context": 65536, "batch": 32, "gpu_mem": None, "ram": None,
        "methods": ("infinigen", "scout"), **changes,
    }  # fmt: skip
    return make_plan(Request(hardware=hardware, **asked))


def told(found: Plan) -> str:
    row = answer(found)
    assert row is not None
    return bound(found, row)


def meant(found: Plan) -> str:
    row = answer(found)
    assert row is not None
    return meaning(found, row)


def test_a_small_host_pool_is_named_with_the_numbers_and_the_fix() -> None:
    """100 GiB hold nine sequences, beside the server."""
    small = plan(ram=100 * GIB)
    assert headline(small) == "scout holds 9 sequences of 65,536 tokens at once, stock 4: 2.2 times as many."
    assert meant(small) == "Simulated, both full: 302.6 tokens/s against 82.27, 3.7 times as fast."
    assert told(small) == (
        "Bounded by host memory: 100 GiB hold 9 sequences of 65,536 tokens, not 32 (device memory 45). To hold all: "
        "--ram 325GiB or --context 19k."
    )
    assert "All 32 fit" in told(plan(ram=325 * GIB)) or "Bounded by --batch" in told(plan(ram=325 * GIB))
    assert told(plan(ram=100 * GIB, context=19 * 1024)).startswith(("All 32 fit", "Bounded by --batch"))


def test_the_documentation_has_todays_answers() -> None:
    text = " ".join((Path(__file__).parents[3] / "docs" / "reference" / "plan.md").read_text().split())
    for found in (plan(), plan(ram=100 * GIB)):
        assert headline(found) in text and meant(found) in text and told(found) in text


@pytest.mark.parametrize("page", ["guides/choose-a-method.md", "start/gpu.md"])
def test_the_plan_that_a_page_shows_is_todays(page: str) -> None:
    text = (Path(__file__).parents[3] / "docs" / page).read_text()
    shown = re.search(r"^hybrid plan (\S+) (.+)\n```\n\n(?:.+\n\n)?```text\n((?:.+\n)+?)```", text, re.M)
    assert shown is not None
    printed = run(*shlex.split(shown[2]), model=shown[1], columns=80).stdout
    lines = shown[3].splitlines()
    assert [line.strip() for line in printed.splitlines()[: len(lines)]] == lines


def test_a_small_device_is_named_and_what_the_engine_would_make_of_it() -> None:
    small = plan("l40s")
    assert told(small).startswith(
        "Bounded by device memory: 41.39 GiB hold 12 sequences of 65,536 tokens, not 32 (host"
    )
    assert "Plan --batch 12" in told(small)
    assert "keep 0 of 2 exact layers whole, run 21 at once" in str(small.row("scout").otherwise)
    assert plan("l40s", batch=12).row("scout").fits


def test_else_the_batch_is_the_bound() -> None:
    assert told(plan()) == (
        "Bounded by --batch (--max-num-seqs) 32. There is room for more: device memory 45, host memory 50. "
        "--batch 45 plans for all of it."
    )
    assert told(plan(batch=45)) == "All 45 fit, and no more: device memory 45, host memory 50."


@pytest.mark.parametrize("batch", [1, 32])
def test_the_largest_batches_are_compared_whatever_batch_is_planned(batch: int) -> None:
    for found in (plan(batch=batch), plan(None, gpu_mem=80 * GIB, ram=512 * GIB, batch=batch)):
        scout, stock = found.row("scout").max_batch, found.row("stock").max_batch
        assert (scout, stock) == (45, 4)
        assert headline(found) == "scout holds 45 sequences of 65,536 tokens at once, stock 4: 11 times as many."


QWEN3_8B = find_shape("qwen3-8b")
STOCK = "ake the stock engine for this batch"


def test_a_batch_at_which_stock_is_as_fast_is_stocks() -> None:
    """One sequence of 1k: nothing is won where everything fits the device."""
    short = plan("rtx4090", context=1024, batch=1, shape=QWEN3_8B)
    assert meant(short).endswith(f"T{STOCK}: it is exact.")
    assert STOCK not in meant(plan())


def test_a_gain_within_the_simulations_error_is_a_draw_and_stocks() -> None:
    """One sequence of 32k on 24 GB: 1.1 times as fast is simulated, and the simulator errs by more."""
    draw = plan("rtx4090", context=32768, batch=1, shape=QWEN3_8B)
    sentence = f"A gain below 1.3 is within the simulation's error: t{STOCK}, which is exact."
    assert meant(draw).endswith(f"1.1 times as fast. {sentence}")
    on_cpu = plan("epyc-7313", context=2500, batch=1, shape=QWEN3_8B, methods=("quest",))
    assert STOCK in meant(on_cpu)
    assert STOCK not in meant(plan("epyc-7313", context=32768, batch=4, shape=QWEN3_8B, methods=("quest",)))


def test_another_method_is_called_faster_only_beyond_the_simulations_error() -> None:
    planned = plan()
    scout = planned.row("scout")
    for factor, is_named in ((1.29, False), (1.31, True)):
        assert scout.tokens_per_s is not None
        row = replace(planned.row("infinigen"), tokens_per_s=factor * scout.tokens_per_s)
        changed = replace(planned, rows=(planned.row("stock"), row, scout))
        assert (faster(changed, scout) is row) == is_named == ("Faster: infinigen" in meant(changed))


def test_no_method_that_is_not_ready_for_the_device_is_called_faster() -> None:
    """hgca and apex are for comparison on a GPU; all but quest and dense are on a CPU."""
    for machine, names in (("a100-80", ("hgca", "apex")), ("xeon-8480", ("scout", "hgca", "apex", "infinigen", "clo"))):
        configured = "scout" if machine == "a100-80" else "quest"
        planned = plan(machine, methods=(configured, *names), ram=2048 * GIB)
        row = planned.row(configured)
        fast = [replace(planned.row(name), best_tokens_per_s=1e6, tokens_per_s=1e6, fits=True) for name in names]
        assert faster(replace(planned, rows=(planned.row("stock"), row, *fast)), row) is None


def test_without_a_machine_the_first_lines_say_how_to_get_speeds_and_there_are_no_columns_of_them(
    tmp_path: Path,
) -> None:
    found = plan(None, gpu_mem=80 * GIB, ram=512 * GIB)
    assert meant(found).startswith("To see speeds: run hybrid profile --hardware")
    assert meant(found).endswith("of a similar GPU, as --machine a100-80.")
    assert meant(plan(None, gpu_mem=48 * GIB, ram=512 * GIB)).endswith("as --machine a40.")
    on_cpu = plan(None, gpu_mem=0, ram=512 * GIB, methods=("quest",))
    assert meant(on_cpu).startswith("Without a GPU both keep the KV cache in RAM: what can be won is speed. To see")
    hint = re.search(r"of a similar CPU, as --machine (\S+)\.$", meant(on_cpu))
    assert hint is not None and find_hardware(hint[1]).device == "cpu"
    file = tmp_path / "config.json"
    file.write_text(json.dumps(SHAPES["qwen3-14b"]))
    lines = run("--gpu-mem", "0", "--ram", "64", model=str(file), columns=80).stdout.splitlines()
    assert "To see speeds" in " ".join(" ".join(lines[:4]).split())
    table = lines[next(i for i, line in enumerate(lines) if line.startswith("method ")) :]
    assert "per s" not in table[0] and not [line for line in table if line.endswith(" -")]


def test_one_sequence_is_no_sequences() -> None:
    found = plan("rtx4090", shape=find_shape("qwen3-8b"), context=32768, batch=8)
    assert "stock 1: 8 times as many." in headline(found)
    one = plan(ram=20 * GIB)
    assert headline(one).startswith("scout holds 1 sequence of") and "GiB hold 1 sequence of" in told(one)


def test_nothing_that_fits_is_said() -> None:
    found = plan(None, gpu_mem=8 * GIB, ram=512 * GIB)
    assert answer(found) is None
    start, _, fix = headline(found).partition(" Plan ")
    assert start.startswith("Nothing holds a single sequence of 65,536 tokens: ")
    assert start.endswith(" GiB of device memory for one.")
    assert fix == "a smaller or a quantised model, or a shorter --context, or a larger device."


def test_a_host_that_holds_nothing_is_told_how_much_it_takes() -> None:
    """The memory that is named holds one sequence, and a tenth less does not."""
    small = plan(None, gpu_mem=0, ram=24 * GIB)
    named = int(re.findall(r"--ram (\d+)GiB", headline(small))[0])
    assert answer(small) is None
    assert answer(plan(None, gpu_mem=0, ram=named * GIB)) is not None
    assert answer(plan(None, gpu_mem=0, ram=int(0.9 * named) * GIB)) is None


def test_the_time_of_a_prompt_on_a_cpu_is_five_times_longer_where_bf16_is_emulated() -> None:
    avx2, fp32, amx = (
        plan(machine, gpu_mem=None, ram=256 * GIB, shape=replace(QWEN3_14B, dtype=dtype))
        for machine, dtype in (("epyc-7313", "bfloat16"), ("epyc-7313", "float32"), ("xeon-6426y", "bfloat16"))
    )
    assert avx2.prompt_s is not None and fp32.prompt_s is not None and amx.prompt_s is not None
    assert avx2.emulates_bf16 and fp32.emulates_bf16 and not amx.emulates_bf16
    assert avx2.prompt_s == pytest.approx(5 * fp32.prompt_s)
    # Operations per cycle and core, and clocks, of the data sheets: 2,048 at 2.5 GHz against 32 at 3 GHz.
    assert fp32.prompt_s / amx.prompt_s == pytest.approx(2048 * 2.5 / (32 * 3.0))
    assert plan().prompt_s is None, "a GPU's prompts are not simulated"


@pytest.mark.parametrize("machine", ["epyc-7313", "xeon-6426y"])
def test_a_gain_that_is_printed_below_the_error_is_called_one(machine: str) -> None:
    """One sequence of 32k of an 8B gains 1.28 and 1.27, which two digits would print as 1.3."""
    config, gains = resolve_config("qwen3-8b", None, {}, ())[0], []
    for batch in (1, 2, 4):
        text = meant(plan(machine, shape=QWEN3_8B, config=config, methods=("quest",), context=32768, batch=batch))
        gains.append(float(re.findall(r"([\d.]+) times as fast", text)[-1]))
        assert ("A gain below 1.3 is within the simulation's error" in text) == (gains[-1] < 1.3), text
    assert 1.2 < gains[0] < 1.3 < gains[-1]


def test_a_method_that_is_faster_is_named() -> None:
    assert "Faster:" not in meant(plan())
    slow = plan(methods=("dense", "scout"), batch=32)
    configured = make_plan(
        Request(
            QWEN3_14B, CONFIG.model_copy(update={"method": "dense"}), 65536, 32, None, None, find_hardware("a100-80"),
            methods=("dense", "scout"),
        )
    )  # fmt: skip
    assert headline(slow).startswith("scout")
    assert headline(configured).startswith("dense") and "Faster: scout, 704.6." in meant(configured)


@pytest.mark.parametrize(
    "extra",
    [
        (),
        ("--ram", "100GiB"),
        ("--machine", "l40s", "--context", "128k", "--cores", "64", "--gpus", "2"),
        ("--context", "1M", "--batch", "1"),
    ],
)
def test_nothing_is_cut_in_80_columns(tmp_path: Path, extra: tuple[str, ...]) -> None:
    file = tmp_path / "qwen3-14b" / "config.json"
    file.parent.mkdir()
    file.write_text(json.dumps(SHAPES["qwen3-14b"]))
    asked = ("--machine", "a100", "--context", "64k", "--batch", "32", *extra)
    narrow, wide = (run(*asked, model=str(file), columns=columns) for columns in (80, 400))
    assert narrow.exit_code == 0, narrow.output
    assert "…" not in narrow.output
    kept, _, command = narrow.output.partition("hybrid serve")
    assert max(map(len, kept.splitlines())) <= 80
    # Whatever stands in a wide console stands here too, and the command can be copied.
    assert " ".join(kept.split()) == " ".join(wide.output.partition("hybrid serve")[0].split())
    copied = shlex.split(command.replace("\\\n", " "))
    assert copied == shlex.split(wide.output.partition("hybrid serve")[2])
    rows = [line.split()[0] for line in narrow.output.splitlines() if line and not line.startswith((" ", "-"))]
    assert {"stock", "scout", "infinigen", "hgca", "dense"} <= set(rows), "methods are rows"
    assert "whole layers" in narrow.output.split("method ")[0], "among the device's memory, before the table"
