"""A decode step as fixed launches over fixed buffers: what a CUDA graph captures and replays.

The same step as `Selective` takes, with nothing decided on the host: padding rows have no
pages, step numbers and due recalls are read from device memory. Between steps the host writes `StepInputs` and admits
or releases requests. What becomes of selected pages that are not resident is a subclass's.

    between steps:  begin
    graph:          per layer: lookahead (of the next one), attend
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields
from typing import ClassVar

import torch
from torch import Tensor

from hybrid_backend.errors import WorkerError
from hybrid_backend.kernels import triton as kernels
from hybrid_backend.kernels.cpu import Pool
from hybrid_backend.step import ModelSpec


@dataclass(frozen=True)
class GraphShape:
    """What is fixed when a graph is captured."""

    rows: int  # of a step, at most
    heads: int
    columns: int  # pages of a sequence, at most
    regions: int  # running requests, at most
    slots: int  # of a region
    budget: int  # pages that a sparse layer attends
    lists: int  # selections of a sparse layer: 1, or one per KV head
    sinks: int
    recent: int
    aggregate: str
    bound: float
    scale: float
    recalls: int  # pages that a row recalls in one layer and step, at most
    predicted: bool  # the CPU's partial takes the predicted query, one layer ahead (`lookahead.partial_query`)
    patience: int  # of the stream for the CPU in one step, see `kernels.triton.await_answer`
    deadline_seconds: float  # the same, for people
    multiprocessors: int = 1  # of the device; what `kernels.triton.splits_for` divides

    @property
    def most(self) -> int:
        """Pages that a list of a sparse layer may hold."""
        return min(self.columns, max(self.budget, self.slots))


@dataclass(frozen=True)
class StepInputs:
    """What changes from step to step, on the device. A row of padding has ``num_pages`` 0 and ``pages`` -1."""

    table: Tensor  # [rows, columns] int32 host pages
    num_pages: Tensor  # [rows] int32
    lengths: Tensor  # [rows] int32 tokens, with this step's
    positions: Tensor  # [rows] int32 of this step's token
    pages: Tensor  # [rows] int32 host page of this step's token
    regions: Tensor  # [rows] int32
    generations: Tensor  # [rows] int32, of the regions when the host opened the step
    budgets: Tensor  # [rows] int32 pages: `GraphShape.budget`, or all of a row that is not under pressure
    number: Tensor  # [1] int32, grows by one per step
    due: Tensor  # [layers] int32: 1 where the layer recalls in this step

    @classmethod
    def zeros(cls, shape: GraphShape, layers: int, device: torch.device) -> StepInputs:
        sizes = {"table": (shape.rows, shape.columns), "number": (1,), "due": (layers,)}
        return cls(
            **{
                each.name: torch.zeros(sizes.get(each.name, (shape.rows,)), dtype=torch.int32, device=device)
                for each in fields(cls)
            }
        )

    def first(self, rows: int) -> StepInputs:
        """Of a step that has fewer rows."""
        per_row = {f.name: getattr(self, f.name)[:rows] for f in fields(self) if f.name not in ("number", "due")}
        return StepInputs(**per_row, number=self.number, due=self.due)


@dataclass(frozen=True)
class DeviceState:
    """All that the launches keep on the device, beside the slots and digests, which are the tiers'."""

    inputs: StepInputs
    maps: kernels.Maps
    copies: kernels.Copies
    no_scores: Tensor  # [rows, 1, columns], of exact layers
    keep: Tensor  # [rows, slots] int32
    patience: Tensor  # [1] int64, what is left of `GraphShape.patience` in this step
    tally: Tensor  # [layers, len(kernels.Tally)] int64

    @classmethod
    def make(cls, shape: GraphShape, layers: int, device: torch.device) -> DeviceState:
        """On ``meta``, to learn its size."""
        total, recalls = shape.regions * shape.slots, (layers, shape.rows, shape.recalls)
        return cls(
            inputs=StepInputs.zeros(shape, layers, device),
            maps=kernels.Maps(
                torch.full((layers, shape.regions, shape.columns), -1, dtype=torch.int32, device=device),
                torch.full((layers, total), -1, dtype=torch.int32, device=device),
                torch.full((layers, total), float("-inf"), device=device),
            ),
            copies=kernels.Copies(
                torch.full(recalls, -1, dtype=torch.int32, device=device),
                torch.zeros(recalls, dtype=torch.int32, device=device),
                torch.zeros(recalls, dtype=torch.int32, device=device),
                torch.zeros(recalls, device=device),
                torch.zeros(recalls[:2], dtype=torch.int32, device=device),
                torch.zeros(recalls[:2], dtype=torch.int64, device=device),
            ),
            no_scores=torch.zeros(shape.rows, 1, shape.columns, device=device),
            keep=torch.zeros(shape.rows, shape.slots, dtype=torch.int32, device=device),
            patience=torch.zeros(1, dtype=torch.int64, device=device),
            tally=torch.zeros(layers, len(kernels.Tally._fields), dtype=torch.int64, device=device),
        )

    @property
    def nbytes(self) -> int:
        inputs = [getattr(self.inputs, f.name) for f in fields(self.inputs)]
        parts = (*inputs, *self.maps, *self.copies, self.no_scores, self.keep, self.patience, self.tally)
        return sum(x.nbytes for x in parts)


