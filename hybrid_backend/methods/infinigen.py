"""Method ``infinigen``: recall only (InfiniGen, OSDI 2024, section 4), a baseline for ScoutAttention.

The predicted query selects the next layer's pages. Pages that are not resident are copied to the device while the
current layer runs, and the next layer waits for the copy. The CPU computes nothing.

Deviations: whole pages are recalled in place of single tokens. They are chosen by the same digests, budget and
selection as in ``scout``, so that a comparison isolates recalling from computing. The prediction is ScoutAttention's,
without skewed partial weights. Pages that the frames cannot hold (exact layers, ``sparse: never``) are attended in the
host pool, which a GPU reads over the bus.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hybrid_backend.config import HybridConfig
from hybrid_backend.errors import ConfigError
from hybrid_backend.methods.selective import Selective
from hybrid_backend.step.method import frames_per_request

if TYPE_CHECKING:
    from hybrid_backend.step import Toolbox


class InfiniGen(Selective):
    """Copies of selected pages to the device one layer ahead; the device attends all of them."""

    name = "infinigen"
    reads_int8 = True

    @classmethod
    def check(cls, config: HybridConfig, device: torch.device, num_layers: int, num_kv_heads: int) -> None:
        if config.selection.granularity == "kv_head":
            raise ConfigError(f"selection.granularity: {config.method} recalls whole pages; write layer")
        super().check(config, device, num_layers, num_kv_heads)
        needed = config.budget_pages + 1
        if frames_per_request(config) < needed and config.sparse != "never":
            raise ConfigError(
                f"frames_per_request: {config.frames_per_request} is less than the budget of {config.budget_pages} "
                f"pages and one for the new page, which {config.method} keeps resident; write auto, or {needed} or more"
            )

    @classmethod
    def recalls(cls, config: HybridConfig) -> bool:
        return True

    def lookahead(self, step: Toolbox, layer: int, q: Tensor) -> None:
        step.select(layer, q)
        step.recall(layer, at_once=True)

    def attend(self, step: Toolbox, layer: int, q: Tensor) -> Tensor:
        if step.selection(layer) is None:
            self.lookahead(step, layer, q)
        step.arrive(layer)
        resident = step.attend_resident(layer, q)
        return step.merge(layer, resident, step.attend_missing(layer, q), q.dtype)
