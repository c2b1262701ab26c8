"""Mailboxes: CPU partials that the device asks for by itself, without Python and without a system call."""

from __future__ import annotations

import ctypes as C
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hybrid_backend.errors import WorkerError
from hybrid_backend.kernels.cpu import library as lib
from hybrid_backend.kernels.cpu.partial import Pool

if TYPE_CHECKING:
    from typing import Self

_LINE = 16  # int32 of a cache line: each flag has one of its own
STEPS = 16  # HB_MAIL_STEPS: so many steps' failures are remembered; a power of two
_FLAGS = 4 * (2 * _LINE + STEPS)  # bytes: asked, answered, failed


@dataclass(frozen=True)
class Mailbox:
    """Where one layer's questions and answers lie, in pinned memory where there is a GPU.

    The device writes the query and the lists (unless the host keeps them), then the step's number to ``asked``; the
    server writes the partial, then the same number to ``answered``. Numbers go up. The partial is rounded to the dtype
    of the cache, in which it crosses the bus: the sum that it becomes a part of is rounded to it as well.

    A row without pages, or of a request that is gone, gets the empty partial: ``lse`` -inf, and nothing is written to
    ``out``. So what ``out`` holds where ``lse`` is -inf (of another step, or NaN) must not be used, not even times 0.
    """

    q: Tensor  # [rows, heads, head_dim], dtype of the cache
    ids: Tensor  # [rows, lists, capacity] int32 host pages, whole ones; empty where the host keeps the lists
    counts: Tensor  # [rows, lists] int32, likewise
    out: Tensor  # [rows, heads, head_dim], dtype of the cache; anything where lse is -inf
    lse: Tensor  # [rows, heads] fp32, natural log
    asked: Tensor  # [16] int32, the first counts
    answered: Tensor  # the same
    failed: Tensor  # [STEPS] int32: of a job that could not be computed its number, at number % STEPS

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in vars(self).values())


@dataclass(eq=False)
class RequestBoxes:
    """Where the questions of requests and their answers lie, in pinned memory where there is a GPU.

    As in `Mailbox`, but by request: one question of each at a time, about any layer.
    """

    q: Tensor  # [requests, heads, head_dim], dtype of the cache
    ids: Tensor  # [requests, capacity] int32 host pages, whole ones
    counts: Tensor  # [requests] int32, how many of them
    layer: Tensor  # [requests] int32, see `QuestionBoxes.position`
    out: Tensor  # [requests, heads, head_dim], dtype of the cache; 0 where lse is -inf
    lse: Tensor  # [requests, heads] fp32, natural log
    asked: Tensor  # [requests, 16] int32, the first of each counts
    answered: Tensor  # the same
    failed: Tensor  # [requests, STEPS] int32: of a job that could not be computed its number, at number % STEPS

    @property
    def nbytes(self) -> int:
        """Host memory of all boxes."""
        return sum(getattr(self, field.name).nbytes for field in fields(RequestBoxes))


def mailbox_bytes(rows: int, lists: Sequence[tuple[int, int]], heads: int, head_dim: int, itemsize: int) -> int:
    """What `Mailboxes` allocates for layers of ``lists`` (as there), in host memory."""
    each = _vector_bytes(heads, head_dim, itemsize)
    return sum(_FLAGS + rows * (each + 4 * count * (capacity + 1)) for count, capacity in lists)


def question_bytes(requests: int, capacity: int, heads: int, head_dim: int, itemsize: int) -> int:
    """What `QuestionBoxes` allocates, in host memory."""
    return requests * (_FLAGS + _vector_bytes(heads, head_dim, itemsize) + 4 * (capacity + 2))  # ids, counts and layer


def _vector_bytes(heads: int, head_dim: int, itemsize: int) -> int:
    """Of one row: q, out and lse."""
    return 2 * heads * head_dim * itemsize + 4 * heads


