"""``hybrid serve MODEL --engine vllm``: vLLM's own OpenAI-compatible server, in this process, with our flags set."""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hybrid_backend.config import HybridConfig
from hybrid_backend.engines.address import LOOPBACK, ServerAddress, who_can_reach, why_not
from hybrid_backend.engines.cpu_defaults import (
    AOT,
    BIND,
    LAYER_NAME,
    compiler_lacks,
    cores_to_bind,
    float32_line,
    has_bf16,
    intel_openmp,
    says_how_to_compile,
    starts_eager,
)
from hybrid_backend.engines.flags import (
    RefusingParser,
    engine_errors,
    flag_names,
    help_flags,
    refuse_other_backend,
    served_name,
)
from hybrid_backend.engines.lifecycle import DRAIN_SECONDS, ServerProcess, environment, is_ending, served
from hybrid_backend.engines.vllm import ADDITIONAL_CONFIG_KEY, BACKEND, CPU_WORKER, GPU_WORKER, STOCK_COMMAND, compat
from hybrid_backend.engines.vllm.checks import check_engine_config
from hybrid_backend.engines.vllm.environment import check_environment
from hybrid_backend.engines.vllm.settings import attached_config, chosen
from hybrid_backend.errors import EngineError
from hybrid_backend.host_memory import System
from hybrid_backend.model_layers import has_delta_nets
from hybrid_backend.workers.cpus import Topology

NAME = "vLLM"
_FOLDERS = ("PROMETHEUS_MULTIPROC_DIR", "VLLM_RPC_BASE_PATH")
"""Variables for the folders of metrics and of sockets. The first one joins the worker's metrics with the API server's;
prometheus_client reads it when it is imported."""


def engine_arguments(model: str, served_as: str, config_json: str, page_size: int, extra: Sequence[str]) -> list[str]:
    """Return vLLM's command line for ``model``. The user's flags after ``--`` come last and win."""
    arguments = ["--model", model, "--attention-backend", BACKEND, "--block-size", str(page_size)]
    arguments += ["--additional-config", config_json]
    arguments += ["--host", LOOPBACK, "--shutdown-timeout", str(DRAIN_SECONDS)]
    return [*arguments, *served_name(model, served_as, extra), *extra]


def check_installation() -> None:
    """Raise EngineError unless a usable vLLM is installed that can read the environment, before it is imported."""
    installed = compat.installed()
    if installed is None:
        raise EngineError(f"vLLM is not installed; {compat.VLLM.fix}, or run `make serve`")
    # The engine process warns of an untested version, so the result is ignored.
    compat.VLLM.check_installed(installed)
    check_environment()


def take_address(extra: Sequence[str]) -> ServerAddress:
    """Take the server's address before the engine is imported. Raise EngineError if it cannot be used."""
    return ServerAddress().take(extra, 8000, elsewhere=("--uds", "--config"))


def run(model: str | Path, served_as: str, config: HybridConfig, extra: Sequence[str], address: ServerAddress) -> None:
    """Serve ``model`` on ``address`` until stopped; the engine flags ``extra`` come last and win."""
    if help_flags(extra):
        print("vLLM's own flags (importing it takes some seconds):", file=sys.stderr, flush=True)
    additional = json.dumps({ADDITIONAL_CONFIG_KEY: config.model_dump(mode="json")})
    with served() as server, environment({name: os.environ.get(name, str(server.folder)) for name in _FOLDERS}):
        flags = _with_flags_of_file(extra)
        arguments = engine_arguments(str(model), served_as, additional, config.page_size, flags)
        try:
            _serve(arguments, server, address)
        except RuntimeError as error:
            if "Engine core initialization failed" not in str(error):
                raise
            raise EngineError("the engine did not start; the reason is in the log above") from None


def _serve(arguments: Sequence[str], server: ServerProcess, address: ServerAddress) -> None:
    """Run the server until it is stopped.

    Raises:
        EngineError: the flags are refused, or the engine ended by itself.
    """
    import uvloop
    from vllm.entrypoints.launchers.api_server.entry import run_server_worker
    from vllm.utils.system_utils import decorate_logs

    set_up, _, _ = compat.command_line()
    set_up()
    decorate_logs("APIServer")
    parsed, url, listener = _prepare(arguments, address)
    server.set_address(url)

    class Loop(uvloop.Loop):
        """Event loop that ends at once at a second signal, or at a deadline: vLLM's own handlers know neither."""

        def add_signal_handler(  # type: ignore[override]
            self, sig: int, callback: Callable[..., Any], *args: Any
        ) -> None:
            server.watch_engine()
            stop = partial(callback, *args)
            ends = partial(server.on_signal, sig, stop, parsed.shutdown_timeout)
            super().add_signal_handler(sig, ends if sig in (signal.SIGINT, signal.SIGTERM) else stop)

    logging.getLogger("vllm.v1.engine.async_llm").addFilter(_is_unexpected)
    uvloop.run(run_server_worker(url, listener, parsed), loop_factory=Loop)
    server.finish()


