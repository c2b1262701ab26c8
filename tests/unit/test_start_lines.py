"""Lines of the log that describe a runtime when it is up."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hybrid_backend.engines.start import start_lines
from hybrid_backend.kernels.cpu import library
from tests.support.harness import METHODS, Engine, config, spec


@pytest.fixture
def without_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Show a package that was installed where no compiler was at hand."""
    loads = (library.native, library.kernel_choices, library._loaded)
    monkeypatch.setattr(library, "LIBRARY", tmp_path / "libhybrid_cpu.so")
    for load in loads:
        load.cache_clear()
    yield
    monkeypatch.undo()
    for load in loads:
        load.cache_clear()


def lines(groups: int = 1, **keys: object) -> list[tuple[int, str]]:
    engine = Engine(config(**keys), spec(), num_pages=200)
    return list(start_lines(engine.runtime, groups))


def test_one_line_names_what_serves() -> None:
    best = library.isas()[0]
    assert lines(method="quest") == [
        (
            logging.INFO,
            "hybrid backend: method quest, host pool 2.3 MiB (3,200 tokens), budget 64 tokens (exact up to 64 tokens), "
            f"digests minmax_and_int8, kernels native ({best}), in place on {torch.get_num_threads()} threads",
        )
    ]
    ((_, shared),) = lines(groups=2, method="quest")
    assert "(1,600 tokens)" in shared


@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_its_line(name: str) -> None:
    ((level, line),) = lines(**METHODS[name])
    assert level == logging.INFO and "digests " in line and "none tokens" not in line and "budget none" not in line


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"method": "quest"}, ", budget 64 tokens (exact up to 64 tokens), "),
        ({"method": "scout"}, ", budget 64 tokens (exact up to 96 tokens), "),
        ({"method": "scout", "sparse": "always"}, ", budget 64 tokens (exact up to 64 tokens), "),
        ({"method": "quest", "sparse": "never"}, ", every token attended, "),
        ({"method": "scout", "sparse": "never"}, ", every token attended, "),
        ({"method": "dense"}, ", every token attended, "),
        ({"method": "headinfer"}, ", every token attended, "),
        ({"method": "apex"}, ", every token attended, "),
        ({"method": "hgca"}, ", part of a long context attended (exact up to "),
    ],
)
def test_the_line_says_how_much_is_attended_and_which_contexts_are_exact(keys: dict[str, str], text: str) -> None:
    ((_, line),) = lines(**{**METHODS[keys["method"]], **keys})
    assert text in line


def test_where_native_kernels_are_missing_a_warning_says_why_and_the_fix(without_library: None) -> None:
    (_, line), (level, warning) = lines()
    assert "kernels torch, 2 worker threads" in line
    assert level == logging.WARNING
    assert "PyTorch attends instead of native CPU kernels" in warning and "install one (Debian" in warning


def test_who_asks_for_torch_is_not_warned(without_library: None) -> None:
    assert len(lines(workers={"threads": 2, "kernel": "torch"})) == 1


def test_where_auto_is_not_quest_the_line_says_why() -> None:
    ((_, line),) = lines(selection={"digest": "minmax_int8", "aggregate": "max"})
    assert "method scout (quest cannot serve: selection.digest: minmax_int8 needs selection.aggregate softmax" in line


def test_where_pages_are_copied_the_workers_attend() -> None:
    ((_, line),) = lines(method="scout")
    assert line.endswith("2 worker threads")
