"""A whole decode layer in one native call: write K/V, update digests, score, select, attend, write the output."""

from __future__ import annotations

import ctypes as C
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from hybrid_backend.errors import WorkerError
from hybrid_backend.kernels.cpu import library as lib
from hybrid_backend.kernels.cpu.partial import Pool
from hybrid_backend.kernels.operations import digest_kind

AGGREGATES = ("sum", "max", "softmax")  # in the order of the library's numbers


@lru_cache(maxsize=1)
def openmp_entry() -> int | None:
    """Address of ``GOMP_parallel`` in the OpenMP runtime that torch uses, None if it uses another kind of threads.

    Working in the engine's own threads means that no second set of threads competes with them for its cores. GNU's
    runtime has this function, and LLVM's and Intel's have it for compatibility.
    """
    candidates: list[str | None] = [None]  # preloaded, or linked into the program: this one wins for torch too
    torch_libraries = Path(torch.__file__).parent / "lib"
    with open("/proc/self/maps") as maps:
        loaded = {line.split()[-1] for line in maps if "omp" in line and line.split()[-1].startswith("/")}
    names = ("libgomp", "libiomp5", "libomp")
    mine = [path for path in sorted(loaded) if Path(path).name.startswith(names)]
    mine.sort(key=lambda path: torch_libraries not in Path(path).parents)
    for name in candidates + list(mine):
        try:
            function = C.CDLL(name).GOMP_parallel
        except (OSError, AttributeError):
            continue
        return C.cast(function, C.c_void_p).value
    return None


def decodes(heads: int, kv_heads: int, head_dim: int, page_size: int) -> bool:
    """Whether `Decoder` has kernels for a model of this shape, where the library is available."""
    sizes = head_dim in range(16, 257, 16) and page_size in range(16, 129, 16)
    return sizes and 1 <= heads // kv_heads <= 16


