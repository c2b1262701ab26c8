"""Choices of `hybrid serve` on a CPU where the user made none. The measurements are in docs/cpu-start.md."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sysconfig
from collections.abc import Collection, Iterable, Mapping
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Any

from hybrid_backend.model import has_delta_nets, weights_to_load

# What /proc/cpuinfo calls instructions that multiply bf16: AVX-512, AMX, AArch64. (AVX-NE-CONVERT only converts.)
BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
BIND = "VLLM_CPU_OMP_THREADS_BIND"
FEW_CORES = 4
"""Up to so many physical cores, one kept free for vLLM's front end costs more prefill than it gains elsewhere, and
compiling takes minutes."""
LAYER_NAME, AOT = "VLLM_USE_LAYERNAME", "VLLM_USE_AOT_COMPILE"
"""vLLM's switches: whether compiled code names a layer by an object that only Python can pass on; whether it is saved
with what Dynamo traced."""
_PRELOAD = "LD_PRELOAD"
# How a user says whether, and how, vLLM compiles.
_COMPILATION = (
    "--enforce-eager",
    "--no-enforce-eager",
    "--optimization-level",
    "-O",
    "--compilation-config",
    "-cc",
)


def has_bf16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Tell whether the CPU has bf16 instructions; True if it does not list its instructions."""
    try:
        lines = re.findall(r"^(?:flags|Features)\s*:(.*)$", cpuinfo.read_text(), re.MULTILINE)
    except OSError:
        return True
    return not lines or not BF16_FLAGS.isdisjoint(lines[0].split())


def float32_line(model: Any, path: str, available: int) -> str | None:
    """Tell whether to serve in fp32 a model whose dtype the user left open, by `float32_is_better`.

    Args:
        model: the engine's configuration of the model; both engines' have ``dtype``, ``hf_config``, ``revision`` and
            ``quantization``.
        path: directory or hub id of the model.
        available: bytes of memory for weights and host pool.

    Returns:
        what to log if it is to be served in fp32, None if in its own dtype.
    """
    dtype, config = str(model.dtype).removeprefix("torch."), model.hf_config.to_dict()
    weights, _ = weights_to_load(path, config, dtype, model.revision)
    # Kernels for 4-bit weights and for gated delta nets take no fp32.
    if model.quantization is not None or has_delta_nets(config) or not float32_is_better(dtype, weights, available):
        return None
    return (
        f"dtype float32 instead of {dtype}: this CPU has no bf16 instructions, and emulates them several times slower; "
        f"--dtype {dtype} halves the memory of weights and KV cache"
    )


def float32_is_better(dtype: str, weight_bytes: int, available: int, cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """bf16 and fp16 are emulated on a CPU without bf16 instructions (prefill was five times slower there), so fp32 is
    better if its weights leave most of the memory.

    Args:
        dtype: of the model, as torch names it, without ``torch.``.
        weight_bytes: of the weights in ``dtype``, 0 if that is not known.
        available: bytes of memory for weights and host pool.
    """
    fits = 0 < 2 * weight_bytes <= available // 3
    return dtype in ("bfloat16", "float16") and fits and not has_bf16(cpuinfo)


def cores_to_bind(
    cores: Iterable[int],
    environment: Mapping[str, str] = os.environ,
    ranks: int = 1,
    engines: int = 1,
    nodes: int = 1,
) -> str | None:
    """`BIND` for a machine of few cores: all of them; for ranks that would share a NUMA node, which vLLM refuses
    (tensor parallelism) or binds to the same cores (replicas): a part for each. None: vLLM's own choice stays.

    Args:
        cores: one logical CPU of each physical core that this process may use.
        ranks: of all ``engines`` (replicas) on this machine.
        nodes: NUMA nodes of these cores.
    """
    listed = sorted(cores)
    if not {BIND, "VLLM_CPU_NUM_OF_RESERVED_CPU", "VLLM_CPU_SIM_MULTI_NUMA", "CPU_VISIBLE_MEMORY_NODES"}.isdisjoint(
        environment
    ):
        return None
    if ranks == 1:
        return ",".join(map(str, listed)) if 1 < len(listed) <= FEW_CORES else None
    if engines == 1 and ranks <= nodes:
        return None
    parts = [listed[len(listed) * rank // ranks : len(listed) * (rank + 1) // ranks] for rank in range(ranks)]
    parts = [part[:-1] if len(part) > FEW_CORES else part for part in parts]  # one for vLLM's front end
    return "|".join(",".join(map(str, part or [listed[rank % len(listed)]])) for rank, part in enumerate(parts))


def intel_openmp(environment: Mapping[str, str] = os.environ, distribution: str = "intel-openmp") -> dict[str, str]:
    """The variable that preloads Intel's OpenMP, which vLLM's wheel for x86 CPUs requires and its documentation tells
    users to preload. Empty: it is not installed, or the user preloads an OpenMP."""
    preloaded = environment.get(_PRELOAD, "")
    if any(name in preloaded for name in ("libiomp", "libomp", "libgomp")):
        return {}
    try:
        found = [file.locate() for file in files(distribution) or () if file.name == "libiomp5.so"]
    except PackageNotFoundError:
        return {}
    path = os.path.realpath(str(found[0])) if found else ""
    if not os.path.isfile(path) or re.search(r"[\s:]", path):  # which separate the names in the variable
        return {}
    return {_PRELOAD: f"{path}:{preloaded}" if preloaded else path}


def compiler_lacks(environment: Mapping[str, str] = os.environ, include: str | None = None) -> str | None:
    """Return what torch.compile lacks on this CPU, in words; None if nothing.

    Args:
        include: the folder of Python's headers; None: this Python's.
    """
    chosen = environment.get("CXX", "")
    try:
        compiler = shlex.split(chosen) or ["g++"]  # as Inductor chooses it
    except ValueError as error:
        return f"a C++ compiler (CXX={chosen!r} is no command line: {error})"
    if shutil.which(compiler[0], path=environment.get("PATH")) is None:
        return f"a C++ compiler ({compiler[0]}; Debian, Ubuntu: apt-get install g++)"
    if not Path(include or sysconfig.get_path("include"), "Python.h").is_file():
        return "Python's headers (Python.h; Debian, Ubuntu: apt-get install python3-dev)"
    return None


def starts_eager(cores: int, flags: Collection[str]) -> bool:
    """Tell whether a server on so many physical cores starts without compiling the model.

    Args:
        flags: names of the engine flags that the user wrote.
    """
    return cores <= FEW_CORES and not says_how_to_compile(flags)


def says_how_to_compile(flags: Collection[str]) -> bool:
    return any(flag.startswith(_COMPILATION) for flag in flags)
