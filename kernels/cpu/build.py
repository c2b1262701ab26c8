"""Build script of the native CPU kernels: one shared library with a plain C ABI, without torch and without Python.

Each instruction set is a translation unit with flags of its own. A unit that the compiler cannot build is left out with
a message, and the library has fewer kernels. This file uses the standard library only, because setup.py loads it by
path.

    python kernels/cpu/build.py                      # beside the sources, for an editable installation
    python kernels/cpu/build.py --sanitize address,undefined --run
    python kernels/cpu/build.py --sanitize thread --run
    python kernels/cpu/build.py --sanitize address,undefined --emulate-tiles --run
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCES = HERE / "src"
HEADERS = (SOURCES / "api.h", SOURCES / "api_operations.h")
"""The declarations of the library's C ABI, which `interface` reads when the library is loaded."""
LIBRARY = "libhybrid_cpu.so"

COMMON = ["-std=c++17", "-fPIC", "-fvisibility=hidden", "-pthread"]
# -ffp-contract=fast compiles a * b + c to one FMA where the ISA has it. The warnings come from gcc's intrinsics
# headers.
ISA_COMMON = ["-O3", "-ffp-contract=fast", "-Wno-psabi", "-Wno-maybe-uninitialized", "-Wno-uninitialized"]
_AVX2 = ["-mavx2", "-mfma", "-mf16c"]
_AVX512 = [*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512"]
_ARM = "-march=armv8.2-a"
_ISA_FLAGS: dict[str, dict[str, list[str]]] = {
    "x86_64": {
        "avx2": _AVX2,
        "avx2_bytes": _AVX2,
        "avx2_attend": _AVX2,
        "avx512": _AVX512,
        "avx512_bf16": [*_AVX512, "-mavx512bf16"],
        "vnni": [*_AVX512, "-mavx512vnni"],
        "vnni_attend": [*_AVX512, "-mavx512vnni"],
        "vbmi": [*_AVX512, "-mavx512vbmi"],
        "amx": [*_AVX512, "-mamx-tile", "-mamx-bf16"],
        "amx_prompt": [*_AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16"],
    },
    "aarch64": {
        "neon": [],
        "neon_dotprod": [f"{_ARM}+dotprod"],
        "neon_i8mm": [f"{_ARM}+dotprod+i8mm"],
        "neon_bf16": [f"{_ARM}+bf16"],
    },
}
"""Compiler flags by architecture and instruction set."""
# The library exports no C++ symbol, so that it cannot clash with another copy of the standard library.
EXPORTS = "{ global: hb_*; local: *; };\n"
CORE = [
    *("dispatch", "kv_format", "attend_job", "digest", "codes", "pool", "mailbox", "decode", "decode_select"),
    *("judge", "op_attend", "op_digests", "op_labels", "op_prompt", "op_residency", "op_scores", "op_select"),
    *("measure", "selfcheck", "api"),
]

NO_COMPILER = (
    "no C++ compiler found: install one (Debian, Ubuntu: apt-get install build-essential; or clang) or name it in CXX, "
    "then install this package again; until then attention on the CPU runs in torch, several times slower"
)


class BuildError(Exception):
    """Error for a library that cannot be built; the message is one line for the user."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split())[:2000])


def compiler() -> list[str]:
    """Return the C++ compiler's command line: CXX, or the first usual name that exists.

    Raises:
        BuildError: no compiler exists, or CXX names none.
    """
    chosen = os.environ.get("CXX", "").strip()
    if chosen:
        return _named_compiler(chosen)
    for command in ("c++", "g++", "clang++"):
        if shutil.which(command):
            return [command]
    raise BuildError(NO_COMPILER)


def _named_compiler(text: str) -> list[str]:
    """Split the value of CXX into a command line.

    Raises:
        BuildError: ``text`` is not a program that answers to --version.
    """
    try:
        command = shlex.split(text)
        done = subprocess.run([*command, "--version"], capture_output=True, text=True, errors="replace", timeout=60)
        reason = "" if done.returncode == 0 else f"exit status {done.returncode} of --version"
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        reason = str(getattr(error, "strerror", None) or error)
    if reason:
        raise BuildError(f"CXX={text[:200]!r} is no C++ compiler ({reason}); name one, such as g++, or unset CXX")
    return command


def interface_hash() -> str:
    """Return a hash of the headers that declare the C ABI.

    The library carries the hash of its build. `library` compares the two, so that a library which was built from other
    declarations is never called.
    """
    return hashlib.sha256(b"".join(header.read_bytes() for header in HEADERS)).hexdigest()[:16]


def sources() -> list[Path]:
    """List the C++ sources and headers of the library."""
    return sorted(path for path in SOURCES.iterdir() if path.suffix in (".cpp", ".h"))


def machine(command: list[str]) -> str:
    """Return the architecture that a compiler builds for; this machine's where the compiler does not tell."""
    told = subprocess.run([*command, "-dumpmachine"], capture_output=True, text=True, errors="replace").stdout
    name = told.partition("-")[0].strip() or platform.machine()
    return {"AMD64": "x86_64", "arm64": "aarch64"}.get(name, name)


def isa_flags(command: list[str]) -> dict[str, list[str]]:
    """Return the flags of each instruction set that the compiler's architecture has units for."""
    chosen = {"generic": [], **_ISA_FLAGS.get(machine(command), {})}
    if any("zig" in Path(word).name for word in command):
        # Zig names a CPU where clang and gcc name an architecture.
        return {isa: [flag.replace(_ARM, "-mcpu=generic") for flag in flags] for isa, flags in chosen.items()}
    return chosen


def build(target: Path, objects: Path, extra: list[str] | None = None) -> list[str]:
    """Compile and link the library.

    Args:
        target: path of the library.
        objects: folder for object files.
        extra: further flags of compiler and linker.

    Returns:
        The instruction sets in the library.

    Raises:
        BuildError: no compiler, or the portable part does not compile.
    """
    made, compiled = compile_all(objects, extra or [])
    target.parent.mkdir(parents=True, exist_ok=True)
    # The new file is linked in the target's folder and renamed. So a process that has mapped the old library keeps it
    # whole; a move from another file system would write into it.
    fresh = target.with_name(f"{target.stem}.{os.getpid()}.so")
    exports = objects / "exports.map"
    exports.write_text(EXPORTS)
    flags = ["-shared", "-pthread", "-static-libstdc++", "-static-libgcc", f"-Wl,--version-script={exports}"]
    try:
        _run([*compiler(), *flags, *(extra or []), "-o", str(fresh), *map(str, compiled)])
        fresh.replace(target)
    finally:
        fresh.unlink(missing_ok=True)
    return made


def compile_all(objects: Path, extra: list[str]) -> tuple[list[str], list[Path]]:
    """Compile all units that this compiler can build.

    Args:
        objects: folder for object files.
        extra: further compiler flags.

    Returns:
        The instruction sets and the object files.

    Raises:
        BuildError: no compiler, or a unit that every library needs does not compile.
    """
    cxx = compiler()
    objects.mkdir(parents=True, exist_ok=True)

    def compile_unit(name: str, flags: list[str]) -> tuple[Path, str | None]:
        out = objects / f"{name}.o"
        command = [*cxx, *COMMON, *flags, *extra, "-c", str(SOURCES / f"{name}.cpp"), "-o", str(out)]
        result = subprocess.run(command, capture_output=True, text=True)
        return out, None if result.returncode == 0 else result.stderr

    with ThreadPoolExecutor(os.cpu_count() or 1) as threads:
        units = isa_flags(cxx).items()
        jobs = {isa: threads.submit(compile_unit, f"isa_{isa}", ISA_COMMON + flags) for isa, flags in units}
        core = [threads.submit(compile_unit, unit, ["-O3", *definitions(unit)]) for unit in CORE if unit != "dispatch"]
        made, files = [], []
        for isa, job in jobs.items():
            out, error = job.result()
            if error is None:
                made.append(isa)
                files.append(out)
            elif isa == "generic":
                raise BuildError(f"the portable CPU kernel does not compile with {shlex.join(cxx)}: {_first(error)}")
            else:
                why = _first(error)
                print(f"kernels/cpu: no {isa} kernels, this compiler cannot build them: {why}", file=sys.stderr)
        core.append(threads.submit(compile_unit, "dispatch", ["-O2", *have(made)]))
        for job in core:
            out, error = job.result()
            if error is not None:
                raise BuildError(f"the CPU kernels do not compile with {shlex.join(cxx)}: {_first(error)}")
            files.append(out)
    return made, files


def _first(messages: str) -> str:
    """Return the first error among a compiler's messages."""
    lines = messages.splitlines()
    return next((line for line in lines if "error" in line), "".join(lines[-1:])) or "it gives no reason"


def definitions(unit: str) -> list[str]:
    """Return the macro definitions of a unit that every library has."""
    return [f'-DHB_INTERFACE_HASH="{interface_hash()}"'] if unit == "api" else []


def have(made: list[str]) -> list[str]:
    """Return the compiler flags that tell dispatch.cpp which instruction sets were built."""
    return [f"-DHB_HAVE_{isa.upper()}" for isa in made]


def build_driver(target: Path, objects: Path, sanitizers: str = "", tiles: bool = False) -> list[str]:
    """Build the C++ test driver, the kernels linked in.

    Args:
        target: path of the driver.
        objects: folder for object files.
        sanitizers: value of -fsanitize; empty for none.
        tiles: emulate AMX in software.

    Returns:
        The instruction sets in the driver.

    Raises:
        BuildError: something does not compile.
    """
    extra = [f"-fsanitize={sanitizers}", "-fno-omit-frame-pointer", "-g1", "-O1"] if sanitizers else []
    if tiles:
        extra.append("-DHB_EMULATE_TILES")
    if "undefined" in sanitizers:
        extra.append("-fno-sanitize-recover=undefined")
    made, files = compile_all(objects, extra)
    tests = [str(path) for path in sorted((HERE / "tests").glob("*.cpp"))]
    flags = ["-O2", *COMMON, *extra, *have(made), f"-I{SOURCES}"]
    _run([*compiler(), *flags, *tests, *map(str, files), "-o", str(target)])
    return made


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise BuildError(f"{shlex.join(command[:1])} failed: {_first(result.stderr)}")


def main() -> None:
    """Build the library or the test driver, as the command line says."""
    parser = argparse.ArgumentParser(description="Build the native CPU kernels.")
    parser.add_argument("--out", type=Path, default=HERE / LIBRARY)
    parser.add_argument("--driver", type=Path, help="build the C++ test driver instead, under this name")
    parser.add_argument("--sanitize", default="", help="build it with sanitizers: address,undefined or thread")
    parser.add_argument("--emulate-tiles", action="store_true", help="the AMX code on AVX-512 (prompts: with BF16)")
    parser.add_argument("--run", action="store_true", help="run the driver")
    options = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory() as scratch:
            if options.sanitize or options.driver:
                driver = options.driver or Path(scratch) / "driver"
                build_driver(driver, Path(scratch), options.sanitize, options.emulate_tiles)
                if options.run:
                    sys.exit(subprocess.run([str(driver)]).returncode)
                return
            print("built", options.out.name, "with", ", ".join(build(options.out, Path(scratch))))
    except BuildError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
