"""Samples of what an approximation lost: attention mass and cosines of predicted queries, layer by layer in turn.

The mass reads all keys of a sequence, which only the host has. Where the device tier is the host, a layer is measured
as soon as it has run. A GPU hands over what the layer computed with, by an operation that a graph holds like any other
and that does nothing in other steps; nobody waits for it. When that has come, perhaps steps later, a thread beside the
engine's measures it over the host pool. What became of the request by then is looked at: its pages may be others'.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
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
from hybrid_backend.tiers.sizes import StepShape, TierLayout
from hybrid_backend.tiers.state import StepState, sample_boxes

_MOST = 64  # that wait to be measured: beyond them none is taken


class Samples(Protocol):
    """What a decode step samples. ``layer``: of those with full attention; ``q``: ``[rows, heads, head_dim]``."""

    def begin(self, number: int, rows: DecodeRows, judged: Sequence[int], requests: Sequence[int]) -> Tensor | None:
        """A step begins.

        Args:
            number: `StepInputs.number`.
            judged: rows that leave pages out, of which one is measured.
            requests: of each row the index of its request.

        Returns:
            `StepInputs.sampled`, on the host; None: zeros.
        """

    def keep(self, layer: int, step: Step, q: Tensor) -> None:
        """The predicted query of a layer that has not run yet."""

    def take(self, layer: int, step: Step, q: Tensor, selected: Selection | None) -> None:
        """The layer has run, with the true query ``q``."""

    def count(self) -> None:
        """Add to the `Stats` what was measured. Waits for nobody."""

    def finish(self) -> None:
        """Wait until all that the device has handed over is counted."""

    def drop(self) -> None:
        """What is under way counts no more."""

    def abandon(self) -> None:
        """Forget the predicted queries of the open step."""

    @property
    def host_bytes(self) -> int: ...

    def close(self) -> None: ...


class HostSamples:
    """Measured at once; the device tier is the host. On another one nothing is.

    Args:
        covered: `KnowsAttended.covered`, of the open step.
    """

    host_bytes = 0

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
        """Cosines of all rows; attention mass, which reads all keys of a sequence, of one that leaves pages out."""
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
        """It is counted already."""

    def finish(self) -> None:
        """Nothing is under way."""

    def drop(self) -> None:
        """Nothing is under way."""

    def abandon(self) -> None:
        self._predicted.clear()

    def close(self) -> None:
        """Nothing to stop."""


class _Asked(NamedTuple):
    """A sample that the device was asked for."""

    number: int  # `StepInputs.number`
    rows: int  # of the step
    is_judged: bool  # the row leaves pages out; else there are cosines only
    request: int  # of the row, `FramePool.index`
    generation: int  # of that index
    tokens: int  # of the row's sequence
    pages: int  # the same


class BoxSamples:
    """Handed over by the device through pinned memory, a box for each layer, and measured in a thread of its own.

    Nothing of the host's is waited for, and what the thread reads stays what it was: tokens of a sequence are written
    once, and when the pages go to another request the index of this one was released before. So a sample counts if that
    has not happened by the time that it is measured.

    Args:
        layers: that are sampled (`sampled_layers`), with their places in the step's state.
        has_predictions: queries are predicted: there are cosines of rows, too, that leave no page out.
        failure: `CpuAttention.failure`.
    """

    def __init__(
        self,
        config: HybridConfig,
        model: ModelSpec,
        tiers: Tiers,
        stats: Stats,
        shape: StepShape,
        state: StepState,
        layers: dict[int, int],
        has_predictions: bool,
        failure: Callable[[int], WorkerError | None],
    ) -> None:
        self._config, self._tiers, self._stats, self._state, self._layers = config, tiers, stats, state, layers
        self._has_predictions, self._failure, self._scale = has_predictions, failure, model.scale
        boxes = sample_boxes(
            model, len(layers), shape.rows, shape.columns, *shape.listed(True), pin=tiers.device.type == "cuda"
        )
        self._nbytes = boxes.nbytes
        self._boxes = {layer: boxes.of(at) for at, layer in enumerate(layers)}
        inputs = state.inputs
        self._wanted = {layer: inputs.sampled[row : row + 1] for layer, row in layers.items()}
        self._arrived = {layer: state.arrived[row : row + 1] for layer, row in layers.items()}
        self._predicted: dict[int, Tensor] = {}
        self._asked: dict[int, _Asked] = {}  # by layer, what has not come yet
        self._measured = deque[tuple[int, _Asked, Future[float]]]()
        self._thread = ThreadPoolExecutor(1, "hybrid-samples")

    def begin(self, number: int, rows: DecodeRows, judged: Sequence[int], requests: Sequence[int]) -> Tensor | None:
        self.count()
        step = number - 1
        due = [layer for layer in self._layers if self._config.is_sampled(step, layer)]
        if not due or len(self._measured) >= _MOST or not (judged or self._has_predictions):
            return None
        wanted = torch.zeros(len(self._state.inputs.sampled), dtype=torch.int32)
        row = judged[step % len(judged)] if judged else 0
        request = requests[row]
        asked = _Asked(
            number, rows.count, bool(judged), request, int(self._tiers.frames.generation[request]),
            int(rows.seq_lens[row]), int(rows.num_pages[row]),
        )  # fmt: skip
        for layer in due:
            before = self._asked.get(layer)
            # One that should have come long ago: its step failed half-way. What comes of it has another number.
            if before is None or before.number + STEPS < number:
                self._asked[layer] = asked
                wanted[self._layers[layer]] = row + 1
        return wanted

    def keep(self, layer: int, step: Step, q: Tensor) -> None:
        if layer in self._layers:
            self._predicted[layer] = q

    def take(self, layer: int, step: Step, q: Tensor, selected: Selection | None) -> None:
        """Launched in every step, so that a graph holds for all of them, and no kernel is compiled late."""
        predicted = self._predicted.pop(layer, None)
        if layer not in self._layers or selected is None:
            return
        now = self._state.inputs
        self._tiers.operations.take_sample(
            q, predicted, selected.pages, selected.pages_listed, now.table, now.num_pages, self._wanted[layer],
            now.number, self._arrived[layer], self._boxes[layer],
        )  # fmt: skip

    def count(self) -> None:
        for layer, asked in list(self._asked.items()):
            if int(self._boxes[layer].number) == asked.number:
                del self._asked[layer]
                self._came(layer, asked)
        while self._measured and self._measured[0][2].done():
            layer, asked, mass = self._measured.popleft()
            found = mass.result()
            if self._is_current(asked):
                self._stats.layers[layer].saw_mass(found)

    def _came(self, layer: int, asked: _Asked) -> None:
        if self._failure(asked.number) is not None:
            return  # what the step computed is void
        box, stats = self._boxes[layer], self._stats.layers[layer]
        stats.saw_cosine(float(box.cosines[: asked.rows].mean()))
        if not asked.is_judged or not self._is_current(asked):
            return
        count, table = int(box.listed[0]), box.table[: asked.pages].long()
        mass = self._thread.submit(
            kept_mass, box.q.clone(), self._tiers.host.layers[layer], table, asked.tokens, box.pages[:, :count].long(),
            self._scale,
        )  # fmt: skip
        self._measured.append((layer, asked, mass))

    def _is_current(self, asked: _Asked) -> bool:
        """The row's request still runs, in the pages that it had."""
        return int(self._tiers.frames.generation[asked.request]) == asked.generation

    def finish(self) -> None:
        self.count()
        for _, _, mass in self._measured:
            mass.result()
        self.count()

    def drop(self) -> None:
        self._asked.clear()
        self._measured.clear()

    def abandon(self) -> None:
        self._predicted.clear()

    @property
    def host_bytes(self) -> int:
        return self._nbytes

    def close(self) -> None:
        self.drop()
        self._thread.shutdown(cancel_futures=True)


