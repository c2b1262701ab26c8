"""What `hybrid profile` refuses before it loads a model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from hybrid_backend.cli import app
from hybrid_backend.tools import pictures

MODEL = "nobody/no-such-model"  # taken as it is; loading it would fail


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "gpu"], "--device: got 'gpu', expected auto, cuda or cpu"),
        (["--min-cosine", "5"], "--min-cosine: got 5.0, expected a number from -1 to 1"),
        (["--min-mass", "2"], "--min-mass: got 2.0, expected a number from 0 to 1"),
        (["--max-kl", "-1"], "--max-kl: got -1.0, expected a number >= 0"),
        (["--max-kl", "nan"], "--max-kl: got nan, expected a number >= 0"),
        (["--batch", "0", "--machine", "h100"], "--batch: got 0, expected an integer >= 1"),
        (["--no-spread", "--lookups", "-1"], "--lookups: got -1, expected an integer >= 0"),
        (["--gate-steps", "0"], "--gate-steps: got 0, expected an integer >= 1"),
        (["--set", "method=scot"], "method: unknown method 'scot'"),
        (["--text", "/nowhere"], "--text /nowhere: no such file"),
        (["--check", "/nowhere"], "--check /nowhere: no such file"),
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


def test_pictures_that_could_not_be_drawn_are_told_before_an_hour_is_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(pictures, "find_spec", lambda name: None)
    refused = CliRunner().invoke(app, ["profile", MODEL, "--out", str(tmp_path / "out.yaml")])
    assert refused.exit_code == 1 and refused.stderr.startswith("error: the pictures need matplotlib")
    assert "pip install 'hybrid-backend[profile]'" in refused.stderr and not list(tmp_path.iterdir())
