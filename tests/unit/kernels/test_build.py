"""Building the native library."""

from __future__ import annotations

import errno
import importlib.util
import os
from pathlib import Path
from types import ModuleType

import pytest

from hybrid_backend.kernels import cpu


@pytest.fixture
def build() -> ModuleType:
    """kernels/cpu/build.py, loaded by its path as setup.py loads it."""
    path = Path(str(cpu.__file__)).with_name("build.py")
    spec = importlib.util.spec_from_file_location("build", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("chosen", "reason"),
    [
        ('g++ "', "No closing quotation"),
        ("/nonexistent/c++ -O2", "No such file or directory"),
        ("/", "Permission denied"),
        ("false", "exit status 1 of --version"),
        ("./no-format", "Exec format error"),
    ],
)
def test_a_broken_compiler_of_the_user_is_named_in_one_line(
    build: ModuleType, chosen: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "no-format").write_bytes(b"\x7fELF")
    (tmp_path / "no-format").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CXX", chosen)
    with pytest.raises(build.BuildError) as error:
        build.build(tmp_path / build.LIBRARY, tmp_path / "objects")
    message = str(error.value)
    assert f"CXX={chosen!r}" in message and reason in message and "unset CXX" in message and "\n" not in message


def test_what_a_compiler_reports_is_told_in_one_line(
    build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "cat")  # answers to --version, and compiles nothing
    with pytest.raises(build.BuildError, match="does not compile with cat: Try") as error:
        build.build(tmp_path / build.LIBRARY, tmp_path / "objects")
    assert "\n" not in str(error.value)


def test_a_library_that_is_in_use_is_kept_whole(
    build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler is stood in for: what counts is how its file is put in place, also from another file system, which
    no test can be sure to find."""
    monkeypatch.setattr(build, "compile_all", lambda objects, extra: (["generic"], []))
    monkeypatch.setattr(build, "compiler", lambda: ["c++"])
    monkeypatch.setattr(build, "_run", lambda command: Path(command[command.index("-o") + 1]).write_bytes(b"new"))

    rename_within = os.rename

    def rename(source: str, target: str) -> None:
        if Path(source).parent != Path(target).parent:
            raise OSError(errno.EXDEV, "another file system")
        rename_within(source, target)

    monkeypatch.setattr(os, "rename", rename)
    target = tmp_path / "there" / build.LIBRARY
    target.parent.mkdir()
    target.write_bytes(b"old")
    (tmp_path / "objects").mkdir()
    with target.open("rb") as in_use:
        build.build(target, tmp_path / "objects")
        assert in_use.read() == b"old"
    assert target.read_bytes() == b"new"
    assert list(target.parent.iterdir()) == [target]
