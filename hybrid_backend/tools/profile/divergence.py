"""KL between the model's distributions with some layers sparse, one or all but a few, and with all layers dense.

Attention mass does not tell. A layer can cover 95 % of its mass with its pages and still miss the one token that
answers a question, where hundreds of others look almost like it; another one covers half of its mass and nothing is
lost. So a register of entries that are all alike is asked for some of them, and plain text goes on, and distributions
are compared.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import DynamicCache

from hybrid_backend.config import HybridConfig
from hybrid_backend.errors import ConfigError
from hybrid_backend.tools.profile.measure import page_digests, select
from hybrid_backend.tools.profile.network import Network, Rope
from hybrid_backend.tools.profile.texts import Encode, Window

_MARK = "hybrid_selects"
_ASKED = 4
"""Entries that a prompt asks for."""
_TOKENS = 64
"""Tokens of a text that are compared."""


Sparse = Collection[int] | Mapping[int, int]
"""Layers that are sparse, all with the budget of the configuration; or each with tokens of its own."""


@dataclass(frozen=True)
class Probe:
    """A prompt. ``ids[given:]`` are given token by token, as to decode steps; ``compared``: the places in ``ids`` of
    the tokens whose distributions are compared. ``kind``: ``lookups`` or ``text``."""

    kind: str
    ids: tuple[int, ...]
    given: int
    compared: tuple[int, ...]


def text_probe(window: Window) -> Probe:
    """Return a probe of kind ``text``: its last tokens are compared, after the rest of the window."""
    end, first = len(window.ids), len(window.ids) - min(_TOKENS, len(window.ids) // 4)
    return Probe("text", window.ids, first - 1, tuple(range(first, end)))


def lookup_probes(encode: Encode, context: int, count: int, seed: int = 0) -> list[Probe]:
    """``count`` prompts of about ``context`` tokens: entries of random hexadecimal digits, some of them asked for.

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
        room = context - _ASKED * 2 * len(question(code()))  # an answer is shorter than its question
        while len(body) < room:
            entries.append((code(), code()))
            body += encode("Entry {} has the code {}.\n".format(*entries[-1]))
        if len(entries) < 2 * _ASKED:
            raise ConfigError(f"--context {context}: too short for lookups; take a longer one, or --lookups 0")
        ids, compared = list(body), list[int]()
        for key, value in dice.sample(entries, _ASKED):
            ids += question(key)
            answer = encode(f" {value}")
            compared += range(len(ids), len(ids) + len(answer))
            ids += answer
        probes.append(Probe("lookups", tuple(ids), len(body), tuple(compared)))
    return probes


@dataclass
class Reference:
    """The dense pass over a probe. Every sparse pass begins from it and is compared with it.

    Attributes:
        cache: keys and values of ``ids[:given]`` in every layer.
        outputs: what each decoder layer returned for ``ids[given:]``.
        dense: ``[compared, vocabulary]`` log probabilities.
    """

    network: Network
    probe: Probe
    cache: DynamicCache
    outputs: list[Any]
    dense: Tensor

    @classmethod
    def measure(cls, network: Network, probe: Probe, advance: Callable[[], None] = lambda: None) -> Reference:
        """Run the whole probe, all layers dense. ``advance`` is called for each layer of the prefill."""
        reference = cls(network, probe, DynamicCache(), [], torch.empty(0))
        ids = torch.tensor([probe.ids[: probe.given]], device=network.device)
        with torch.inference_mode():
            with network.watched(lambda *_: advance()):
                network.decoder(ids, past_key_values=reference.cache, use_cache=True)
            with network.attending(_attention, _MARK), network.recorded() as reference.outputs:
                reference.dense = reference.distributions(0)
        return reference

    @property
    def bytes(self) -> int:
        """Size of the tensors, nearly all of it keys and values."""
        cached = sum(layer.keys.nbytes + layer.values.nbytes for layer in self.cache.layers)
        return int(cached) + self.dense.nbytes

    def distributions(self, first: int) -> Tensor:
        """Run ``ids[given:]``, with the layers before ``first`` as they were in the dense pass.

        Returns:
            ``[compared, vocabulary]`` log probabilities.
        """
        for layer in self.cache.layers:
            if (beyond := layer.get_seq_length() - self.probe.given) > 0:
                layer.crop(-beyond)
        ids = torch.tensor([self.probe.ids[self.probe.given :]], device=self.network.device)
        predicting = torch.tensor(self.probe.compared, device=ids.device) - self.probe.given - 1
        with self.network.replaying(self.outputs[:first]):
            logits = self.network.model(
                ids, past_key_values=self.cache, use_cache=True, logits_to_keep=predicting
            ).logits[0]
        return torch.log_softmax(logits.float(), -1)


