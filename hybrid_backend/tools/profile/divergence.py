"""KL between the model's distributions with some layers sparse, one or all but a few, and with all layers dense.

Attention mass does not show it. A layer can cover 95 % of its mass with its pages and still miss the one token that
answers a question, where hundreds of tokens look almost like it; another layer covers half of its mass and loses
nothing. Therefore answers are compared: the continuation of texts, and lookups in a register of entries that are all
alike.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.cache_utils import DynamicCache

from hybrid_backend.config import HybridConfig
from hybrid_backend.errors import ConfigError
from hybrid_backend.kernels.digest_format import format_named
from hybrid_backend.tools.profile.measure import page_digests, select
from hybrid_backend.tools.profile.network import Network, Rope, visible
from hybrid_backend.tools.profile.texts import Encode, Window

_QUESTIONS = 4
"""Entries that a lookup prompt asks for."""
_TOKENS = 64
"""Tokens of a text that are compared."""

Sparse = Collection[int] | Mapping[int, int]
"""Layers that are sparse with the budget of the configuration, or the budget in tokens of each sparse layer."""


@dataclass(frozen=True)
class Probe:
    """A prompt of kind ``lookups`` or ``text``, whose answers are compared.

    The first ``prompt_tokens`` tokens are prefilled, the others are decoded one by one. ``compared``: places in ``ids``
    of the tokens whose distributions are compared.
    """

    kind: str
    ids: tuple[int, ...]
    prompt_tokens: int
    compared: tuple[int, ...]


def text_probe(window: Window) -> Probe:
    """Return a probe of kind ``text``, which compares the last tokens of the window."""
    end = len(window.ids)
    first = end - min(_TOKENS, end // 4)
    return Probe("text", window.ids, first - 1, tuple(range(first, end)))


def lookup_probes(encode: Encode, context: int, count: int, seed: int = 0, questions: int = _QUESTIONS) -> list[Probe]:
    """Return ``count`` prompts of about ``context`` tokens: entries of random hexadecimal digits, and ``questions``.

    Raises:
        ConfigError: the context is too short for them.
    """
    dice = random.Random(seed)

    def code() -> str:
        return "-".join(f"{dice.randrange(1 << 16):04x}" for _ in range(8))

    def question(key: str) -> list[int]:
        return encode(f"\nThe code of entry {key} is")

    probes = []
    for _ in range(count):
        body, entries = encode("A register of entries, each with its code.\n"), []
        # An answer is shorter than its question, and an entry, by which the body may exceed its room, than two of them.
        room = context - max(2 * questions, 3) * len(question(code()))
        while len(body) < room:
            entries.append((code(), code()))
            body += encode("Entry {} has the code {}.\n".format(*entries[-1]))
        if len(entries) < 2 * questions:
            raise ConfigError(f"--context {context}: too short for lookups; take a longer one, or --lookups 0")
        ids, compared = list(body), list[int]()
        for key, value in dice.sample(entries, questions):
            ids += question(key)
            answer = encode(f" {value}")
            compared += range(len(ids), len(ids) + len(answer))
            ids += answer
        probes.append(Probe("lookups", tuple(ids), len(body), tuple(compared)))
    return probes


class Reference:
    """The dense pass over a probe, from which every sparse pass begins and with which it is compared.

    ``dense``: ``[compared, vocabulary]`` log probabilities. ``bytes``: size of the tensors, mostly keys and values.
    """

    def __init__(self, network: Network, probe: Probe) -> None:
        self.network, self.probe, self.cache = network, probe, DynamicCache()
        self._outputs: list[Any] = []
        with torch.inference_mode():
            network.hidden(probe.ids[: probe.prompt_tokens], past_key_values=self.cache, use_cache=True)
            with network.attending(_SparseAttention(network).attend):
                self.dense = self.log_probabilities(0)
        self.bytes = self.dense.nbytes + sum(layer.keys.nbytes + layer.values.nbytes for layer in self.cache.layers)

    def log_probabilities(self, first: int) -> Tensor:
        """Decode the tokens after the prompt; return ``[compared, vocabulary]`` log probabilities.

        The layers before ``first`` repeat what they returned in the dense pass.
        """
        start = self.probe.prompt_tokens
        for layer in self.cache.layers:
            if (beyond := layer.get_seq_length() - start) > 0:
                layer.crop(-beyond)
        ids = torch.tensor([self.probe.ids[start:]], device=self.network.device)
        predicting = torch.tensor(self.probe.compared, device=ids.device) - start - 1
        with self.network.replaying(self._outputs, first):
            step = self.network.model(ids, past_key_values=self.cache, use_cache=True, logits_to_keep=predicting)
        return torch.log_softmax(step.logits[0].float(), -1)


class References:
    """Cache of the probes' dense passes, of at most ``limit`` bytes; the oldest pass leaves first."""

    def __init__(self, network: Network, limit: int = 2 << 30) -> None:
        self._network, self._limit = network, limit
        self._measured: dict[Probe, Reference] = {}

    def __contains__(self, probe: Probe) -> bool:
        return probe in self._measured

    def get(self, probe: Probe) -> Reference:
        """Return the dense pass over ``probe``; the first call measures it."""
        if probe not in self._measured:
            reference = Reference(self._network, probe)
            while self._measured and sum(old.bytes for old in self._measured.values()) + reference.bytes > self._limit:
                del self._measured[next(iter(self._measured))]
            self._measured[probe] = reference
        return self._measured[probe]


