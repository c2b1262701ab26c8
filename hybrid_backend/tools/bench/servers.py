"""Servers for one measurement: started as a user starts them, stopped when it is done, their logs kept."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
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
    from hybrid_backend.methods import resolve_method
    from hybrid_backend.workers import resolve_kernel

    settings, _ = resolve_config(model, None, os.environ, _overrides(config))
    resolve_method(settings.method)
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
    """A plain kill is a Ctrl-C: what was started is stopped. In the main thread only."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def running(
    command: Sequence[str], port: int, model: str, log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """The server that ``command`` starts on ``port``; ``environment``: what is set beside; empty: what is not set.

    Raises:
        BenchError: it ended, or answers nothing after `START_DEADLINE` seconds; names its log.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    variables = {**os.environ, **_ENVIRONMENT, **(environment or {})}
    with log.open("wb") as sink, ThreadPoolExecutor(1) as thread:
        # Signals interrupt the main thread alone: one that came while a process starts would leave it behind.
        starting: Future[subprocess.Popen[bytes]] = thread.submit(
            subprocess.Popen,
            command,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={name: value for name, value in variables.items() if value},
        )
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_until_healthy(starting.result(), url, log)
            yield Server(url, model, log, starting.result())
        finally:
            stop(starting.result())


def _wait_until_healthy(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_DEADLINE
    # One client, without certificates: reading them for every question takes a tenth of a core from what starts.
    with httpx.Client(timeout=5, verify=False) as client:
        while time.monotonic() < deadline:
            if process.poll() is not None:
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
    """As Ctrl-C does; the whole session is killed if it does not end by itself."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(grace)
        except subprocess.TimeoutExpired:
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
