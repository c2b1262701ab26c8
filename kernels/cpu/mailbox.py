"""Mailboxes: CPU partials that the device asks for by itself, without Python and without a system call."""

from __future__ import annotations

import ctypes as C
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from hybrid_backend.errors import WorkerError
from hybrid_backend.kernels.cpu import library as lib
from hybrid_backend.kernels.cpu.partial import Pool

_LINE = 16  # int32 of a cache line: each flag has one of its own
STEPS = 16  # HB_MAIL_STEPS: so many steps' failures are remembered


@dataclass(frozen=True)
class Mailbox:
    """Where one layer's questions and answers lie, in pinned memory where there is a GPU.

    The device writes the query and the lists (unless the host keeps them), then the step's number to ``asked``; the
    server writes the partial, then the same number to ``answered``. Numbers go up; a row without pages gets the empty
    partial.
    """

    q: Tensor  # [rows, heads, head_dim], dtype of the cache
    ids: Tensor  # [rows, lists, capacity] int32 host pages, whole ones; empty where the host keeps the lists
    counts: Tensor  # [rows, lists] int32, likewise
    out: Tensor  # [rows, heads, head_dim] fp32
    lse: Tensor  # [rows, heads] fp32, natural log
    asked: Tensor  # [16] int32, the first counts
    answered: Tensor  # the same
    failed: Tensor  # [STEPS] int32: of a job that could not be computed its number, at number % STEPS

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in vars(self).values())


def mailbox_bytes(rows: int, lists: Sequence[tuple[int, int]], heads: int, head_dim: int, itemsize: int) -> int:
    """What `Mailboxes` allocates for layers of ``lists`` (as there), in host memory."""
    each = heads * head_dim * (itemsize + 4) + 4 * heads  # q and out, lse
    flags = 4 * (2 * _LINE + STEPS)
    return sum(flags + rows * (each + 4 * count * (capacity + 1)) for count, capacity in lists)


class Mailboxes:
    """One mailbox per layer, and the native thread that serves them together with a pool.

    Args:
        pool: whose threads help.
        layers: by layer, its host pages ``[pages, kv_heads, 2, page_size, head_dim]``.
        heads: query heads.
        rows: of a step, at most.
        lists: by layer, how many (1, or one per KV head) and the pages of each, at most; of a layer of ``kept`` (0, 0).
        scale: multiplies the logits.
        current: ``[requests]`` int64 generations: a row whose index was released since the device wrote ``generations``
            is dropped (the empty partial).
        kept: by layer, ``[rows, kv_heads]`` int32 tokens, which the host may change between steps: a row whose request
            has index i attends, for each KV head, so many tokens of the i-th of ``rows`` equal parts of the layer.
            ``requests`` and ``current`` are needed for it.
        cpu: to pin the server's thread to.

    Raises:
        WorkerError: a shape that the kernels lack.
    """

    def __init__(
        self,
        pool: Pool,
        layers: Mapping[int, Tensor],
        heads: int,
        rows: int,
        lists: Mapping[int, tuple[int, int]],
        scale: float,
        *,
        current: Tensor | None = None,
        kept: Mapping[int, Tensor] = MappingProxyType({}),
        cpu: int = -1,
    ) -> None:
        self._native = lib.native()
        self._keep = (pool, dict(layers), current, dict(kept))
        first = next(iter(layers.values()))
        _, kv_heads, _, page_size, dim = first.shape

        def pinned(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, pin_memory=torch.cuda.is_available())

        self.requests = pinned(rows, dtype=torch.int64)
        self.generations = pinned(rows, dtype=torch.int64)
        self.layers = {
            layer: Mailbox(
                q=pinned(rows, heads, dim, dtype=first.dtype),
                ids=pinned(rows, *lists[layer]),
                counts=pinned(rows, lists[layer][0]),
                out=pinned(rows, heads, dim, dtype=torch.float32),
                lse=pinned(rows, heads, dtype=torch.float32),
                asked=pinned(_LINE),
                answered=pinned(_LINE),
                failed=pinned(STEPS),
            )
            for layer in layers
        }
        boxes = (lib.MailboxArgs * len(layers))()
        for args, (layer, box) in zip(boxes, self.layers.items(), strict=True):
            args.cache = lib.cache_of(layers[layer])
            args.rows, args.lists, args.capacity = box.ids.shape
            for name in ("q", "ids", "counts", "out", "lse", "asked", "answered", "failed"):
                setattr(args, name, getattr(box, name).data_ptr())  # of an empty one 0
            if layer in kept:
                args.lists, args.capacity = kv_heads, len(layers[layer]) // rows
                args.counts = kept[layer].data_ptr()
            if current is not None:
                args.request, args.generation = self.requests.data_ptr(), self.generations.data_ptr()
                args.current = current.data_ptr()
        model = lib.model_of(first.dtype, kv_heads, heads, dim, page_size, scale)
        self._handle = self._native.hb_mail_new(pool.handle, C.byref(model), boxes, len(layers), cpu)
        if not self._handle:
            raise WorkerError(f"native CPU kernel: {lib.failure()}")

    @property
    def nbytes(self) -> int:
        """Host memory of all boxes."""
        return sum(box.nbytes for box in self.layers.values())

    @property
    def served(self) -> int:
        """Jobs answered so far."""
        return int(self._native.hb_mail_served(self._handle)) if self._handle else 0

    def failure(self, number: int) -> str | None:
        """Why a job of this number could not be computed (its answer was empty), None: all could. Known for the last
        `STEPS` numbers, when their answers are there."""
        for layer, box in self.layers.items():
            if int(box.failed[number % STEPS]) == number:
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