def divergence(reference: Reference, config: HybridConfig, sparse: Sparse, predicted: Collection[int] = ()) -> float:
    """Measure the KL of the dense distributions to those with sparse layers, in nats per compared token.

    The true query selects in the ``sparse`` layers; if they are ``predicted``, too, the query that follows from the
    input of the layer before.
    """
    budgets = sparse if isinstance(sparse, Mapping) else dict.fromkeys(sparse, config.budget_tokens)
    configs = {index: config.model_copy(update={"budget_tokens": tokens}) for index, tokens in budgets.items()}
    network, dense = reference.network, reference.dense
    attention = _SparseAttention(network, configs, predicted)
    with torch.inference_mode(), network.attending(attention.attend), network.watched(attention.watch):
        log_probabilities = reference.log_probabilities(min(budgets, default=len(network.layers)))
    return float((dense.exp() * (dense - log_probabilities)).sum(-1).mean())


@dataclass
class _SparseAttention:
    """Attention of decode steps in which the layers of ``configs`` attend selected pages only.

    Those of them that are ``predicted`` select by the query that the input of the layer before predicts.
    """

    network: Network
    configs: Mapping[int, HybridConfig] = field(default_factory=dict)
    predicted: Collection[int] = ()
    _previous: Tensor | None = None
    _query: Tensor | None = None

    def watch(self, index: int, x: Tensor, rope: Rope) -> None:
        """Predict the query of a layer from the input of the layer before it."""
        self._query = None
        if index in self.predicted and index in self.configs and self._previous is not None:
            self._query = self.network.layers[index].queries_and_keys(self._previous, rope)[0].transpose(0, 1)
        self._previous = x

    def attend(self, index: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        allowed = visible(q.shape[2], k.shape[2], window, q.device)[None]
        if index in self.configs:
            query = q[0] if self._query is None else self._query
            pages = _selected(self.configs[index], scale, query, k[0])
            allowed = allowed & pages.repeat_interleave(q.shape[1] // len(pages), 0)
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=allowed[None], scale=scale, enable_gqa=True)


def _selected(config: HybridConfig, scale: float, q: Tensor, k: Tensor) -> Tensor:
    """Return the tokens that a decode step at each of the last positions selects, ``[1 | kv_heads, queries, tokens]``.

    Shapes: q ``[heads, queries, dim]``, k ``[kv_heads, tokens, dim]``.
    """
    keys = k.transpose(0, 1).cpu()
    digests = page_digests(keys, config.page_size, format_named(config.selection.digest))
    seq_lens = torch.arange(len(keys) - q.shape[1] + 1, len(keys) + 1)
    chosen = select(q.transpose(0, 1).cpu(), digests, seq_lens, config, scale)[0]
    return chosen.repeat_interleave(config.page_size, 2)[..., : len(keys)].transpose(0, 1).to(q.device)