def _is_unexpected(record: logging.LogRecord) -> bool:
    """Tell whether a log record is unexpected: any but an EngineDeadError while the server shuts down.

    vLLM's output reader may see the end of the engine before it is cancelled. `ServerProcess` reports a crash.
    """
    error = record.exc_info[0] if record.exc_info else None
    return not (is_ending() and error is not None and error.__name__ == "EngineDeadError")


def _with_flags_of_file(extra: Sequence[str]) -> list[str]:
    """Replace ``--config FILE`` by the flags in that file, which come first.

    vLLM would put them before our own flags, which would then overrule them.
    """
    indices = [i for i, flag in enumerate(extra) if flag.partition("=")[0] == "--config"]
    if not indices or help_flags(extra):
        return list(extra)
    first = indices[0]
    _, is_one_word, path = extra[first].partition("=")
    rest = list(extra[first + 1 :])
    if not is_one_word:
        path = rest.pop(0) if rest else ""
    if len(indices) > 1 or not path:
        raise EngineError("--config: expected one file of engine flags, as --config engine.yaml")
    with engine_errors(logging.getLogger(__name__), f"--config: vLLM cannot read {path}"):
        flags: list[str] = _parser().load_config_file(path)
    if "--model" in flags:
        raise EngineError(f"--config: {path} names a model; leave it out, `hybrid serve MODEL` names it")
    return [*flags, *extra[:first], *rest]


def _prepare(arguments: Sequence[str], address: ServerAddress) -> tuple[Any, str, socket.socket]:
    """Refuse all that can be refused before a process is started: flags, engine configuration, ``address``."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.logger import init_logger
    from vllm.platforms import current_platform

    logger = init_logger("vllm.hybrid_backend")
    device = current_platform.device_type
    if device not in ("cpu", "cuda"):
        raise EngineError(
            f"this version serves on vLLM's CPU and CUDA engines, not on {device}: "
            f"{compat.CPU_INSTALL}, in an environment of its own"
        )
    if device == "cuda":
        logger.warning(
            "the hybrid backend's CUDA tier has run on one GPU only, and served nobody yet: see docs/lab/cuda.md"
        )
    with engine_errors(logger, f"vLLM cannot serve {arguments[arguments.index('--model') + 1]}"):
        parsed = _parse(arguments)
        _refuse_other_servers(parsed)
        _, _, validate = compat.command_line()
        validate(parsed)
        choices = list(_choose_for_cpu(parsed, flag_names(arguments))) if device == "cpu" else []
        config = AsyncEngineArgs.from_cli_args(parsed).create_engine_config()
        refuse_other_backend(chosen(config), STOCK_COMMAND)
        check_engine_config(config, attached_config(config), GPU_WORKER if device == "cuda" else CPU_WORKER)
        if device == "cpu":
            _refuse_dtype(config.model_config)
        for line in choices:  # vLLM has set its logging up by this time.
            logger.info(line)
        url, listener = _listen(parsed, address)
        if not parsed.uds:
            logger.info(who_can_reach(parsed.host, parsed.port))
    return parsed, url, listener


def _listen(parsed: Any, address: ServerAddress) -> tuple[str, socket.socket]:
    """Return vLLM's URL and a socket that listens on it, so that a second server ends before its engine starts."""
    from vllm.entrypoints.launchers.launcher import setup_server

    address.release()  # vLLM binds its own socket to the address.
    try:
        url, listener = setup_server(parsed, reuse_port=False)
        listener.listen()
    except OSError as error:
        if error.errno not in (errno.EADDRINUSE, errno.EADDRNOTAVAIL):
            raise
        if parsed.uds:
            raise EngineError(
                f"--uds: {parsed.uds} is already in use; remove the file or choose another one"
            ) from error
        raise EngineError(why_not(parsed.host, parsed.port, error)) from error
    return url, listener


def _refuse_other_servers(parsed: Any) -> None:
    """Refuse flags with which `vllm serve` starts another server than the one HTTP server that we start."""
    names = [
        name for name in ("headless", "grpc", "data_parallel_multi_port_external_lb") if getattr(parsed, name, False)
    ]
    if (parsed.api_server_count or 1) > 1:
        names.append("api_server_count")
    if names:
        raise EngineError(
            f"--{names[0].replace('_', '-')}: `hybrid serve` starts one HTTP server; leave it out, or use vLLM's own "
            "command line (docs/reference/vllm.md)"
        )


