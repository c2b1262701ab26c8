"""Importance of the whole context for each attention head: gates between full and streaming attention.

DuoAttention (arXiv 2410.10819, section 2.2): a gate per KV head mixes full attention and attention over sink and
recent tokens. The model is frozen; the gates are trained on prompts in which passkeys must be recalled, so that the
last hidden states stay near those of full attention while an L1 term pulls the gates down. CLO (arXiv 2511.14510,
appendix A) scores heads this way; a gate per query head is trained in the same way here.

DuoAttention's settings are 2000 steps, contexts of 1,000 to 32,000 tokens, ten passkeys, 128 sink and 256 recent
tokens, learning rate 0.02 (a tenth of it at both ends), weight 0.05. Ours are sized for minutes on a CPU, and the
distance is relative to the length of the hidden states, so that one weight of the L1 term suits models of any scale.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor
from torch.nn import functional

from hybrid_backend.config import HeadScores, HybridConfig
from hybrid_backend.errors import ConfigError
from hybrid_backend.hardware import Hardware
from hybrid_backend.model import ModelShape
from hybrid_backend.tools.plan.simulate.costs import Costs
from hybrid_backend.tools.profile.measure import Measures
from hybrid_backend.tools.profile.network import Attend, Network, visible
from hybrid_backend.tools.profile.texts import Encode

Kind = Literal["kv_head", "query_head"]
_WORDS = (
    "apple", "river", "stone", "window", "garden", "silver", "morning", "letter",
    "bridge", "candle", "forest", "winter", "market", "doctor", "orange", "paper",
    "castle", "island", "yellow", "engine", "summer", "mirror", "kitchen", "teacher",
    "valley", "basket", "rocket", "pencil", "harbor", "ladder", "button", "carpet",
)  # fmt: skip


@dataclass(frozen=True)
class GateOptions:
    """Options of the training. ``samples``: prompts of ``context`` tokens, each with ``passkeys`` lists of ``words``.

    Streaming attention sees ``sink`` first and ``recent`` last tokens; ``weight`` is the factor of the L1 term, which
    is the mean of all gates.
    """

    steps: int = 20
    context: int = 512
    sink: int = 16
    recent: int = 64
    rate: float = 0.08
    weight: float = 0.05
    samples: int = 8
    passkeys: int = 3
    words: int = 8


class GateState(BaseModel):
    """State of the training after ``step`` steps: gates ``[full layers][heads]``, Adam's moments, the distances."""

    model_config = ConfigDict(frozen=True)
    step: int
    gates: list[list[float]]
    first: list[list[float]]
    second: list[list[float]]
    losses: list[float]


@dataclass(frozen=True)
class Passkey:
    """A prompt. The loss compares the hidden states that predict its last ``answer`` tokens."""

    ids: tuple[int, ...]
    answer: int


