"""Servers that run for the time of a measurement, started as users start them. Their logs stay."""

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
START_DEADLINE = 600.0
"""Seconds within which a server must answer: a busy machine compiles for minutes."""
# vLLM would keep a core free for the server's front end, but the client mostly waits.
_ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
}


@dataclass
class Server:
    """A running server. ``url`` is without /v1, ``model`` the model's name in requests."""

    url: str
    model: str
    log: Path
    process: subprocess.Popen[bytes]


def parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """Return the values of ``--set`` by dotted key; ConfigError for anything but a known key=value."""
    return dict(map(parse_override, overrides))


def configured(model: str, config: Mapping[str, Any]) -> HybridConfig:
    """Return the configuration of a `hybrid_server`; ConfigError if the server would refuse it."""
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
    """Run ``hybrid serve`` with the shipped configuration of the model, changed by ``config`` (dotted keys)."""
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
    """Run vLLM without this plugin, serving the model in ``directory`` under the name ``model``."""
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(directory)]
    command += ["--served-model-name", model, "--port", str(port), *flags]
    environment = {"VLLM_PLUGINS": "none", **(environment or {})}
    with running(command, port, model, folder / f"stock-{port}.log", environment) as server:
        yield server


@contextmanager
def interruptible() -> Iterator[None]:
    """Let SIGTERM raise KeyboardInterrupt, so that a plain kill stops what was started. Main thread only."""
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


@contextmanager
def _interrupts_deferred() -> Iterator[Sequence[int]]:
    """Delay SIGINT and SIGTERM until the end of the block; yield the list of those that have arrived.

    An exception within a method of `subprocess.Popen` would leave its lock taken. Only the main thread gets signals.
    """
    pending, previous = list[int](), dict[int, Any]()
    if threading.current_thread() is not threading.main_thread():
        yield pending
        return
    try:
        for interrupt in (signal.SIGINT, signal.SIGTERM):
            previous[interrupt] = signal.signal(interrupt, lambda received, _frame: pending.append(received))
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
    """Run ``command``, which starts a server on ``port``, for the time of the block.

    ``environment`` is added to the variables of this process; an empty value unsets a variable. In the main thread a
    SIGTERM raises KeyboardInterrupt, as Ctrl-C does, so that the server is stopped.

    Raises:
        BenchError: the server ended, or answers nothing after `START_DEADLINE` seconds; names its log.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    variables = {**os.environ, **_ENVIRONMENT, **(environment or {})}
    in_main_thread = threading.current_thread() is threading.main_thread()
    process: subprocess.Popen[bytes] | None = None
    with log.open("wb") as sink, interruptible() if in_main_thread else nullcontext():
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
                # An interrupt may come before anything was stopped.
                try:
                    stop(process)
                except KeyboardInterrupt:
                    stop(process, grace=0)
                    raise


def _wait_until_healthy(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_DEADLINE
    # Loading certificates for each request would take a tenth of a core from the server.
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
    """Return the first error of `hybrid serve` in a server's log, or the log's last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return next((line for line in lines if line.startswith("error: ")), lines[-1] if lines else "it said nothing")


def stop(process: subprocess.Popen[bytes], grace: float = 60) -> None:
    """End a server by SIGTERM; kill its whole session after ``grace`` seconds or an interrupt.

    A shell's background jobs, nohup and many CI runners start their children with SIGINT ignored, so it would not do.
    """
    with _interrupts_deferred() as interrupts:
        has_crashed = process.poll() is not None
        if not has_crashed:
            process.terminate()
        deadline = time.monotonic() + grace
        while process.poll() is None and time.monotonic() < deadline and not interrupts:
            time.sleep(0.02)
        # After an orderly end nothing is killed, so that tests see processes that a server leaves behind.
        if has_crashed or process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def executable(name: str) -> str:
    """Return the path of a console script of this environment; BenchError if there is none."""
    path = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if path is None:
        raise BenchError(f"no command {name!r} beside {sys.executable} or on PATH; install hybrid-backend there")
    return path


def free_port() -> int:
    """Return a TCP port that no program listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
