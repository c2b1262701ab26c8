"""Environment variables that vLLM reads, checked before it is imported."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from functools import partial

from hybrid_backend.engines.upstream import package_folder
from hybrid_backend.errors import EngineError
from hybrid_backend.host_memory import numbers

_CPU_LISTS: dict[str, Callable[[str], object]] = {
    "VLLM_CPU_OMP_THREADS_BIND": lambda text: text in ("auto", "nobind") or list(map(numbers, text.split("|"))),
    "CPU_VISIBLE_MEMORY_NODES": numbers,
}
"""Variables that vLLM stores as text and parses when its processes start."""


def check_environment() -> None:
    """Raise EngineError for a variable whose value vLLM cannot read.

    vLLM evaluates some variables when it is imported and all of them in its worker processes, half a minute after the
    start, and its errors name no variable. Its table is loaded here without the package around it.
    """
    folder = package_folder("vllm")
    if folder is None:
        return
    spec = importlib.util.spec_from_file_location("vllm.envs", folder / "vllm" / "envs.py")
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, read in module.environment_variables.items():
        if name in os.environ:
            _check(name, read)
    for name, parse in _CPU_LISTS.items():
        if os.environ.get(name):
            _check(name, partial(parse, os.environ[name]))


def _check(name: str, read: Callable[[], object]) -> None:
    try:
        read()
    except Exception as error:  # vLLM raises what int(), float() or json raise.
        raise EngineError(
            f"{name}: got {os.environ[name]!r}, which vLLM cannot read ({error}); correct it or unset it"
        ) from error
