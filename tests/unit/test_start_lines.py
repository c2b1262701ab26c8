"""What the log says of a runtime when it is up."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from hybrid_backend.engines.start import start_lines
from hybrid_backend.kernels.cpu import library
from tests.support.harness import METHODS, Engine, config, spec


@pytest.fixture
def without_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """As where no compiler was at hand when the package was installed."""
    monkeypatch.setattr(library, "LIBRARY", tmp_path / "libhybrid_cpu.so")
    library.native.cache_clear()
    yield
    monkeypatch.undo()
    library.native.cache_clear()


def lines(groups: int = 1, **keys: object) -> list[tuple[int, str]]:
    engine = Engine(config(**keys), spec(), num_pages=200)
    try:
        return list(start_lines(engine.runtime, groups))
    finally:
        engine.close()


def test_one_line_names_what_serves() -> None:
    best = library.isas()[0]
    assert lines() == [
        (
            logging.INFO,
            "hybrid backend: method scout, host pool 2.3 MiB (3,200 tokens), budget 64 tokens, "
            f"digests minmax_and_int8, kernels native ({best}), 2 worker threads",
        )
    ]
    ((_, shared),) = lines(groups=2)
    assert "(1,600 tokens)" in shared


@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_its_line(name: str) -> None:
    ((level, line),) = lines(**METHODS[name])
    assert level == logging.INFO and "budget " in line and "digests " in line


def test_where_native_kernels_are_missing_a_warning_says_why_and_the_fix(without_library: None) -> None:
    (_, line), (level, warning) = lines()
    assert "kernels torch, 2 worker threads" in line
    assert level == logging.WARNING
    assert "PyTorch attends instead of native CPU kernels" in warning and "install one (Debian" in warning


def test_who_asks_for_torch_is_not_warned(without_library: None) -> None:
    assert len(lines(workers={"threads": 2, "kernel": "torch"})) == 1
