"""Partial attention over pages: at once in the calling thread, or later in a pool of native threads."""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from hybrid_backend.errors import DeadlineError, WorkerError
from hybrid_backend.kernels.cpu import library as lib
from hybrid_backend.kernels.kv_format import head_dim_of


def partial(
    q: Tensor, layer: Tensor, ids: Tensor, valid: Tensor, scale: float, *, isa: str | None = None
) -> tuple[Tensor, Tensor]:
    """Attend each row's listed pages with the row's query, in the calling thread.

    Args:
        q: queries ``[rows, heads, head_dim]``.
        layer: ``[pages, kv_heads, 2, page_size, head_dim]``, K before V, bf16, fp16 or fp32; any strides but contiguous
            rows. head_dim is a multiple of 16 up to 512, page_size a multiple of 16 up to 128. A KV head has at most 16
            query heads.
        ids: ``[rows, 1 | kv_heads, k]`` int64 page ids; one list per row, or one per KV head. Negative: padding.
        valid: same shape, int64, tokens to attend at the start of each page; 0: the page is skipped.
        scale: factor of the logits; positive.
        isa: instruction set; None: the chosen kernels.

    Returns:
        ``(out, lse)``, fp32 ``[rows, heads, head_dim]`` and ``[rows, heads]``, natural log. An empty list gives 0 and
        -inf. A NaN in K has weight 0; a NaN in V of an attended token reaches the output.

    Raises:
        WorkerError: a page id that the layer lacks, or a shape that the kernels lack.
    """
    args, out, lse, _alive = _arguments(q, layer, ids, valid, scale)
    lib.check(lib.native().hb_partial(ctypes.byref(args), lib.isa_index(isa)))
    return out, lse


def _arguments(
    q: Tensor, layer: Tensor, ids: Tensor, valid: Tensor, scale: float
) -> tuple[Any, Tensor, Tensor, tuple[Tensor, ...]]:
    """Return the C arguments, the outputs, and the tensors that must outlive the call."""
    args = lib.PartialArgs()
    args.cache = lib.cache_of(layer)
    args.model = _model(q, layer, scale)
    return (args, *_fill(args, q, layer, ids, valid))


def _model(q: Tensor, layer: Tensor, scale: float) -> Any:
    """Describe the shapes of a job. Queries are converted to the dtype of pages that are not in 8 bits."""
    dtype = q.dtype if layer.dtype is torch.int8 else layer.dtype
    _, kv_heads, _, page_size, _ = layer.shape
    return lib.model_of(dtype, kv_heads, q.shape[1], head_dim_of(layer), page_size, scale, kv_dtype=layer.dtype)


