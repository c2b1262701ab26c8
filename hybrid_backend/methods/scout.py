"""Method ``scout``: ScoutAttention (DESIGN.md section 4).

At the input of layer l the query of layer l+1 is predicted, its pages are selected by Quest digests, and the CPU
workers start on the selected pages that are not resident, one layer ahead. Inside layer l+1 the device attends the
resident ones, the two partials merge, and every few steps (per layer) the missing important pages are recalled into
the slots of the least important resident ones, visible from the next step on.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from torch import Tensor

from hybrid_backend.attention.partial import Partial, merge
from hybrid_backend.methods.selective import LayerPlan, Selective, StepPlan
from hybrid_backend.step import DecodeRows, Step
from hybrid_backend.workers import Owners, Ticket

if TYPE_CHECKING:
    from hybrid_backend.methods.graph_step import GraphStep


class Scout(Selective):
    """The flagship: resident pages on the device, the important rest on the CPU, one layer ahead."""

    @classmethod
    def launches(cls) -> type[GraphStep]:
        from hybrid_backend.methods.graph_scout import GraphScout

        return GraphScout

    def _start_ahead(self, layer: int, rows: DecodeRows, plan: StepPlan, entry: LayerPlan, q: Tensor) -> None:
        if self.config.lookahead.partial_query == "predicted" and plan.is_sparse:
            entry.ticket = self._submit(layer, plan.owners, entry, q)

    def _attend_planned(self, layer: int, step: Step, plan: StepPlan, entry: LayerPlan, q: Tensor) -> Tensor:
        assert step.decode is not None
        if entry.ticket is None:
            entry.ticket = self._submit(layer, plan.owners, entry, q)
        result = self._device_partial(layer, q, entry.device)
        if entry.ticket is not None:
            result = merge(result, self._wait(layer, entry.ticket))
        self._count(layer, entry.device, entry.missing)
        if self._recall_due(layer, step.number):
            self._copy_in(layer, step.decode, plan, entry)
        return result.out

    def abandon(self, step: Step) -> None:
        if isinstance(step.plan, StepPlan):
            for entry in step.plan.layers.values():
                if entry.ticket is not None:
                    entry.ticket.abandon()

    def _recall_due(self, layer: int, step_number: int) -> bool:
        """Every ``intervals[layer]`` steps; layers take turns, so that copies spread over the steps."""
        if not self.config.recall.enabled or layer in self.config.exact_layers:
            return False
        return (step_number + layer) % self.config.recall_interval(layer) == 0

    def _submit(self, layer: int, owners: Owners, entry: LayerPlan, q: Tensor) -> Ticket | None:
        if not entry.missing.ids.shape[2]:
            return None
        return self.workers.submit(
            q, self.tiers.host.layers[layer], entry.missing, self.model.scale, f"layer {layer}", owners
        )

    def _wait(self, layer: int, ticket: Ticket) -> Partial:
        needed = time.perf_counter()
        partial = ticket.wait(self.config.workers.deadline_seconds)
        entry = self.stats.layers[layer]
        entry.wait_seconds += time.perf_counter() - needed
        entry.lead_seconds += needed - ticket.asked
        return partial
