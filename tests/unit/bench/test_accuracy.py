"""The accuracy bench: what it asks, what it compares, what it refuses."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result as Called
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from hybrid_backend.cli import app
from hybrid_backend.tools.bench import accuracy, fidelity, servers
from hybrid_backend.tools.bench.accuracy import bootstrap, made_prompts, read_prompts
from hybrid_backend.tools.bench.fidelity import Answer, compare


def called(out: Path, *arguments: str) -> Called:
    return CliRunner().invoke(app, ["bench", "accuracy", "--out", str(out), *arguments])


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_dir)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--budgets", "100"],
            "--budgets: got '100', expected a share as 10%, or tokens: a multiple of the p",
        ),
        (["--budgets", "256,48"], "--budgets: got '48', expected a share as 10%, or tokens: a multiple"),
        (["--budgets", "100%"], "--budgets: got '100%', expected a share as 10%"),
        (["--budgets", "512", "--set", "method=hgca"], "--budgets: hgca heeds no request's budget (quest, scout, inf"),
        (["--out", "/dev/null/x"], "--out /dev/null/x: cannot be written (Not a directory)"),
        (["--host-pool", "8GB"], "--host-pool: got '8GB', expected a size; write 8GiB"),
        (["--set", "budget_token=1024"], "--set budget_token: "),
        (["--also", "method=dense kv_dtyp=int8"], "--set kv_dtyp: "),
        (["--set", "method=scot"], "method: unknown method 'scot'"),
        (["--model", "no-such-model"], "model 'no-such-model' is neither in the catalog"),
        (["smollm2"], "smollm2: not an option; flags of the servers' engine go after --"),
        (["--prompts", "/nowhere.jsonl"], "--prompts /nowhere.jsonl"),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], message: str, tmp_path: Path, model_dir: Path) -> None:
    done = called(tmp_path, *arguments)
    assert done.exit_code == 1 and done.stdout == ""
    assert done.stderr.startswith(f"error: {message}") and len(done.stderr.splitlines()) == 1, done.stderr


def test_made_prompts_are_lookups_prose_and_code_and_always_the_same(tokenizer: Any) -> None:
    prompts = list(made_prompts(tokenizer, 1024, 2))
    assert [prompt.source for prompt in prompts] == ["lookups"] * 2 + ["python-reference"] * 2 + ["python-source"] * 2
    assert all(900 < len(prompt.ids) <= 1024 for prompt in prompts) and len(set(prompts)) == 6
    text = tokenizer.decode(prompts[0].ids)
    key = re.search(r"The code of entry (\S+) is$", text)
    assert key is not None and text.count(f"Entry {key[1]} has the code ") == 1
    assert prompts == list(made_prompts(tokenizer, 1024, 2))


def test_own_prompts_are_texts_or_messages_in_the_models_chat_template(tmp_path: Path, tokenizer: Any) -> None:
    lines = [{"prompt": "Once upon a time"}, {"messages": [{"role": "user", "content": "Hello there"}]}]
    (tmp_path / "own.jsonl").write_text("\n".join(map(json.dumps, lines)))
    text, chat = read_prompts(tmp_path / "own.jsonl", tokenizer)
    assert text.source == "own.jsonl" and tokenizer.decode(text.ids) == "Once upon a time"
    assert tokenizer.decode(chat.ids).endswith("Hello there<|im_end|>\n<|im_start|>assistant\n")


def position(likely: int, other: int, probability: float) -> dict[int, float]:
    return {likely: math.log(probability), other: math.log(1 - probability)}


def test_fidelity_is_the_kl_by_hand_and_leaves_the_prompts_own_position_out() -> None:
    dense = [position(1, 2, 0.9), position(3, 4, 0.8), position(5, 6, 0.6)]
    near = [position(7, 8, 0.5), position(3, 4, 0.6), position(6, 5, 0.6)]
    found = compare(dense, near)
    by_hand = [
        0.8 * math.log(0.8 / 0.6) + 0.2 * math.log(0.2 / 0.4),
        0.6 * math.log(0.6 / 0.4) + 0.4 * math.log(0.4 / 0.6),
    ]
    assert found.kl == pytest.approx(sum(by_hand) / 2) and (found.agreement, found.positions) == (0.5, 2)
    assert compare(dense, dense).kl == pytest.approx(0, abs=1e-9) and compare(dense[:1], near[:1]).positions == 0


def test_each_budget_follows_the_dense_answer_unless_the_prompt_fits_it(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, int, int, list[int]]] = []

    def ask(server: str, prompt: tuple[int, ...], tokens: int, begin: Any = (), budget: int = 0) -> Answer:
        asked.append((server, len(prompt), budget, list(begin)))
        probability = 0.9 if server == "stock" else 0.8
        return Answer([1, 2, 3], [position(1, 2, probability)] * 3)

    monkeypatch.setattr(servers, "stock_server", lambda *_: nullcontext("stock"))
    monkeypatch.setattr(servers, "hybrid_server", lambda *_: nullcontext("hybrid"))
    monkeypatch.setattr(fidelity, "ask", ask)
    own = tmp_path / "own.jsonl"
    own.write_text("\n".join(json.dumps({"prompt": "word " * count}) for count in (300, 1000)))
    done = called(tmp_path, "--prompts", str(own), "--budgets", "512,10%")
    assert done.exit_code == 0, done.output
    assert asked[:2] == [("stock", 301, 0, []), ("stock", 1001, 0, [])]
    assert asked[2:] == [("hybrid", n, budget, [1, 2, 3]) for n, budget in ((301, 32), (1001, 512), (1001, 112))]
    results = [json.loads(line) for line in (tmp_path / "accuracy.jsonl").read_text().splitlines()]
    assert [(result["budget"], result["prompt_tokens"]) for result in results] == [
        ("10%", 301),
        ("512", 1001),
        ("10%", 1001),
    ]
    kl = 0.9 * math.log(0.9 / 0.8) + 0.1 * math.log(0.1 / 0.2)
    assert all(result["kl"] == pytest.approx(kl) and result["positions"] == 2 for result in results)
    rows = [line.split() for line in done.stdout.splitlines()]
    assert ["10%", "own.jsonl", "2", f"{kl:.4f}", f"{kl:.4f}..{kl:.4f}", "1.000"] in rows, done.stdout


def test_further_configurations_follow_the_same_answers(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[dict[str, Any]] = []

    def hybrid(folder: Path, settings: dict[str, Any], *_: Any) -> nullcontext[str]:
        served.append({key: value for key, value in settings.items() if key != "host_pool.size"})
        return nullcontext(settings["kv_dtype"])

    def ask(server: str, prompt: tuple[int, ...], tokens: int, begin: Any = (), budget: int = 0) -> Answer:
        return Answer([1, 2, 3], [position(1, 2, 0.8 if server == "int8" else 0.9)] * 3)

    monkeypatch.setattr(servers, "stock_server", lambda *_: nullcontext("stock"))
    monkeypatch.setattr(servers, "hybrid_server", hybrid)
    monkeypatch.setattr(fidelity, "ask", ask)
    own = tmp_path / "own.jsonl"
    own.write_text(json.dumps({"prompt": "word " * 300}))
    also = ["--set", "kv_dtype=auto", "--also", "method=dense kv_dtype=int8"]
    done = called(tmp_path, "--prompts", str(own), *also)
    assert done.exit_code == 0, done.output
    assert served == [{"kv_dtype": "auto"}, {"kv_dtype": "int8", "method": "dense"}]
    results = [json.loads(line) for line in (tmp_path / "accuracy.jsonl").read_text().splitlines()]
    assert [(result["budget"], round(result["kl"], 4)) for result in results] == [
        ("auto", 0.0),
        ("method=dense kv_dtype=int8", 0.0367),
    ]


@pytest.mark.parametrize("on_gpu", [False, True])
def test_stock_has_a_size_of_its_own_on_a_gpu_and_both_servers_hold_the_longest_prompt(
    on_gpu: bool, tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU stock's KV lies in device memory, where a pool of host memory would not fit beside an 8B's weights."""
    started: dict[str, list[str]] = {}
    running: list[str] = []

    @contextmanager
    def server(name: str, flags: list[str]) -> Iterator[str]:
        assert not running, "one server after the other"
        running.append(name)
        started[name] = flags
        yield name
        running.remove(name)

    monkeypatch.setattr(servers, "stock_server", lambda folder, directory, flags, *_: server("stock", flags))
    monkeypatch.setattr(servers, "hybrid_server", lambda folder, settings, flags, *_: server("hybrid", flags))
    monkeypatch.setattr(fidelity, "ask", lambda *_, **__: Answer([1, 2, 3], [position(1, 2, 0.9)] * 3))
    monkeypatch.setattr(accuracy, "has_gpu", lambda: on_gpu)
    own = tmp_path / "own.jsonl"
    own.write_text(json.dumps({"prompt": "word " * 3000}))
    asked = ["--prompts", str(own), "--host-pool", "16GiB", "--answer", "20"]
    assert called(tmp_path, *asked, "--", "--seed", "3").exit_code == 0
    for flags in started.values():
        assert flags[flags.index("--max-model-len") + 1] == str(3001 + 20) and flags[-2:] == ["--seed", "3"]
    assert ("--kv-cache-memory-bytes" in started["stock"]) == (not on_gpu)
    assert on_gpu or started["stock"][started["stock"].index("--kv-cache-memory-bytes") + 1] == str(16 * 2**30)


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=20))
def test_the_interval_holds_the_mean_and_is_the_same_each_time(values: list[float]) -> None:
    low, high = bootstrap(values, 500)
    assert low <= sum(values) / len(values) + 1e-9 and high >= sum(values) / len(values) - 1e-9
    assert (low, high) == bootstrap(values, 500)
