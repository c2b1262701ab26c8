"""ScoutAttention's decode step as fixed launches over fixed buffers: what a CUDA graph captures and replays.

The same step as `Scout` (one selection per layer), with nothing decided on the host: padding rows have no pages, step
numbers and due recalls are read from device memory, the CPU workers are asked through mailboxes. Between steps the host
writes `StepInputs` and admits or releases requests.

    graph:  begin, then per layer: lookahead (of the next one), attend
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid_backend.kernels import triton as kernels
from hybrid_backend.kernels.cpu import Mailboxes, Pool


@dataclass(frozen=True)
class GraphShape:
    """What is fixed when a graph is captured."""

    rows: int  # of a step, with padding
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
    splits: int = 1


@dataclass(frozen=True)
class StepInputs:
    """What changes from step to step, on the device; row r of a shorter batch has ``num_pages`` 0, ``pages`` -1."""

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
        rows = torch.zeros(6, shape.rows, dtype=torch.int32, device=device)
        table = torch.zeros(shape.rows, shape.columns, dtype=torch.int32, device=device)
        number, due = (torch.zeros(n, dtype=torch.int32, device=device) for n in (1, layers))
        num_pages, lengths, positions, pages, regions, budgets = rows
        return cls(table, num_pages, lengths, positions, pages, regions, budgets, number, due)


class GraphScout:
    """The device's state and the launches of a step.

    Args:
        host: per layer ``[pages, kv_heads, 2, page_size, head_dim]``, host memory as the device sees it.
        digests: per layer ``[pages, kv_heads, 2, head_dim]`` on the device, None for an exact layer.
        pool: CPU workers.
    """

    def __init__(self, shape: GraphShape, host: Sequence[Tensor], digests: Sequence[Tensor | None], pool: Pool) -> None:
        self.shape = shape
        self._host, self._digests = list(host), list(digests)
        layers, self._page = len(host), host[0].shape[3]
        on_gpu = torch.cuda.is_available()
        device = torch.device("cuda" if on_gpu else "cpu")
        total = shape.regions * shape.slots
        self.inputs = StepInputs.zeros(shape, layers, device)
        self.slots = [torch.zeros(total, *x.shape[1:], dtype=x.dtype, device=device) for x in host]
        self.maps = kernels.Maps(
            torch.full((layers, shape.regions, shape.columns), -1, dtype=torch.int32, device=device),
            torch.full((layers, total), -1, dtype=torch.int32, device=device),
            torch.full((layers, total), float("-inf"), device=device),
        )
        recalls = (layers, shape.rows, shape.recalls)
        self._copies = kernels.Copies(
            torch.full(recalls, -1, dtype=torch.int32, device=device),
            torch.zeros(recalls, dtype=torch.int32, device=device),
            torch.zeros(recalls, dtype=torch.int32, device=device),
            torch.zeros(recalls, device=device),
            torch.zeros(recalls[:2], dtype=torch.int32, device=device),
            torch.zeros(recalls[:2], dtype=torch.int64, device=device),
        )
        self._no_scores = torch.zeros(shape.rows, 1, shape.columns, device=device)  # of exact layers
        self._keep = torch.zeros(shape.rows, shape.slots, dtype=torch.int32, device=device)
        # The workers read generations, the device too: pinned memory serves both.
        self.generations = torch.zeros(shape.regions, dtype=torch.int64, pin_memory=on_gpu)
        self.late = torch.zeros(1, dtype=torch.int32, pin_memory=on_gpu)
        # An exact layer leaves to the CPU whatever its slots cannot hold.
        self.mail = Mailboxes(
            pool, host, shape.heads, shape.rows, 1, shape.columns, shape.scale, current=self.generations
        )
        self._selected: dict[int, tuple[kernels.SelectedPages, Tensor]] = {}

    # --- between steps, by the host ---

    def admit(self, region: int, pages: Tensor) -> None:
        """Fill the region of a request whose prompt is in the host pool: its first pages and its last ones.

        Args:
            pages: ``[n]`` int32 host pages of the sequence, the one of its next token included.
        """
        shape = self.shape
        count, first = len(pages), region * shape.slots
        head = min(count, shape.sinks, shape.slots)
        rest = min(count - head, shape.slots - head)
        logical = torch.cat([torch.arange(head), torch.arange(count - rest, count)]).int()
        slots = (first + torch.arange(len(logical))).int()
        device = self.maps.page_of.device
        where = slots.to(device).long()
        self.maps.slot_of[:, region, logical.to(device).long()] = slots.to(device)
        self.maps.page_of[:, where] = logical.to(device)
        age = logical.float().masked_fill(logical < shape.sinks, float("inf"))  # the oldest go first, the sinks never
        self.maps.importance[:, where] = age.to(device)
        for host, slot_pages in zip(self._host, self.slots, strict=True):
            kernels.copy_pages(host, slot_pages, pages[logical.long()].to(device), slots.to(device))

    def release(self, region: int) -> None:
        """The region's request is gone: its answers under way are dropped, its slots hold nothing."""
        self.generations[region] += 1
        self.maps.slot_of[:, region] = -1
        mine = slice(region * self.shape.slots, (region + 1) * self.shape.slots)
        self.maps.page_of[:, mine] = -1
        self.maps.importance[:, mine] = float("-inf")

    def write_rows(self, regions: Tensor) -> None:
        """Tell the mailboxes which regions (``[n]``) the rows of the next step have."""
        self.mail.regions[: len(regions)] = regions
        self.mail.generations[: len(regions)] = self.generations[regions]

    def close(self) -> None:
        self.mail.close()

    # --- the step: launches only ---

    def begin(self) -> None:
        """What the last step copied becomes visible; pages that begin get their slots."""
        kernels.commit_pages(self.maps, self._copies, self.generations)
        now = self.inputs
        kernels.open_pages(self.maps, now.regions, now.pages, now.positions, self._page)

    def lookahead(self, layer: int, q: Tensor) -> None:
        """The predicted query of ``layer``, ``[rows, heads, head_dim]``: select its pages, start the CPU on what is
        missing."""
        self._select(layer, q)
        if self.shape.predicted:
            self._ask(layer, q)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store the step's tokens and attend; ``[rows, heads, head_dim]`` in the model's dtype."""
        shape, now, maps = self.shape, self.inputs, self.maps.of(layer)
        letters = self.mail.layers[layer]
        is_ahead = layer in self._selected
        if not is_ahead:
            self._select(layer, q)
        kernels.append_tokens(
            k, v, self._host[layer], now.pages, now.positions, self.slots[layer], now.regions, maps.slot_of,
            self._digests[layer],
        )  # fmt: skip
        if not (is_ahead and shape.predicted):
            self._ask(layer, q)
        chosen, scores = self._selected.pop(layer)
        parts = kernels.paged_partial(q, self.slots[layer], chosen.slots, chosen.tokens, shape.scale, shape.splits)
        kernels.await_answer(letters.answered, now.number, self.late, shape.patience)
        out, _ = kernels.merge_partials(*parts, cpu=(letters.out, letters.lse), dtype=q.dtype)
        if self._digests[layer] is not None:
            self._recall(layer, chosen, scores)
        return out

    def _select(self, layer: int, q: Tensor) -> None:
        shape, now, digests = self.shape, self.inputs, self._digests[layer]
        if digests is None:  # every page; scores say nothing
            scores = self._no_scores
            budgets, most = now.num_pages, shape.columns
        else:
            scores = kernels.page_scores(
                q, digests, now.table, now.num_pages, shape.aggregate, False, shape.bound, shape.scale
            )
            budgets, most = now.budgets, min(shape.columns, max(shape.budget, shape.slots))
        chosen = kernels.select_pages(
            scores, now.num_pages, now.lengths, budgets, now.regions, self.maps.slot_of[layer], now.table, self._page,
            shape.sinks, shape.recent, most,
        )  # fmt: skip
        self._selected[layer] = chosen, scores

    def _ask(self, layer: int, q: Tensor) -> None:
        letters, (chosen, _) = self.mail.layers[layer], self._selected[layer]
        letters.q.copy_(q, non_blocking=True)
        letters.ids[:, :, : chosen.missing.shape[2]].copy_(chosen.missing, non_blocking=True)
        letters.counts.copy_(chosen.missing_listed, non_blocking=True)
        kernels.ask(letters.asked, self.inputs.number)

    def _recall(self, layer: int, chosen: kernels.SelectedPages, scores: Tensor) -> None:
        shape, now = self.shape, self.inputs
        maps, copies = self.maps.of(layer), self._copies.of(layer)
        kernels.note_scores(maps, scores, now.num_pages, now.budgets, now.regions, shape.sinks, shape.recent)
        selected, absent = (chosen.slots, chosen.slots_listed), (chosen.absent, chosen.missing_listed)
        due = now.due[layer : layer + 1]
        kernels.plan_recall(
            maps, copies, scores, now.table, selected, absent, now.num_pages, now.regions, self.generations, due,
            self._keep,
        )  # fmt: skip
        kernels.copy_pages(self._host[layer], self.slots[layer], copies.host_pages, copies.slots)
