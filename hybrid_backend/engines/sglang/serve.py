"""``hybrid serve MODEL --engine sglang``: SGLang's own OpenAI-compatible server, in this process, with our flags."""

from __future__ import annotations

import argparse
import copy
import logging
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from hybrid_backend.config import HybridConfig
from hybrid_backend.engines.address import check_address
from hybrid_backend.engines.refusal import other_backend
from hybrid_backend.engines.sglang import BACKEND, compat
from hybrid_backend.engines.sglang.settings import ENV_RESOLVED, chosen
from hybrid_backend.errors import EngineError, HybridError

NAME = "SGLang"
_HOST, _PORT = "127.0.0.1", 30000


def check_installation() -> None:
    """Raise EngineError unless an SGLang is installed that has what we lean on, before it is imported."""
    if compat.installed() is None:
        raise EngineError(
            f"SGLang is not installed here; {compat.SGLANG.fix} in an environment of its own, "
            "or run `make serve ENGINE=sglang`"
        )
    compat.check_engine()


def check_port(extra: Sequence[str]) -> None:
    """Raise EngineError if the server's address cannot be used."""
    check_address(extra, _HOST, _PORT, elsewhere=("--config",))


def engine_arguments(model: str, served_as: str, extra: Sequence[str]) -> list[str]:
    """SGLang's command line for ``model``. What the user wrote after ``--`` comes last and wins."""
    arguments = ["--model-path", model, "--attention-backend", BACKEND, "--enable-metrics"]
    if model != served_as:
        arguments += ["--served-model-name", served_as]
    return [*arguments, *extra]


def run(model: str | Path, served_as: str, config: HybridConfig, extra: Sequence[str]) -> None:
    """Run the server until it is stopped. All of SGLang's processes find the configuration in the environment."""
    os.environ[ENV_RESOLVED] = config.model_dump_json()
    arguments = engine_arguments(str(model), served_as, extra)
    server_args = _prepare(arguments)

    from sglang.launch_server import run_server
    from sglang.srt.utils import kill_process_tree

    # Until SGLang's server sets handlers of its own, a signal must end its processes too.
    signal.signal(signal.SIGTERM, _stop)
    try:
        run_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def _prepare(arguments: Sequence[str]) -> Any:
    """SGLang's arguments, resolved: what can be refused is refused here, before a process is started."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.server_args import ServerArgs, prepare_server_args

    class Parser(argparse.ArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise EngineError(f"{message}; engine flags are listed by `hybrid serve MODEL --engine sglang -- --help`")

    if "--config" not in arguments:  # what a file says, only SGLang can read
        parser = Parser(prog="hybrid serve MODEL --engine sglang --")
        ServerArgs.add_cli_args(parser)
        parser.parse_args(list(arguments))
    try:
        server_args = prepare_server_args(list(arguments))
        server_args.resolve_once()
        if not chosen(server_args):
            raise other_backend("sglang serve")
        copy.deepcopy(server_args).check_server_args()  # SGLang asks again when it starts, with a traceback
    except HybridError:
        raise
    except Exception as error:  # SGLang raises everything from ValueError to AssertionError for what it cannot use
        logging.getLogger(__name__).debug("refused by SGLang", exc_info=True)
        model = arguments[arguments.index("--model-path") + 1]
        raise EngineError(f"SGLang cannot serve {model}: {error or type(error).__name__}") from error
    return server_args
