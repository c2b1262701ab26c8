"""Asking servers: our own with token ids and log-probabilities, any other over its OpenAI-compatible API."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hybrid_backend.errors import EngineError
from hybrid_backend.tools.bench.accuracy.fidelity import FIDELITY_FLAGS, TOP, Distribution, compare
from hybrid_backend.tools.bench.accuracy.task import Task
from hybrid_backend.tools.bench.client import post, served_models, without_v1
from hybrid_backend.tools.bench.servers import Server


@dataclass(frozen=True)
class Answer:
    """Generated tokens, and at each of their positions the log-probabilities of the most likely ones."""

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
    """A greedy answer of at most ``max_tokens`` tokens after the forced tokens ``begin``, which are part of it.

    ``ends``: tokens that end an answer. vLLM ends it at a forced one too (an end of turn stands between question and
    answer), so after ``begin`` the end is found here. ``budget``: tokens, 0: as the server has it.
    """
    asked = {**({"forced": list(begin)} if begin else {}), **({"budget_tokens": budget} if budget else {})}
    body = {
        "model": server.model, "prompt": list(prompt), "max_tokens": len(begin) + max_tokens, "temperature": 0,
        "logprobs": TOP, "return_tokens_as_token_ids": True,
        **({"vllm_xargs": asked} if asked else {}), **({"ignore_eos": True} if begin else {}),
    }  # fmt: skip
    logprobs = post(server.url, "/v1/completions", body)["choices"][0].get("logprobs")
    if not logprobs or not logprobs.get("tokens") or not logprobs.get("top_logprobs"):
        raise EngineError(f"{server.url} gave no log-probabilities; start it with {' '.join(FIDELITY_FLAGS)}")
    tokens = [_id(token) for token in logprobs["tokens"]]
    if tokens[: len(begin)] != list(begin):
        raise EngineError(f"{server.url} did not follow the given tokens; start it with {' '.join(FIDELITY_FLAGS)}")
    free = next((i + 1 for i in range(len(begin), len(tokens)) if tokens[i] in ends), len(tokens))
    places = logprobs["top_logprobs"][:free]
    return Answer(tokens[:free], [{_id(t): value for t, value in place.items()} for place in places])


def _id(token: str) -> int:
    return int(token.removeprefix("token_id:"))


@dataclass(frozen=True)
class Fidelity:
    """How near a server stayed to dense along the dense answer: mean KL(dense || server) in nats, share of equal most
    likely tokens. None where the answer has no position that decoding computes."""

    kl: float | None
    agreement: float | None
    positions: int


def fidelity(dense: Sequence[Distribution], ours: Sequence[Distribution], first: int) -> Fidelity:
    """Of positions ``first`` and later; position 0 of an answer is the (exact) prompt's unless its question was
    decoded."""
    p, q = list(dense[first:]), list(ours[first:])
    if not p:
        return Fidelity(None, None, 0)
    certain = {0: 0.0}  # `compare` leaves out the first position
    found = compare([certain, *p], [certain, *q])
    if not math.isfinite(found.kl):
        raise EngineError("the server reported log-probabilities that are no numbers; look at its log")
    return Fidelity(found.kl, found.agreement, found.positions)


@dataclass(frozen=True)
class Scored:
    """Any OpenAI-compatible server; ``url`` without /v1."""

    url: str
    api: Literal["completions", "chat"]
    model: str

    @classmethod
    def at(cls, url: str, api: Literal["completions", "chat"]) -> Scored:
        """Raises BenchError if nothing answers there."""
        base = without_v1("--endpoint", url)
        return cls(base, api, served_models("--endpoint", base, 30)[0])

    def ask(self, task: Task) -> str:
        """The greedy answer. A chat endpoint applies its own template and does not get the answer's beginning."""
        body: dict[str, Any] = {"model": self.model, "max_tokens": task.max_tokens, "temperature": 0}
        if self.api == "completions":
            return str(post(self.url, "/v1/completions", {**body, "prompt": task.prompt})["choices"][0]["text"])
        body["messages"] = [{"role": "user", "content": task.content}]
        return str(post(self.url, "/v1/chat/completions", body)["choices"][0]["message"]["content"])
