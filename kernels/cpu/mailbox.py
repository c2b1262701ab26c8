"""Mailboxes: CPU partials that the device asks for by itself, without Python and without a system call."""

from __future__ import annotations

import ctypes as C
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid_backend.errors import WorkerError
from hybrid_backend.kernels.cpu import library as lib
from hybrid_backend.kernels.cpu.partial import Pool

_LINE = 16  # int32 of a cache line: each flag has one of its own
STEPS = 16  # HB_MAIL_STEPS: so many steps' failures are remembered


@dataclass(frozen=True)
class Letters:
    """What one layer's mailbox holds, in pinned memory where there is a GPU.

    The device writes the query and the lists, then the step's number to ``asked``; the server writes the partial, then
    the same number to ``answered``. Numbers go up; a row without pages gets the empty partial.
    """

    q: Tensor  # [rows, heads, head_dim], dtype of the cache
    ids: Tensor  # [rows, lists, capacity] int32 host pages, whole ones
    counts: Tensor  # [rows, lists] int32
    out: Tensor  # [rows, heads, head_dim] fp32
    lse: Tensor  # [rows, heads] fp32, natural log
    asked: Tensor  # [16] int32, the first counts
    answered: Tensor  # the same
    failed: Tensor  # [STEPS] int32: of a job that could not be computed its number, at number % STEPS


class Mailboxes:
    """One mailbox per layer, and the native thread that serves them together with a pool.

    Args:
        pool: whose threads help.
        layers: host pages of each layer, ``[pages, kv_heads, 2, page_size, head_dim]``.
        heads: query heads.
        rows: of a step, at most.
        lists: per layer, how many (1, or one per KV head) and the pages of each, at most.
        scale: multiplies the logits.
        current: ``[regions]`` int64 generations: a row whose region moved on since the device wrote ``generations`` is
            dropped (the empty partial).
        cpu: to pin the server's thread to.

    Raises:
        WorkerError: a shape that the kernels lack.
    """

    def __init__(
        self,
        pool: Pool,
        layers: Sequence[Tensor],
        heads: int,
        rows: int,
        lists: Sequence[tuple[int, int]],
        scale: float,
        *,
        current: Tensor | None = None,
        cpu: int = -1,
    ) -> None:
        self._native = lib.native()
        self._keep = (pool, list(layers), current)
        _, kv_heads, _, page_size, dim = layers[0].shape
        dtype = layers[0].dtype

        def pinned(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, pin_memory=torch.cuda.is_available())

        self.regions = pinned(rows, dtype=torch.int64)
        self.generations = pinned(rows, dtype=torch.int64)
        self.layers = [
            Letters(
                q=pinned(rows, heads, dim, dtype=dtype),
                ids=pinned(rows, count, capacity),
                counts=pinned(rows, count),
                out=pinned(rows, heads, dim, dtype=torch.float32),
                lse=pinned(rows, heads, dtype=torch.float32),
                asked=pinned(_LINE),
                answered=pinned(_LINE),
                failed=pinned(STEPS),
            )
            for count, capacity in lists
        ]
        boxes = (lib.MailboxArgs * len(layers))()
        for box, layer, letters in zip(boxes, layers, self.layers, strict=True):
            box.cache = lib.cache_of(layer)
            box.rows, box.lists, box.capacity = letters.ids.shape
            for name in ("q", "ids", "counts", "out", "lse", "asked", "answered", "failed"):
                setattr(box, name, getattr(letters, name).data_ptr())
            if current is not None:
                box.region, box.generation = self.regions.data_ptr(), self.generations.data_ptr()
                box.current = current.data_ptr()
        model = lib.model_of(dtype, kv_heads, heads, dim, page_size, scale)
        self._handle = self._native.hb_mail_new(pool.handle, C.byref(model), boxes, len(layers), cpu)
        if not self._handle:
            raise WorkerError(f"native CPU kernel: {lib.failure()}")

    @property
    def served(self) -> int:
        """Jobs answered so far."""
        return int(self._native.hb_mail_served(self._handle)) if self._handle else 0

    def failure(self, number: int) -> str | None:
        """Why a job of this number could not be computed (its answer was empty), None: all could. Known for the last
        `STEPS` numbers, when their answers are there."""
        for layer, letters in enumerate(self.layers):
            if int(letters.failed[number % STEPS]) == number:
                why = self._native.hb_mail_error(self._handle).decode() if self._handle else "the workers are gone"
                return f"a CPU worker failed on layer {layer}: {why}"
        return None

    def close(self) -> None:
        """Stop the server; what is asked from now on is never answered. To call before the pool is closed."""
        if self._handle:
            self._native.hb_mail_free(self._handle)
            self._handle = None

    def __enter__(self) -> Mailboxes:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
