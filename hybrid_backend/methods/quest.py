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

import torch
from torch import Tensor

from hybrid_backend.batch import DecodeRows, ModelSpec
from hybrid_backend.config import HybridConfig
from hybrid_backend.errors import ConfigError
from hybrid_backend.in_place.step import kept_bytes, span_bytes, why_not_in_place
from hybrid_backend.methods.selective import budget_pages, check_codes
from hybrid_backend.step.method import Method, OwnMemory
from hybrid_backend.tiers import TierLayout
from hybrid_backend.tiers.sizes import DigestKind


class Quest(Method):
    """Selection of pages that the native kernels attend in the host pool."""

    name = "quest"
    budgets_vary = True
    attends_in_place = True

    @classmethod
    def check(cls, config: HybridConfig, device: torch.device, num_layers: int, num_kv_heads: int) -> None:
        super().check(config, device, num_layers, num_kv_heads)
        if device.type != "cpu":
            raise ConfigError("method: quest attends pages in the host's memory, not on a GPU; write method: scout")
        selection = config.selection
        if selection.digest == "minmax_int8" and not _can_score_bytes(config):
            raise ConfigError(
                "selection.digest: minmax_int8 needs selection.aggregate softmax, or sum with granularity layer, "
                f"not {selection.aggregate} with {selection.granularity}; write auto or minmax"
            )

    @classmethod
    def layout(cls, config: HybridConfig, model: ModelSpec, device: torch.device) -> TierLayout:
        reason = why_not_in_place(config, model.num_heads, model.num_kv_heads, model.head_dim, device)
        if reason:
            raise ConfigError(f"method: quest needs the native CPU kernels, but {reason}; write method: scout")
        return TierLayout(separate=False, digests=_digest_kind(config, model))

    @classmethod
    def own_memory(
        cls, config: HybridConfig, model: ModelSpec, device: torch.device, pages: int, max_requests: int
    ) -> OwnMemory:
        return OwnMemory()

    @classmethod
    def grown_bytes(cls, config: HybridConfig, model: ModelSpec, device: torch.device, tokens: int) -> int:
        layout, pages = cls.layout(config, model, device), -(-tokens // config.page_size)
        layers = len(layout.digest_layers(config, model))
        shortlists = kept_bytes(config, model, pages, layers)
        has_spans = layout.digests == "minmax_and_int8" and config.selection.candidates > 0
        return shortlists + (span_bytes(model, pages, layers) if has_spans else 0)

    def budgets(self, rows: DecodeRows) -> Tensor:
        """Return `Method.budgets`: a row with more pages than its budget leaves pages out."""
        if self.config.sparse == "never":
            return rows.num_pages
        return budget_pages(self.config, rows).minimum(rows.num_pages)

    def gauges(self) -> dict[str, float]:
        return {} if self.config.sparse == "never" else {"hybrid_budget_tokens": self.config.budget_tokens}


def _digest_kind(config: HybridConfig, model: ModelSpec) -> DigestKind:
    """Return the kind of digests that ``selection.digest`` stands for where pages are attended in place."""
    if config.selection.digest == "codes":
        check_codes(config, model)
        return "codes"
    return "minmax_and_int8" if config.selection.digest != "minmax" and _can_score_bytes(config) else "minmax"


def _can_score_bytes(config: HybridConfig) -> bool:
    """Tell whether the native decoder can score digests in bytes as the configuration asks."""
    selection = config.selection
    return selection.aggregate == "softmax" or (selection.aggregate == "sum" and selection.granularity == "layer")
