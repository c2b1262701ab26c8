"""What `hybrid profile` refuses before it loads a model."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from hybrid_backend.cli import app
from hybrid_backend.tools.profile import profiler
from hybrid_backend.tools.profile.options import Options

MODEL = "nobody/no-such-model"  # taken as it is; loading it would fail


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "gpu"], "--device: got 'gpu', expected auto, cuda or cpu"),
        (["--min-cosine", "5"], "--min-cosine: got 5.0, expected a number from -1 to 1"),
        (["--max-kl", "-1"], "--max-kl: got -1.0, expected a number >= 0"),
        (["--max-kl", "nan"], "--max-kl: got nan, expected a number >= 0"),
        (["--batch", "0", "--machine", "h100"], "--batch: got 0, expected an integer >= 1"),
        (["--no-spread", "--lookups", "-1"], "--lookups: got -1, expected an integer >= 0"),
        (["--gates", "--gate-steps", "0"], "--gate-steps: got 0, expected an integer >= 1"),
        (["--set", "method=scot"], "method: unknown method 'scot'"),
        (["--text", "/nowhere"], "--text /nowhere: no such file"),
    ],
)
def test_a_mistake_is_one_line_before_the_model_is_loaded(arguments: list[str], message: str, tmp_path: Path) -> None:
    refused = CliRunner().invoke(app, ["profile", MODEL, "--out", str(tmp_path / "out.yaml"), *arguments])
    assert refused.exit_code == 1 and refused.stderr.startswith(f"error: {message}"), refused.output
    assert refused.stderr.count("\n") == 1 and not list(tmp_path.iterdir())


def test_a_gpu_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refused = CliRunner().invoke(app, ["profile", MODEL, "--out", str(tmp_path / "out.yaml"), "--device", "cuda"])
    assert refused.exit_code == 1 and "--device: got 'cuda', but torch sees no CUDA device" in refused.stderr
    assert refused.stderr.count("\n") == 1


def test_an_empty_model_is_told() -> None:
    refused = CliRunner().invoke(app, ["profile", ""])
    assert refused.exit_code == 1 and "name a model" in refused.stderr


def run_with(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *arguments: str) -> Options:
    """Options that the command hands to the profiler."""
    taken: list[Options] = []
    monkeypatch.setattr(profiler, "profile", lambda *given, **_: taken.append(given[3]))
    done = CliRunner().invoke(app, ["profile", MODEL, "--out", str(tmp_path / "out.yaml"), *arguments])
    assert done.exit_code == 0, done.output
    return taken[0]


def test_a_run_is_quick_unless_it_is_to_be_thorough_and_each_number_can_be_chosen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    quick = run_with(monkeypatch, tmp_path)
    assert (quick.windows, quick.lookups, quick.gates, quick.spread) == (1, 1, None, True)
    thorough = run_with(monkeypatch, tmp_path, "--thorough")
    assert (thorough.windows, thorough.lookups, thorough.gates) == (2, 2, Options().gates)
    mixed = run_with(monkeypatch, tmp_path, "--thorough", "--windows=3", "--no-gates")
    assert (mixed.windows, mixed.lookups, mixed.gates) == (3, 2, None)
    assert run_with(monkeypatch, tmp_path, "--gates").gates is not None


@pytest.mark.parametrize("fresh", [False, True])
def test_ctrl_c_says_in_one_line_how_to_go_on(fresh: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(profiler, "profile", stopped)
    (tmp_path / "out.json").touch()
    arguments = ["profile", MODEL, "--out", str(tmp_path / "out.yaml"), *(["--fresh"] if fresh else [])]
    done = CliRunner().invoke(app, arguments)
    again = "the same command without --fresh" if fresh else "the same command"
    assert done.exit_code == 130 and "stopped" not in done.stdout
    assert done.stderr == f"\nstopped; {again} goes on from here; {tmp_path / 'out.json'} holds what was measured\n"


def test_what_will_be_measured_is_told_before_the_profiler_begins(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told: list[str] = []

    def begun(*_: object, **__: object) -> None:
        told.append(capture.getvalue())

    capture = io.StringIO()
    monkeypatch.setattr(profiler, "profile", begun)
    with contextlib.redirect_stdout(capture):
        app(["profile", MODEL, "--out", str(tmp_path / "out.yaml")], standalone_mode=False)
    first = "measuring attention and KL of each layer of no-such-model; a forward pass is timed first, for the estimate"
    assert told == [f"{first}\n"]
