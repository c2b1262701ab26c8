"""InfiniGen's launches: what is missing is copied over the bus one layer ahead, and the layer waits for its copy."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybrid_backend.kernels import triton as kernels
from hybrid_backend.kernels.cpu import Pool
from hybrid_backend.methods.graph_step import GraphStep, StepInputs


class GraphInfinigen(GraphStep):
    """`InfiniGen` as launches. What the slots cannot hold (exact layers, ``sparse: never``) is attended where it lies:
    the kernel itself reads host pages over the bus."""

    always_copies = True

    def _prepare(self, pool: Pool, host_pages: Sequence[Tensor]) -> None:
        self._copied: dict[int, torch.cuda.Event] = {}

    def lookahead(self, layer: int, q: Tensor) -> None:
        self._select(layer, q)
        if self._copies_pages(layer):
            self._fetch(layer, len(q))

    def _attend(self, layer: int, now: StepInputs, q: Tensor) -> Tensor:
        if layer not in self._selected:
            self.lookahead(layer, q)
        chosen, scores = self._selected.pop(layer)
        copied, rest = self._copies_pages(layer), None
        if copied:
            chosen = self._arrived(layer, now, scores)
        parts = self._partial(q, self._slots[layer], chosen.slots, chosen.tokens, self.shape.slots)
        if not copied:
            tokens = chosen.missing_listed * self._page  # the growing page is resident: these are whole
            over_bus = self._partial(q, self._host[layer], chosen.missing, tokens, self.shape.columns)
            rest = kernels.merge_partials(*over_bus)
        return kernels.merge_partials(*parts, cpu=rest, dtype=q.dtype)[0]

    def _fetch(self, layer: int, rows: int) -> None:
        self._copy_in(layer, self.inputs.first(rows))
        if self._copying is not None:
            self._copied[layer] = self._copying.record_event()

    def _arrived(self, layer: int, now: StepInputs, scores: Tensor) -> kernels.SelectedPages:
        """Wait (inside the stream) for this layer's copies, not for those of the next; then they are resident."""
        if self._copying is not None:
            torch.cuda.current_stream().wait_event(self._copied.pop(layer))
        one = slice(layer, layer + 1)
        maps, copies = (part[one] for part in self.maps), (part[one] for part in self._copies)
        kernels.commit_pages(kernels.Maps(*maps), kernels.Copies(*copies), self.generations)
        return self._split(layer, now, scores)