def _pinned(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.zeros(*shape, dtype=dtype, pin_memory=torch.cuda.is_available())


class _Server:
    """A native thread that serves boxes together with a pool, on the CPU that the pool has for it."""

    _handle: int | None = None

    def _serve(self, pool: Pool, layer: Tensor, heads: int, scale: float, boxes: C.Array[lib.MailboxArgs]) -> None:
        """``layer``: one of those that are asked about, which are all of its shape but for the pages."""
        self._native = lib.native()
        _, kv_heads, _, page_size, dim = layer.shape
        model = lib.model_of(layer.dtype, kv_heads, heads, dim, page_size, scale)
        cpu = -1 if pool.server_cpu is None else pool.server_cpu
        self._handle = self._native.hb_mail_new(pool.handle, C.byref(model), boxes, len(boxes), cpu)
        if not self._handle:
            raise WorkerError(f"native CPU kernel: {lib.failure()}")

    @property
    def served(self) -> int:
        """Jobs answered so far."""
        return int(self._native.hb_mail_served(self._handle)) if self._handle else 0

    def _why(self, box: int) -> str:
        """What the box's last failed job failed of."""
        return str(self._native.hb_mail_error(self._handle, box).decode()) if self._handle else "the workers are gone"

    def close(self) -> None:
        """Stop the server; what is asked from now on is never answered. To call before the pool is closed."""
        if self._handle:
            self._native.hb_mail_free(self._handle)
            self._handle = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Mailboxes(_Server):
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
    ) -> None:
        self._keep = (pool, dict(layers), current, dict(kept))
        first = next(iter(layers.values()))
        kv_heads, dim = first.shape[1], first.shape[4]
        self.requests = _pinned(rows, dtype=torch.int64)
        self.generations = _pinned(rows, dtype=torch.int64)
        self.layers = {
            layer: Mailbox(
                q=_pinned(rows, heads, dim, dtype=first.dtype),
                ids=_pinned(rows, *lists[layer]),
                counts=_pinned(rows, lists[layer][0]),
                out=_pinned(rows, heads, dim, dtype=first.dtype),
                lse=_pinned(rows, heads, dtype=torch.float32),
                asked=_pinned(_LINE),
                answered=_pinned(_LINE),
                failed=_pinned(STEPS),
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
        self._serve(pool, first, heads, scale, boxes)

    @property
    def nbytes(self) -> int:
        """Host memory of all boxes."""
        return sum(box.nbytes for box in self.layers.values())

    def failure(self, number: int) -> str | None:
        """Why a job of this number could not be computed (its answer was empty), None: all could. Known for the last
        `STEPS` numbers, when their answers are there."""
        for index, (layer, box) in enumerate(self.layers.items()):
            if int(box.failed[number % STEPS]) == number:
                return f"a CPU worker failed on layer {layer}: {self._why(index)}"
        return None


class QuestionBoxes(RequestBoxes, _Server):
    """One question at a time of each running request, about any layer, and the native thread that serves them.

    What a request asks is answered when the workers get to it, perhaps many steps later. A question that is asked over
    another one, before its answer came, replaces it: whoever takes answers looks at their numbers
    (`kernels.triton.questions`). Boxes are served in turn, each by the whole pool: a question waits for the one that is
    being computed, and for at most one of each other request.

    Args:
        pool: whose threads help.
        layers: by layer, its host pages ``[pages, kv_heads, 2, page_size, head_dim]``, alike but for the pages.
        heads: query heads.
        requests: that run at once, at most.
        capacity: pages of a sequence, at most.
        scale: multiplies the logits.

    Raises:
        WorkerError: a shape that the kernels lack.
    """

    def __init__(
        self,
        pool: Pool,
        layers: Mapping[int, Tensor],
        heads: int,
        requests: int,
        capacity: int,
        scale: float,
    ) -> None:
        first = next(iter(layers.values()))
        dim = first.shape[4]
        super().__init__(
            q=_pinned(requests, heads, dim, dtype=first.dtype),
            ids=_pinned(requests, capacity),
            counts=_pinned(requests),
            layer=_pinned(requests),
            out=_pinned(requests, heads, dim, dtype=first.dtype),
            lse=_pinned(requests, heads, dtype=torch.float32),
            asked=_pinned(requests, _LINE),
            answered=_pinned(requests, _LINE),
            failed=_pinned(requests, STEPS),
        )
        self.position = {layer: index for index, layer in enumerate(layers)}  # what `RequestBoxes.layer` holds
        caches = (lib.Cache * len(layers))(*map(lib.cache_of, layers.values()))
        self._keep = (pool, dict(layers), caches)
        boxes = (lib.MailboxArgs * requests)()
        for request, args in enumerate(boxes):
            args.rows, args.lists, args.capacity = 1, 1, capacity
            args.caches, args.caches_count = C.addressof(caches), len(layers)
            for field in fields(RequestBoxes):
                setattr(args, field.name, getattr(self, field.name)[request].data_ptr())
        self._serve(pool, first, heads, scale, boxes)

    def failure(self, request: int) -> str:
        """Why the last question of the request that could not be computed could not."""
        return f"a CPU worker failed on a question of request {request}: {self._why(request)}"
