"""Samples of the error of an approximation: attention mass of selections and cosines of predicted queries.

The attention mass of a selection is the share of the exact attention weights that falls on the selected pages. The
measurement needs all keys of a sequence, which only the host has. If the device tier is the host, `HostSamples`
measures a layer as soon as the layer has run. With a GPU, `BoxSamples` measures later: the operation `take_sample`
copies a layer's query and selection to pinned memory, and a thread measures the attention mass over the host pool.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from hybrid_backend.attention.quality import kept_mass, mass_recall, query_cosine
from hybrid_backend.batch import DecodeRows, ModelSpec, Step
from hybrid_backend.config import HybridConfig
from hybrid_backend.errors import WorkerError
from hybrid_backend.kernels.cpu import STEPS
from hybrid_backend.kernels.operations import Selection
from hybrid_backend.observe.stats import Stats
from hybrid_backend.step.buffers import StepBuffers
from hybrid_backend.step.quality import QualityWatch
from hybrid_backend.tiers import Tiers
from hybrid_backend.tiers.sizes import TierLayout
from hybrid_backend.tiers.state import sample_boxes

_MAX_WAITING = 64
"""Number of samples that may wait for the measuring thread. More samples are not taken."""


class Samples(Protocol):
    """Samples layers with full attention in decode steps."""

    def begin(self, number: int, rows: DecodeRows, judged: Sequence[int], requests: Sequence[int]) -> Tensor | None:
        """Choose the layers and the row that a step samples.

        Args:
            number: number of the step (`StepInputs.number`).
            rows: decode rows of the step.
            judged: rows that leave pages out; the attention mass of one of these rows is measured.
            requests: request index of each row (`FramePool.index`).

        Returns:
            `StepInputs.sampled` on the host; None: no layer is sampled by an operation.
        """

    def keep(self, layer: int, step: Step, q: Tensor) -> None:
        """Keep the predicted query ``q`` ``[rows, heads, head_dim]`` of a layer that has not run yet."""

    def take(self, layer: int, step: Step, q: Tensor, selected: Selection | None) -> None:
        """Sample a layer that has run with the true query ``q`` ``[rows, heads, head_dim]`` and its selected pages."""

    def count(self) -> None:
        """Add finished measurements to `Stats`, without waiting for the device or a thread."""

    def finish(self) -> None:
        """Wait until all samples that the device has written are measured, and add them to `Stats`."""

    def drop(self) -> None:
        """Discard all samples that are not measured yet."""

    def abandon(self) -> None:
        """Forget the predicted queries of the open step."""

    @property
    def host_bytes(self) -> int:
        """Pinned host memory that receives the samples, in bytes."""

    def close(self) -> None:
        """Stop the measuring thread."""


class HostSamples:
    """Measures a layer as soon as the layer has run. Nothing is measured if the device tier is not the host.

    ``covered`` returns the tokens that a row attended in a layer of the open step (`KnowsAttended.covered`).
    """

    host_bytes = 0
    """Pinned host memory for samples; none is needed if the device tier is the host."""

    def __init__(
        self,
        config: HybridConfig,
        model: ModelSpec,
        tiers: Tiers,
        stats: Stats,
        covered: Callable[[int, DecodeRows, int], Tensor | None],
    ) -> None:
        self._config, self._model, self._tiers, self._stats, self._covered = config, model, tiers, stats, covered
        self._judged: Sequence[int] = ()
        self._predicted: dict[int, Tensor] = {}

    def begin(self, number: int, rows: DecodeRows, judged: Sequence[int], requests: Sequence[int]) -> None:
        self._judged = judged

    def _is_sampled(self, layer: int, step: Step) -> bool:
        return self._tiers.device.type == "cpu" and not step.is_captured and self._config.is_sampled(step.number, layer)

    def keep(self, layer: int, step: Step, q: Tensor) -> None:
        if self._is_sampled(layer, step):
            self._predicted[layer] = q

    def take(self, layer: int, step: Step, q: Tensor, selected: Selection | None) -> None:
        """Measure the query cosine over all rows, and the attention mass of one row that leaves pages out."""
        stats, rows, predicted = self._stats.layers[layer], step.decode, self._predicted.pop(layer, None)
        if rows is None or not self._is_sampled(layer, step):
            return
        if predicted is not None:
            stats.saw_cosine(query_cosine(predicted, q))
        if not self._judged:
            return
        r = self._judged[step.number % len(self._judged)]
        covered = self._covered(layer, rows, r)
        if covered is None:
            return
        blocks, table = self._tiers.host.blocks(layer), rows.page_table[r, : int(rows.num_pages[r])]
        stats.saw_mass(mass_recall(q[r], blocks, table, covered, self._model.num_kv_heads, self._model.scale))

    def count(self) -> None:
        """Do nothing, because `take` has added the measurements to `Stats`."""

    def finish(self) -> None:
        """Do nothing, because no measurement is pending."""

    def drop(self) -> None:
        """Do nothing, because no measurement is pending."""

    def abandon(self) -> None:
        self._predicted.clear()

    def close(self) -> None:
        """Do nothing, because there is no thread."""


class _PendingSample(NamedTuple):
    """A sample that the device will write, as the host knows it when the step begins."""

    number: int
    """Number of the step (`StepInputs.number`)."""
    rows: int
    """Decode rows of the step."""
    is_judged: bool
    """The sampled row leaves pages out, so that its attention mass is measured."""
    request: int
    """Request index of the sampled row (`FramePool.index`)."""
    generation: int
    """Generation of the request index (`FramePool.generation`)."""
    tokens: int
    """Sequence length of the sampled row."""
    pages: int
    """Pages of the sampled row."""


class BoxSamples:
    """Measures samples that a GPU writes to pinned memory, in a thread, so that neither the device nor a step waits.

    Each layer has a box, the pinned buffers of its latest sample (`kernels.operations.Sample`). K and V of a running
    request do not change, so the thread may read them while later steps run. A sample counts only if its request index
    was not released before the measurement ended, because the request's pages may then hold another sequence.

    ``failure`` returns the CPU workers' error in a step (`CpuAttention.failure`). ``has_predictions`` means that
    queries are predicted, so that a step in which no row leaves pages out is sampled for its cosines.
    """

    def __init__(
        self,
        config: HybridConfig,
        model: ModelSpec,
        tiers: Tiers,
        stats: Stats,
        buffers: StepBuffers,
        layers: Sequence[int],
        has_predictions: bool,
        failure: Callable[[int], WorkerError | None],
    ) -> None:
        self._config, self._tiers, self._stats, self._inputs = config, tiers, stats, buffers.inputs
        self._has_predictions, self._failure, self._scale = has_predictions, failure, model.scale
        shape, self._positions = buffers.shape, {layer: buffers.layers[layer].position for layer in layers}
        boxes = sample_boxes(
            model, len(layers), shape.rows, shape.columns, *shape.list_shape(True), pin=tiers.device.type == "cuda"
        )
        self._nbytes = boxes.nbytes
        self._boxes = {layer: boxes.of(index) for index, layer in enumerate(layers)}
        positions = self._positions.items()
        self._sampled_rows = {layer: self._inputs.sampled[row : row + 1] for layer, row in positions}
        self._arrived = {layer: buffers.state.arrived[row : row + 1] for layer, row in positions}
        self._predicted: dict[int, Tensor] = {}
        self._pending: dict[int, _PendingSample] = {}
        """Sample of each layer that the device has not written yet."""
        self._measured = deque[tuple[int, _PendingSample, Future[float]]]()
        """``(layer, sample, attention mass)`` of the samples that the thread measures, oldest first."""
        self._thread = ThreadPoolExecutor(1, "hybrid-samples")

    def begin(self, number: int, rows: DecodeRows, judged: Sequence[int], requests: Sequence[int]) -> Tensor | None:
        self.count()
        step = number - 1
        due = [layer for layer in self._positions if self._config.is_sampled(step, layer)]
        if not due or len(self._measured) >= _MAX_WAITING or not (judged or self._has_predictions):
            return None
        sampled = torch.zeros(len(self._inputs.sampled), dtype=torch.int32)
        row = judged[step % len(judged)] if judged else 0
        request = requests[row]
        sample = _PendingSample(
            number, rows.count, bool(judged), request, int(self._tiers.frames.generation[request]),
            int(rows.seq_lens[row]), int(rows.num_pages[row]),
        )  # fmt: skip
        for layer in due:
            pending = self._pending.get(layer)
            # A sample that is still pending after STEPS steps belongs to a step that failed, so it is replaced.
            if pending is None or pending.number + STEPS < number:
                self._pending[layer] = sample
                sampled[self._positions[layer]] = row + 1
        return sampled

    def keep(self, layer: int, step: Step, q: Tensor) -> None:
        if layer in self._positions:
            self._predicted[layer] = q

    def take(self, layer: int, step: Step, q: Tensor, selected: Selection | None) -> None:
        """Launch `take_sample`, in every step, so that a captured CUDA graph can sample any later step."""
        predicted = self._predicted.pop(layer, None)
        if layer not in self._positions or selected is None:
            return
        inputs = self._inputs
        self._tiers.operations.take_sample(
            q, predicted, selected.pages, selected.pages_listed, inputs.table, inputs.num_pages,
            self._sampled_rows[layer], inputs.number, self._arrived[layer], self._boxes[layer],
        )  # fmt: skip

    def count(self) -> None:
        for layer, sample in list(self._pending.items()):
            if int(self._boxes[layer].number) == sample.number:
                del self._pending[layer]
                self._measure(layer, sample)
        while self._measured and self._measured[0][2].done():
            layer, sample, future = self._measured.popleft()
            mass = future.result()
            if self._is_current(sample):
                self._stats.layers[layer].saw_mass(mass)

    def _measure(self, layer: int, sample: _PendingSample) -> None:
        """Add the cosine of a sample that has arrived to `Stats`, and let the thread measure its attention mass."""
        # Samples of a failed step are discarded.
        if self._failure(sample.number) is not None:
            return
        box, stats = self._boxes[layer], self._stats.layers[layer]
        stats.saw_cosine(float(box.cosines[: sample.rows].mean()))
        if not sample.is_judged or not self._is_current(sample):
            return
        count, table = int(box.listed[0]), box.table[: sample.pages].long()
        mass = self._thread.submit(
            kept_mass, box.q.clone(), self._tiers.host.layers[layer], table, sample.tokens,
            box.pages[:, :count].long(), self._scale,
        )  # fmt: skip
        self._measured.append((layer, sample, mass))

    def _is_current(self, sample: _PendingSample) -> bool:
        """Tell whether the sampled request still has its index, so that its pages still hold its K and V."""
        return int(self._tiers.frames.generation[sample.request]) == sample.generation

    def finish(self) -> None:
        self.count()
        for _, _, mass in self._measured:
            mass.result()
        self.count()

    def drop(self) -> None:
        self._pending.clear()
        self._measured.clear()

    def abandon(self) -> None:
        self._predicted.clear()

    @property
    def host_bytes(self) -> int:
        return self._nbytes

    def close(self) -> None:
        self.drop()
        self._thread.shutdown(cancel_futures=True)


def sampled_layers(config: HybridConfig, model: ModelSpec, layout: TierLayout) -> list[int]:
    """Return the layers that select pages if the configuration samples at all; empty otherwise."""
    return layout.selecting_layers(config, model) if config.metrics.sample_interval else []


def watched(watch: QualityWatch, samples: Samples, budgets: Tensor, rows: DecodeRows) -> Tensor:
    """Adjust the budgets ``[rows]`` of a step by the samples that are measured so far (`QualityWatch.budgets`)."""
    samples.count()
    last_budget = watch.budget, watch.is_dense
    budgets = watch.budgets(budgets, rows)
    # Pending samples were taken with the last budget, so the new budget must not be judged by them.
    if (watch.budget, watch.is_dense) != last_budget:
        samples.drop()
    return budgets
