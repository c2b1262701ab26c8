"""Method ``toy``: the smallest useful method, StreamingLLM (arXiv 2309.17453) over pages in host memory.

A layer attends the first ``sinks`` pages of a sequence and its last ones, ``budget_tokens`` in all. This file is all
that a method needs; docs/how/methods.md#writing-one explains it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_backend.batch import DecodeRows, ModelSpec
from hybrid_backend.config import HybridConfig
from hybrid_backend.step import Toolbox
from hybrid_backend.step.method import Method, staging_tokens
from hybrid_backend.tiers import TierLayout


class Toy(Method):
    """First and last pages of every sequence, attended where they lie."""

    name = "toy"
    attends_selection = False  # It attends the pages that `covered` names, and selects none.

    @classmethod
    def layout(cls, config: HybridConfig, model: ModelSpec, device: torch.device) -> TierLayout:
        separate = device.type != "cpu"
        return TierLayout(separate=separate, staging_tokens=staging_tokens(config) if separate else 0)

    def budgets(self, rows: DecodeRows) -> Tensor:
        if self.config.sparse == "never":
            return rows.num_pages
        return rows.num_pages.clamp(max=self.config.budget_pages)

    def begin_decode(self, step: Toolbox, rows: DecodeRows) -> None:
        budgets = self.budgets(rows)
        tokens = rows.seq_lens - (rows.num_pages - budgets) * self.config.page_size
        step.counting.count_tokens(int(tokens.sum()), int(budgets.sum()))

    def attend(self, step: Toolbox, layer: int, q: Tensor) -> Tensor:
        inputs = step.inputs(len(q))
        columns = inputs.table.shape[1]
        is_dense = self.config.sparse == "never" or self.config.is_exact(layer)
        places = torch.arange(columns if is_dense else min(columns, self.config.budget_pages), device=q.device)
        left_out = (inputs.num_pages - len(places)).clamp(min=0)[:, None]
        pages = places + left_out * (places >= self.config.sinks)
        ids = inputs.table.gather(1, pages.clamp(max=columns - 1))[:, None]
        tokens = inputs.seq_lens[:, None] - left_out * self.config.page_size
        partials = step.attend(q, self.tiers.host.views[layer], ids, tokens.int())
        return step.merge(layer, partials, None, q.dtype)

    def covered(self, layer: int, rows: DecodeRows, r: int) -> Tensor | None:
        """Return the mask of the tokens that row ``r`` attended (`step.method.KnowsAttended`)."""
        page_size, left_out = self.config.page_size, int((rows.num_pages - self.budgets(rows))[r])
        if not left_out or self.config.is_exact(layer):
            return None
        covered = torch.ones(1, int(rows.seq_lens[r]), dtype=torch.bool)
        first = self.config.sinks * page_size
        covered[:, first : first + left_out * page_size] = False
        return covered
