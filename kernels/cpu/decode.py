"""Decode layers in one native call each, which writes K and V, updates digests, selects pages and attends them."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from hybrid_backend.errors import WorkerError
from hybrid_backend.kernels.cpu import library as lib
from hybrid_backend.kernels.cpu.partial import Pool
from hybrid_backend.kernels.digest_format import MINMAX_INT8, digest_format_of
from hybrid_backend.kernels.kv_format import head_dim_of
from hybrid_backend.kernels.operations import AGGREGATES


@lru_cache(maxsize=1)
def openmp_entry() -> int | None:
    """Return the address of ``GOMP_parallel`` in the OpenMP runtime that torch uses; None if torch uses other threads.

    The decoder works in the engine's own threads, so that no second set of threads competes for the engine's cores.
    GNU's runtime has this function, and LLVM's and Intel's have it for compatibility.
    """
    # A preloaded runtime, or one that is linked into the program, comes first, as it does for torch.
    candidates: list[str | None] = [None]
    torch_libraries = Path(torch.__file__).parent / "lib"
    with open("/proc/self/maps") as maps:
        loaded = {line.split()[-1] for line in maps if "omp" in line and line.split()[-1].startswith("/")}
    names = ("libgomp", "libiomp5", "libomp")
    runtimes = [path for path in sorted(loaded) if Path(path).name.startswith(names)]
    runtimes.sort(key=lambda path: torch_libraries not in Path(path).parents)
    for name in candidates + list(runtimes):
        try:
            function = ctypes.CDLL(name).GOMP_parallel
        except (OSError, AttributeError):
            continue
        return ctypes.cast(function, ctypes.c_void_p).value
    return None


def decodes(heads: int, kv_heads: int, head_dim: int, page_size: int) -> bool:
    """Tell if `Decoder` has kernels for a model of this shape, on a machine where the library is available."""
    sizes = head_dim in range(16, 513, 16) and page_size in range(16, 129, 16)
    return sizes and 1 <= heads // kv_heads <= 16


class Decoder:
    """Decode layers of one model over their KV memory: `begin` once per step, `layer` once per layer.

    A decoder may be used by one thread at a time.

    Args:
        layers: ``[pages, kv_heads, 2, page_size, head_dim]`` of each layer; None: the layer is not decoded here.
        digests: maxima and minima or codes (`digest_format`), by layer. A layer without digests is exact: all its rows
            are dense.
        heads: query heads.
        scale: factor of the logits; positive.
        byte_digests: byte digests by layer (`digests.empty_byte_digests`), from which pages are then scored, except
            with ``aggregate="max"`` and with sums per head. The caller writes those of whole pages
            (`digests.write_byte_digests`), the decoder those of pages that it fills.
        sinks: ``[heads]`` fp32 by layer, contiguous: logit of one more key of each head, without a value.
        bound: position of a page's score between the middle (0) and the upper end (1: Quest) of what its digest allows.
        team: threads that work: ``"caller"`` alone, ``"openmp"`` (the engine's threads, `openmp_entry`) or a `Pool`,
            whose threads then help the caller.
        threads: threads of the OpenMP team; None: ``torch.get_num_threads()``.
        isa: instruction set; None: the chosen kernels.
        dtype: of queries, new K and V, and outputs, where the pages are in 8 bits; None: that of the pages.

    Raises:
        ValueError: tensors that do not fit together.
        WorkerError: a shape that the kernels lack.
    """

    def __init__(
        self,
        layers: Sequence[Tensor | None],
        digests: Mapping[int, Tensor],
        heads: int,
        scale: float,
        *,
        byte_digests: Mapping[int, Tensor] | None = None,
        sinks: Mapping[int, Tensor] | None = None,
        bound: float = 1.0,
        team: str | Pool = "openmp",
        threads: int | None = None,
        isa: str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        first = next((layer for layer in layers if layer is not None), None)
        if first is None:
            raise ValueError("a decoder needs a layer")
        self._native = lib.native()
        byte_digests, sinks = byte_digests or {}, sinks or {}
        self._alive = (list(layers), dict(digests), dict(byte_digests), dict(sinks))
        kv_heads, page_size, dim = first.shape[1], first.shape[3], head_dim_of(first)
        self.dtype = first.dtype if dtype is None else dtype
        self.shape = (heads, dim)
        self._layers = len(layers)
        self._kv_shape = (kv_heads, dim)
        self._page_size = page_size
        self._layer_shape, self._layer_dtype = first.shape[1:], first.dtype
        model = lib.model_of(self.dtype, kv_heads, heads, dim, page_size, scale, bound, self._layer_dtype)
        self._handle = self._native.hb_decode_new(ctypes.byref(model), len(layers), lib.isa_index(isa))
        if not self._handle:
            raise WorkerError(f"native CPU decoder: {lib.failure()}")
        for index, layer in enumerate(layers):
            if layer is not None:
                self._set_layer(index, layer, digests.get(index), byte_digests.get(index), sinks.get(index))
        self._args = lib.LayerArgs()
        self._args_ref = ctypes.byref(self._args)
        self._strides: object = None
        self._pool: Pool | None = None
        self._gomp: int | None = None
        self._threads = 1
        if isinstance(team, Pool):
            self._pool, self._threads = team, team.threads + 1
        elif team == "openmp":
            self._gomp = openmp_entry()
            self._threads = (threads or torch.get_num_threads()) if self._gomp else 1
        elif team != "caller":
            raise ValueError(f"team must be 'caller', 'openmp' or a Pool, not {team!r}")

    def _set_layer(
        self, index: int, layer: Tensor, digests: Tensor | None, byte_digests: Tensor | None, sinks: Tensor | None
    ) -> None:
        """Check the memory of one layer and hand it to the library."""
        kv_heads, dim = self._kv_shape
        if layer.dtype != self._layer_dtype or layer.shape[1:] != self._layer_shape:
            raise ValueError(f"layer {index} is unlike layer 0: {tuple(layer.shape)} {layer.dtype}")
        if digests is not None:
            digest_format = digest_format_of(digests, dim)
            if digest_format is MINMAX_INT8 or digests.dtype != digest_format.dtype(self.dtype):
                raise ValueError(
                    f"digests of layer {index} must be {self.dtype} or codes, not {digests.dtype} "
                    f"{tuple(digests.shape)}"
                )
        heads = self.shape[0]
        if sinks is not None and (sinks.shape != (heads,) or sinks.dtype != torch.float32 or not sinks.is_contiguous()):
            raise ValueError(f"sinks of layer {index} must be contiguous fp32 [{heads}], not {sinks}")
        cache = lib.cache_of(layer)
        store = lib.Digests() if digests is None else lib.digests_of(digests)
        copy = lib.ByteDigests() if byte_digests is None else lib.byte_digests_of(byte_digests, kv_heads, dim)
        lib.check(
            self._native.hb_decode_set_layer(
                self._handle,
                index,
                ctypes.byref(cache),
                ctypes.byref(store),
                ctypes.byref(copy),
                None if sinks is None else sinks.data_ptr(),
            )
        )

    def begin(
        self,
        page_table: Tensor,
        seq_lens: Tensor,
        budgets: Tensor,
        *,
        sinks: int = 1,
        recent: int = 1,
        tokens: Tensor | None = None,
        per_head: bool = False,
        aggregate: str = "sum",
        sequences: Tensor | None = None,
        candidates: int = 0,
        interval: int = 1,
        skips: Tensor | None = None,
    ) -> None:
        """Begin a step. The library copies all arguments.

        Args:
            page_table: block table ``[rows, columns]`` int32 or int64; columns beyond a sequence are not read.
            seq_lens: ``[rows]`` tokens of each sequence, this step's included.
            budgets: ``[rows]`` or ``[layers, rows]`` pages to attend; negative, or at least the row's pages: all pages.
            sinks: first pages that are always selected.
            recent: last pages that are always selected; the growing page always is.
            tokens: ``[rows]`` position of each row in q, k, v and out; None: 0, 1, 2...
            per_head: one list per KV head instead of one per row.
            aggregate: combination of the query heads' scores, one of `AGGREGATES`. With ``softmax`` each query head's
                scores become shares of the scored pages, which are summed.
            sequences: ``[rows]`` distinct ids of the sequences, valid until `forget`. With them and byte digests, long
                rows are searched in two levels: spans of 8 pages, then the pages of the best spans.
            candidates: pages scored per page of budget in such a search; 0: all pages are scored.
            interval: tokens of a sequence between two steps in which a layer scores all pages; layers take turns by
                position. In the steps between, a row selects among the best pages of the last such step (four times the
                budget) and newer pages. With codes, at odd positions (position plus layer), it selects among the best
                pages of the step before (twice the budget). 1: every step scores all pages. More than 1 needs
                ``sequences``. All pages are scored for a new row, and after a change of its budget.
            skips: ``[rows]`` tokens at the start of each row's first page that are not attended, fewer than the page
                and the sequence have; None: none.

        Raises:
            ValueError: arguments that do not fit together.
            WorkerError: the library refused the step.
        """
        seq_lens, budgets = seq_lens.long().contiguous(), budgets.long().contiguous()
        if page_table.dtype not in (torch.int32, torch.int64):
            page_table = page_table.long()
        if page_table.stride(1) != 1:
            page_table = page_table.contiguous()
        rows, columns = page_table.shape
        if rows != len(seq_lens) or budgets.shape not in ((rows,), (self._layers, rows)):
            raise ValueError(f"{rows} rows of pages, {len(seq_lens)} lengths, budgets {tuple(budgets.shape)}")
        page_size = self._page_size
        if rows and int(seq_lens.max()) > columns * page_size:
            raise ValueError(
                f"a sequence of {int(seq_lens.max())} tokens has more pages than the table's {columns} columns"
            )
        if tokens is not None:
            tokens = tokens.long().contiguous()
        if sequences is not None:
            sequences = sequences.long().contiguous()
        if interval < 1 or (interval > 1 and sequences is None):
            raise ValueError(f"interval {interval}: 1, or more with sequences")
        if skips is not None:
            skips = skips.long().contiguous()
            if len(skips) != rows:
                raise ValueError(f"{rows} rows of pages, {len(skips)} skips")
        step = lib.StepArgs(
            rows, sinks, recent, per_head, AGGREGATES.index(aggregate), candidates, interval,
            sequences.data_ptr() if sequences is not None else None,
            tokens.data_ptr() if tokens is not None else None,
            seq_lens.data_ptr(), budgets.data_ptr(), rows if budgets.ndim > 1 else 0,
            skips.data_ptr() if skips is not None else None,
            page_table.data_ptr(), page_table.stride(0), page_table.dtype == torch.int64,
        )  # fmt: skip
        lib.check(self._native.hb_decode_begin(self._handle, ctypes.byref(step)))

    def forget(self, sequence: int) -> None:
        """Drop the state of a sequence that ended, so that its id may be used again."""
        self._native.hb_decode_forget(self._handle, sequence)

    @property
    def span_bytes(self) -> int:
        """Memory of the spans' digests and of the shortlists, in bytes."""
        return int(self._native.hb_decode_span_bytes(self._handle))

    def layer(
        self,
        index: int,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        out: Tensor,
        *,
        score_q: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> None:
        """Decode one layer for the rows of `begin`.

        Args:
            index: index of the layer.
            q: queries ``[tokens, heads, head_dim]`` of `dtype`, ``[heads, head_dim]`` contiguous, any token
                stride.
            k: new keys ``[tokens, kv_heads, head_dim]``, like ``q``; None: pages and digests have them already.
            v: new values, like ``k``.
            out: ``[tokens, heads, head_dim]`` of `dtype`; only the rows' tokens are written.
            score_q: queries that select pages, like ``q``; None: ``q``.
            lse: ``[rows, heads]`` fp32, contiguous: takes the log-sum-exp, sinks included; None: not needed.

        Raises:
            ValueError: tensors of another dtype or shape.
            WorkerError: a page id that the layer lacks.
        """
        strides: object = (
            q.stride(),
            out.stride(),
            None if k is None else k.stride(),
            None if v is None else v.stride(),
            None if score_q is None else score_q.stride(),
        )
        args = self._args
        if strides != self._strides:
            self._strides = None  # strides of a refused call must not be used again
            self._check(q, k, v, out, score_q)
            self._strides = strides
        args.q = q.data_ptr()
        args.k = k.data_ptr() if k is not None else None
        args.v = v.data_ptr() if v is not None else None
        args.score_q = score_q.data_ptr() if score_q is not None else None
        args.out = out.data_ptr()
        args.lse = lse.data_ptr() if lse is not None else None
        handle = self._pool.handle if self._pool is not None else None
        code = self._native.hb_decode_layer(self._handle, index, self._args_ref, handle, self._gomp, self._threads)
        if code:
            lib.check(code)

    def _check(self, q: Tensor, k: Tensor | None, v: Tensor | None, out: Tensor, score_q: Tensor | None) -> None:
        """Check tensors and set their strides, once for each new set of strides."""
        size = q.element_size()
        args = self._args
        named = {"q": q, "k": k, "v": v, "out": out, "score_q": score_q}
        for name, x in named.items():
            if x is None:
                continue
            shape = self._kv_shape if name in ("k", "v") else self.shape
            strides = (shape[1] if shape[0] > 1 else x.stride(1), 1)  # the stride of a single head is arbitrary
            if tuple(x.shape[1:]) != shape or x.dtype != self.dtype or x.stride()[1:] != strides:
                raise ValueError(
                    f"{name} must be {self.dtype} [tokens, {shape[0]}, {shape[1]}] with contiguous heads, not "
                    f"{x.dtype} {tuple(x.shape)} with strides {x.stride()}"
                )
            setattr(args, f"{name}_row_stride", x.stride(0) * size)

    def selected(self, row: int, list_: int = 0) -> Tensor:
        """Return the logical pages that the last layer selected, ascending, int32.

        Args:
            row: index of the row.
            list_: index of the KV head if the step selects per head, else 0.
        """
        pages = ctypes.c_void_p()
        count = self._native.hb_decode_selected(self._handle, row, list_, ctypes.byref(pages))
        if not count or not pages.value:
            return torch.empty(0, dtype=torch.int32)
        return torch.frombuffer((ctypes.c_int32 * count).from_address(pages.value), dtype=torch.int32).clone()

    def close(self) -> None:
        """Free the decoder."""
        if self._handle is not None:
            self._native.hb_decode_free(self._handle)
            self._handle = None

    def __del__(self) -> None:
        if getattr(self, "_handle", None) is not None:
            self.close()
