"""Counters of one rank, by layer, since its start. `metrics` publishes them under the same names after ``hybrid_``.

Each figure has one meaning, whatever runs the operations of the step. All figures are of decode rows in layers with
full attention; prefill counts nothing here. *Mean over the selections*: where KV heads select for themselves, a layer's
number is the mean over its KV heads, so it may be a fraction.

| figure | unit | meaning | counted |
| --- | --- | --- | --- |
| selected_tokens | tokens, mean over the selections | attended by the device tier or the CPU workers, including the step's own tokens | in each layer and step |
| context_tokens | tokens | in the contexts of the rows, which dense attention attends | when a step ends |
| cpu_tokens | as selected_tokens | the selected tokens that the CPU workers attended | as selected_tokens |
| resident_lookups | pages, mean over the selections | that hold the selected tokens | in each layer and step, at the selection |
| resident_hits | as resident_lookups | the looked-up pages that the device tier held before the step copied any: in a frame or a store of the device; anywhere in the host pool if that is the device tier and has no frames | as resident_lookups |
| recalled_pages | pages | given a frame because a selection lacked them, without the pages that fill a new request's frames | when the copy begins |
| head_lookups | KV heads, one per row | whose cached pages (`clo`) were compared with the query | in each layer and step, rows that leave pages out |
| head_hits | as head_lookups | the looked-up heads that kept their pages | as head_lookups |
| loaded_head_pages | pages of one KV head | that the missed heads copied to the device tier | as head_lookups |
| wait_seconds | seconds | in which the device tier waited for a CPU partial | when the wait is over |
| attention_seconds | seconds | of attention of decode rows, selection included, by the native call that does both in place | in each layer and step |
| lead_seconds | seconds | from the request for a partial of at least one page to the need for it, by one clock | when the partial is needed |
| cosine_* | | of predicted and true query, mean over rows and heads | in sampled steps, by layer with a prediction |
| mass_* | share | of the dense attention weights that the selected tokens hold, of one row that attends less than its context | in sampled steps |

The tokens of HGCA's context caches lie in no page, so `hgca` looks no page up. On a GPU samples are counted when they
have been measured, some steps later; samples of the mass are counted only if the request still runs then. A path that
cannot know a figure publishes nothing: the sampled figures of methods on a GPU that do not attend what the step selects
(`hgca`, `clo`).
"""  # noqa: E501

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass
class LayerStats:
    """Totals of one layer since the start."""

    selected_tokens: float = 0
    context_tokens: int = 0
    cpu_tokens: float = 0
    resident_hits: float = 0
    resident_lookups: float = 0
    recalled_pages: int = 0
    head_lookups: int = 0
    head_hits: int = 0
    loaded_head_pages: int = 0
    wait_seconds: float = 0.0
    attention_seconds: float = 0.0
    lead_seconds: float = 0.0
    cosine_sum: float = 0.0
    cosine_samples: int = 0
    mass_sum: float = 0.0
    mass_samples: int = 0

    def saw_cosine(self, cosine: float) -> None:
        """Count a sampled cosine of predicted and true query. NaN is left out, because it would stay in the sum."""
        if math.isfinite(cosine):
            self.cosine_sum += cosine
            self.cosine_samples += 1

    def saw_mass(self, mass: float) -> None:
        """Count a sampled share of the attention mass that the attended tokens had. NaN is left out."""
        if math.isfinite(mass):
            self.mass_sum += mass
            self.mass_samples += 1

    @property
    def resident_hit_ratio(self) -> float | None:
        """Share of the looked-up pages that were resident; None before the first look-up."""
        return self.resident_hits / self.resident_lookups if self.resident_lookups else None

    @property
    def predicted_query_cosine(self) -> float | None:
        """Mean of the sampled cosines; None before the first sample."""
        return self.cosine_sum / self.cosine_samples if self.cosine_samples else None

    @property
    def attention_mass_recall(self) -> float | None:
        """Mean of the sampled masses; None before the first sample."""
        return self.mass_sum / self.mass_samples if self.mass_samples else None


@dataclass
class Stats:
    """All counters of one rank.

    ``steps`` counts decode steps by the strategy for rows on the CPU, and by the strategy of `apex`'s rule.
    """

    layers: list[LayerStats]
    steps: Counter[tuple[str, str]] = field(default_factory=Counter)

    @classmethod
    def of(cls, num_layers: int) -> Stats:
        """Return counters of ``num_layers`` layers, all 0."""
        return cls([LayerStats() for _ in range(num_layers)])

    def forget(self) -> None:
        """Set all counters to 0."""
        for layer_stats in self.layers:
            vars(layer_stats).update(vars(LayerStats()))
        self.steps.clear()

    def attended(self, layer: int, selected: float, on_cpu: float) -> None:
        """Count the tokens that a layer attended in a step, and the tokens among them that CPU workers attended."""
        self.layers[layer].selected_tokens += selected
        self.layers[layer].cpu_tokens += on_cpu

    def saw_contexts(self, layers: Iterable[int], tokens: int) -> None:
        """Count the tokens in the contexts of a step's decode rows."""
        for layer in layers:
            self.layers[layer].context_tokens += tokens

    def looked_up(self, layer: int, pages: float, resident: float) -> None:
        """Count the pages that hold a layer's selected tokens, and the resident pages among them."""
        self.layers[layer].resident_lookups += pages
        self.layers[layer].resident_hits += resident

    def cpu_ratio(self) -> float:
        """Return the share of all attended tokens that the CPU workers attended."""
        selected = sum(layer.selected_tokens for layer in self.layers)
        return sum(layer.cpu_tokens for layer in self.layers) / selected if selected else 0.0
