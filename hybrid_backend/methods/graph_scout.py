"""ScoutAttention's launches: what is missing is the CPU's, asked for through mailboxes one layer ahead."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybrid_backend.errors import DeadlineError, WorkerError
from hybrid_backend.kernels import triton as kernels
from hybrid_backend.kernels.cpu import STEPS, Mailboxes, Pool
from hybrid_backend.methods.graph_step import GraphShape, GraphStep, StepInputs
from hybrid_backend.step import ModelSpec


class GraphScout(GraphStep):
    """`Scout` as launches: the CPU's partial is awaited inside the stream, recalls are visible from the next step."""

    def _prepare(self, pool: Pool, host_pages: Sequence[Tensor]) -> None:
        # Of the last steps, since the host is behind the device when it asks.
        pinned = self._slots[0].is_cuda
        self.late = torch.zeros(STEPS, dtype=torch.int32, pin_memory=pinned)
        self._written = torch.zeros(STEPS, self.shape.rows, dtype=torch.int32, pin_memory=pinned)
        # An exact layer leaves to the CPU whatever its slots cannot hold.
        shape, current = self.shape, self.generations
        lists = [(1, shape.columns) if digests is None else (shape.lists, shape.most) for digests in self._digests]
        self.mail = Mailboxes(pool, host_pages, shape.heads, shape.rows, lists, shape.scale, current=current)

    def failure(self, number: int) -> WorkerError | None:
        if int(self.late[number % STEPS]) == number:
            return DeadlineError(
                f"CPU workers did not answer within workers.deadline_seconds={self.shape.deadline_seconds}"
            )
        why = self.mail.failure(number)
        return None if why is None else WorkerError(why)

    def written(self, number: int, rows: int) -> list[int]:
        return [int(page) for page in self._written[number % STEPS, :rows]]

    @classmethod
    def planned_host_bytes(cls, shape: GraphShape, model: ModelSpec, exact_layers: int) -> int:
        vector = shape.heads * model.head_dim
        each = vector * (model.dtype.itemsize + 4) + 4 * shape.heads  # `Letters`: q and out, lse
        sparse = 4 * shape.lists * (shape.most + 1)  # ids and counts
        exact = 4 * (shape.columns + 1)
        rows = model.num_layers * each + exact_layers * exact + (model.num_layers - exact_layers) * sparse
        flags = 3 * 64
        return model.num_layers * flags + shape.rows * rows + 4 * STEPS * (1 + shape.rows)

    @property
    def host_bytes(self) -> int:
        """Of the mailboxes, and what is remembered of the last steps."""
        mail: int = sum(x.nbytes for letters in self.mail.layers for x in vars(letters).values())
        return mail + self.late.nbytes + self._written.nbytes

    def close(self) -> None:
        self.mail.close()

    def begin(self, number: int) -> None:
        now = self.inputs
        # Plain copies to pinned memory: one that converts, or has gaps, would wait for the device.
        self.mail.regions.copy_(now.regions.long(), non_blocking=True)
        # The workers drop rows of padding, so that what their lists held before does not matter.
        generations = now.generations.long().masked_fill(now.num_pages == 0, -1)
        self.mail.generations.copy_(generations, non_blocking=True)
        self._written[number % STEPS].copy_(now.pages, non_blocking=True)
        self._patience.fill_(self.shape.patience)
        super().begin(number)

    def lookahead(self, layer: int, q: Tensor) -> None:
        self._select(layer, q)
        if self.shape.predicted:
            self._ask(layer, q)

    def _attend(self, layer: int, now: StepInputs, q: Tensor) -> Tensor:
        letters, is_ahead = self.mail.layers[layer], layer in self._selected
        if not is_ahead:
            self._select(layer, q)
        if not (is_ahead and self.shape.predicted):
            self._ask(layer, q)
        chosen, _ = self._selected[layer]
        parts = self._partial(q, self._slots[layer], chosen.slots, chosen.tokens, self.shape.slots)
        kernels.await_answer(letters.answered, now.number, self.late, self._patience, self._tally[layer])
        of_cpu = letters.out[: len(q)], letters.lse[: len(q)]
        out, _ = kernels.merge_partials(*parts, cpu=of_cpu, dtype=q.dtype)
        if self._copies_pages(layer):
            self._copy_in(layer, now)
        del self._selected[layer]
        return out

    def _ask(self, layer: int, q: Tensor) -> None:
        letters, (chosen, _) = self.mail.layers[layer], self._selected[layer]
        rows = len(q)
        letters.q[:rows].copy_(q, non_blocking=True)
        letters.ids[:rows].copy_(chosen.missing, non_blocking=True)
        letters.counts[:rows].copy_(chosen.missing_listed, non_blocking=True)
        kernels.ask(letters.asked, self.inputs.number, chosen.missing_listed, self._tally[layer])
