"""Add a method: StreamingLLM (arXiv 2309.17453) over the pages of the host pool, asked one question offline.

To serve it, name the class in your package as an entry point of the group ``hybrid_backend.methods``.
"""

from __future__ import annotations

import torch

from hybrid_backend.batch import DecodeRows, ModelSpec
from hybrid_backend.config import HybridConfig
from hybrid_backend.methods import register
from hybrid_backend.step import Toolbox
from hybrid_backend.step.method import Method, staging_tokens
from hybrid_backend.tiers import TierLayout


class FirstAndLast(Method):
    """Attention to the first ``sinks`` pages of a sequence and to its last ones, ``budget_tokens`` in all."""

    name = "first_and_last"
    attends_selection = False  # It attends the pages that `covered` names, and selects none.

    @classmethod
    def layout(cls, config: HybridConfig, model: ModelSpec, device: torch.device) -> TierLayout:
        separate = device.type != "cpu"
        return TierLayout(separate=separate, staging_tokens=staging_tokens(config) if separate else 0)

    def budgets(self, rows: DecodeRows) -> torch.Tensor:
        return rows.num_pages - self.left_out(rows.num_pages)

    def left_out(self, num_pages: torch.Tensor) -> torch.Tensor:
        return (num_pages - self.config.budget_pages).clamp(min=0) * (self.config.sparse != "never")

    def begin_decode(self, step: Toolbox, rows: DecodeRows) -> None:
        tokens = rows.seq_lens - self.left_out(rows.num_pages) * self.config.page_size
        step.counting.count_tokens(int(tokens.sum()), int(self.budgets(rows).sum()))

    def attend(self, step: Toolbox, layer: int, q: torch.Tensor) -> torch.Tensor:
        inputs = step.inputs(len(q))
        left_out = self.left_out(inputs.num_pages)[:, None] * (not self.config.is_exact(layer))
        places = torch.arange(inputs.table.shape[1], device=q.device)
        pages = places + left_out * (places >= self.config.sinks)
        ids = inputs.table.gather(1, pages.clamp(max=len(places) - 1))[:, None]
        tokens = inputs.seq_lens[:, None] - left_out * self.config.page_size
        return step.merge(layer, step.attend(q, self.tiers.host.views[layer], ids, tokens.int()), None, q.dtype)

    def covered(self, layer: int, rows: DecodeRows, r: int) -> torch.Tensor | None:
        """Return the mask of the tokens that row ``r`` attended (`step.method.KnowsAttended`)."""
        left_out = int(self.left_out(rows.num_pages[r])) * (not self.config.is_exact(layer))
        pages = torch.arange(int(rows.seq_lens[r])) // self.config.page_size
        return ((pages < self.config.sinks) | (pages >= self.config.sinks + left_out))[None] if left_out else None


if __name__.endswith("main__"):  # vLLM's worker processes import this script as __mp_main__.
    register(FirstAndLast)
if __name__ == "__main__":
    from offline import main

    main(__doc__, {"method": FirstAndLast.name})