def _refuse_dtype(model: Any) -> None:
    """Refuse a dtype with which vLLM 0.32 ends at the first request (`cpu_gdn_attention_core` asserts bf16)."""
    dtype = str(model.dtype).removeprefix("torch.")
    if has_delta_nets(model.hf_config.to_dict()) and dtype != "bfloat16":
        raise EngineError(
            f"--dtype {dtype}: vLLM's CPU kernel for gated delta nets takes bfloat16 alone; use --dtype bfloat16"
        )


def _choose_for_cpu(parsed: Any, flags: Collection[str]) -> Iterator[str]:
    """Set dtype, cores and compilation if the user did not; yield a line for the log about each choice."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    if parsed.dtype == "auto" and "--dtype" not in flags and not has_bf16():
        model = AsyncEngineArgs.from_cli_args(parsed).create_model_config()
        available = System().available() // parsed.data_parallel_size  # Each replica has weights of its own.
        line = float32_line(model, str(model.model), available)
        if line is not None:
            parsed.dtype = "float32"
            yield line
    topology = Topology.read()
    cores = topology.one_per_core(os.sched_getaffinity(0))
    nodes = sum(not node.isdisjoint(cores) for node in topology.nodes.values())
    yield from _choose_cores(parsed, cores, nodes)
    for name, value in intel_openmp().items():
        os.environ[name] = value
        yield f"{name}={value}: Intel's OpenMP, which hands work to a waiting core sooner than GNU's"
    yield from _choose_compilation(parsed, flags, len(cores))


def _choose_cores(parsed: Any, cores: Collection[int], nodes: int) -> Iterator[str]:
    """Bind ranks to cores if vLLM's own binding is worse (`cores_to_bind`)."""
    engines = parsed.data_parallel_size_local or parsed.data_parallel_size
    ranks = parsed.tensor_parallel_size * parsed.pipeline_parallel_size * engines
    binding = cores_to_bind(cores, os.environ, ranks, engines, nodes)
    if binding is not None:
        os.environ[BIND] = binding
        why = "all cores compute, where vLLM would keep one of so few for itself"
        yield f"{BIND}={binding}: {why if ranks == 1 else 'each rank computes on cores of its own'}"


def _choose_compilation(parsed: Any, flags: Collection[str], cores: int) -> Iterator[str]:
    """Choose whether, and how, the model is compiled."""
    from vllm.envs import environment_variables

    if starts_eager(cores, flags):
        parsed.enforce_eager = True
        yield (
            "--enforce-eager: the first start is one or two minutes shorter; with --no-enforce-eager it decodes about "
            "a third faster, and later starts take some seconds more"
        )
    elif not says_how_to_compile(flags) and (lacking := compiler_lacks()):
        parsed.enforce_eager = True
        yield f"--enforce-eager: vLLM cannot compile here without {lacking}; with it, it decodes about a third faster"
    if parsed.enforce_eager:
        return
    inductor = parsed.compilation_config.inductor_compile_config
    # Where the switch exists, an object may name a layer, which the C++ wrapper cannot pass on.
    uses_text = LAYER_NAME in environment_variables and os.environ.setdefault(LAYER_NAME, "0") == "0"
    if uses_text and inductor.setdefault("cpp_wrapper", True):
        yield (
            f"cpp_wrapper, {LAYER_NAME}=0: operators are called from C++ instead of Python; "
            """if this model does not compile with it: -cc.inductor_compile_config='{"cpp_wrapper": false}'"""
        )
    if os.environ.setdefault(AOT, "0") == "0":
        yield f"{AOT}=0: on a CPU vLLM cannot load what it saves with it, and would compile at every start"


def _parser() -> Any:
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(RefusingParser, FlexibleArgumentParser):
        pass

    _, make_parser, _ = compat.command_line()
    return make_parser(Parser(prog="hybrid serve MODEL --"))


def _parse(arguments: Sequence[str]) -> Any:
    # With a help flag, vLLM's parser has no --model, and must see nothing else.
    parsed = _parser().parse_args(help_flags(arguments) or list(arguments))
    # A second --additional-config replaces the first. Ours must survive the user's, which is for other plugins.
    name = "--additional-config"
    if not isinstance(parsed.additional_config, dict):
        raise EngineError(f"{name}: got {parsed.additional_config!r}, expected a JSON object")
    if name in arguments:
        parsed.additional_config = {
            **json.loads(arguments[arguments.index(name) + 1]),
            **parsed.additional_config,
        }
    if getattr(parsed, "disable_access_log_for_endpoints", "") is None:
        parsed.disable_access_log_for_endpoints = "/metrics"  # `hybrid top` reads it every two seconds.
    return parsed
