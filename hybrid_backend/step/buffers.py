"""Buffers of the decode steps of one rank, allocated once, because a captured CUDA graph needs fixed addresses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from hybrid_backend.batch import ModelSpec
from hybrid_backend.config import HybridConfig
from hybrid_backend.kernels.operations import AwaitedPages, Copies, Maps, Reuse
from hybrid_backend.step.awaited_fills import AwaitedFills
from hybrid_backend.step.budgets import LayerBudgets
from hybrid_backend.tiers import Tiers
from hybrid_backend.tiers.sizes import StepShape
from hybrid_backend.tiers.state import StepInputs, StepState


class LayerBuffers(NamedTuple):
    """Views of the buffers of one layer, made once, because making a view costs as much time as a small operation."""

    position: int
    """Position of the layer in stacked maps and counters."""
    host: Tensor
    """Host pool of the layer, as the device tier addresses it: ``[pages, kv_heads, 2, page_size, head_dim]``."""
    frames: Tensor | None
    """Frames of the layer, shaped like `host`; None if the device tier reads the host pool."""
    frame_of: Tensor | None
    """``[requests, columns]`` int32 frame of each logical page; None if the layer has no frames."""
    digests: Tensor | None
    """Digests of the layer's host pages; None if the layer attends every page."""
    maps: Maps
    """Residency maps of the layer."""
    copies: Copies
    """Recalls of the layer that are under way."""
    counters: Tensor
    """``[COUNTERS]`` int64 totals of the layer on the device tier (`kernels.operations.Counters`)."""
    awaited: AwaitedPages | None
    """Copies to the layer's frames that rows wait for; None if no row waits, as copies are done at once."""
    reuse: Reuse | None
    """Selections of the layer that later steps attend again; None if each step selects, or attends every page."""


class StepBuffers:
    """Step inputs, residency maps and counters of the layers that do not have their whole KV on the device."""

    def __init__(
        self, config: HybridConfig, model: ModelSpec, tiers: Tiers, shape: StepShape, factors: Mapping[int, float]
    ) -> None:
        """Allocate the buffers.

        Args:
            config: page size and budgets.
            model: shapes on this rank.
            tiers: memory that the views point into.
            shape: sizes that all steps have in common.
            factors: budget of each selecting layer relative to the mean (`step.method.factors_of`); empty: all equal.
        """
        requests, layers = tiers.frames.requests, tiers.layout.framed_layers(model)
        self.shape = shape
        self.full_layers = tiers.layout.full_layers(model)
        self.state = StepState.make(
            requests, shape.columns, shape.max_frames, shape.recalls, len(layers), tiers.device,
            len(layers) if factors else 0, shape.reused,
        )  # fmt: skip
        self.inputs, self.maps = self.state.inputs, self.state.maps
        self.layers = {layer: self._layer(tiers, layer, index) for index, layer in enumerate(layers)}
        self.awaited_fills = AwaitedFills(config, tiers, self.state, layers)
        budgets = {layer: round(config.budget_pages * factors.get(layer, 1)) for layer in layers}
        limits = [max(budgets[layer], self.layers[layer].maps.size) for layer in layers] if shape.frames else None
        self.layer_budgets = LayerBudgets(config, factors, layers, limits) if factors else None
        self._inputs_of_rows: dict[int, StepInputs] = {}

    def _layer(self, tiers: Tiers, layer: int, index: int) -> LayerBuffers:
        """Make the views of one layer at position ``index`` of the stacked buffers."""
        maps, frames = self.maps.of(index), tiers.frames.layers.get(layer)
        count = tiers.layout.frames(tiers.frames.requests, layer)
        maps = Maps(maps.frame_of, maps.page_of[:count], maps.importance[:count])
        is_reused = self.shape.selection_steps > 1 and tiers.has_digests(layer)
        return LayerBuffers(
            index, tiers.host.views[layer], frames, None if frames is None else maps.frame_of,
            tiers.digest_layer(layer), maps, self.state.copies.of(index), self.state.counters[index],
            self.state.awaited.of(index) if tiers.is_async and frames is not None else None,
            self.state.reuse.of(index) if is_reused else None,
        )  # fmt: skip

    def inputs_of(self, rows: int) -> StepInputs:
        """Return views of the step inputs of the first ``rows`` rows."""
        if rows not in self._inputs_of_rows:
            self._inputs_of_rows[rows] = self.inputs.first(rows)
        return self._inputs_of_rows[rows]

    def evicts(self, layer: int) -> bool:
        """Tell whether pages can be evicted from frames of ``layer``. A layer that attends every page evicts none."""
        shape = self.shape
        return shape.frames > 0 and self.layers[layer].digests is not None and shape.min_budget < shape.columns

    def budgets_of(self, layer: int, inputs: StepInputs) -> Tensor:
        """Return the budget of ``layer`` for each row of ``inputs``, ``[rows]`` int32 pages."""
        return inputs.budgets if self.layer_budgets is None else inputs.layer_budgets[self.layers[layer].position]
