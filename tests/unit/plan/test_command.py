"""The command `hybrid plan`: its options, its answer in text and JSON, and what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hybrid_backend.cli import app
from hybrid_backend.errors import ConfigError
from hybrid_backend.tools.plan.command import memory, tokens
from hybrid_backend.tools.plan.table import COLUMNS
from tests.support.plan_command import run

GIB = 2**30


def test_the_command_prints_the_answer_a_table_and_the_serve_command(model_dir: Path) -> None:
    result = run("--batch", "4", "--machine", "a10", "--cores", "8", "--set", "budget_tokens=512")
    assert result.exit_code == 0, result.output
    served = "hybrid serve smollm2-135m-instruct --set=budget_tokens=512 --set=method=scout"
    for text in ("scout", "infinigen", "on a10, 8 cores:", "scout, device memory: ", served):
        assert text in result.output
    assert "To see speeds" in run("--gpu-mem", "24GiB", "--ram", "64GiB").output
    assert "smollm2-135m-instruct was made for 8,192 tokens" in run("--machine", "t4", "--context", "16k").output
    assert "does not fit 64 times: device" in run("--gpu-mem", "2GiB", "--ram", "64GiB", "--batch", "64").output


def test_the_plan_has_the_dtype_that_serve_chooses_where_bf16_is_emulated(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fp32, if its weights take at most a third of the memory: 8B weights do of 256 GiB, and not of 64 GiB."""

    def served(*words: str) -> str:
        return str(re.findall(r"--dtype\s+\\?\s*(\w+)", run(*words, model="qwen3-8b").output)[-1])

    assert served("--machine", "epyc-7313") == "float32"
    assert served("--machine", "epyc-7313", "--ram", "64GiB") == "bfloat16"
    assert served("--machine", "epyc-7313", "--dtype", "bfloat16") == "bfloat16"
    assert served("--machine", "xeon-6426y") == "bfloat16"
    for has_instructions, dtype in ((True, "bfloat16"), (False, "float32")):  # this machine
        monkeypatch.setattr("hybrid_backend.engines.cpu_defaults.has_bf16", lambda has=has_instructions: has)
        assert served("--gpu-mem", "0", "--ram", "256GiB") == dtype
        assert served("--gpu-mem", "24", "--ram", "256GiB") == "bfloat16", "a GPU computes it"


def test_the_first_paragraph_has_the_time_of_a_prompt_and_a_note_that_of_the_other_dtype(model_dir: Path) -> None:
    in_float32, in_bf16 = (
        " ".join(run("--machine", "epyc-7313", "--ram", ram, "--context", "32k", model="qwen3-8b").output.split())
        for ram in ("256GiB", "64GiB")
    )
    for output, own, other in ((in_float32, "14 min", "70 min"), (in_bf16, "70 min", "14 min")):
        first, _, notes = output.partition("Bounded by")
        assert f"Until its first token a prompt of 32,768 tokens takes about {own}" in first
        assert f"a prompt takes {other}" in notes and "this CPU emulates bfloat16" in notes
    assert "emulates" not in run("--machine", "xeon-6426y", model="qwen3-8b").output


def test_the_plan_says_which_memory_it_took(model_dir: Path) -> None:
    def load(*words: str) -> str:
        return " ".join(run("--gpu-mem", "0", *words).output.split())

    assert "which is free here now; --ram plans with another size" in load()
    assert "host 7 GiB" in load("--ram", "7GiB") and "--ram plans" not in load("--ram", "7GiB")
    on_machine = " ".join(run("--machine", "epyc-9354").output.split())
    assert "host 384 GiB, all that the machine has; --ram plans with less" in on_machine


def test_cores_and_devices_are_those_of_a_machine(model_dir: Path) -> None:
    asked = ("--machine", "h100", "--method", "hgca", "--batch", "32", "--json")
    usual, few, eight = (json.loads(run(*asked, *more).output) for more in ((), ("--cores", "2"), ("--gpus", "8")))
    assert few["rows"][1]["step_ms"] > usual["rows"][1]["step_ms"] and few["machine"] == "h100, 2 cores"
    assert eight["devices"] == 8 and eight["rows"][1]["max_batch"] > usual["rows"][1]["max_batch"]
    on_cpu = json.loads(run("--machine", "EPYC 7313", "--cores", "4", "--json").output)
    assert on_cpu["machine"] == "epyc-7313, 4 cores" and on_cpu["device_limit"] == 0


CPU_NAMES = (
    "one of ryzen-7950x, epyc-7313, epyc-9354, xeon-6426y, xeon-8480, or the JSON file of 'hybrid profile --hardware'"
)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "--gpu-mem 0 --machine h100 --cores 16 --ram 64GiB",
            "--gpu-mem 0: --machine h100 has a GPU, whose rates are not those of its CPU; name a CPU server: "
            f"{CPU_NAMES}",
        ),
        (
            "--machine epyc-7313 --gpu-mem 24",
            "--gpu-mem: --machine epyc-7313 is a CPU server, which has no GPU memory; leave --gpu-mem out, or name a "
            "machine with a GPU: one of t4, a10,",
        ),
        ("--machine epyc-7313 --gpus 2", "--gpus 2: a CPU server without a GPU is planned; leave --gpus out, or name"),
        (
            "--gpu-mem 0 --ram 9GiB --cores 4",
            "--cores: counts are for speeds, and the rates of this machine are not known; add --machine with "
            f"{CPU_NAMES}, or leave --cores out to plan memory alone",
        ),
        ("--gpu-mem 24 --ram 9GiB --gpus 2", "--gpus: counts are for speeds, and the rates of this machine are not"),
    ],
)
def test_options_that_contradict_each_other_are_refused_with_the_fix(arguments: str, message: str) -> None:
    refused = CliRunner().invoke(app, ["plan", "smollm2-135m-instruct", *arguments.split()])
    assert refused.exit_code == 1 and refused.stdout == "" and refused.stderr.startswith(f"error: {message}")
    assert refused.stderr.count("\n") == 1


