"""Requests of the accuracy bench: log-probabilities of its own servers, text of other servers, and attention mass."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from hybrid_backend.errors import EngineError
from hybrid_backend.tools.bench.accuracy.fidelity import FIDELITY_FLAGS, TOP, Distribution
from hybrid_backend.tools.bench.accuracy.task import Task
from hybrid_backend.tools.bench.client import Endpoint, post
from hybrid_backend.tools.bench.servers import Server
from hybrid_backend.tools.status.reading import read
from hybrid_backend.tools.status.source import from_server, metrics_url

_PUBLISH_SECONDS = 0.6  # A worker publishes its metrics at most every half second.


@dataclass(frozen=True)
class Answer:
    """Generated tokens, and at each of their positions the log-probabilities of the most likely tokens."""

    tokens: list[int]
    logprobs: list[Distribution]


def ask(
    server: Server,
    prompt: Sequence[int],
    max_tokens: int,
    begin: Sequence[int] = (),
    ends: Collection[int] = (),
    budget: int = 0,
) -> Answer:
    """Return a greedy answer of the forced tokens ``begin`` and at most ``max_tokens`` more, up to one of ``ends``.

    vLLM would also end the answer at a forced token, so after ``begin`` it is cut here. ``budget`` is the number of
    tokens that the request attends; 0 leaves the server's.

    Raises:
        EngineError: the server was started without `FIDELITY_FLAGS`.
    """
    extra = {**({"forced": list(begin)} if begin else {}), **({"budget_tokens": budget} if budget else {})}
    body = {
        "model": server.model, "prompt": list(prompt), "max_tokens": len(begin) + max_tokens, "temperature": 0,
        "logprobs": TOP, "return_tokens_as_token_ids": True,
        **({"vllm_xargs": extra} if extra else {}), **({"ignore_eos": True} if begin else {}),
    }  # fmt: skip
    logprobs = post(server.url, "/v1/completions", body)["choices"][0].get("logprobs")
    if not logprobs or not logprobs.get("tokens") or not logprobs.get("top_logprobs"):
        raise EngineError(f"{server.url} gave no log-probabilities; start it with {' '.join(FIDELITY_FLAGS)}")
    tokens = [_token_id(token) for token in logprobs["tokens"]]
    if tokens[: len(begin)] != list(begin):
        raise EngineError(f"{server.url} did not follow the given tokens; start it with {' '.join(FIDELITY_FLAGS)}")
    end = next((i + 1 for i in range(len(begin), len(tokens)) if tokens[i] in ends), len(tokens))
    positions = logprobs["top_logprobs"][:end]
    return Answer(tokens[:end], [{_token_id(t): value for t, value in position.items()} for position in positions])


def _token_id(token: str) -> int:
    return int(token.removeprefix("token_id:"))


def ask_endpoint(endpoint: Endpoint, api: str, task: Task) -> str:
    """Return any OpenAI-compatible server's greedy answer to a task, over the ``completions`` or the ``chat`` API.

    A chat endpoint applies its own template, and does not get the answer's beginning.
    """
    body: dict[str, Any] = {"model": endpoint.model, "max_tokens": task.max_tokens, "temperature": 0}
    if api == "completions":
        return str(post(endpoint.url, "/v1/completions", {**body, "prompt": task.prompt})["choices"][0]["text"])
    body["messages"] = [{"role": "user", "content": task.content}]
    return str(post(endpoint.url, "/v1/chat/completions", body)["choices"][0]["message"]["content"])


class MassMeter:
    """Attention mass of the answers of one server, which must answer one request at a time.

    With ``metrics.sample_interval: 1`` each decode step of a sparse context is one sample per layer. So the mean before
    and after an answer give the mean of the answer's own steps.
    """

    def __init__(self, server: Server, exact_layers: set[int]) -> None:
        """Measure ``server``, without the layers that attend everything."""
        self._server, self._exact_layers = server, exact_layers
        self._metrics = from_server(metrics_url(server.url))
        self._mean, self._steps = 0.0, 0

    def since_last(self, steps: int) -> float | None:
        """Return the mean over sparse layers, heads and the last ``steps`` decode steps; None if none was sampled."""
        if not steps:
            return None
        time.sleep(_PUBLISH_SECONDS)
        # The worker publishes after a step, so one more step is needed.
        post(self._server.url, "/v1/completions", {"model": self._server.model, "prompt": "One more.", "max_tokens": 1})
        layers = enumerate(read(asyncio.run(self._metrics()), time.time()).layers)
        masses = [layer.mass_recall for index, layer in layers if index not in self._exact_layers]
        sampled = [mass for mass in masses if mass is not None]
        mean = sum(sampled) / len(sampled) if sampled else self._mean
        if mean == self._mean:
            return None
        total = self._steps + steps
        mass = (mean * total - self._mean * self._steps) / steps
        self._mean, self._steps = mean, total
        return mass
