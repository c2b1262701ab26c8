"""Method ``scout``: ScoutAttention (arXiv 2603.27138).

At the input of layer l the query of layer l+1 is predicted, and its pages are selected by digests. The CPU workers
start on the selected pages that are not resident, one layer ahead. In layer l+1 the device attends the resident pages,
and the two partials merge. Every few steps a layer recalls missing important pages of a request into the frames of its
least important resident pages. Recalled pages are visible from the next step on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from hybrid_backend.config import HybridConfig
from hybrid_backend.methods.selective import Selective

if TYPE_CHECKING:
    from hybrid_backend.step import Toolbox


class Scout(Selective):
    """Attention of resident pages on the device, and of other important pages on the CPU, one layer ahead."""

    name = "scout"
    reads_int8 = True
    uses_workers = True
    budgets_vary = True

    @classmethod
    def recalls(cls, config: HybridConfig) -> bool:
        return config.recall.enabled

    def gauges(self) -> dict[str, float]:
        values, recall = super().gauges(), self.config.recall
        if recall.enabled and self.config.sparse != "never" and isinstance(recall.intervals, int):
            values["hybrid_recall_interval"] = recall.intervals
        return values

    def lookahead(self, step: Toolbox, layer: int, q: Tensor) -> None:
        step.select(layer, q)
        if self.config.lookahead.partial_query == "predicted":
            step.ask_cpu(layer, q)

    def attend(self, step: Toolbox, layer: int, q: Tensor) -> Tensor:
        if step.selection(layer) is None:
            step.select(layer, q)
        if not step.has_asked(layer):
            step.ask_cpu(layer, q)
        resident = step.attend_resident(layer, q)
        result = step.merge(layer, resident, step.take_cpu(layer, q.shape[0]), q.dtype)
        step.recall(layer)
        return result