class References:
    """The probes' dense passes, kept as long as all of them take at most ``limit`` bytes; else the oldest one goes."""

    def __init__(self, network: Network, limit: int = 2 << 30) -> None:
        self._network, self._limit = network, limit
        self._measured: dict[Probe, Reference] = {}

    def __contains__(self, probe: Probe) -> bool:
        return probe in self._measured

    def of(self, probe: Probe, advance: Callable[[], None] = lambda: None) -> Reference:
        """Return the dense pass over ``probe``, measured at the first call, which calls ``advance`` for each layer."""
        if probe not in self._measured:
            reference = Reference.measure(self._network, probe, advance)
            while self._measured and sum(old.bytes for old in self._measured.values()) + reference.bytes > self._limit:
                del self._measured[next(iter(self._measured))]
            self._measured[probe] = reference
        return self._measured[probe]


def divergences(
    reference: Reference,
    config: HybridConfig,
    sparse: Sequence[Sparse],
    advance: Callable[[float], None] = lambda _: None,
    predicted: Sequence[Collection[int]] = (),
) -> list[float]:
    """Measure what sets of sparse layers cost: KL of the dense distributions to the sparse ones.

    Args:
        reference: the dense pass over the probe.
        config: budget, page size, selection.
        sparse: sets of layers; the true query selects in them.
        advance: called with the KL of each set, as soon as it is known.
        predicted: for each set, or for none, the layers of it that select by the query that follows from the input of
            the layer before.

    Returns:
        For each set the KL in nats per compared token.
    """
    network, queries, kl_of_sets = reference.network, _Predicted(reference.network), list[float]()
    with torch.inference_mode(), network.attending(_attention, _MARK), network.watched(queries):
        for place, layers in enumerate(sparse):
            budgets = layers if isinstance(layers, Mapping) else dict.fromkeys(layers, config.budget_tokens)
            for layer in network.full_layers:
                selects = None
                if layer.index in budgets:
                    own = config.model_copy(update={"budget_tokens": budgets[layer.index]})
                    selects = partial(queries.select, layer.index, partial(_selected, own, layer.scale))
                setattr(layer.attention, _MARK, selects)
            queries.layers = set(budgets).intersection(predicted[place] if predicted else ())
            dense_log_probs, sparse_log_probs = (
                reference.dense,
                reference.distributions(min(budgets, default=len(network.layers))),
            )
            kl_of_sets.append(float((dense_log_probs.exp() * (dense_log_probs - sparse_log_probs)).sum(-1).mean()))
            advance(kl_of_sets[-1])
    return kl_of_sets


@dataclass
class _Predicted:
    """Queries of some ``layers``, as the input of the layer before predicts them; watches the model's layers."""

    network: Network
    layers: Collection[int] = ()
    _before: Tensor | None = None
    _queries: dict[int, Tensor] = field(default_factory=dict)

    def __call__(self, index: int, x: Tensor, rope: Rope) -> None:
        """``x``: ``[tokens, hidden]``, what goes into a layer."""
        if index in self.layers and index and self._before is not None:
            self._queries[index] = self.network.layers[index].queries_and_keys(self._before, rope)[0].transpose(0, 1)
        self._before = x

    def select(self, index: int, selects: Callable[[Tensor, Tensor], Tensor], q: Tensor, k: Tensor) -> Tensor:
        """Select by the predicted query, or by ``q``, ``[heads, queries, dim]``, if none is predicted."""
        return selects(self._queries.pop(index, q), k)


def _selected(config: HybridConfig, scale: float, q: Tensor, k: Tensor) -> Tensor:
    """Return what a decode step at each of the last positions would select, ``[1 | kv_heads, queries, tokens]``."""
    keys, kind = k.transpose(0, 1).cpu(), config.selection.digest
    digests = page_digests(keys, config.page_size, "minmax_int8" if kind == "auto" else kind)
    seq_lens = torch.arange(len(keys) - q.shape[1] + 1, len(keys) + 1)
    chosen = select(q.transpose(0, 1).cpu(), digests, seq_lens, config, scale)[0]
    return chosen.repeat_interleave(config.page_size, 2)[..., : len(keys)].transpose(0, 1).to(q.device)


def _attention(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float, **more: Any
) -> tuple[Tensor, None]:
    """Attend as Transformers' attention functions do.

    Args:
        module: the attention module; it carries the selection under `_MARK`.
        q: ``[1, heads, queries, dim]``.
        k: ``[1, kv_heads, tokens, dim]``.
        v: ``[1, kv_heads, tokens, dim]``.
        mask: is not used.
        scaling: factor of the logits.
        more: of which ``sliding_window`` is used.
    """
    queries, tokens, window = q.shape[2], k.shape[2], more.get("sliding_window")
    key = torch.arange(tokens, device=q.device)
    position = key[tokens - queries :, None]
    allowed = (key <= position)[None]
    if window is not None:
        allowed = allowed & (key > position - window)
    selects = getattr(module, _MARK, None)
    if selects is not None:
        chosen = selects(q[0], k[0])
        allowed = allowed & chosen.repeat_interleave(q.shape[1] // len(chosen), 0)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed[None], scale=scaling, enable_gqa=True)
    return out.transpose(1, 2), None