class GraphStep(ABC):
    """The device's state and the launches of a step. A step has as many rows as the queries that it is given.

    Args:
        host: per layer ``[pages, kv_heads, 2, page_size, head_dim]``, host memory as the device sees it.
        digests: per layer ``[pages, kv_heads, 2, head_dim]`` on the device, None for an exact layer.
        slots: per layer ``[regions * slots, kv_heads, 2, page_size, head_dim]`` on the device.
        generations: ``[regions]`` int64, of the regions (`tiers.slots`); pinned where there is a GPU: the device reads
            it, and the workers do.
        pool: CPU workers.
        host_pages: ``host`` as the workers see it.
    """

    always_copies: ClassVar[bool] = False  # in every step, whatever `recall` says

    def __init__(
        self,
        shape: GraphShape,
        host: Sequence[Tensor],
        digests: Sequence[Tensor | None],
        slots: Sequence[Tensor],
        generations: Tensor,
        pool: Pool,
        host_pages: Sequence[Tensor],
    ) -> None:
        self.shape = shape
        self._host, self._digests, self._slots = list(host), list(digests), list(slots)
        layers, self._page = len(host), host[0].shape[3]
        device = slots[0].device
        self._state = state = DeviceState.make(shape, layers, device)
        self.inputs, self.maps = state.inputs, state.maps
        self._copies, self._no_scores, self._keep = state.copies, state.no_scores, state.keep
        self._patience = state.patience
        self.generations = generations
        self._tally = state.tally
        self._told = torch.zeros(state.tally.shape, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._selected: dict[int, tuple[kernels.SelectedPages, Tensor]] = {}
        # Pages cross the bus beside the step.
        self._copying = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._prepare(pool, host_pages)

    def _prepare(self, pool: Pool, host_pages: Sequence[Tensor]) -> None:
        """What a subclass keeps beside that."""

    # --- between steps, by the host ---

    def admit(self, region: int, pages: Tensor) -> int:
        """Fill the region of a request whose prompt is in the host pool: its first pages and its last ones.

        Args:
            pages: ``[n]`` int32 host pages of the sequence, the one of its next token included.

        Returns:
            Pages copied, of all layers.
        """
        shape, device = self.shape, self.maps.page_of.device
        count, first = len(pages), region * shape.slots
        head = min(count, shape.sinks, shape.slots)
        rest = min(count - head, shape.slots - head)
        logical = torch.cat([torch.arange(head, device=device), torch.arange(count - rest, count, device=device)])
        slots = torch.arange(first, first + len(logical), device=device)
        self.maps.slot_of[:, region, logical] = slots.int()
        self.maps.page_of[:, slots] = logical.int()
        age = logical.float().masked_fill(logical < shape.sinks, float("inf"))  # the oldest go first, the sinks never
        self.maps.importance[:, slots] = age
        chosen = pages.to(device)[logical].int()
        for host, slot_pages in zip(self._host, self._slots, strict=True):
            kernels.copy_pages(host, slot_pages, chosen, slots.int())
        return len(logical) * len(self._host)

    def release(self, region: int) -> None:
        """The region's request is gone (and its generation has moved on): its slots hold nothing."""
        self.maps.slot_of[:, region] = -1
        mine = slice(region * self.shape.slots, (region + 1) * self.shape.slots)
        self.maps.page_of[:, mine] = -1
        self.maps.importance[:, mine] = float("-inf")

    def failure(self, number: int) -> WorkerError | None:
        """What went wrong in the step of this `StepInputs.number`, which the device has passed, but not long ago: the
        CPU did not answer in time (a DeadlineError), or could not compute what it was asked."""
        return None

    def written(self, number: int, rows: int) -> list[int]:
        """The host pages that the first ``rows`` rows of a step with a `failure` wrote to."""
        return []

    def tally(self, layer: int) -> kernels.Tally:
        """What the layer's kernels have counted, as far as the device has come: it may be a step behind."""
        return kernels.Tally(*self._told[layer].tolist())

    def lists(self, layer: int) -> int:
        """Selections of each row in the layer."""
        return 1 if self._digests[layer] is None else self.shape.lists

    @property
    def device_bytes(self) -> int:
        """Maps, copies under way, the step's inputs; not the slots and digests, which are the tiers'."""
        return self._state.nbytes

    @classmethod
    def planned_host_bytes(cls, shape: GraphShape, model: ModelSpec, exact_layers: int) -> int:
        """What `host_bytes` will be. Allocates nothing."""
        return 0

    @property
    def host_bytes(self) -> int:
        return 0

    def close(self) -> None:
        """Stop whoever serves the device."""

    # --- the step: launches only ---

    def begin(self, number: int) -> None:
        """`inputs` are written, ``number`` among them: what the last step copied becomes visible; pages that begin get
        their slots."""
        now = self.inputs
        self._selected.clear()  # of a forward that raised
        kernels.commit_pages(self.maps, self._copies, self.generations)
        kernels.open_pages(self.maps, now.regions, now.pages, now.positions, self._page)

    @abstractmethod
    def lookahead(self, layer: int, q: Tensor) -> None:
        """The predicted query of ``layer``, ``[rows, heads, head_dim]``: select its pages, start on what is missing."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store the step's tokens and attend; ``[rows, heads, head_dim]`` in the model's dtype."""
        now = self.inputs.first(len(q))
        kernels.append_tokens(
            k, v, self._host[layer], now.pages, now.positions, self._slots[layer], now.regions,
            self.maps.slot_of[layer], self._digests[layer],
        )  # fmt: skip
        out = self._attend(layer, now, q)
        if self._copying is not None and layer == len(self._host) - 1:
            torch.cuda.current_stream().wait_stream(self._copying)
        if layer == len(self._host) - 1:
            self._told.copy_(self._tally, non_blocking=True)
        return out

    @abstractmethod
    def _attend(self, layer: int, now: StepInputs, q: Tensor) -> Tensor:
        """Attend the layer's selection; the step's tokens are stored. ``now`` has as many rows as ``q``."""

    # --- for subclasses ---

    def _copies_pages(self, layer: int) -> bool:
        """Whether pages of the layer change places with its slots: not where every step attends all of them."""
        return self._digests[layer] is not None and self.shape.budget < self.shape.columns

    def _select(self, layer: int, q: Tensor) -> None:
        """Select the layer's pages with ``q`` and split them by residency."""
        shape, now, digests = self.shape, self.inputs.first(len(q)), self._digests[layer]
        if digests is None:  # every page; scores say nothing
            scores = self._no_scores[: len(q)]
        else:
            scores = kernels.page_scores(
                q, digests, now.table, now.num_pages, now.budgets, shape.aggregate, shape.lists > 1, shape.bound,
                shape.scale,
            )  # fmt: skip
        self._selected[layer] = self._split(layer, now, scores, self._tally[layer]), scores

    def _split(self, layer: int, now: StepInputs, scores: Tensor, tally: Tensor | None = None) -> kernels.SelectedPages:
        """The best pages by residency, as it is now."""
        shape = self.shape
        if self._digests[layer] is None:
            budgets, most = now.num_pages, shape.columns
        else:
            budgets, most = now.budgets, shape.most
        return kernels.select_pages(
            scores, now.num_pages, now.lengths, budgets, now.regions, self.maps.slot_of[layer], now.table, self._page,
            shape.sinks, shape.recent, most, tally,
        )  # fmt: skip

    def _partial(self, q: Tensor, kv: Tensor, ids: Tensor, tokens: Tensor, most: int) -> tuple[Tensor, Tensor]:
        """Attention over listed pages of ``kv``, at most ``most`` of a row, in parts."""
        splits = kernels.splits_for(len(q), kv.shape[1], most * self._page, self.shape.multiprocessors)
        return kernels.paged_partial(q, kv, ids, tokens, self.shape.scale, splits)

    def _copy_in(self, layer: int, now: StepInputs) -> None:
        """If the layer is due, start copying its missing pages over the least important resident ones. They become
        visible by `kernels.commit_pages`."""
        shape, rows = self.shape, len(now.regions)
        maps, copies = self.maps.of(layer), self._copies.of(layer)
        chosen, scores = self._selected[layer]
        kernels.note_scores(maps, scores, now.num_pages, now.budgets, now.regions, shape.sinks, shape.recent)
        absent = chosen.absent, chosen.missing_listed
        if scores.shape[1] > 1:  # a selection per KV head, but slots hold pages of all heads
            pages, listed, scores = kernels.union_pages(*absent, scores)
            absent = pages, listed
        kernels.plan_recall(
            maps, copies, scores, now.table, (chosen.slots, chosen.slots_listed), absent, now.num_pages, now.regions,
            now.generations, now.due[layer : layer + 1], self._keep, self._tally[layer],
        )  # fmt: skip
        if self._copying is not None:
            self._copying.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._copying) if self._copying is not None else nullcontext():
            kernels.copy_pages(self._host[layer], self._slots[layer], copies.host_pages[:rows], copies.slots[:rows])
