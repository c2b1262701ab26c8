"""A real server under test: started as a user starts it, asked over HTTP, stopped, its log at hand."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml
from openai import OpenAI

MODEL = "smollm2-135m-instruct"
API_KEY = "secret"  # what clients send, whether the server asks for it or not
START_DEADLINE = 600.0  # a busy machine compiles for minutes
# No core is kept free for the server's front end: the client mostly waits.
_ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
}


@dataclass
class Server:
    """A running server. ``model`` is the name that requests must use."""

    url: str
    model: str
    log: Path
    process: subprocess.Popen[bytes]

    def client(self) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=API_KEY, timeout=600, max_retries=0)

    def http(self) -> httpx.Client:
        return httpx.Client(timeout=300, headers={"Authorization": f"Bearer {API_KEY}"})

    def complete(self, prompt: str, tokens: int, **options: Any) -> str:
        """Greedy completion."""
        answer = self.client().completions.create(
            model=self.model, prompt=prompt, max_tokens=tokens, temperature=0, **options
        )
        return str(answer.choices[0].text)

    def complete_all(self, prompts: Sequence[str], tokens: int, at_once: int = 4, **options: Any) -> list[str]:
        """Greedy completions, ``at_once`` requests in flight."""
        with ThreadPoolExecutor(at_once) as pool:
            return list(pool.map(lambda prompt: self.complete(prompt, tokens, **options), prompts))

    def metrics(self, prefix: str = "hybrid_") -> dict[str, dict[str, float]]:
        """``{metric: {layer or "": value}}``, summed over all other labels."""
        found: dict[str, dict[str, float]] = {}
        for line in httpx.get(f"{self.url}/metrics", timeout=60).text.splitlines():
            match = re.fullmatch(r"([\w:]+)(?:\{(.*)\})? (\S+)", line)
            if match and match[1].startswith(prefix):
                labels = dict(re.findall(r'(\w+)="([^"]*)"', match[2] or ""))
                values = found.setdefault(match[1], {})
                layer = labels.get("layer", "")
                values[layer] = values.get(layer, 0.0) + float(match[3])
        return found

    def total(self, name: str, layers: set[int] | None = None) -> float:
        """One metric, summed over its layers (or some of them)."""
        values = self.metrics(name).get(name, {})
        return sum(v for layer, v in values.items() if layers is None or (layer and int(layer) in layers))


@contextmanager
def hybrid_server(
    folder: Path,
    config: dict[str, Any],
    flags: Sequence[str] = (),
    model: str = MODEL,
    engine: str = "vllm",
    environment: dict[str, str] | None = None,
) -> Iterator[Server]:
    """``hybrid serve`` with the shipped configuration of the model, changed by ``config`` (dotted keys)."""
    overrides = [
        f"--set={key}={yaml.safe_dump(value, default_flow_style=True).strip().removesuffix('...').strip()}"
        for key, value in config.items()
    ]
    port = free_port()
    command = [executable("hybrid"), "serve", model, "--engine", engine, *overrides, "--", "--port", str(port), *flags]
    with running(command, port, folder / f"hybrid-{port}.log", environment) as server:
        yield server


@contextmanager
def stock_server(
    folder: Path, model_dir: Path, flags: Sequence[str] = (), environment: dict[str, str] | None = None
) -> Iterator[Server]:
    """The engine without our plugin."""
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(model_dir),
        "--served-model-name",
        MODEL,
        "--port",
        str(port),
        *flags,
    ]
    environment = {"VLLM_PLUGINS": "none", **(environment or {})}
    with running(command, port, folder / f"stock-{port}.log", environment) as server:
        yield server


def executable(name: str) -> str:
    """A console script of the environment that runs the tests."""
    return str(Path(sys.executable).parent / name)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running(command: list[str], port: int, log: Path, environment: dict[str, str] | None = None) -> Iterator[Server]:
    """``environment``: what is set beside the tests' own; empty: what is not set."""
    variables = {**os.environ, **_ENVIRONMENT, **(environment or {})}
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={name: value for name, value in variables.items() if value},
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_until_healthy(process, url, log)
        yield Server(url, MODEL, log, process)
    finally:
        stop(process)


def _wait_until_healthy(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_DEADLINE
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"server exited with {process.returncode}:\n{log.read_text()[-4000:]}")
        try:
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    raise RuntimeError(f"server not healthy after {START_DEADLINE} s:\n{log.read_text()[-4000:]}")


def stop(process: subprocess.Popen[bytes], grace: float = 60) -> None:
    """As Ctrl-C does; the whole session is killed if it does not end by itself."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(grace)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
