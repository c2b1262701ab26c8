"""Mailboxes: the device asks the CPU workers for partials itself, without Python and without a system call."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from hybrid_backend.errors import WorkerError
from hybrid_backend.kernels.cpu import library as lib
from hybrid_backend.kernels.cpu.interface import CONSTANTS
from hybrid_backend.kernels.cpu.partial import Pool
from hybrid_backend.kernels.kv_format import head_dim_of

if TYPE_CHECKING:
    from typing import Self

_LINE = 16  # int32 of a cache line; each flag has a line of its own
STEPS = CONSTANTS["HB_MAIL_STEPS"]
"""Steps whose failures are remembered; a power of two."""
_FLAGS = 4 * (2 * _LINE + STEPS)  # bytes of asked_flag, answered and failed


@dataclass(frozen=True)
class Mailbox:
    """Questions and answers of one layer, in pinned memory where there is a GPU.

    The device writes the query and the lists (unless the host keeps them), then the step's number to ``asked_flag``.
    The server writes the partial, then the same number to ``answered``. Numbers go up. The partial crosses the bus in
    the model's dtype; the sum that it is merged into is rounded to that dtype as well.

    A row without pages, or of a request that was released, gets the empty partial: ``lse`` is -inf, and ``out`` keeps
    its old content. So ``out`` must not be used where ``lse`` is -inf, not even times 0, as it may be NaN.
    """

    q: Tensor
    """``[rows, heads, head_dim]`` in the model's dtype."""
    ids: Tensor
    """``[rows, lists, capacity]`` int32 host pages, whole ones; empty if the host keeps the lists."""
    counts: Tensor
    """``[rows, lists]`` int32 pages of each list; empty if the host keeps the lists."""
    out: Tensor
    """``[rows, heads, head_dim]`` in the model's dtype; undefined where ``lse`` is -inf."""
    lse: Tensor
    """``[rows, heads]`` fp32, natural log."""
    asked_flag: Tensor
    """``[16]`` int32, of which the first is the flag."""
    answered: Tensor
    """``[16]`` int32, of which the first is the flag."""
    failed: Tensor
    """``[STEPS]`` int32: number of a failed job, at its number modulo `STEPS`."""

    @property
    def nbytes(self) -> int:
        """Host memory of the box, in bytes."""
        return sum(tensor.nbytes for tensor in vars(self).values())


class QueryShape(NamedTuple):
    """Queries of a model, and so the partials of its questions' answers."""

    heads: int
    """Query heads."""
    dtype: torch.dtype
    """The model's dtype, which pages in 8 bits do not tell."""


class HostLists(NamedTuple):
    """Lists of a layer that the host may change between steps."""

    tokens: Tensor
    """``[rows, kv_heads]`` int32: the row of request i attends, for each KV head, so many tokens of the i-th of
    ``rows`` equal parts of the layer's pages."""
    whole: Tensor
    """``[rows]`` int32: if not 0, request i attends so many pages of `whole_pages` instead, with all KV heads."""
    whole_pages: Tensor
    """``[rows, capacity]`` int32 pages of `host`."""
    host: Tensor
    """Host pages, in the layout of the layer's pages."""


@dataclass(eq=False)
class RequestBoxes:
    """Questions and answers of requests, in pinned memory where there is a GPU.

    As in `Mailbox`, but by request: each request has one question at a time, about any layer.
    """

    q: Tensor
    """``[requests, heads, head_dim]`` in the model's dtype."""
    ids: Tensor
    """``[requests, capacity]`` int32 host pages, whole ones."""
    counts: Tensor
    """``[requests]`` int32 number of pages."""
    layer: Tensor
    """``[requests]`` int32 position of the layer (`QuestionBoxes.position`)."""
    out: Tensor
    """``[requests, heads, head_dim]`` in the model's dtype; 0 where ``lse`` is -inf."""
    lse: Tensor
    """``[requests, heads]`` fp32, natural log."""
    asked_flag: Tensor
    """``[requests, 16]`` int32, of which the first of each request is the flag."""
    answered: Tensor
    """``[requests, 16]`` int32, of which the first of each request is the flag."""
    failed: Tensor
    """``[requests, STEPS]`` int32: number of a failed job, at its number modulo `STEPS`."""

    @property
    def nbytes(self) -> int:
        """Host memory of all boxes, in bytes."""
        return sum(getattr(self, field.name).nbytes for field in fields(RequestBoxes))


