"""Fidelity of a vLLM server to dense attention: answers along a forced text, KL of their next-token distributions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hybrid_backend.errors import EngineError
from hybrid_backend.tools.bench.client import post
from hybrid_backend.tools.bench.servers import Server

TOP = 200
"""Log-probabilities per position that a server reports; the rest of the vocabulary is one bucket."""
TEACHER = "hybrid_backend.tools.bench.teacher:Forced"
FIDELITY_FLAGS = ("--logits-processors", TEACHER, "--max-logprobs", str(TOP))
"""Flags of a vLLM server that `ask` can force to follow a text."""
FIDELITY_ENVIRONMENT = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
"""vLLM's V2 model runner, the default on a GPU, takes logits processors of another kind."""
Distribution = dict[int, float]
"""Log-probabilities by token id."""


@dataclass(frozen=True)
class Answer:
    """Generated tokens, and at each of their positions the log-probabilities of the most likely tokens."""

    tokens: list[int]
    logprobs: list[Distribution]


def ask(server: Server, prompt: Sequence[int], max_tokens: int, begin: Sequence[int] = (), budget: int = 0) -> Answer:
    """Return a greedy answer of the forced tokens ``begin`` and at most ``max_tokens`` more.

    ``budget`` is the number of tokens that the request attends; 0 leaves the server's.

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
    return Answer(tokens, [{_token_id(t): value for t, value in place.items()} for place in logprobs["top_logprobs"]])


def _token_id(token: str) -> int:
    return int(token.removeprefix("token_id:"))


@dataclass(frozen=True)
class Comparison:
    """Mean KL(dense || sparse) in nats and share of equal most likely tokens over some positions; nan without any."""

    kl: float
    agreement: float
    positions: int


def compare(dense: Sequence[Distribution], sparse: Sequence[Distribution]) -> Comparison:
    """Compare distributions along one text.

    Position 0 is left out: it comes from the prompt's last token, which every method computes densely.

    Raises:
        EngineError: a log-probability is not a number.
    """
    pairs = list(zip(dense[1:], sparse[1:], strict=True))
    if not pairs:
        return Comparison(math.nan, math.nan, 0)
    kl = sum(_kl(p, q) for p, q in pairs) / len(pairs)
    if not math.isfinite(kl):
        raise EngineError("the server reported log-probabilities that are no numbers; look at its log")
    agreement = sum(max(p, key=p.__getitem__) == max(q, key=q.__getitem__) for p, q in pairs) / len(pairs)
    return Comparison(kl, agreement, len(pairs))


def _kl(p: Distribution, q: Distribution) -> float:
    """Return the KL over the tokens that both report, with all other tokens as one bucket: a slight underestimate."""
    shared = p.keys() & q.keys()
    kl = sum(math.exp(p[token]) * (p[token] - q[token]) for token in shared)
    rest_p, rest_q = (max(1e-12, 1 - sum(math.exp(x[token]) for token in shared)) for x in (p, q))
    return kl + rest_p * math.log(rest_p / rest_q)
