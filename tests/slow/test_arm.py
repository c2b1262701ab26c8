"""The native library on AArch64, cross-compiled with zig and run by qemu-user.

qemu computes what the instructions define. It shows neither the speed nor the weaker memory order of a real Arm CPU.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "kernels" / "cpu" / "build.py"
QEMU = shutil.which("qemu-aarch64")
SYSROOT = Path("/usr/aarch64-linux-gnu")
"""Debian's glibc for AArch64 (libc6-arm64-cross)."""


def find_zig() -> list[str]:
    """The command line of zig: of this environment, of the one that `make wheel` makes, or of the system."""
    if importlib.util.find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang"]
    of_wheels = ROOT / ".venv-wheel" / "bin" / "python"
    if of_wheels.exists():
        return [str(of_wheels), "-m", "ziglang"]
    return ["zig"] if shutil.which("zig") else []


ZIG = find_zig()
MISSING = [
    text
    for text, is_missing in (
        ("qemu-aarch64 (Debian: apt-get install qemu-user)", not QEMU),
        ("glibc for AArch64 (Debian: apt-get install libc6-arm64-cross)", not (SYSROOT / "lib").is_dir()),
        ("zig (pip install ziglang, or make wheel)", not ZIG),
    )
    if is_missing
]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"nothing runs for AArch64 without {'; '.join(MISSING)}")

CXX = [*ZIG, "c++", "-target", "aarch64-linux-gnu.2.28"]
ENVIRONMENT = {
    **os.environ,
    "CXX": shlex.join(CXX),
    **dict.fromkeys(("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR"), str(ROOT / ".cache" / "zig")),
}


def run(*command: str | Path, seconds: float = 1200) -> str:
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def emulate(cpu: str, *command: str | Path) -> str:
    assert QEMU is not None
    return run(QEMU, "-L", SYSROOT, "-cpu", cpu, *command)


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The native tests (kernels/cpu/tests) for AArch64."""
    path = tmp_path_factory.mktemp("arm") / "driver"
    run(sys.executable, BUILD, "--driver", path)
    return path


# A CPU that qemu knows, and the variants of prompts and of bytes that it runs, best first.
CPUS = {
    "cortex-a72": ("neon generic", "neon generic"),
    "neoverse-n1": ("neon generic", "neon_dotprod neon generic"),
    "max": ("neon_bf16 neon generic", "neon_i8mm neon_dotprod neon generic"),
}


@pytest.mark.parametrize("cpu", CPUS)
def test_every_variant_is_right_on_the_cpus_that_have_it(driver: Path, cpu: str) -> None:
    told = emulate(cpu, driver, "2", "every_variant").splitlines()
    prompt, digest_bytes = CPUS[cpu]
    assert f"prompt: {prompt}" in told and f"bytes: {digest_bytes}" in told
    assert told[-1] == "neon, 0 failures"


def test_the_library_is_right_on_arm(driver: Path) -> None:
    told = emulate("max", driver, "2")  # all tests
    assert told.splitlines()[-1] == "neon, 0 failures"


LOADER = r"""
#include <dlfcn.h>
#include <stdio.h>
int main(int, char** argv) {
  void* library = dlopen(argv[1], RTLD_NOW);
  if (!library) return fprintf(stderr, "%s\n", dlerror()), 1;
  const auto count = (int (*)())dlsym(library, "hb_isa_count");
  const auto name = (const char* (*)(int))dlsym(library, "hb_isa_name");
  const auto runs = (int (*)(int))dlsym(library, "hb_isa_runs");
  for (int i = 0; i < count(); i++) printf("%s %d\n", name(i), runs(i));
}
"""


def test_the_library_of_the_wheel_loads_on_arm(tmp_path: Path) -> None:
    """Of the wheel that `make wheel` made for AArch64; without one, the library as the wheel's build makes it."""
    library = tmp_path / "libhybrid_cpu.so"
    made = list(Path(os.environ.get("HYBRID_WHEELS", tmp_path)).glob("*_aarch64.whl"))
    if made:
        with zipfile.ZipFile(made[0]) as wheel:
            library.write_bytes(wheel.read("hybrid_backend/kernels/cpu/libhybrid_cpu.so"))
    else:
        built = run(sys.executable, BUILD, "--out", library)
        assert built.split()[-5:] == ["generic,", "neon,", "neon_dotprod,", "neon_i8mm,", "neon_bf16"]
    (tmp_path / "loader.cpp").write_text(LOADER)
    run(*CXX, tmp_path / "loader.cpp", "-ldl", "-o", tmp_path / "loader")
    assert emulate("cortex-a72", tmp_path / "loader", library).split() == ["neon", "1", "generic", "1"]