def mailbox_bytes(rows: int, lists: Sequence[tuple[int, int]], heads: int, head_dim: int, itemsize: int) -> int:
    """Return the host memory of `Mailboxes` in bytes, for layers with these ``lists``."""
    vector_bytes = _vector_bytes(heads, head_dim, itemsize)
    return sum(_FLAGS + rows * (vector_bytes + 4 * count * (capacity + 1)) for count, capacity in lists)


def question_bytes(requests: int, capacity: int, heads: int, head_dim: int, itemsize: int) -> int:
    """Return the host memory of `QuestionBoxes` in bytes."""
    list_bytes = 4 * (capacity + 2)  # ids, counts and layer
    return requests * (_FLAGS + _vector_bytes(heads, head_dim, itemsize) + list_bytes)


def _vector_bytes(heads: int, head_dim: int, itemsize: int) -> int:
    """Return the bytes of one row's q, out and lse."""
    return 2 * heads * head_dim * itemsize + 4 * heads


def _pinned(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    """Allocate zeros, in pinned memory where there is a GPU."""
    return torch.zeros(*shape, dtype=dtype, pin_memory=torch.cuda.is_available())


class _Server:
    """Native thread that serves boxes together with a pool, on the pool's CPU for it."""

    _handle: int | None = None

    def _serve(self, pool: Pool, layer: Tensor, q: Tensor, scale: float, boxes: Any) -> None:
        """Start the thread.

        Args:
            pool: pool whose threads help.
            layer: any layer of the questions; all have its shape but for the number of pages.
            q: ``[rows, heads, head_dim]`` queries of a box.
            scale: factor of the logits.
            boxes: array of `lib.MailboxArgs`.

        Raises:
            WorkerError: a shape that the kernels lack.
        """
        self._native = lib.native()
        (_, kv_heads, _, page_size, _), (_, heads, dim) = layer.shape, q.shape
        model = lib.model_of(q.dtype, kv_heads, heads, dim, page_size, scale, kv_dtype=layer.dtype)
        cpu = -1 if pool.server_cpu is None else pool.server_cpu
        self._handle = self._native.hb_mail_new(pool.handle, ctypes.byref(model), boxes, len(boxes), cpu)
        if not self._handle:
            raise WorkerError(f"native CPU kernel: {lib.failure()}")

    @property
    def served(self) -> int:
        """Number of jobs answered so far."""
        return int(self._native.hb_mail_served(self._handle)) if self._handle else 0

    def _why(self, box: int) -> str:
        """Return the error of the box's last failed job."""
        return str(self._native.hb_mail_error(self._handle, box).decode()) if self._handle else "the workers are gone"

    def close(self) -> None:
        """Stop the server before the pool is closed. Later questions are never answered."""
        if self._handle:
            self._native.hb_mail_free(self._handle)
            self._handle = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Mailboxes(_Server):
    """Mailboxes of the layers, one each, and the native thread that serves them together with a pool.

    Args:
        pool: pool whose threads help.
        layers: host pages ``[pages, kv_heads, 2, page_size, head_dim]`` by layer.
        queries: query heads and dtype.
        rows: rows of a step at most.
        lists: number of lists (1, or one per KV head) and pages of a list at most, by layer; (0, 0) for a layer of
            ``host_lists``.
        scale: factor of the logits.
        current: ``[requests]`` int64 current generation of each index. A row whose index was released since the device
            wrote ``generations`` gets the empty partial.
        host_lists: lists that the host keeps, by layer. ``requests`` and ``current`` are needed for them.

    Raises:
        WorkerError: a shape that the kernels lack.
    """

    def __init__(
        self,
        pool: Pool,
        layers: Mapping[int, Tensor],
        queries: QueryShape,
        rows: int,
        lists: Mapping[int, tuple[int, int]],
        scale: float,
        *,
        current: Tensor | None = None,
        host_lists: Mapping[int, HostLists] = MappingProxyType({}),
    ) -> None:
        self._keep = (pool, dict(layers), current, dict(host_lists))
        first = next(iter(layers.values()))
        kv_heads, dim, (heads, dtype) = first.shape[1], head_dim_of(first), queries
        self.requests = _pinned(rows, dtype=torch.int64)
        self.generations = _pinned(rows, dtype=torch.int64)
        self.layers = {
            layer: Mailbox(
                q=_pinned(rows, heads, dim, dtype=dtype),
                ids=_pinned(rows, *lists[layer]),
                counts=_pinned(rows, lists[layer][0]),
                out=_pinned(rows, heads, dim, dtype=dtype),
                lse=_pinned(rows, heads, dtype=torch.float32),
                asked_flag=_pinned(_LINE),
                answered=_pinned(_LINE),
                failed=_pinned(STEPS),
            )
            for layer in layers
        }
        boxes = (lib.MailboxArgs * len(layers))()
        for args, (layer, box) in zip(boxes, self.layers.items(), strict=True):
            args.cache = lib.cache_of(layers[layer])
            args.rows, args.lists, args.capacity = box.ids.shape
            for name in ("q", "ids", "counts", "out", "lse", "asked_flag", "answered", "failed"):
                setattr(args, name, getattr(box, name).data_ptr())  # an empty tensor's address is 0
            if layer in host_lists:
                lists_of_host = host_lists[layer]
                args.lists, args.capacity = kv_heads, len(layers[layer]) // rows
                args.counts, args.whole = lists_of_host.tokens.data_ptr(), lists_of_host.whole.data_ptr()
                args.whole_ids = lists_of_host.whole_pages.data_ptr()
                args.whole_stride = lists_of_host.whole_pages.stride(0)
                args.host = lib.cache_of(lists_of_host.host)
            if current is not None:
                args.request, args.generation = self.requests.data_ptr(), self.generations.data_ptr()
                args.current = current.data_ptr()
        self._serve(pool, first, next(iter(self.layers.values())).q, scale, boxes)

    @property
    def nbytes(self) -> int:
        """Host memory of all boxes."""
        return sum(box.nbytes for box in self.layers.values())

    def failure(self, number: int) -> str | None:
        """Return the error of a failed job of this number; None if all layers' jobs succeeded.

        Errors are remembered for the last `STEPS` numbers, and are valid when the answers have arrived.
        """
        for index, (layer, box) in enumerate(self.layers.items()):
            if int(box.failed[number % STEPS]) == number:
                return f"a CPU worker failed on layer {layer}: {self._why(index)}"
        return None


class QuestionBoxes(RequestBoxes, _Server):
    """Boxes of running requests, for one question each at a time, and the native thread that serves them.

    A question may be answered many steps later. A question that is asked before the last one was answered replaces it,
    so the device compares the numbers of the answers (`kernels.triton.questions`). The whole pool serves one box after
    the other. So a question waits for the current one, and for at most one question of each other request.

    Args:
        pool: pool whose threads help.
        layers: host pages ``[pages, kv_heads, 2, page_size, head_dim]`` by layer, alike but for the number of pages.
        queries: query heads and dtype.
        requests: requests that run at once at most.
        capacity: pages of a sequence at most.
        scale: factor of the logits.

    Raises:
        WorkerError: a shape that the kernels lack.
    """

    def __init__(
        self,
        pool: Pool,
        layers: Mapping[int, Tensor],
        queries: QueryShape,
        requests: int,
        capacity: int,
        scale: float,
    ) -> None:
        first = next(iter(layers.values()))
        dim, (heads, dtype) = head_dim_of(first), queries
        super().__init__(
            q=_pinned(requests, heads, dim, dtype=dtype),
            ids=_pinned(requests, capacity),
            counts=_pinned(requests),
            layer=_pinned(requests),
            out=_pinned(requests, heads, dim, dtype=dtype),
            lse=_pinned(requests, heads, dtype=torch.float32),
            asked_flag=_pinned(requests, _LINE),
            answered=_pinned(requests, _LINE),
            failed=_pinned(requests, STEPS),
        )
        self.position = {layer: index for index, layer in enumerate(layers)}
        """Number of each layer in `RequestBoxes.layer`."""
        caches = (lib.Cache * len(layers))(*map(lib.cache_of, layers.values()))
        self._keep = (pool, dict(layers), caches)
        boxes = (lib.MailboxArgs * requests)()
        for request, args in enumerate(boxes):
            args.rows, args.lists, args.capacity = 1, 1, capacity
            args.caches, args.caches_count = ctypes.addressof(caches), len(layers)
            for field in fields(RequestBoxes):
                setattr(args, field.name, getattr(self, field.name)[request].data_ptr())
        self._serve(pool, first, self.q, scale, boxes)

    def failure(self, request: int) -> str:
        """Return the error of the request's last failed question."""
        return f"a CPU worker failed on a question of request {request}: {self._why(request)}"
