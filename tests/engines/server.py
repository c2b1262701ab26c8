"""A real server under test: started as a user starts it, asked over HTTP, stopped, its log at hand."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from openai import DefaultHttpxClient, OpenAI

from hybrid_backend.tools.bench import servers
from hybrid_backend.tools.bench.servers import executable, free_port, stop

__all__ = ["MODEL", "Server", "all_of", "executable", "free_port", "hybrid_server", "running", "stock_server", "stop"]

MODEL = servers.DEMO
API_KEY = "secret"  # what clients send, whether the server asks for it or not


@dataclass
class Server(servers.Server):
    """A running server, asked as users ask it."""

    def client(self) -> OpenAI:
        # Without certificates, which take longer to read than a short answer to come.
        plain = DefaultHttpxClient(verify=False, timeout=600)
        return OpenAI(base_url=f"{self.url}/v1", api_key=API_KEY, timeout=600, max_retries=0, http_client=plain)

    def http(self) -> httpx.Client:
        return httpx.Client(timeout=300, verify=False, headers={"Authorization": f"Bearer {API_KEY}"})

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

    def metrics(self, prefix: str = "hybrid_", by: str = "layer") -> dict[str, dict[str, float]]:
        """``{metric: {layer (or another label ``by``) or "": value}}``, summed over all other labels."""
        found: dict[str, dict[str, float]] = {}
        for line in httpx.get(f"{self.url}/metrics", timeout=60, verify=False).text.splitlines():
            match = re.fullmatch(r"([\w:]+)(?:\{(.*)\})? (\S+)", line)
            if match and match[1].startswith(prefix):
                labels = dict(re.findall(r'(\w+)="([^"]*)"', match[2] or ""))
                values = found.setdefault(match[1], {})
                place = labels.get(by, "")
                values[place] = values.get(place, 0.0) + float(match[3])
        return found

    def total(self, name: str, layers: set[int] | None = None) -> float:
        """One metric, summed over its layers (or some of them)."""
        values = self.metrics(name).get(name, {})
        return sum(v for layer, v in values.items() if layers is None or (layer and int(layer) in layers))


@contextmanager
def all_of(starts: Sequence[AbstractContextManager[Server]]) -> Iterator[list[Server]]:
    """Servers that start at the same time."""
    with ThreadPoolExecutor(len(starts)) as pool:
        entered = [pool.submit(start.__enter__) for start in starts]
        try:
            yield [each.result() for each in entered]
        finally:
            for start, done in zip(starts, entered, strict=True):
                if done.exception() is None:
                    start.__exit__(None, None, None)


@contextmanager
def _asked(started: AbstractContextManager[servers.Server]) -> Iterator[Server]:
    try:
        with started as server:
            yield Server(**vars(server))
    except servers.BenchError as error:
        if found := re.search(r"its log: (\S+)$", str(error)):
            print(Path(found[1]).read_text()[-4000:])
        raise


def hybrid_server(
    folder: Path,
    config: Mapping[str, Any],
    flags: Sequence[str] = (),
    model: str = MODEL,
    engine: str = "vllm",
    environment: Mapping[str, str] | None = None,
) -> AbstractContextManager[Server]:
    """``hybrid serve`` with the shipped configuration of the model, changed by ``config`` (dotted keys)."""
    return _asked(servers.hybrid_server(folder, config, flags, model, engine, environment))


def stock_server(
    folder: Path, model_dir: Path, flags: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> AbstractContextManager[Server]:
    """The engine without our plugin."""
    return _asked(servers.stock_server(folder, model_dir, flags, environment=environment))


def running(
    command: Sequence[str], port: int, log: Path, environment: Mapping[str, str] | None = None
) -> AbstractContextManager[Server]:
    return _asked(servers.running(command, port, MODEL, log, environment))