def passkeys(text: str, encode: Encode, options: GateOptions, seed: int = 0) -> list[Passkey]:
    """Return prompts of ``options.context`` tokens: lists of words, hidden in prose and all asked for at the end.

    Raises:
        ConfigError: the context is too short for them, or the text for the context.
    """
    dice = random.Random(seed)
    prose = encode(text)
    prompts = []
    for _ in range(options.samples):
        lists = [" ".join(dice.choices(_WORDS, k=options.words)) for _ in range(options.passkeys)]
        hidden = [encode(f"\nThe words of list {n} are: {words}.\n") for n, words in enumerate(lists, 1)]
        answer: list[int] = []
        for n, words in dice.sample(list(enumerate(lists, 1)), len(lists)):
            answer += encode(f"\nThe words of list {n} are: {words}.")
        room = options.context - len(answer) - sum(map(len, hidden))
        if room < options.context // 4 or len(prose) < room:
            raise ConfigError(
                f"gates: a context of {options.context} tokens is too short for {options.passkeys} passkeys of "
                f"{options.words} words, or the text for the context; take a longer one, or --no-gates"
            )
        start = dice.randrange(len(prose) - room + 1)
        filler = prose[start : start + room]
        ids: list[int] = []
        places = sorted(dice.randrange(room // 20, room - room // 20) for _ in hidden)
        for place, previous, needle in zip(places, [0, *places], hidden, strict=False):
            ids += filler[previous:place] + needle
        prompts.append(Passkey(tuple(ids + filler[places[-1] :] + answer), len(answer)))
    return prompts


def train(
    network: Network,
    prompts: Sequence[Passkey],
    kind: Kind,
    options: GateOptions,
    state: GateState | None = None,
) -> Iterator[GateState]:
    """Train the gates, from ``state`` if there is one; deterministic, so that an interrupted run ends as a whole one.

    The state after each step is yielded. The gates of the last one are the importance of each head, 0 (streaming
    suffices) to 1.
    """
    shape = (len(network.full_layers), network.kv_heads if kind == "kv_head" else network.heads)
    if state is None:
        zeros = torch.zeros(shape).tolist()
        state = GateState(step=0, gates=torch.ones(shape).tolist(), first=zeros, second=zeros, losses=[])
    gates = torch.tensor(state.gates, device=network.device, requires_grad=True)
    adam = torch.optim.Adam([gates])
    moments = {"exp_avg": torch.tensor(state.first), "exp_avg_sq": torch.tensor(state.second)}
    adam.state[gates] = {name: moment.to(gates.device) for name, moment in moments.items()}
    adam.state[gates]["step"] = torch.tensor(float(state.step))

    @cache
    def dense(sample: int) -> Tensor:
        with torch.no_grad():
            return _answers(network, prompts[sample], gated_attention(network, options))

    for step in range(state.step, options.steps):
        sample = step % len(prompts)
        answers = _answers(network, prompts[sample], gated_attention(network, options, gates))
        distance = (answers - dense(sample)).pow(2).sum() / dense(sample).pow(2).sum()
        adam.zero_grad()
        (distance + options.weight * gates.mean()).backward()
        adam.param_groups[0]["lr"] = options.rate * _warmth(step, options.steps)
        adam.step()
        with torch.no_grad():
            gates.clamp_(0, 1)
        state = GateState(
            step=step + 1,
            gates=gates.tolist(),
            first=adam.state[gates]["exp_avg"].tolist(),
            second=adam.state[gates]["exp_avg_sq"].tolist(),
            losses=[*state.losses, distance.item()],
        )
        yield state


def _warmth(step: int, steps: int) -> float:
    """Return DuoAttention's learning-rate factor: up from 0.1 in the first fifth of the steps, down in the last."""
    fifth = max(1, steps // 5)
    return min(1.0, max((step + 1) / fifth, 0.1), max((steps - step) / fifth, 0.1))


def _answers(network: Network, prompt: Passkey, attend: Attend) -> Tensor:
    """Return the last hidden states that predict the answer, ``[answer, hidden]``."""
    with network.attending(attend):
        return network.hidden(prompt.ids)[-prompt.answer - 1 : -1]


def gated_attention(network: Network, options: GateOptions, gates: Tensor | None = None) -> Attend:
    """Return attention that ``gates`` ``[full layers, heads]`` mix of full and streaming attention; None: all full."""
    row_of_layer = {layer.index: row for row, layer in enumerate(network.full_layers)}

    def attend(index: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        tokens = q.shape[2]
        allowed = visible(tokens, tokens, window, q.device)
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=allowed, scale=scale, enable_gqa=True)
        if gates is None or index not in row_of_layer:
            return out
        streamed = visible(tokens, tokens, options.recent, q.device)
        streamed[:, : options.sink] = allowed[:, : options.sink]
        streaming = functional.scaled_dot_product_attention(q, k, v, attn_mask=streamed, scale=scale, enable_gqa=True)
        row = gates[row_of_layer[index]]
        share = row.repeat_interleave(q.shape[1] // len(row))[:, None, None]
        return share * out + (1 - share) * streaming

    return attend


def prefetch_bytes_of(hardware: Hardware, shape: ModelShape, config: HybridConfig, context: int, batch: int = 1) -> int:
    """Return T_comp * B_PCIe of CLO (arXiv 2511.14510, Eq. 12 as meant: printed with B in the denominator).

    Returns:
        Bytes that one device's bus moves while the device computes one layer of one step, for all of its sequences
        together; at the link's best rate, since the device reads the pages by itself and sets up no copies.
    """
    layer = Costs(hardware, shape, config, context, -(-batch // hardware.gpus))
    attended = layer.kv(float(min(config.budget_tokens, context)))
    seconds = layer.projections + layer.prediction + layer.rest
    seconds += layer.scoring(layer.digest_bytes) + layer.attention(attended)
    return int(seconds * hardware.link_achieved(math.inf))


def head_scores(
    model: str,
    network: Network,
    windows: Measures,
    gates: Mapping[str, Sequence[Sequence[float]]],
    prefetch_bytes: int = 0,
) -> HeadScores:
    """Return the scores that CLO (arXiv 2511.14510) decides by, for every head of every layer.

    Layers with a sliding window get importance 0 and similarity 1: nothing of them is offloaded, and no rule would
    ever keep or load one of their heads. ``prefetch_bytes`` is 0 where the hardware is not known.
    """

    def rows_of(full_layers: Sequence[Sequence[float]], otherwise: float) -> tuple[tuple[float, ...], ...]:
        rows = {layer.index: row for layer, row in zip(network.full_layers, full_layers, strict=True)}
        sliding = [otherwise] * len(full_layers[0])
        return tuple(tuple(round(score, 5) for score in rows.get(layer.index, sliding)) for layer in network.layers)

    similarity = [
        list(map(fmean, zip(*(layer.similarity for layer in layers), strict=True)))
        for layers in zip(*windows, strict=True)
    ]
    return HeadScores(
        model=model,
        importance=rows_of(gates["query_head"], 0.0),
        kv_importance=rows_of(gates["kv_head"], 0.0),
        similarity=rows_of(similarity, 1.0),
        prefetch_bytes=prefetch_bytes,
    )
