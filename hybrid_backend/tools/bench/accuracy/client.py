"""Requests of the accuracy bench: to its own servers with token ids and log-probabilities, to others with text."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from hybrid_backend.errors import EngineError
from hybrid_backend.tools.bench.accuracy.fidelity import FIDELITY_FLAGS, TOP, Distribution
from hybrid_backend.tools.bench.accuracy.task import Task
from hybrid_backend.tools.bench.client import Endpoint, post
from hybrid_backend.tools.bench.servers import Server


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
    """Return a greedy answer.

    Args:
        server: a vLLM server with `FIDELITY_FLAGS`.
        prompt: token ids.
        max_tokens: most tokens after ``begin``.
        begin: forced tokens, which are part of the answer.
        ends: tokens that end an answer. vLLM would also end it at a forced one, so after ``begin`` it is cut here.
        budget: tokens that the request attends; 0 leaves the server's budget.

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
