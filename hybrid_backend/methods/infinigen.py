"""Method ``infinigen``: recall only (InfiniGen, OSDI 2024, section 4), a baseline for ScoutAttention.

The predicted query selects the next layer's pages; those that are not resident are copied to the device while the
current layer runs, and the next layer waits for the copy. The CPU computes nothing.

Deviations: whole pages instead of single tokens, chosen by the same digests, budget and selection code as ``scout``, so
that a comparison isolates recalling from computing; the prediction is ScoutAttention's (no skewed partial weights).
What the slots cannot hold (exact layers, ``sparse: never``) passes through the staging buffers.
"""

from __future__ import annotations

import time
from collections import Counter
from itertools import islice
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hybrid_backend.attention.partial import Partial, empty_partial, merge
from hybrid_backend.attention.prefill import merge_blocks
from hybrid_backend.config import HybridConfig
from hybrid_backend.errors import ConfigError
from hybrid_backend.methods.selective import LayerPlan, Selective, StepPlan, slots_per_request
from hybrid_backend.step import DecodeRows, Step

if TYPE_CHECKING:
    from hybrid_backend.methods.graph_step import GraphStep


class InfiniGen(Selective):
    """Selected pages are copied to the device one layer ahead; the device attends them all."""

    @classmethod
    def check(cls, config: HybridConfig, device: torch.device, num_layers: int, num_kv_heads: int) -> None:
        if config.selection.granularity == "kv_head":
            raise ConfigError(f"selection.granularity: {config.method} recalls whole pages; write layer")
        super().check(config, device, num_layers, num_kv_heads)
        needed = config.budget_pages + 1
        if slots_per_request(config) < needed and config.sparse != "never":
            raise ConfigError(
                f"slots_per_request: {config.slots_per_request} is less than the budget of {config.budget_pages} pages "
                f"and one for the new page, which {config.method} keeps resident; write auto, or {needed} or more"
            )

    @classmethod
    def launches(cls) -> type[GraphStep]:
        from hybrid_backend.methods.graph_infinigen import GraphInfinigen

        return GraphInfinigen

    def _start_ahead(self, layer: int, rows: DecodeRows, plan: StepPlan, entry: LayerPlan, q: Tensor) -> None:
        if plan.is_sparse:
            self._copy_in(layer, rows, plan, entry)

    def _attend_planned(self, layer: int, step: Step, plan: StepPlan, entry: LayerPlan, q: Tensor) -> Tensor:
        rows = step.decode
        assert rows is not None
        if plan.is_sparse and layer not in self.config.exact_layers:
            if entry.query is None:
                self._copy_in(layer, rows, plan, entry)
            self._wait(layer)
            entry = self._split(layer, rows, plan, entry.selected, entry.scores)
        self.stats.attended(layer, entry.device.tokens + entry.missing.tokens, 0)
        result = self._device_partial(layer, q, entry.device)
        if entry.missing.ids.shape[2]:
            result = merge(result, self._streamed(layer, rows, entry, q))
        return result.out

    def _streamed(self, layer: int, rows: DecodeRows, entry: LayerPlan, q: Tensor) -> Partial:
        """Attention over what the slots cannot hold."""
        stream = self.tiers.stream
        if stream is None:
            return self._partial(q, self.tiers.host.layers[layer], entry.missing, self.model.scale)
        heads = range(self.model.num_kv_heads)
        pieces = []
        for r in range(rows.count):
            ids, valid = entry.missing.ids[r, 0], entry.missing.valid[r, 0]
            pieces += stream.pieces(r, heads, 1, ids[ids >= 0], int(valid.sum()))
        counts = Counter(piece.row for piece in pieces)
        blocks = iter(stream.blocks(layer, pieces))
        parts = []
        for r in range(rows.count):
            query = q[r : r + 1]
            nothing = empty_partial(query)
            start = Partial(nothing.out.transpose(0, 1), nothing.lse.transpose(0, 1))
            part = merge_blocks(start, query, islice(blocks, counts[r]), self.model.scale, len(heads))
            parts.append(Partial(part.out.transpose(0, 1), part.lse.transpose(0, 1)))
        return Partial(torch.cat([p.out for p in parts]), torch.cat([p.lse for p in parts]))

    def _wait(self, layer: int) -> None:
        needed = time.perf_counter()
        self.tiers.transfers.finish(layer)
        self.stats.layers[layer].wait_seconds += time.perf_counter() - needed
