"""Building the native library."""

from __future__ import annotations

import errno
import importlib.util
import os
from pathlib import Path

import pytest

from hybrid_backend.kernels import cpu


def test_a_library_that_is_in_use_is_kept_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler is stood in for: what counts is how its file is put in place, also from another file system, which
    no test can be sure to find."""
    path = Path(str(cpu.__file__)).with_name("build.py")
    spec = importlib.util.spec_from_file_location("build", path)
    assert spec is not None and spec.loader is not None
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
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
