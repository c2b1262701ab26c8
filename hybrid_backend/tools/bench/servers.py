"""Servers for one measurement: started as a user starts them, stopped when it is done, their logs kept."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from hybrid_backend.config import HybridConfig, parse_override, resolve_config
from hybrid_backend.tools.bench.client import BenchError

DEMO = "smollm2-135m-instruct"
START_DEADLINE = 600.0  # seconds; a busy machine compiles for minutes
# No core is kept free for the server's front end: the client mostly waits.
_ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
}


@dataclass
class Server:
    """A running server. ``url`` is without /v1, ``model`` the name that requests must use."""

    url: str
    model: str
    log: Path
    process: subprocess.Popen[bytes]


def parse_overrides(given: Sequence[str]) -> dict[str, Any]:
    """Values of ``--set`` by dotted key, for `hybrid_server`.

    Raises:
        ConfigError: something else than key=value, or no key of the configuration.
    """
    return dict(map(parse_override, given))


def configured(model: str, config: Mapping[str, Any]) -> HybridConfig:
    """What `hybrid_server` serves with.

    Raises:
        ConfigError: a value, method or kernel that it would refuse.
    """
    from hybrid_backend.methods import check_method_name
    from hybrid_backend.workers import resolve_kernel

    settings, _ = resolve_config(model, None, os.environ, _overrides(config))
    check_method_name(settings.method)
    resolve_kernel(settings.workers.kernel)
    return settings


def _overrides(config: Mapping[str, Any]) -> list[str]:
    return [
        f"{key}={yaml.safe_dump(value, default_flow_style=True).strip().removesuffix('...').strip()}"
        for key, value in config.items()
    ]


@contextmanager
def hybrid_server(
    folder: Path,
    config: Mapping[str, Any],
    flags: Sequence[str] = (),
    model: str = DEMO,
    engine: str = "vllm",
    environment: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """``hybrid serve`` with the shipped configuration of the model, changed by ``config`` (dotted keys)."""
    overrides = [f"--set={override}" for override in _overrides(config)]
    port = free_port()
    command = [executable("hybrid"), "serve", model, "--engine", engine, *overrides, "--", "--port", str(port), *flags]
    with running(command, port, model, folder / f"hybrid-{port}.log", environment) as server:
        yield server


@contextmanager
def stock_server(
    folder: Path,
    directory: str | Path,
    flags: Sequence[str] = (),
    model: str = DEMO,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """vLLM without our plugin, serving what is in ``directory`` as ``model``."""
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(directory)]
    command += ["--served-model-name", model, "--port", str(port), *flags]
    environment = {"VLLM_PLUGINS": "none", **(environment or {})}
    with running(command, port, model, folder / f"stock-{port}.log", environment) as server:
        yield server


@contextmanager
def ended_in_order() -> Iterator[None]:
    """Let SIGTERM raise KeyboardInterrupt, so that a plain kill stops what was started. Main thread only."""
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


@contextmanager
def _interrupts_deferred() -> Iterator[Sequence[int]]:
    """Hold back SIGINT and SIGTERM until the block has ended; yields the list of those that have arrived.

    `subprocess.Popen` needs it around all of its methods: an exception in the middle of one leaves its lock taken.
    Other threads than the main one receive no signals.
    """
    pending, previous = list[int](), dict[int, Any]()
    if threading.current_thread() is not threading.main_thread():
        yield pending
        return
    try:
        for held_back in (signal.SIGINT, signal.SIGTERM):
            previous[held_back] = signal.signal(held_back, lambda received, _frame: pending.append(received))
        yield pending
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        for number in pending:
            signal.raise_signal(number)


@contextmanager
def running(
    command: Sequence[str], port: int, model: str, log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """Run ``command``, which starts a server on ``port``, for as long as the block lasts.

    In the main thread a SIGTERM in between raises KeyboardInterrupt, as Ctrl-C does, so that the server is stopped.

    Args:
        environment: variables to set in addition; an empty value unsets one.

    Raises:
        BenchError: the server ended, or answers nothing after `START_DEADLINE` seconds; names its log.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    variables = {**os.environ, **_ENVIRONMENT, **(environment or {})}
    in_main_thread = threading.current_thread() is threading.main_thread()
    process: subprocess.Popen[bytes] | None = None
    with log.open("wb") as sink, ended_in_order() if in_main_thread else nullcontext():
        try:
            with _interrupts_deferred():
                process = subprocess.Popen(
                    command,
                    stdout=sink,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    env={name: value for name, value in variables.items() if value},
                )
            url = f"http://127.0.0.1:{port}"
            _wait_until_healthy(process, url, log)
            yield Server(url, model, log, process)
        finally:
            if process is not None:
                # The interrupt may have come before anything was stopped.
                try:
                    stop(process)
                except KeyboardInterrupt:
                    stop(process, grace=0)
                    raise


def _wait_until_healthy(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_DEADLINE
    # One client, without certificates: reading them for every question takes a tenth of a core from what starts.
    with httpx.Client(timeout=5, verify=False) as client:
        while time.monotonic() < deadline:
            with _interrupts_deferred():
                has_ended = process.poll() is not None
            if has_ended:
                raise BenchError(f"a server ended with {process.returncode}: {_reason(log)}; its log: {log}")
            try:
                if client.get(f"{url}/health").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.25)
    raise BenchError(f"a server does not answer {START_DEADLINE:g} s after its start; its log: {log}")


def _reason(log: Path) -> str:
    """Our own error in a server's log, else the last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return next((line for line in lines if line.startswith("error: ")), lines[-1] if lines else "it said nothing")


def stop(process: subprocess.Popen[bytes], grace: float = 60) -> None:
    """End a server by SIGTERM, as service managers do; kill its whole session after ``grace`` seconds or an interrupt.

    SIGINT would not do: a shell's background jobs, nohup and many CI runners start their children with it ignored.
    """
    with _interrupts_deferred() as interrupts:
        has_crashed = process.poll() is not None
        if not has_crashed:
            process.terminate()
        deadline = time.monotonic() + grace
        while process.poll() is None and time.monotonic() < deadline and not interrupts:
            time.sleep(0.02)
        # After an orderly end nothing is killed: what such a server leaves behind must be seen.
        if has_crashed or process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def executable(name: str) -> str:
    """A console script of this environment.

    Raises:
        BenchError: there is none.
    """
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if found is None:
        raise BenchError(f"no command {name!r} beside {sys.executable} or on PATH; install hybrid-backend there")
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
