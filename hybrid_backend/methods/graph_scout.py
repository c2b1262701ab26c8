"""ScoutAttention's decode step as fixed launches over fixed buffers: what a CUDA graph captures and replays.

The same step as `Scout` (one selection per layer), with nothing decided on the host: padding rows have no pages, step
numbers and due recalls are read from device memory, the CPU workers are asked through mailboxes. Between steps the host
writes `StepInputs` and admits or releases requests.

    between steps:  begin
    graph:          per layer: lookahead (of the next one), attend
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from hybrid_backend.kernels import triton as kernels
from hybrid_backend.kernels.cpu import Mailboxes, Pool


@dataclass(frozen=True)
class GraphShape:
    """What is fixed when a graph is captured."""

    rows: int  # of a step, at most
    heads: int
    columns: int  # pages of a sequence, at most
    regions: int  # running requests, at most
    slots: int  # of a region
    budget: int  # pages that a sparse layer attends
    sinks: int
    recent: int
    aggregate: str
    bound: float
    scale: float
    recalls: int  # pages that a row recalls in one layer and step, at most
    predicted: bool  # the CPU's partial takes the predicted query, one layer ahead (`lookahead.partial_query`)
    patience: int  # of the waiting stream, see `kernels.triton.await_answer`
    multiprocessors: int = 1  # of the device; what `kernels.triton.splits_for` divides


@dataclass(frozen=True)
class StepInputs:
    """What changes from step to step, on the device. A row of padding has ``num_pages`` 0 and ``pages`` -1."""

    table: Tensor  # [rows, columns] int32 host pages
    num_pages: Tensor  # [rows] int32
    lengths: Tensor  # [rows] int32 tokens, with this step's
    positions: Tensor  # [rows] int32 of this step's token
    pages: Tensor  # [rows] int32 host page of this step's token
    regions: Tensor  # [rows] int32
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
        )

    @property
    def nbytes(self) -> int:
        inputs = [getattr(self.inputs, f.name) for f in fields(self.inputs)]
        return sum(x.nbytes for x in (*inputs, *self.maps, *self.copies, self.no_scores, self.keep))


class GraphScout:
    """The device's state and the launches of a step. A step has as many rows as the queries that it is given.

    Args:
        host: per layer ``[pages, kv_heads, 2, page_size, head_dim]``, host memory as the device sees it.
        digests: per layer ``[pages, kv_heads, 2, head_dim]`` on the device, None for an exact layer.
        slots: per layer ``[regions * slots, kv_heads, 2, page_size, head_dim]`` on the device.
        generations: ``[regions]`` int64, of the regions (`tiers.slots`); pinned where there is a GPU: the device reads
            it, and the workers do.
        pool: CPU workers.
    """

    def __init__(
        self,
        shape: GraphShape,
        host: Sequence[Tensor],
        digests: Sequence[Tensor | None],
        slots: Sequence[Tensor],
        generations: Tensor,
        pool: Pool,
    ) -> None:
        self.shape = shape
        self._host, self._digests, self._slots = list(host), list(digests), list(slots)
        layers, self._page = len(host), host[0].shape[3]
        device = slots[0].device
        self._state = state = DeviceState.make(shape, layers, device)
        self.inputs, self.maps = state.inputs, state.maps
        self._copies, self._no_scores, self._keep = state.copies, state.no_scores, state.keep
        self.generations = generations
        self.late = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
        # An exact layer leaves to the CPU whatever its slots cannot hold.
        self.mail = Mailboxes(pool, host, shape.heads, shape.rows, 1, shape.columns, shape.scale, current=generations)
        self._selected: dict[int, tuple[kernels.SelectedPages, Tensor]] = {}
        # Recalled pages cross the bus beside the step.
        self._copying = torch.cuda.Stream(device) if device.type == "cuda" else None

    # --- between steps, by the host ---

    def admit(self, region: int, pages: Tensor) -> None:
        """Fill the region of a request whose prompt is in the host pool: its first pages and its last ones.

        Args:
            pages: ``[n]`` int32 host pages of the sequence, the one of its next token included.
        """
        shape, device = self.shape, self.maps.page_of.device
        count, first = len(pages), region * shape.slots
        head = min(count, shape.sinks, shape.slots)
        rest = min(count - head, shape.slots - head)
        logical = torch.cat([torch.arange(head), torch.arange(count - rest, count)]).to(device)
        slots = torch.arange(first, first + len(logical), device=device)
        self.maps.slot_of[:, region, logical] = slots.int()
        self.maps.page_of[:, slots] = logical.int()
        age = logical.float().masked_fill(logical < shape.sinks, float("inf"))  # the oldest go first, the sinks never
        self.maps.importance[:, slots] = age
        chosen = pages.to(device)[logical].int()
        for host, slot_pages in zip(self._host, self._slots, strict=True):
            kernels.copy_pages(host, slot_pages, chosen, slots.int())

    def release(self, region: int) -> None:
        """The region's request is gone (and its generation has moved on): its slots hold nothing."""
        self.maps.slot_of[:, region] = -1
        mine = slice(region * self.shape.slots, (region + 1) * self.shape.slots)
        self.maps.page_of[:, mine] = -1
        self.maps.importance[:, mine] = float("-inf")

    @property
    def resident_pages(self) -> int:
        """Slots that hold a page, over all layers. Waits for the device."""
        return int((self.maps.page_of >= 0).sum())

    @property
    def device_bytes(self) -> int:
        """Maps, copies under way, the step's inputs; not the slots and digests, which are the tiers'."""
        return self._state.nbytes

    def close(self) -> None:
        self.mail.close()

    # --- the step: launches only ---

    def begin(self) -> None:
        """`inputs` are written: what the last step copied becomes visible; pages that begin get their slots."""
        now = self.inputs
        self.mail.regions.copy_(now.regions, non_blocking=True)
        generations = self.generations.to(now.regions.device, non_blocking=True)[now.regions.long()]
        # The workers drop rows of padding, so that what their lists held before does not matter.
        self.mail.generations.copy_(generations.masked_fill(now.num_pages == 0, -1), non_blocking=True)
        kernels.commit_pages(self.maps, self._copies, self.generations)
        kernels.open_pages(self.maps, now.regions, now.pages, now.positions, self._page)

    def lookahead(self, layer: int, q: Tensor) -> None:
        """The predicted query of ``layer``, ``[rows, heads, head_dim]``: select its pages, start the CPU on what is
        missing."""
        self._select(layer, q)
        if self.shape.predicted:
            self._ask(layer, q)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store the step's tokens and attend; ``[rows, heads, head_dim]`` in the model's dtype."""
        shape, now, maps = self.shape, self.inputs.first(len(q)), self.maps.of(layer)
        letters = self.mail.layers[layer]
        is_ahead = layer in self._selected
        if not is_ahead:
            self._select(layer, q)
        kernels.append_tokens(
            k, v, self._host[layer], now.pages, now.positions, self._slots[layer], now.regions, maps.slot_of,
            self._digests[layer],
        )  # fmt: skip
        if not (is_ahead and shape.predicted):
            self._ask(layer, q)
        chosen, scores = self._selected.pop(layer)
        parts = kernels.paged_partial(q, self._slots[layer], chosen.slots, chosen.tokens, shape.scale, self._splits(q))
        kernels.await_answer(letters.answered, now.number, self.late, shape.patience)
        of_cpu = letters.out[: len(q)], letters.lse[: len(q)]
        out, _ = kernels.merge_partials(*parts, cpu=of_cpu, dtype=q.dtype)
        if self._digests[layer] is not None:
            self._recall(layer, now, chosen, scores)
        if self._copying is not None and layer == len(self._host) - 1:
            torch.cuda.current_stream().wait_stream(self._copying)
        return out

    def _splits(self, q: Tensor) -> int:
        kv_heads = self._host[0].shape[1]
        tokens = self.shape.slots * self._page
        return kernels.splits_for(len(q), kv_heads, tokens, self.shape.multiprocessors)

    def _select(self, layer: int, q: Tensor) -> None:
        shape, now, digests = self.shape, self.inputs.first(len(q)), self._digests[layer]
        if digests is None:  # every page; scores say nothing
            scores = self._no_scores[: len(q)]
            budgets, most = now.num_pages, shape.columns
        else:
            scores = kernels.page_scores(
                q, digests, now.table, now.num_pages, now.budgets, shape.aggregate, False, shape.bound, shape.scale
            )
            budgets, most = now.budgets, min(shape.columns, max(shape.budget, shape.slots))
        chosen = kernels.select_pages(
            scores, now.num_pages, now.lengths, budgets, now.regions, self.maps.slot_of[layer], now.table, self._page,
            shape.sinks, shape.recent, most,
        )  # fmt: skip
        self._selected[layer] = chosen, scores

    def _ask(self, layer: int, q: Tensor) -> None:
        letters, (chosen, _) = self.mail.layers[layer], self._selected[layer]
        rows, width = len(q), chosen.missing.shape[2]
        letters.q[:rows].copy_(q, non_blocking=True)
        letters.ids[:rows, :, :width].copy_(chosen.missing, non_blocking=True)
        letters.counts[:rows].copy_(chosen.missing_listed, non_blocking=True)
        kernels.ask(letters.asked, self.inputs.number)

    def _recall(self, layer: int, now: StepInputs, chosen: kernels.SelectedPages, scores: Tensor) -> None:
        shape, rows = self.shape, len(now.regions)
        maps, copies = self.maps.of(layer), self._copies.of(layer)
        kernels.note_scores(maps, scores, now.num_pages, now.budgets, now.regions, shape.sinks, shape.recent)
        selected, absent = (chosen.slots, chosen.slots_listed), (chosen.absent, chosen.missing_listed)
        due = now.due[layer : layer + 1]
        kernels.plan_recall(
            maps, copies, scores, now.table, selected, absent, now.num_pages, now.regions, self.generations, due,
            self._keep,
        )  # fmt: skip
        if self._copying is not None:
            self._copying.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._copying) if self._copying is not None else nullcontext():
            kernels.copy_pages(self._host[layer], self._slots[layer], copies.host_pages[:rows], copies.slots[:rows])
