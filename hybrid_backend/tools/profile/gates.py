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

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor
from torch.nn import functional as F

from hybrid_backend.errors import ConfigError
from hybrid_backend.tools.profile.network import Network
from hybrid_backend.tools.profile.texts import Encode

Kind = Literal["kv_head", "query_head"]
_MARK = "hybrid_gates"
_WORDS = (
    "apple", "river", "stone", "window", "garden", "silver", "morning", "letter",
    "bridge", "candle", "forest", "winter", "market", "doctor", "orange", "paper",
    "castle", "island", "yellow", "engine", "summer", "mirror", "kitchen", "teacher",
    "valley", "basket", "rocket", "pencil", "harbor", "ladder", "button", "carpet",
)  # fmt: skip


@dataclass(frozen=True)
class GateOptions:
    """``context``: tokens of a prompt; ``sink``, ``recent``: tokens of streaming attention; ``weight``: of the L1 term
    (the mean of all gates); ``samples``: prompts, taken in turn."""

    steps: int = 20
    context: int = 512
    sink: int = 16
    recent: int = 64
    rate: float = 0.08
    weight: float = 0.05
    samples: int = 8
    passkeys: int = 3
    words: int = 8
    save_every: int = 10


class GateState(BaseModel):
    """Training after ``step`` steps, exactly: gates ``[full layers][heads]`` and Adam's two moments."""

    model_config = ConfigDict(frozen=True)
    step: int
    gates: list[list[float]]
    first: list[list[float]]
    second: list[list[float]]
    losses: list[float]


@dataclass(frozen=True)
class Passkey:
    """A prompt; the loss looks at the hidden states that predict its last ``answer`` tokens."""

    ids: tuple[int, ...]
    answer: int


def passkeys(text: str, encode: Encode, options: GateOptions, seed: int = 0) -> list[Passkey]:
    """Prompts of ``options.context`` tokens: lists of words hidden in prose, all of them asked for at the end.

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
    save: Callable[[GateState], None] = lambda state: None,
    advance: Callable[[], None] = lambda: None,
) -> GateState:
    """Train the gates, from ``state`` if given; deterministic, so that an interrupted run ends where a whole one does.

    Returns:
        The last state; its gates are the importance of each head, 0 (streaming suffices) to 1.
    """
    heads = network.kv_heads if kind == "kv_head" else network.heads
    shape = (len(network.full_layers), heads)
    gates = torch.ones(shape) if state is None else torch.tensor(state.gates)
    first = torch.zeros(shape) if state is None else torch.tensor(state.first)
    second = torch.zeros(shape) if state is None else torch.tensor(state.second)
    losses = [] if state is None else list(state.losses)
    begin = 0 if state is None else state.step
    dense: dict[int, Tensor] = {}
    with _gated(network, options) as mix:
        for step in range(begin, options.steps):
            sample = step % len(prompts)
            if sample not in dense:
                mix(None)
                with torch.no_grad():
                    dense[sample] = _answers(network, prompts[sample])
            leaf = gates.to(network.device).requires_grad_()
            mix(leaf)
            target = dense[sample]
            distance = (_answers(network, prompts[sample]) - target).pow(2).sum() / target.pow(2).sum()
            loss = distance + options.weight * leaf.mean()
            (gradient,) = torch.autograd.grad(loss, leaf)
            rate = options.rate * _warmth(step, options.steps)
            gates, first, second = _adam(gates, gradient.cpu(), first, second, step, rate)
            losses.append(float(distance.detach()))
            advance()
            if (step + 1) % options.save_every == 0 or step + 1 == options.steps:
                state = GateState(
                    step=step + 1, gates=gates.tolist(), first=first.tolist(), second=second.tolist(), losses=losses
                )
                save(state)
    assert state is not None
    return state


def _warmth(step: int, steps: int) -> float:
    """DuoAttention's schedule: a fifth of the steps up from a tenth, a fifth down."""
    fifth = max(1, steps // 5)
    return min(1.0, max((step + 1) / fifth, 0.1), max((steps - step) / fifth, 0.1))


def _adam(
    gates: Tensor, gradient: Tensor, first: Tensor, second: Tensor, step: int, rate: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Take one step of Adam with its usual decay rates, then clamp the gates to 0..1."""
    first = 0.9 * first + 0.1 * gradient
    second = 0.999 * second + 0.001 * gradient.pow(2)
    mean, square = first / (1 - 0.9 ** (step + 1)), second / (1 - 0.999 ** (step + 1))
    return (gates - rate * mean / (square.sqrt() + 1e-8)).clamp(0, 1), first, second


def _answers(network: Network, prompt: Passkey) -> Tensor:
    """The last hidden states that predict the answer, ``[answer, hidden]``."""
    out = network.decoder(torch.tensor([prompt.ids], device=network.device), use_cache=False)
    hidden: Tensor = out.last_hidden_state[0, -prompt.answer - 1 : -1]
    return hidden


@contextmanager
def _gated(network: Network, options: GateOptions) -> Iterator[Callable[[Tensor | None], None]]:
    """The model with our attention. The yielded function sets the gates ``[full layers, heads]``; None: all full."""

    def mix(gates: Tensor | None) -> None:
        for row, layer in enumerate(network.full_layers):
            setattr(layer.attention, _MARK, None if gates is None else (gates[row], options.sink, options.recent))

    with network.attending(_attention, _MARK):
        mix(None)
        yield mix


def _attention(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float, **more: Any
) -> tuple[Tensor, None]:
    """Attend as Transformers' attention functions do, mixed by the module's gates.

    Args:
        module: the attention module; it carries the gates under `_MARK`.
        q: ``[1, heads, tokens, dim]``.
        k: ``[1, kv_heads, tokens, dim]``.
        v: ``[1, kv_heads, tokens, dim]``.
        mask: is not used.
        scaling: factor of the logits.
        more: of which ``sliding_window`` is used.
    """
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    position = torch.arange(q.shape[2], device=q.device)
    distance = position[:, None] - position
    gated = getattr(module, _MARK, None)
    window = more.get("sliding_window")
    if window is not None:
        allowed = (distance >= 0) & (distance < window)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, scale=scaling)
    else:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling)
    if gated is not None:
        gates, sink, recent = gated
        allowed = (distance >= 0) & ((distance < recent) | (position < sink))
        streaming = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, scale=scaling)
        share = gates.repeat_interleave(q.shape[1] // len(gates))[:, None, None]
        out = share * out + (1 - share) * streaming
    return out.transpose(1, 2), None
