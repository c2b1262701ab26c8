"""Method ``quest``: query-aware selection of pages that are attended in place, on a CPU (Quest, arXiv 2406.10774).

Every layer scores its pages by their digests with the step's own query and attends the best ones where they lie in the
host pool. Nothing is copied, and no worker is waited for. `in_place.step` runs a step as one native call per layer.

Extensions of the paper, each of them a key of ``selection``:

* One selection per layer (``granularity``). The scores of query heads combine as softmax shares (``aggregate``).
* Digests in bytes, and codes of every key (``digest``), instead of minima and maxima in the cache's type.
* The score of a page is the middle of the range of logits that its digest allows, plus a share of half of the width
  (``bound``).
* Long sequences are scored in two levels, spans of 8 pages first (``candidates``).
* A layer scores all pages in each 8th step only. In the other steps it selects among the best pages of the last time
  (``interval``).
* Budgets may differ from layer to layer (``budget_factors``) and follow a promised attention mass (``quality``).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hybrid_backend.batch import DecodeRows, ModelSpec
from hybrid_backend.config import HybridConfig
from hybrid_backend.errors import ConfigError
from hybrid_backend.in_place.step import kept_bytes, span_bytes, why_not_in_place
from hybrid_backend.kernels.digest_format import MINMAX, MINMAX_AND_INT8, MINMAX_INT8, DigestFormat
from hybrid_backend.methods.selective import budget_pages, digest_format
from hybrid_backend.step.method import Method, OwnMemory
from hybrid_backend.tiers import TierLayout


class Quest(Method):
    """Selection of pages that the native kernels attend in the host pool."""

    name = "quest"
    budgets_vary = True
    suits_cpu = True
    reads_int8 = True
    attends_in_place = True

    @classmethod
    def check(cls, config: HybridConfig, device: torch.device, num_layers: int, num_kv_heads: int) -> None:
        super().check(config, device, num_layers, num_kv_heads)
        if device.type != "cpu":
            raise ConfigError("method: quest attends pages in the host's memory, not on a GPU; write method: scout")
        if reason := _why_not_scored(config):
            raise ConfigError(f"{reason}; write auto or minmax")

    @classmethod
    def layout(cls, config: HybridConfig, model: ModelSpec, device: torch.device) -> TierLayout:
        reason = why_not_in_place(config, model.num_heads, model.num_kv_heads, model.head_dim, device)
        if reason:
            raise ConfigError(f"method: quest needs the native CPU kernels, but {reason}; write method: scout")
        return TierLayout(separate=False, digests=_digest_format(config, model))

    @classmethod
    def own_memory(
        cls, config: HybridConfig, model: ModelSpec, device: torch.device, pages: int, max_requests: int
    ) -> OwnMemory:
        return OwnMemory()

    @classmethod
    def grown_bytes(cls, config: HybridConfig, model: ModelSpec, device: torch.device, tokens: int) -> int:
        layout, pages = cls.layout(config, model, device), -(-tokens // config.page_size)
        layers, digests = len(layout.digest_layers(config, model)), _digest_format(config, model)
        shortlists = kept_bytes(config, model, digests, pages, layers)
        has_spans = digests.has_byte_copy and config.selection.candidates > 0
        return shortlists + (span_bytes(model, pages, layers) if has_spans else 0)

    @classmethod
    def exact_tokens(cls, config: HybridConfig) -> float:
        """Return `Method.exact_tokens`: the budget, whatever share of it a layer has beyond."""
        return math.inf if config.sparse == "never" else config.budget_pages * config.page_size

    def budgets(self, rows: DecodeRows) -> Tensor:
        """Return `Method.budgets`: a row with more pages than its budget leaves pages out."""
        if self.config.sparse == "never":
            return rows.num_pages
        return budget_pages(self.config, rows).minimum(rows.num_pages)

    def gauges(self) -> dict[str, float]:
        return {} if self.config.sparse == "never" else {"hybrid_budget_tokens": self.config.budget_tokens}


def why_not_quest(config: HybridConfig, heads: int, kv_heads: int, head_dim: int, device: torch.device) -> str:
    """Return the reason why `quest` cannot serve; an empty string if it can. Arguments as in `why_not_in_place`."""
    return why_not_in_place(config, heads, kv_heads, head_dim, device) or _why_not_scored(config)


def _digest_format(config: HybridConfig, model: ModelSpec) -> DigestFormat:
    """Return the format of digests that ``selection.digest`` stands for where pages are attended in place.

    The native decoder takes byte digests as copies of maxima and minima in the cache's type.
    """
    chosen = digest_format(config, model, MINMAX_AND_INT8 if _can_score_bytes(config) else MINMAX)
    return MINMAX_AND_INT8 if chosen is MINMAX_INT8 else chosen


def _why_not_scored(config: HybridConfig) -> str:
    """Return the reason why the native decoder cannot score the configured digests; an empty string if it can."""
    selection = config.selection
    if selection.digest != MINMAX_INT8.name or _can_score_bytes(config):
        return ""
    return (
        "selection.digest: minmax_int8 needs selection.aggregate softmax, or sum with granularity layer, "
        f"not {selection.aggregate} with {selection.granularity}"
    )


def _can_score_bytes(config: HybridConfig) -> bool:
    """Tell whether the native decoder can score byte digests with the configuration's ``selection.aggregate``."""
    selection = config.selection
    return selection.aggregate == "softmax" or (selection.aggregate == "sum" and selection.granularity == "layer")