class Decoder:
    """The layers of one model over their KV memory; `begin` once per step, `layer` once per layer.

    Only one thread may use it at a time.

    Args:
        layers: per layer ``[pages, kv_heads, 2, page_size, head_dim]``; None for a layer that is not ours.
        digests: by layer ``[pages, kv_heads, 2, head_dim]``; a layer without them is exact, all its rows are dense.
        heads: query heads.
        quantized: by layer, the digests in bytes (`digests.quantized_like`); pages are then scored from them, except
            with ``aggregate="max"`` and with sums per head. Whole pages that this decoder did not fill itself must be
            brought up to date with `digests.quantize`.
        sinks: by layer ``[heads]`` fp32, contiguous: one more key of each head, of this logit and no value.
        scale: of the softmax; positive.
        bound: of a page's logits, see `digests.scores`.
        team: who works: ``"caller"`` alone, ``"openmp"`` (the engine's threads, see `openmp_entry`) or a `Pool`, whose
            threads then help the caller.
        threads: of the OpenMP team, default ``torch.get_num_threads()``.
    """

    def __init__(
        self,
        layers: Sequence[Tensor | None],
        digests: Mapping[int, Tensor],
        heads: int,
        scale: float,
        *,
        quantized: Mapping[int, Tensor] | None = None,
        sinks: Mapping[int, Tensor] | None = None,
        bound: float = 1.0,
        team: str | Pool = "openmp",
        threads: int | None = None,
        isa: str | None = None,
    ) -> None:
        first = next((layer for layer in layers if layer is not None), None)
        if first is None:
            raise ValueError("a decoder needs a layer")
        self._native = lib.native()
        quantized, sinks = quantized or {}, sinks or {}
        self._alive = (list(layers), dict(digests), dict(quantized), dict(sinks))
        _, kv_heads, _, page_size, dim = first.shape
        self.dtype = first.dtype
        self.shape = (heads, dim)
        self._layers = len(layers)
        self._kv_shape = (kv_heads, dim)
        self._page_size = page_size
        model = lib.model_of(first.dtype, kv_heads, heads, dim, page_size, scale, bound)
        self._handle = self._native.hb_decode_new(C.byref(model), len(layers), lib.isa_index(isa))
        if not self._handle:
            raise WorkerError(f"native CPU decoder: {lib.failure()}")
        for index, layer in enumerate(layers):
            if layer is None:
                continue
            if layer.dtype != first.dtype or layer.shape[1:] != first.shape[1:]:
                raise ValueError(f"layer {index} is unlike layer 0: {tuple(layer.shape)} {layer.dtype}")
            cache = lib.cache_of(layer)
            store = lib.digests_of(digests[index]) if index in digests else lib.DigestStore()
            kind = digest_kind(digests[index], dim) if index in digests else "minmax"
            if kind == "bytes" or (index in digests and kind == "minmax" and digests[index].dtype != layer.dtype):
                raise ValueError(
                    f"digests of layer {index} must be {layer.dtype} or codes, not {digests[index].dtype} "
                    f"{tuple(digests[index].shape)}"
                )
            rows = lib.bytes_of(quantized[index], kv_heads, dim) if index in quantized else lib.ByteStore()
            sink = sinks.get(index)
            if sink is not None and (sink.shape != (heads,) or sink.dtype != torch.float32 or not sink.is_contiguous()):
                raise ValueError(f"sinks of layer {index} must be contiguous fp32 [{heads}], not {sink}")
            lib.check(
                self._native.hb_decode_set_layer(
                    self._handle, index, C.byref(cache), C.byref(store), C.byref(rows),
                    None if sink is None else sink.data_ptr(),
                )
            )  # fmt: skip
        self._args = lib.LayerArgs()
        self._args_ref = C.byref(self._args)
        self._strides: object = None
        self._rows = 0
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
        """Start a step; everything is copied.

        Args:
            page_table: ``[rows, columns]`` int32 or int64 page ids; columns beyond a sequence are not read.
            seq_lens: ``[rows]`` tokens, with the one of this step.
            budgets: ``[rows]`` or ``[layers, rows]`` pages to attend; negative, or at least the row's: all.
            sinks, recent: first and last pages, always selected; the tail page always is.
            tokens: ``[rows]`` each row's position in q, k, v and out; None: 0, 1, 2...
            per_head, aggregate: as in `digests.scores`; with aggregate ``softmax`` each query head's scores become
                shares (their softmax over all pages that are scored) before they are added up.
            sequences: ``[rows]`` ids of the sequences, all different, until `forget`. With them and digests in bytes,
                long rows are searched in two levels: spans of 8 pages first, then the pages of the best spans.
            candidates: pages scored per page of budget in such a search; 0: all pages are scored.
            interval: tokens of a sequence between two looks of a layer at all pages, by their positions, layers in
                turn; between them a row selects among the best of the last look, four times the budget, and newer
                pages; with codes, at odd positions (position plus layer), among twice the budget, the best of the step
                before. 1: every step looks; more needs ``sequences``. A row that is new or whose budget has changed
                looks.
            skips: ``[rows]`` tokens at the start of each row's first page that are not attended, fewer than the page
                and the sequence have; None: none.
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
        lib.check(self._native.hb_decode_begin(self._handle, C.byref(step)))
        self._rows = rows

    def forget(self, sequence: int) -> None:
        """A sequence is gone; its id may be used again."""
        self._native.hb_decode_forget(self._handle, sequence)

    @property
    def span_bytes(self) -> int:
        """Memory that the digests of spans take, and the pages that looks have kept."""
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
            q: ``[tokens, heads, head_dim]``; k, v: ``[tokens, kv_heads, head_dim]``, or None if the pages (and digests)
                hold them already. All in the cache's dtype, ``[heads, head_dim]`` contiguous, any token stride.
            out: ``[tokens, heads, head_dim]``, the cache's dtype; written at the rows' tokens only.
            score_q: the query that selects pages, like q; None: q.
            lse: fp32 ``[rows, heads]``, contiguous, also written if given; the sinks are in it.

        Raises:
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
            self._strides = None  # what a refused call has set fits no other
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
        """Once for every new set of strides."""
        size = q.element_size()
        args = self._args
        named = {"q": q, "k": k, "v": v, "out": out, "score_q": score_q}
        for name, x in named.items():
            if x is None:
                continue
            shape = self._kv_shape if name in ("k", "v") else self.shape
            strides = (shape[1] if shape[0] > 1 else x.stride(1), 1)  # that of a single head says nothing
            if tuple(x.shape[1:]) != shape or x.dtype != self.dtype or x.stride()[1:] != strides:
                raise ValueError(
                    f"{name} must be {self.dtype} [tokens, {shape[0]}, {shape[1]}] with contiguous heads, not "
                    f"{x.dtype} {tuple(x.shape)} with strides {x.stride()}"
                )
            setattr(args, f"{name}_row_stride", x.stride(0) * size)

    @property
    def counts(self) -> Tensor:
        """Pages selected per row (and list) in the last layer: ``[rows]`` int32."""
        if not self._rows:
            return torch.empty(0, dtype=torch.int32)
        address = self._native.hb_decode_counts(self._handle)
        return torch.frombuffer((C.c_int32 * self._rows).from_address(address), dtype=torch.int32).clone()

    def selected(self, row: int, list_: int = 0) -> Tensor:
        """Logical pages that the last layer selected for a row (and KV head, with ``per_head``), ascending."""
        pages = C.c_void_p()
        count = self._native.hb_decode_selected(self._handle, row, list_, C.byref(pages))
        if not count or not pages.value:
            return torch.empty(0, dtype=torch.int32)
        return torch.frombuffer((C.c_int32 * count).from_address(pages.value), dtype=torch.int32).clone()

    def close(self) -> None:
        if self._handle is not None:
            self._native.hb_decode_free(self._handle)
            self._handle = None

    def __del__(self) -> None:
        if getattr(self, "_handle", None) is not None:
            self.close()
