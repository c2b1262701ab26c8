"""Partial attention over pages: at once in the calling thread, or later on a pool of native threads."""

from __future__ import annotations

import ctypes as C
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from hybrid_backend.errors import DeadlineError, WorkerError
from hybrid_backend.kernels.cpu import library as lib


def partial(
    q: Tensor, layer: Tensor, ids: Tensor, valid: Tensor, scale: float, *, isa: str | None = None
) -> tuple[Tensor, Tensor]:
    """Attention of one query per row over its listed pages, in the calling thread.

    Args:
        q: ``[rows, heads, head_dim]``.
        layer: ``[pages, kv_heads, 2, page_size, head_dim]``, K before V, bf16, fp16 or fp32; any strides but for
            contiguous rows. head_dim: a multiple of 16 up to 256; page_size: of 16 up to 128; at most 16 query heads
            per KV head.
        ids: ``[rows, 1 | kv_heads, k]`` int64 page ids; one list per row, or one per KV head. Negative: padding.
        valid: same shape, int64, tokens to attend at the start of each page; 0: skip the page.
        scale: multiplies the logits; positive.
        isa: which kernels (`isas`), None for the best.

    Returns:
        ``(out, lse)``, fp32 ``[rows, heads, head_dim]`` and ``[rows, heads]``, natural log. An empty list gives 0 and
        -inf. A NaN in K weighs nothing, a NaN in V of an attended token comes through.

    Raises:
        WorkerError: a page id that the layer lacks, or a shape that the kernels lack.
    """
    args, out, lse, _alive = _arguments(q, layer, ids, valid, scale)
    lib.check(lib.native().hb_partial(C.byref(args), lib.isa_index(isa)))
    return out, lse


def _arguments(
    q: Tensor, layer: Tensor, ids: Tensor, valid: Tensor, scale: float
) -> tuple[lib.PartialArgs, Tensor, Tensor, tuple[Tensor, ...]]:
    """The C arguments, the outputs, and the tensors that must outlive the call."""
    args = lib.PartialArgs()
    args.cache = lib.cache_of(layer)
    args.model = lib.model_of(layer.dtype, layer.shape[1], q.shape[1], layer.shape[4], layer.shape[3], scale)
    return (args, *_fill(args, q, layer, ids, valid))


