"""``hybrid serve MODEL --engine sglang``: SGLang's own OpenAI-compatible server, in this process, with our flags."""

from __future__ import annotations

import argparse
import copy
import logging
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hybrid_backend.config import HybridConfig
from hybrid_backend.engines.address import ServerAddress, who_can_reach
from hybrid_backend.engines.flags import (
    RefusingParser,
    engine_errors,
    flag_names,
    help_flags,
    refuse_other_backend,
    served_name,
)
from hybrid_backend.engines.lifecycle import served
from hybrid_backend.engines.sglang import BACKEND, compat, patches, signals
from hybrid_backend.engines.sglang.settings import ENV_RESOLVED, chosen
from hybrid_backend.errors import EngineError

NAME = "SGLang"
_logger = logging.getLogger(__name__)


def check_installation() -> None:
    """Raise EngineError unless a usable SGLang is installed, before it is imported."""
    if compat.installed() is None:
        raise EngineError(
            f"SGLang is not installed here; {compat.SGLANG.fix} in an environment of its own, "
            "or run `make serve ENGINE=sglang`"
        )
    compat.check_engine()


def take_address(extra: Sequence[str]) -> ServerAddress:
    """Take the server's address before the engine is imported. Raise EngineError if it cannot be used."""
    return ServerAddress().take(extra, 30000, elsewhere=("--config",))


def engine_arguments(model: str, served_as: str, extra: Sequence[str]) -> list[str]:
    """Return SGLang's command line for ``model``. The user's flags after ``--`` come last and win."""
    arguments = ["--model-path", model, "--attention-backend", BACKEND, "--enable-metrics"]
    return [*arguments, *served_name(model, served_as, extra), *extra]


def run(model: str | Path, served_as: str, config: HybridConfig, extra: Sequence[str], address: ServerAddress) -> None:
    """Serve ``model`` on ``address`` until stopped.

    All of SGLang's processes read the configuration from the environment.
    """
    os.environ[ENV_RESOLVED] = config.model_dump_json()
    if help_flags(extra):
        print("SGLang's own flags (importing it takes some seconds):", file=sys.stderr, flush=True)
    with served() as server, _temporary_files_in(server.folder):
        signals.register(server)
        patches.register_address(address)

        from sglang.srt.plugins import load_plugins

        load_plugins()
        patches.verify_address()
        arguments = engine_arguments(str(model), served_as, _with_flags_of_file(extra))
        server_args = _prepare(arguments)
        _take_address_of(server_args, address, extra)
        _logger.info(who_can_reach(server_args.host, server_args.port))

        from sglang.launch_server import run_server

        run_server(server_args)
        server.finish()


@contextmanager
def _temporary_files_in(folder: Path) -> Iterator[None]:
    """Have this process make its temporary files in ``folder``: sockets and metrics, which SGLang does not remove."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    cache_dir()  # This call sets the variable that keeps torch's cache in its place.
    before = tempfile.tempdir
    tempfile.tempdir = str(folder)
    try:
        yield
    finally:
        tempfile.tempdir = before


def _take_address_of(server_args: Any, address: ServerAddress, extra: Sequence[str]) -> None:
    """Have ``address`` be the one of SGLang's resolved arguments.

    A file of flags may have named another one. SGLang's servers with several processes and over HTTP/2 do not take a
    socket, but bind the address themselves.
    """
    if server_args.tokenizer_worker_num > 1 or server_args.enable_http2:
        address.release()
    elif "--config" in flag_names(extra):
        address.take([f"--host={server_args.host}", f"--port={server_args.port}"], server_args.port, ())


def _with_flags_of_file(extra: Sequence[str]) -> list[str]:
    """Replace ``--config FILE`` by the flags in that file, which come first.

    SGLang would put them before our own flags, which would then overrule them.
    """
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.utils.server_args_config_parser import ConfigArgumentMerger

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    words = [word for flag in extra for word in (flag.split("=", 1) if flag.startswith("--config=") else [flag])]
    with engine_errors(_logger, "--config: SGLang cannot read it"):
        merged: list[str] = ConfigArgumentMerger(parser).merge_config_with_args(words)
    if not flag_names(merged).isdisjoint({"--model", "--model-path"}):
        raise EngineError("--config: the file names a model; leave it out, `hybrid serve MODEL` names it")
    return merged


def _prepare(arguments: Sequence[str]) -> Any:
    """Return SGLang's resolved arguments, and refuse all that can be refused before a process is started."""
    from sglang.srt.server_args import ServerArgs, prepare_server_args

    class Parser(RefusingParser, argparse.ArgumentParser):
        pass

    parser = Parser(prog="hybrid serve MODEL --engine sglang --")
    ServerArgs.add_cli_args(parser)
    parser.parse_args(list(arguments))
    with engine_errors(_logger, f"SGLang cannot serve {arguments[arguments.index('--model-path') + 1]}"):
        server_args = prepare_server_args(list(arguments))
        server_args.resolve_once()
        refuse_other_backend(chosen(server_args), "sglang serve")
        copy.deepcopy(server_args).check_server_args()  # SGLang's own check at start would print a traceback.
    return server_args