def _fill(args: Any, q: Tensor, layer: Tensor, ids: Tensor, valid: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Fill the job's part of `lib.PartialArgs`; return the outputs and the tensors that must outlive the job."""
    if q.dtype != layer.dtype and layer.dtype is not torch.int8:
        q = q.to(layer.dtype)
    if q.stride(2) != 1:
        q = q.contiguous()
    ids, valid = _listed(ids), _listed(valid)
    if ids.shape != valid.shape or ids.dim() != 3 or ids.shape[0] != q.shape[0]:
        raise ValueError(f"page lists {tuple(ids.shape)} and {tuple(valid.shape)} do not fit {q.shape[0]} rows")
    rows, heads, dim = q.shape
    if dim != args.model.head_dim:
        raise ValueError(f"queries of {dim} channels do not fit a cache of {args.model.head_dim}")
    out = torch.empty(rows, heads, dim, dtype=torch.float32)
    lse = torch.empty(rows, heads, dtype=torch.float32)
    size = q.element_size()
    args.q, args.q_row_stride, args.q_head_stride = q.data_ptr(), q.stride(0) * size, q.stride(1) * size
    args.rows, args.lists, args.capacity = ids.shape
    args.ids, args.valid = ids.data_ptr(), valid.data_ptr()
    args.out, args.out_type, args.lse = out.data_ptr(), lib.DTYPES[torch.float32], lse.data_ptr()
    args.out_row_stride, args.out_head_stride = heads * dim * 4, dim * 4
    return out, lse, (q, layer, ids, valid, out, lse)


def _listed(x: Tensor) -> Tensor:
    """Return ``x`` as contiguous int64."""
    return x if x.dtype == torch.int64 and x.is_contiguous() else x.long().contiguous()


class _Template:
    """C arguments of one layer's jobs. Jobs of a layer are similar, so unchanged arguments of the last job are kept."""

    def __init__(self, layer: Tensor, scale: float, forget: Callable[[weakref.ref[Tensor]], object]) -> None:
        self.args = lib.PartialArgs()
        self.args.cache = lib.cache_of(layer)
        self.pointer = ctypes.byref(self.args)
        self._layer = weakref.ref(layer, forget)
        self._address = layer.data_ptr()
        self._scale = scale
        self._alike: tuple[object, ...] = ()
        self._out = self._lse = torch.empty(0)

    def is_of(self, layer: Tensor, scale: float) -> bool:
        """Tell if the arguments belong to this layer and scale."""
        return self._layer() is layer and self._address == layer.data_ptr() and self._scale == scale

    def fill(self, q: Tensor, layer: Tensor, ids: Tensor, valid: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """Fill the arguments and return the same as `_fill`."""
        alike = (
            q.shape,
            q.stride(),
            q.dtype,
            ids.shape,
            ids.stride(),
            ids.dtype,
            valid.shape,
            valid.stride(),
            valid.dtype,
        )
        if alike != self._alike:
            self._alike = ()
            self.args.model = _model(q, layer, self._scale)
            out, lse, alive = _fill(self.args, q, layer, ids, valid)
            # Only arguments that need no conversion may skip the checks the next time.
            is_unchanged = alive[0] is q and alive[2] is ids and alive[3] is valid
            if is_unchanged:
                self._alike = alike
            # empty_like is the fastest way to make a tensor. The expanded prototypes take no memory.
            self._out, self._lse = out.new_empty(1).expand(out.shape), lse.new_empty(1).expand(lse.shape)
            return out, lse, alive
        args = self.args
        out, lse = torch.empty_like(self._out), torch.empty_like(self._lse)
        args.q, args.ids, args.valid = q.data_ptr(), ids.data_ptr(), valid.data_ptr()
        args.out, args.lse = out.data_ptr(), lse.data_ptr()
        return out, lse, (q, layer, ids, valid, out, lse)


class NativeTicket:
    """Submitted partial. `wait` returns its result, or raises the worker's error."""

    __slots__ = ("_alive", "_error", "_handle", "_pool", "_result", "_span", "_what")

    def __init__(
        self, pool: Pool, handle: int, result: tuple[Tensor, Tensor], alive: tuple[Tensor, ...], what: str
    ) -> None:
        self._pool = pool
        self._handle: int | None = handle
        self._result = result
        self._alive = alive  # memory that the workers read and write
        self._what = what
        self._error: str | None = None
        self._span = (0.0, 0.0)

    def wait(self, deadline: float, *, help: bool = False) -> tuple[Tensor, Tensor]:
        """Wait for the result and return it as `partial` does.

        Args:
            deadline: seconds.
            help: the calling thread works too.

        Raises:
            DeadlineError: the workers did not finish in time; the job is dropped.
            WorkerError: a worker failed, or the job was dropped before.
        """
        if self._handle is not None:
            code = self._pool.native.hb_wait(self._handle, deadline, help)
            if code == lib.TIMEOUT:
                self.abandon()
                raise DeadlineError(
                    f"CPU workers did not finish {self._what} within workers.deadline_seconds={deadline}"
                )
            if code == lib.ERROR:
                self._error = f"a CPU worker failed on {self._what}: {lib.failure()}"
            self._free()
        if self._error is not None:
            raise WorkerError(self._error)
        return self._result

    def done(self) -> bool:
        """Tell if `wait` would return or raise at once."""
        return self._handle is None or self._pool.native.hb_wait(self._handle, 0.0, False) != lib.TIMEOUT

    def span(self) -> tuple[float, float]:
        """Return the times at which the work began and ended (`time.perf_counter`), once `wait` has returned."""
        return self._span

    def abandon(self) -> None:
        """Drop the job. Its memory stays alive until no worker uses it any more."""
        if self._handle is not None:
            self._pool.native.hb_cancel(self._handle)
            self._pool._bury(self._handle, self._alive)
            self._error = f"{self._what} was abandoned"
            self._handle = None

    def _free(self) -> None:
        """Give the finished job back to the pool."""
        started, ended = ctypes.c_double(), ctypes.c_double()
        self._pool.native.hb_ticket_span(self._handle, ctypes.byref(started), ctypes.byref(ended))
        self._span = (started.value, ended.value)
        if self._pool._handle is not None:  # a closed pool cannot take it back
            self._pool.native.hb_ticket_free(self._handle)
        self._handle = None

    def __del__(self) -> None:
        if getattr(self, "_handle", None) is not None:
            self.abandon()


class Adopted(Protocol):
    """A background job of a pool (`judging.NativeJudging`)."""

    def close(self) -> None:
        """Give up the job and free its native memory. A second call does nothing."""


class Pool:
    """Native threads that compute partials while the caller does something else; no Python runs in them.

    Pages of one sequence stay with few threads, and a thread without work takes over tasks of other threads. Any number
    of Python threads may submit jobs.

    Args:
        threads: number of threads.
        cpus: CPU of each thread; None: threads are not pinned.
        isa: instruction set; None: the chosen kernels.
        spin_seconds: time for which a thread without work polls before it sleeps. Only for threads that have their
            cores to themselves: a sleeping thread takes tens of microseconds to wake.
        server_cpu: CPU of the thread that serves mailboxes with this pool (`Mailboxes`); None: not pinned.

    Raises:
        ValueError: fewer CPUs than threads.
        WorkerError: the pool could not be made.
    """

    def __init__(
        self,
        threads: int,
        cpus: Sequence[int] | None = None,
        *,
        isa: str | None = None,
        spin_seconds: float = 0.0,
        server_cpu: int | None = None,
    ) -> None:
        if cpus is not None and len(cpus) < threads:
            raise ValueError(f"{threads} threads need as many CPUs, not {list(cpus)}")
        self.native = lib.native()
        self.threads = threads
        self.server_cpu = server_cpu
        pins = (ctypes.c_int * threads)(*cpus[:threads]) if cpus is not None else None
        self._handle = self.native.hb_pool_new(threads, pins, lib.isa_index(isa), round(spin_seconds * 1e9))
        if not self._handle:
            raise WorkerError(f"native CPU pool: {lib.failure()}")
        self._lock = threading.Lock()
        self._templates: dict[int, _Template] = {}  # Keyed by `id` of the layer's tensor; guarded by the lock.
        self._buried: deque[tuple[int, tuple[Tensor, ...]]] = deque()
        self._adopted: weakref.WeakSet[Adopted] = weakref.WeakSet()  # Background jobs, which end before the pool.

    @property
    def handle(self) -> int:
        """Address of the C pool, for `Decoder`."""
        return int(self._handle)

    def submit(
        self,
        q: Tensor,
        layer: Tensor,
        ids: Tensor,
        valid: Tensor,
        scale: float,
        *,
        requests: Tensor | None = None,
        generations: Tensor | None = None,
        current: Tensor | None = None,
        what: str = "a job",
    ) -> NativeTicket:
        """Start a partial and return at once. The tensors must not change until `NativeTicket.wait` returns.

        Args:
            q: as in `partial`.
            layer: as in `partial`.
            ids: as in `partial`.
            valid: as in `partial`.
            scale: as in `partial`.
            requests: ``[rows]`` int64 index of each row's request, given with ``generations`` and ``current``: row r
                gets the empty partial once ``current[requests[r]] != generations[r]``.
            generations: ``[rows]`` int64 generation of each row's index.
            current: ``[indices]`` int64 current generation of each index.
            what: name of the job in error messages.

        Raises:
            ValueError: tensors that do not fit together.
            WorkerError: the pool is closed, or the kernels lack the shape.
        """
        if self._handle is None:
            raise WorkerError("the pool of native CPU workers is closed")
        if self._buried:
            self._reap()
        with self._lock:
            template = self._templates.get(id(layer))
            if template is None or not template.is_of(layer, scale):
                template = self._remember(layer, scale)
            out, lse, alive = template.fill(q, layer, ids, valid)
            args = template.args
            if current is not None and requests is not None and generations is not None:
                args.request, args.generation = requests.data_ptr(), generations.data_ptr()
                args.current = current.data_ptr()
                alive = (*alive, requests, generations, current)
            elif args.current is not None:
                args.request = args.generation = args.current = None
            handle = self.native.hb_submit(self._handle, template.pointer)
        if not handle:
            raise WorkerError(f"native CPU kernel: {lib.failure()}")
        return NativeTicket(self, handle, (out, lse), alive, what)

    def adopt(self, job: Adopted, begin: Callable[[int, Any], int | None], args: Any) -> int:
        """Begin a background job, which is closed before the pool is; return its handle.

        Raises:
            WorkerError: the pool is closed, or ``begin`` (a function of the library) refuses ``args``.
        """
        if self._handle is None:
            raise WorkerError("the pool of native CPU workers is closed")
        handle = begin(self._handle, args)
        if not handle:
            raise WorkerError(f"native CPU kernel: {lib.failure()}")
        self._adopted.add(job)
        return handle

    def pause(self) -> None:
        """Keep the workers from taking new jobs until `resume`."""
        self.native.hb_pool_pause(self._handle, 1)

    def resume(self) -> None:
        """Let the workers take new jobs again."""
        self.native.hb_pool_pause(self._handle, 0)

    def close(self) -> None:
        """Stop the threads, after the abandoned jobs have ended."""
        if self._handle is not None:
            for handle, _ in self._buried:
                self.native.hb_ticket_free(handle)
            self._buried.clear()
            self._templates.clear()
            for job in list(self._adopted):
                job.close()
            self.native.hb_pool_free(self._handle)
            self._handle = None

    def _remember(self, layer: Tensor, scale: float) -> _Template:
        """Make the arguments of a layer's jobs, which are forgotten together with the layer."""
        key = id(layer)
        template = self._templates[key] = _Template(layer, scale, lambda _: self._templates.pop(key, None))
        return template

    def _bury(self, handle: int, alive: tuple[Tensor, ...]) -> None:
        """Keep an abandoned job's memory until no worker uses it."""
        # A finalizer may call this at any moment, also under the lock, so it only appends, which is atomic.
        if self._handle is not None:
            self._buried.append((handle, alive))

    def _reap(self) -> None:
        """Free a few abandoned jobs that no worker uses any more; only a few, so that a submission stays short."""
        for _ in range(min(8, len(self._buried))):
            try:
                handle, alive = self._buried.popleft()
            except IndexError:  # another thread has freed the last job
                return
            if self.native.hb_ticket_idle(handle):
                self.native.hb_ticket_free(handle)
            else:
                self._buried.append((handle, alive))

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