def test_where_the_hint_of_a_plan_leads_is_a_plan_with_speeds(model_dir: Path) -> None:
    for words in (("--gpu-mem", "0", "--ram", "64GiB"), ("--gpu-mem", "24GiB", "--ram", "64GiB")):
        hint = re.search(r"as --machine ([\w-]+)\.", " ".join(run(*words).output.split()))
        assert hint is not None
        followed = run(*words, "--machine", hint[1])
        assert followed.exit_code == 0 and "tokens/s" in followed.output and "To see speeds" not in followed.output


def test_the_command_prints_json(model_dir: Path) -> None:
    result = run("--machine", "t4", "--json", "--method", "scout", "--context", "16k", "--set", "budget_tokens=512")
    told = json.loads(result.output)
    assert [row["name"] for row in told["rows"]] == ["stock", "scout"]
    assert told["context"] == 16384 and told["rows"][1]["pages"] == 1024 + 1
    items = {item["name"] for item in told["rows"][1]["items"]}
    assert items >= {"weights", "digests", "frames", "staging", "host pool"}
    assert sum(told["rows"][1]["parts_ms"].values()) == pytest.approx(told["rows"][1]["step_ms"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "method=scot"], "method: unknown method 'scot'"),
        (["--machine", ""], "hardware '': no such machine"),
        (["--set", "exact_layers=[0,99]"], "config: exact_layers: got 99, expected layers 0..29"),
        (["--set", "recall.intervals=[1,2]"], "config: recall.intervals: got a list of 2, expected 30"),
        (["--set", "clo.heads=/nope.json", "--method", "clo"], "clo.heads: /nope.json: no such file"),
        (["--set", "apex.hardware=foo", "--method", "apex"], "apex.hardware 'foo': no such machine"),
    ],
)
def test_a_configuration_that_every_method_refuses_is_an_error_of_one_line(
    model_dir: Path, arguments: list[str], message: str
) -> None:
    planned = ["plan", "smollm2-135m-instruct", "--gpu-mem", "0", "--ram", "16GiB"]
    refused = CliRunner().invoke(app, [*planned, *arguments])
    assert refused.exit_code == 1 and refused.stdout == "" and refused.stderr.startswith(f"error: {message}")
    assert refused.stderr.count("\n") == 1


def test_the_serve_command_has_a_configuration_that_is_yaml_itself(model_dir: Path) -> None:
    planned = run("--gpu-mem", "0", "--ram", "16GiB", "--config", '{"sinks": 2}')
    assert planned.exit_code == 0 and """--config '{"sinks": 2}'""" in planned.output


@pytest.mark.parametrize(("text", "count"), [("8192", 8192), ("8k", 8192), ("1M", 2**20)])
def test_contexts_are_read(text: str, count: int) -> None:
    assert tokens(text) == count


@pytest.mark.parametrize("text", ["", "0", "1.5k", "8kb", "-1", "many"])
def test_a_context_that_is_no_number_is_told(text: str) -> None:
    with pytest.raises(ConfigError, match="such as 8192, 128k or 1M"):
        tokens(text)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("24", 24 * GIB),
        ("24.5", 49 * GIB // 2),
        ("4096", 4096 * GIB),
        ("24GiB", 24 * GIB),
        ("24 GiB", 24 * GIB),
        ("24GB", 24 * 10**9),
        ("24 GB", 24 * 10**9),
        ("1.5TiB", 3 * 2**39),
        ("512MiB", GIB // 2),
        ("25769803776", 24 * GIB),
    ],
)
def test_sizes_are_read_with_every_unit_and_small_numbers_without_one_are_gibibytes(text: str, size: int) -> None:
    assert memory("--gpu-mem", text) == size


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("5000", "--ram: got '5000', which is neither GiB nor bytes; write a unit, as 5000GiB"),
        ("-3", "--ram: got '-3', expected a size such as 24GiB, 24GB or 24"),
        ("24XB", "--ram: got '24XB', expected a size such as 24GiB, 24GB or 24"),
        ("", "--ram: got '', expected a size"),
        ("nan", "--ram: got 'nan', expected a size"),
        ("9" * 400, "--ram: got '9999"),
    ],
)
def test_what_is_no_size_is_told_with_the_flag(text: str, message: str) -> None:
    assert memory("--ram", None) is None
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        memory("--ram", text)


def test_no_two_columns_have_the_same_or_nearly_the_same_name(model_dir: Path) -> None:
    titles = [name.replace("\n", " ") for name in COLUMNS]
    words = [frozenset(title.replace("at", "").split()) for title in titles]
    assert len(set(words)) == len(titles)
    assert not any(one < other for one in words for other in words), titles
    printed = run("--machine", "t4", columns=80).stdout
    for title in titles:
        assert all(word in printed for word in title.split())