def _fill(
    args: lib.PartialArgs, q: Tensor, layer: Tensor, ids: Tensor, valid: Tensor
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    if q.dtype != layer.dtype:
        q = q.to(layer.dtype)
    if q.stride(2) != 1:
        q = q.contiguous()
    ids, valid = _listed(ids), _listed(valid)
    if ids.shape != valid.shape or ids.dim() != 3 or ids.shape[0] != q.shape[0]:
        raise ValueError(f"page lists {tuple(ids.shape)} and {tuple(valid.shape)} do not fit {q.shape[0]} rows")
    rows, heads, dim = q.shape
    if dim != layer.shape[4]:
        raise ValueError(f"queries of {dim} channels do not fit a cache of {layer.shape[4]}")
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
    return x if x.dtype == torch.int64 and x.is_contiguous() else x.long().contiguous()


class NativeTicket:
    """A submitted partial. ``wait`` returns it, or raises what a worker raised."""

    def __init__(
        self, pool: Pool, handle: int, result: tuple[Tensor, Tensor], alive: tuple[Tensor, ...], what: str
    ) -> None:
        self._pool = pool
        self._handle: int | None = handle
        self._result = result
        self._alive = alive  # the workers read and write these
        self._what = what
        self._span = (0.0, 0.0)

    def wait(self, deadline: float, *, help: bool = False) -> tuple[Tensor, Tensor]:
        """``(out, lse)`` as `partial` returns them. With ``help`` the calling thread works too.

        Raises:
            DeadlineError: the workers did not finish within ``deadline`` seconds; the job is dropped.
            WorkerError: a worker failed.
        """
        if self._handle is None:
            return self._result
        code = self._pool.native.hb_wait(self._handle, deadline, help)
        if code == lib.TIMEOUT:
            self.abandon()
            raise DeadlineError(f"CPU workers did not finish {self._what} within workers.deadline_seconds={deadline}")
        message = lib.failure() if code == lib.ERROR else None
        self._free()
        if message is not None:
            raise WorkerError(f"a CPU worker failed on {self._what}: {message}")
        return self._result

    def span(self) -> tuple[float, float]:
        """When the work began and ended (`time.perf_counter`); after `wait`."""
        return self._span

    def abandon(self) -> None:
        """Forget the job: what has not begun is dropped, and its memory stays alive until no worker is in it."""
        if self._handle is not None:
            self._pool.native.hb_cancel(self._handle)
            self._pool._bury(self._handle, self._alive)
            self._handle = None

    def _free(self) -> None:
        started, ended = C.c_double(), C.c_double()
        self._pool.native.hb_ticket_span(self._handle, C.byref(started), C.byref(ended))
        self._span = (started.value, ended.value)
        self._pool.native.hb_ticket_free(self._handle)
        self._handle = None

    def __del__(self) -> None:
        if getattr(self, "_handle", None) is not None:
            self.abandon()


class Pool:
    """Native threads that compute partials while the caller does something else. No Python runs in them.

    Threads are pinned to ``cpus`` (one each), if given. Pages of one sequence stay with few threads; a thread that is
    done takes over from others. Any number of Python threads may submit.
    """

    def __init__(self, threads: int, cpus: Sequence[int] | None = None, *, isa: str | None = None) -> None:
        if cpus is not None and len(cpus) < threads:
            raise ValueError(f"{threads} threads need as many CPUs, not {list(cpus)}")
        self.native = lib.native()
        self.threads = threads
        pins = (C.c_int * threads)(*cpus[:threads]) if cpus is not None else None
        self._handle = self.native.hb_pool_new(threads, pins, lib.isa_index(isa))
        if not self._handle:
            raise WorkerError(f"native CPU pool: {lib.failure()}")
        self._lock = threading.Lock()
        self._templates: dict[tuple[int, float, int], lib.PartialArgs] = {}
        self._buried: list[tuple[int, tuple[Tensor, ...]]] = []

    @property
    def handle(self) -> int:
        """The C pool, for `Decoder`."""
        return int(self._handle)

    def submit(
        self,
        q: Tensor,
        layer: Tensor,
        ids: Tensor,
        valid: Tensor,
        scale: float,
        *,
        regions: Tensor | None = None,
        generations: Tensor | None = None,
        current: Tensor | None = None,
        what: str = "a job",
    ) -> NativeTicket:
        """Start a partial (`partial`'s arguments) and return at once; its tensors must not change until `wait`.

        Args:
            regions: ``[rows]`` int64, with ``generations`` ``[rows]`` and ``current`` ``[any]`` int64: row r is dropped
                (its result is the empty partial) once ``current[regions[r]] != generations[r]``.
            what: names the job in errors.
        """
        if self._handle is None:
            raise WorkerError("the pool of native CPU workers is closed")
        self._reap()
        key = (layer.data_ptr(), scale, q.shape[1])
        with self._lock:
            args = self._templates.get(key)
            if args is None:
                args, *_ = _arguments(q, layer, ids, valid, scale)
                self._templates[key] = args
            out, lse, alive = _fill(args, q, layer, ids, valid)
            if current is not None and regions is not None and generations is not None:
                args.region, args.generation = regions.data_ptr(), generations.data_ptr()
                args.current = current.data_ptr()
                alive = (*alive, regions, generations, current)
            else:
                args.region = args.generation = args.current = None
            handle = self.native.hb_submit(self._handle, C.byref(args))
        if not handle:
            raise WorkerError(f"native CPU kernel: {lib.failure()}")
        return NativeTicket(self, handle, (out, lse), alive, what)

    def pause(self) -> None:
        """Workers take no new job until `resume`."""
        self.native.hb_pool_pause(self._handle, 1)

    def resume(self) -> None:
        self.native.hb_pool_pause(self._handle, 0)

    def close(self) -> None:
        """Stop the threads. Abandoned jobs end first."""
        if self._handle is not None:
            for handle, _ in self._buried:
                self.native.hb_ticket_free(handle)
            self._buried.clear()
            self.native.hb_pool_free(self._handle)
            self._handle = None

    def _bury(self, handle: int, alive: tuple[Tensor, ...]) -> None:
        if self._handle is not None:
            self._buried.append((handle, alive))
            self._reap()

    def _reap(self) -> None:
        if not self._buried:
            return
        with self._lock:
            buried, self._buried = self._buried, []
            for handle, alive in buried:
                if self.native.hb_ticket_idle(handle):
                    self.native.hb_ticket_free(handle)
                else:
                    self._buried.append((handle, alive))

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
