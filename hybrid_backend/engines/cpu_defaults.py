"""Choices of `hybrid serve` on a CPU where the user made none. The measurements are in docs/reference/cpu-start.md."""

from __future__ import annotations

import itertools
import os
import re
import shlex
import shutil
import sysconfig
from collections.abc import Collection, Iterable, Mapping
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Any

from hybrid_backend.model import weights_to_load
from hybrid_backend.model_layers import has_delta_nets

# AVX-512, AMX and AArch64 as /proc/cpuinfo spells them. AVX-NE-CONVERT is left out, because it only converts bf16.
BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
BIND = "VLLM_CPU_OMP_THREADS_BIND"
"""vLLM's variable for the CPUs of each rank."""
_OWN_BINDING = (BIND, "VLLM_CPU_NUM_OF_RESERVED_CPU", "VLLM_CPU_SIM_MULTI_NUMA", "CPU_VISIBLE_MEMORY_NODES")
FEW_CORES = 4
"""Physical cores up to which a core kept free for vLLM's front end costs more prefill than it gains elsewhere, and
compiling takes minutes."""
LAYER_NAME = "VLLM_USE_LAYERNAME"
"""vLLM's switch for naming a layer in compiled code by an object, which only Python can pass on."""
AOT = "VLLM_USE_AOT_COMPILE"
"""vLLM's switch for saving compiled code together with what Dynamo traced."""
_PRELOAD = "LD_PRELOAD"
_COMPILATION_FLAGS = (
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
    """Decide by `float32_is_better` whether to serve a model in fp32, if the user left the dtype open.

    Args:
        model: the engine's configuration of the model; both engines' have ``dtype``, ``hf_config``, ``revision`` and
            ``quantization``.
        path: directory or hub id of the model.
        available: bytes of memory for weights and host pool.

    Returns:
        a line for the log if the model is to be served in fp32, None if in its own dtype.
    """
    dtype, config = str(model.dtype).removeprefix("torch."), model.hf_config.to_dict()
    weights, _ = weights_to_load(path, config, dtype, model.revision)
    # Kernels for 4-bit weights and for gated delta nets take no fp32.
    if model.quantization is not None or has_delta_nets(config):
        return None
    if not float32_is_better(dtype, weights, available, emulates_bf16=not has_bf16()):
        return None
    return (
        f"dtype float32 instead of {dtype}: this CPU has no bf16 instructions, and emulates them several times slower; "
        f"--dtype {dtype} halves the memory of weights and KV cache"
    )


def float32_is_better(dtype: str, weight_bytes: int, available: int, *, emulates_bf16: bool) -> bool:
    """Tell whether fp32 is better than half precision, which a CPU without bf16 instructions emulates.

    `hybrid serve` and `hybrid plan` share this rule.

    Prefill was five times slower with emulation. So fp32 is better if its weights leave most of the memory free.

    Args:
        dtype: dtype of the model, as torch names it, without ``torch.``.
        weight_bytes: bytes of the weights in ``dtype``, 0 if unknown.
        available: bytes of memory for weights and host pool.
        emulates_bf16: the CPU has no bf16 instructions (`has_bf16`).
    """
    fits = 0 < 2 * weight_bytes <= available // 3
    return emulates_bf16 and dtype in ("bfloat16", "float16") and fits


def cores_to_bind(
    cores: Iterable[int],
    environment: Mapping[str, str] = os.environ,
    ranks: int = 1,
    engines: int = 1,
    nodes: int = 1,
) -> str | None:
    """Return `BIND` for a machine of few cores, or for ranks that would share a NUMA node.

    A single rank on few cores gets all of them. vLLM refuses ranks of one engine that share a node, and binds replicas
    to the same cores; so each rank gets cores of its own.

    Args:
        cores: one logical CPU of each physical core that this process may use.
        environment: variables of the server, which may hold the user's own binding.
        ranks: ranks of all ``engines`` on this machine.
        engines: replicas on this machine.
        nodes: NUMA nodes of these cores.

    Returns:
        the value of the variable; None if vLLM's own choice stays.
    """
    listed = sorted(cores)
    if not environment.keys().isdisjoint(_OWN_BINDING):
        return None
    if ranks == 1:
        return ",".join(map(str, listed)) if 1 < len(listed) <= FEW_CORES else None
    if engines == 1 and ranks <= nodes:
        return None
    bounds = [len(listed) * rank // ranks for rank in range(ranks + 1)]
    shares = [listed[first:end] for first, end in itertools.pairwise(bounds)]
    # A large share leaves one core to vLLM's front end. Ranks without a share use a core of another rank.
    shares = [share[:-1] if len(share) > FEW_CORES else share for share in shares]
    return "|".join(",".join(map(str, share or [listed[rank % len(listed)]])) for rank, share in enumerate(shares))


def intel_openmp(environment: Mapping[str, str] = os.environ, distribution: str = "intel-openmp") -> dict[str, str]:
    """Return the variable that preloads Intel's OpenMP, as vLLM's documentation asks for on x86 CPUs.

    Returns:
        an empty dict if Intel's OpenMP is not installed, or if the user preloads an OpenMP.
    """
    preloaded = environment.get(_PRELOAD, "")
    if any(name in preloaded for name in ("libiomp", "libomp", "libgomp")):
        return {}
    try:
        libraries = [file.locate() for file in files(distribution) or () if file.name == "libiomp5.so"]
    except PackageNotFoundError:
        return {}
    path = os.path.realpath(str(libraries[0])) if libraries else ""
    if not os.path.isfile(path) or re.search(r"[\s:]", path):  # LD_PRELOAD cannot hold such a path.
        return {}
    return {_PRELOAD: f"{path}:{preloaded}" if preloaded else path}


def compiler_lacks(environment: Mapping[str, str] = os.environ, include: str | None = None) -> str | None:
    """Return what torch.compile lacks on this CPU, in words; None if it lacks nothing.

    Args:
        environment: variables that choose a compiler.
        include: the folder of Python's headers; None: this Python's.
    """
    chosen = environment.get("CXX", "")
    try:
        compiler = shlex.split(chosen) or ["g++"]  # torch.compile's Inductor also takes CXX, else g++.
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
        cores: physical cores.
        flags: names of the engine flags that the user wrote.
    """
    return cores <= FEW_CORES and not says_how_to_compile(flags)


def says_how_to_compile(flags: Collection[str]) -> bool:
    """Tell whether the user's flags say how, or whether, vLLM compiles."""
    return any(flag.startswith(_COMPILATION_FLAGS) for flag in flags)