def make_samples(
    config: HybridConfig,
    model: ModelSpec,
    tiers: Tiers,
    stats: Stats,
    buffers: StepBuffers,
    indices: Mapping[int, int],
    failure: Callable[[int], WorkerError | None],
    covered: Callable[[int, DecodeRows, int], Tensor | None],
    attends_selection: bool,
    has_predictions: bool,
) -> Samples:
    """Return what samples the decode steps.

    Args:
        config: the keys of ``metrics`` are read.
        model: shapes on this rank.
        tiers: the host pool has the keys.
        stats: counters that samples are added to.
        buffers: of the steps.
        indices: position of each layer in stacked counters.
        failure: `CpuAttention.failure`.
        covered: tokens that a row attended in a layer of the open step.
        attends_selection: `Method.attends_selection`.
        has_predictions: queries are predicted.
    """
    layers = sampled_layers(config, model, tiers.layout)
    if not (tiers.asks_by_itself and attends_selection and layers):
        return HostSamples(config, model, tiers, stats, covered)
    sampled = {layer: indices[layer] for layer in layers}
    return BoxSamples(config, model, tiers, stats, buffers.shape, buffers.state, sampled, has_predictions, failure)


def sampled_layers(config: HybridConfig, model: ModelSpec, layout: TierLayout) -> list[int]:
    """Layers of which a device hands samples over, where it selects what is attended."""
    return layout.selecting_layers(config, model) if config.metrics.sample_interval else []


def watched(watch: QualityWatch, samples: Samples, budgets: Tensor, rows: DecodeRows) -> Tensor:
    """`QualityWatch.budgets`, by what was measured so far. Samples that are under way when the budget changes say
    nothing of the new one."""
    samples.count()
    before = watch.budget, watch.is_dense
    budgets = watch.budgets(budgets, rows)
    if (watch.budget, watch.is_dense) != before:
        samples.drop()
    return budgets
