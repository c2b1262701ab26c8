"""Key lookups, KL and attention mass of ways to select pages, on the demo model, without an engine.

    python -m bench.selection_quality [--texts 2] [--prose] [--budget 1024] [--ways layer/softmax/0.5,...]

Each text hides ten passwords in 6,900 tokens of prose; a question and its answer are forced token by token, and every
layer but the exact ones attends the pages that the oracle's operations choose with the true query. A way is
granularity/aggregate/bound by maxima and minima, or granularity/aggregate/codes; ``oracle`` chooses by the true
attention weights; ``decoder/bytes`` and ``decoder/codes`` is the native decoder in place, as a CPU serves, with looks
at all pages in some steps only. Ending in /factors: with the shipped budgets per layer (`budget_factors`), the same
tokens in all. Ending in /every4: a selection is attended again until it is four tokens old or a page begins, as with
`selection.interval` on separate tiers.
Lookups are counted where dense attention is right. ``--prose``: 64 tokens of prose are forced after 5,008 instead, and
nothing is asked. One line per way.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.cache_utils import DynamicCache

from bench.fidelity import Lookup
from bench.fidelity import lookups as facts_in_prose
from hybrid_backend.attention.quality import covered_tokens
from hybrid_backend.config import HybridConfig, SelectionConfig, find_config, load_config
from hybrid_backend.kernels import cpu, oracle
from hybrid_backend.kernels.cpu import digests as native
from hybrid_backend.kernels.digest_format import CODES, MINMAX
from hybrid_backend.methods.scout import Scout
from hybrid_backend.step.budgets import LayerBudgets
from hybrid_backend.step.method import factors_of
from hybrid_backend.tools.hub import fetch
from hybrid_backend.tools.profile.measure import page_digests
from tests.engines.server import MODEL
from tests.engines.texts import tokens_of_prose

WAYS = (
    "layer/sum/1,layer/max/1,kv_head/sum/1,kv_head/max/1,layer/softmax/1,layer/softmax/0.5,layer/softmax/0.3,"
    "kv_head/softmax/1,kv_head/softmax/0.5,layer/softmax/codes,oracle,layer/softmax/0.5/factors,"
    "layer/softmax/codes/factors,oracle/factors,decoder/bytes/factors,decoder/codes/factors"
)


class InPlace:
    """One text's pages under the native decoder.

    Args:
        config: how it selects, and its budget.
        prompt: whose keys and values the pages hold from the start.
        tokens: that will be decoded.
        factors: of layers that select, in the mean 1; none: all have the same budget.
    """

    def __init__(
        self, config: HybridConfig, prompt: DynamicCache, tokens: int, heads: int, factors: dict[int, float]
    ) -> None:
        self._config, size, past = config, config.page_size, prompt.get_seq_length()
        self._table = torch.arange(-(-(past + tokens) // size))[None]
        layers, stores, rows = [], dict[int, Tensor](), dict[int, Tensor]()
        digest_format = CODES if config.selection.digest == CODES.name else MINMAX
        for index, layer in enumerate(prompt.layers):
            kv = torch.stack([layer.keys[0], layer.values[0]], 1)  # [kv_heads, 2, tokens, dim]
            kv = F.pad(kv, (0, 0, 0, self._table.shape[1] * size - past))
            layers.append(kv.unflatten(2, (-1, size)).permute(2, 0, 1, 3, 4).contiguous())
            if config.is_exact(index):
                continue
            found = page_digests(layer.keys[0].transpose(0, 1).contiguous(), size, digest_format)
            stores[index] = F.pad(found, (0,) * (2 * (found.ndim - 1) + 1) + (self._table.shape[1] - len(found),))
            if digest_format is MINMAX:
                rows[index] = native.empty_byte_digests(stores[index])
                native.write_byte_digests(rows[index], stores[index], self._table[0])
        dim, bound = layers[0].shape[4], config.selection.bound
        self._decoder = cpu.Decoder(layers, stores, heads, dim**-0.5, byte_digests=rows, bound=bound)
        self._budgets = LayerBudgets(config, factors, range(len(layers))) if factors else None

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, past: int) -> tuple[Tensor, Tensor]:
        """Return the output ``[1, heads, dim]`` and the attended pages.

        ``q``, ``k`` and ``v`` are those of one token after ``past`` others.
        """
        if layer == 0:
            self._begin(torch.tensor([past + 1]))
        q, k, v = (x.contiguous() for x in (q, k, v))
        out = torch.empty_like(q)
        self._decoder.layer(layer, q, k, v, out)
        return out, self._decoder.selected(0)

    def _begin(self, tokens: Tensor) -> None:
        config = self._config
        pages = (tokens + config.page_size - 1) // config.page_size
        budgets = pages.clamp(max=config.budget_pages)
        self._decoder.begin(
            self._table, tokens, budgets if self._budgets is None else self._budgets.of_rows(budgets, pages),
            sinks=config.sinks, recent=config.recent, aggregate=config.selection.aggregate,
            sequences=torch.zeros(1, dtype=torch.int64), candidates=config.selection.candidates,
            interval=config.selection.steps_between_looks,
        )  # fmt: skip


@dataclass
class Attention:
    """The model's attention: prompts densely, single tokens over what ``way`` selects (None: everything)."""

    page_size: int
    budget: int  # tokens
    exact_layers: tuple[int, ...]
    factors: dict[int, float]  # of the other layers
    way: str | None = None
    in_place: InPlace | None = None  # of the way, if it is a decoder's
    mass: dict[str, list[float]] = field(default_factory=dict)
    selections: dict[int, tuple[int, Tensor]] = field(default_factory=dict)
    """Tokens of the sequence at the last selection of each layer, and the selected pages."""

    def __call__(
        self, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        """``q``: ``[1, heads, queries, dim]``; ``k``, ``v``: ``[1, kv_heads, tokens, dim]``."""
        queries, tokens = q.shape[2], k.shape[2]
        if queries == 1 and self.in_place is not None:
            return self._decoded(self.in_place, q, k, v, scaling, module.layer_idx), None
        allowed = torch.ones(queries, tokens, dtype=torch.bool).tril(tokens - queries)[None, None]
        if queries == 1 and self.way is not None and module.layer_idx not in self.exact_layers:
            allowed = self._selected(self.way, q[0, :, 0], k[0], scaling, module.layer_idx)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2), None

    def _decoded(self, decoder: InPlace, q: Tensor, k: Tensor, v: Tensor, scale: float, layer: int) -> Tensor:
        """``[1, 1, heads, dim]``."""
        kv_heads, tokens, dim = k.shape[1:]
        out, pages = decoder.attend(layer, q[:, :, 0], k[:, :, -1], v[:, :, -1], tokens - 1)
        if layer not in self.exact_layers:
            weights = (torch.matmul(q.view(kv_heads, -1, dim), k[0].transpose(1, 2)) * scale).softmax(-1)
            covered = covered_tokens(pages.long()[None], tokens, self.page_size)
            self._saw(weights, covered)
        return out[None]

    def _saw(self, weights: Tensor, covered: Tensor) -> None:
        assert self.way is not None
        self.mass.setdefault(self.way, []).append(float((weights * covered[:, None]).sum(-1).mean()))

    def _selected(self, way: str, q: Tensor, k: Tensor, scale: float, layer: int) -> Tensor:
        """``[1, heads, 1, tokens]`` bool."""
        kv_heads, tokens, dim = k.shape
        pages = -(-tokens // self.page_size)
        weights = (torch.matmul(q.view(kv_heads, -1, dim), k.transpose(1, 2)) * scale).softmax(-1)
        table, whole = torch.arange(pages, dtype=torch.int32)[None], torch.tensor([pages], dtype=torch.int32)
        every, plain = re.search(r"/every(\d+)$", way), re.sub(r"/every\d+$", "", way)
        first, lists = self.selections.get(layer, (0, table))
        if every and 0 <= tokens - first < int(every[1]) and -(-first // self.page_size) == pages:
            covered = covered_tokens(lists, tokens, self.page_size)
            self._saw(weights, covered)
            return covered.expand(kv_heads, -1).repeat_interleave(len(q) // kv_heads, 0)[None, :, None]
        by_scores = plain.removesuffix("/factors")
        budget = self.budget // self.page_size
        budget = min(pages, budget if plain == by_scores else round(self.factors[layer] * budget))
        if by_scores == "oracle":
            shares = F.pad(weights, (0, pages * self.page_size - tokens)).unflatten(-1, (pages, self.page_size)).sum(-1)
            scores = shares.sum((0, 1))[None, None]
        else:
            granularity, aggregate, by = by_scores.split("/")
            keys = {"digest": by} if by == "codes" else {"bound": float(by)}
            how = SelectionConfig.model_validate({"granularity": granularity, "aggregate": aggregate, **keys})
            digests = page_digests(k.transpose(0, 1), self.page_size, CODES if by == CODES.name else MINMAX)
            scores = oracle.page_scores(
                q[None], digests, table, whole, torch.zeros_like(whole), how.aggregate, how.granularity == "kv_head",
                how.bound, scale, self.page_size,
            )  # fmt: skip
        picked = oracle.select_pages(
            scores, whole, torch.tensor([tokens], dtype=torch.int32), torch.full_like(whole, budget),
            torch.zeros_like(whole), None, table, self.page_size, 1, 2, budget,
        )  # fmt: skip
        lists = picked.pages[0].long()
        self.selections[layer] = tokens, lists
        covered = covered_tokens(lists, tokens, self.page_size)
        self._saw(weights, covered)
        return covered.expand(kv_heads, -1).repeat_interleave(len(q) // kv_heads, 0)[None, :, None]


def lookups(texts: int, seed: int) -> list[Lookup]:
    return facts_in_prose(texts, facts=10, tokens=6900, seed=seed)


def prose(texts: int, seed: int) -> list[Lookup]:
    """Return a prompt in which nothing is hidden, and 64 tokens to follow."""
    cut = [tokens_of_prose(5073, 10_000 + 390_000 * i + 190_000 * seed) for i in range(texts)]
    return [Lookup(text[:5008], text[5008:], []) for text in cut]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--texts", type=int, default=2)
    parser.add_argument("--prose", action="store_true")
    parser.add_argument("--budget", type=int, default=1024, help="tokens")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0, help="of the texts")
    parser.add_argument("--ways", default=WAYS)
    options = parser.parse_args()
    config = load_config(find_config(MODEL))
    sparse = [layer for layer in range(len(config.budget_factors)) if not config.is_exact(layer)]
    factors = factors_of(Scout, config, sparse)
    attention = Attention(options.page_size, options.budget, config.exact_layers, factors)
    AttentionInterface.register("selecting", attention)
    model = AutoModelForCausalLM.from_pretrained(fetch(MODEL), dtype=torch.float32, attn_implementation="selecting")
    ways: list[str | None] = [None, *options.ways.split(",")]
    right: dict[str | None, list[bool]] = {way: [] for way in ways}
    kl: dict[str | None, list[float]] = {way: [] for way in ways}
    prompt: list[int] = []
    cache = DynamicCache()
    with torch.inference_mode():
        asked_for = prose if options.prose else lookups
        for question in asked_for(options.texts, seed=options.seed):
            if question.prompt != prompt:
                prompt, cache, attention.way = question.prompt, DynamicCache(), None
                for part in torch.tensor(prompt).split(1024):
                    model.model(part[None], past_key_values=cache)
            text = question.question + question.answer
            dense: list[Tensor] = []
            for way in ways:
                if cache.get_seq_length() > len(prompt):
                    cache.crop(len(prompt) - cache.get_seq_length())
                attention.way, attention.in_place = way, None
                attention.selections.clear()
                if way is not None and way.startswith("decoder/"):
                    own = factors if way.endswith("/factors") else {}
                    keys = {"digest": "codes" if way.split("/")[1] == "codes" else "minmax_int8"}
                    how = SelectionConfig.model_validate(config.selection.model_dump(exclude_defaults=True) | keys)
                    update = {"budget_tokens": options.budget, "page_size": options.page_size, "selection": how}
                    in_place = InPlace(
                        config.model_copy(update=update), cache, len(text), model.config.num_attention_heads, own
                    )
                    attention.in_place = in_place
                steps = [model(torch.tensor([[token]]), past_key_values=cache).logits[0, -1] for token in text[:-1]]
                found = [step.log_softmax(-1) for step in steps]
                dense = dense or found
                said = [int(step.argmax()) for step in found[len(question.question) - 1 :]]
                right[way].append(said == question.answer)
                kl[way] += [float((p.exp() * (p - q)).sum()) for p, q in zip(dense, found, strict=True)]
    asked = sum(right[None])
    print(f"| way | lookups kept of {asked} | KL (nats) | mass |\n| --- | --- | --- | --- |")
    for way in ways[1:]:
        assert way is not None
        kept = sum(a and b for a, b in zip(right[None], right[way], strict=True))
        mean = sum(kl[way]) / len(kl[way])
        print(f"| {way} | {kept} | {mean:.4f} | {sum(attention.mass[way]) / len(attention.mass[way]):.3f} |")


if __name__ == "__main__":
    main()
