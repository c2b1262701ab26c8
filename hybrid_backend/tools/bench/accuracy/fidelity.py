"""Fidelity of a server to dense attention: KL of next-token distributions, agreement of the most likely tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hybrid_backend.errors import EngineError

TOP = 200
"""Log-probabilities per position that a server reports; the rest of the vocabulary is one bucket."""
TEACHER = "hybrid_backend.tools.bench.accuracy.teacher:Forced"
FIDELITY_FLAGS = ("--logits-processors", TEACHER, "--max-logprobs", str(TOP))
"""Flags of a vLLM server that `client.ask` can force to follow a text."""
FIDELITY_ENVIRONMENT = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
"""vLLM's V2 model runner, the default on a GPU, takes logits processors of another kind."""
Distribution = dict[int, float]
"""Log-probabilities by token id."""


@dataclass(frozen=True)
class Comparison:
    """Mean KL(dense || sparse) in nats and share of equal most likely tokens over some positions; nan without any."""

    kl: float
    agreement: float
    positions: int


def compare(dense: Sequence[Distribution], sparse: Sequence[Distribution], first: int = 1) -> Comparison:
    """Compare distributions along one text, from position ``first`` on.

    Position 0 comes from the prompt's last token, which every method computes densely, unless that token was decoded.

    Raises:
        EngineError: a log-probability is not a number.
    """
    pairs = list(zip(dense[first:], sparse[first:], strict=True))
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
