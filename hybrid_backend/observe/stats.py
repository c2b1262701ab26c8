"""What a rank counts, layer by layer, since start; `metrics` publishes it under the same names with ``hybrid_``.

One meaning each, whatever runs the step's operations. All of them are
about decoding rows in layers with full attention; prompts count nothing here. *Mean over the selections*: where KV heads
select for themselves, a layer's number is the mean over its KV heads, so it may be a fraction.

| figure | unit | what | counted |
| --- | --- | --- | --- |
| selected_tokens | tokens, mean over the selections | attended by the device tier or the CPU workers, the step's own included | each layer and step |
| context_tokens | tokens | of the contexts of the rows: what dense attention attends | when a step ends |
| cpu_tokens | the same as selected_tokens | those of them that the CPU workers attended | the same |
| resident_lookups | pages, mean over the selections | that hold the selected tokens | each layer and step, when selected |
| resident_hits | the same | those of them that the device tier held before the step copied any: in a frame or a store there, or anywhere in the host pool where that is the device tier and there are no frames | the same |
| recalled_pages | pages | given a frame because a selection lacked them; not those that fill a new request's frames | when the copy begins |
| head_lookups | KV heads, one per row | whose cached pages (`clo`) were asked whether they still answer the query | each layer and step, rows that leave pages out |
| head_hits | the same | those of them that kept their pages | the same |
| loaded_head_pages | pages of one KV head | that the others copied to the device tier | the same |
| wait_seconds | seconds | in which the device tier stood still for a CPU partial | when the wait is over |
| attention_seconds | seconds | in which decoding rows were attended, selection included, by the one native call that does it all in place | each layer and step |
| lead_seconds | seconds | from asking the CPU workers for a partial of at least one page to needing it, by one clock | when it is needed |
| cosine_* | | of predicted and true query, mean over rows and heads | sampled steps, by layer with a prediction |
| mass_* | share | of the dense attention weights that the selected tokens hold, one row that attends less than its context | sampled steps |

The tokens of HGCA's context caches lie in no page, so `hgca` looks no page up. On a GPU samples are counted when they have
been measured, some steps later, those of the mass if the request still runs then. What a path cannot know it leaves out, and
nothing is published: the sampled figures of methods on a GPU that do not attend what the step selects (`hgca`, `clo`).
"""  # noqa: E501

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass
class LayerStats:
    """Totals of one layer since start."""

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
        """Between a predicted and the true query. A sum never recovers from what is no number, so that is left out."""
        if math.isfinite(cosine):
            self.cosine_sum += cosine
            self.cosine_samples += 1

    def saw_mass(self, mass: float) -> None:
        """The share of the attention mass that the attended tokens had; no number: left out."""
        if math.isfinite(mass):
            self.mass_sum += mass
            self.mass_samples += 1


@dataclass
class Stats:
    """All counters of one rank."""

    layers: list[LayerStats]
    steps: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Decode steps by how rows on the CPU were attended, and by how a rule would have it (`apex`)."""

    @classmethod
    def of(cls, num_layers: int) -> Stats:
        return cls([LayerStats() for _ in range(num_layers)])

    def forget(self) -> None:
        """All counts are 0 again."""
        for entry in self.layers:
            vars(entry).update(vars(LayerStats()))
        self.steps.clear()

    def attended(self, layer: int, selected: float, on_cpu: float) -> None:
        """Tokens that one layer attended in one step, and how many of them the CPU workers did."""
        entry = self.layers[layer]
        entry.selected_tokens += selected
        entry.cpu_tokens += on_cpu

    def saw_contexts(self, layers: Iterable[int], tokens: int) -> None:
        """Tokens of the decoding rows' contexts in one step."""
        for layer in layers:
            self.layers[layer].context_tokens += tokens

    def looked_up(self, layer: int, pages: float, resident: float) -> None:
        entry = self.layers[layer]
        entry.resident_lookups += pages
        entry.resident_hits += resident

    def cpu_ratio(self) -> float:
        """Share of all attended tokens that the CPU workers attended."""
        selected = sum(layer.selected_tokens for layer in self.layers)
        return sum(layer.cpu_tokens for layer in self.layers) / selected if selected else 0.0
