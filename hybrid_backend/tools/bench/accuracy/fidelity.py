"""How near a server stays to dense attention: KL of next-token distributions, agreement of the most likely tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

TOP = 200  # log-probabilities asked for per position; the rest of the vocabulary is one bucket
# What a vLLM server is started with whose answers are to be followed (`client.ask`).
TEACHER = "hybrid_backend.tools.bench.accuracy.teacher:Forced"
FIDELITY_FLAGS = ("--logits-processors", TEACHER, "--max-logprobs", str(TOP))
# The model runner that vLLM prefers on a GPU takes logits processors of another kind.
FIDELITY_ENVIRONMENT = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
Distribution = dict[int, float]


@dataclass(frozen=True)
class Comparison:
    """Over all positions of one text: mean KL(dense || sparse) in nats, share of equal most likely tokens."""

    kl: float
    agreement: float
    positions: int


def compare(dense: Sequence[Distribution], sparse: Sequence[Distribution]) -> Comparison:
    """Position 0 is left out: it comes from the prompt's last token, which is dense on both sides."""
    kls = [_kl(p, q) for p, q in zip(dense[1:], sparse[1:], strict=True)]
    same = [max(p, key=p.__getitem__) == max(q, key=q.__getitem__) for p, q in zip(dense[1:], sparse[1:], strict=True)]
    return Comparison(sum(kls) / len(kls), sum(same) / len(same), len(kls))


def _kl(p: Distribution, q: Distribution) -> float:
    """KL over the tokens that both report; everything else is one bucket, which can only lower the value a little."""
    shared = p.keys() & q.keys()
    kl = sum(math.exp(p[t]) * (p[t] - q[t]) for t in shared)
    rest_p, rest_q = (max(1e-12, 1 - sum(math.exp(x[t]) for t in shared)) for x in (p, q))
    return kl + rest_p * math.log(rest_p / rest_q)
