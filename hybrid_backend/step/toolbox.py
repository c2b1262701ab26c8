"""The operations that a method may call while a step is open."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hybrid_backend.batch import ModelSpec
from hybrid_backend.config import HybridConfig
from hybrid_backend.kernels.operations import Selection
from hybrid_backend.step.buffers import StepBuffers
from hybrid_backend.step.counting import StepCounters
from hybrid_backend.step.cpu_attention import CpuAttention
from hybrid_backend.tiers import Tiers
from hybrid_backend.tiers.side_stream import side_stream


class PageLists(NamedTuple):
    """Lists of pages in one store that a layer attends (`Operations.paged_partial`)."""

    kv: Callable[[], Tensor]
    """Function that returns the store; it is called when the earlier stores of a result have been attended."""
    ids: Tensor | None
    """``[rows, 1 | lists, n]`` int32 pages of the store; None: all pages in their order."""
    tokens: Tensor
    """``[rows, lists]`` int32 tokens of each list."""
    limit: int
    """Largest number of pages in a list."""
    begins: Tensor | None = None
    """``[rows, lists]`` int32 tokens at the beginning of each list that are left out; None: 0."""


Partials = tuple[Tensor, Tensor]
"""``(out, lse)`` of attention over some keys: ``[rows, heads, parts, head_dim]`` and ``[rows, heads, parts]``.

The LSE is fp32 with a natural logarithm. Both tensors may lack the dimension of parts.
"""


class Toolbox:
    """Operations of the open step over the buffers of one layer, called by `Method.lookahead` and `Method.attend`."""

    def __init__(
        self,
        config: HybridConfig,
        model: ModelSpec,
        tiers: Tiers,
        buffers: StepBuffers,
        counting: StepCounters,
        cpu_attention: CpuAttention,
        uses_workers: bool,
    ) -> None:
        """Keep the buffers; ``uses_workers`` means that CPU workers attend selected pages that are not resident."""
        self._config, self._model, self._tiers = config, model, tiers
        self._ops, self._cpu = tiers.operations, cpu_attention
        self.buffers = buffers
        """Buffers of the steps."""
        self.inputs = buffers.inputs_of
        """Function that returns the step inputs of the first rows of a step (`StepBuffers.inputs_of`)."""
        self.counting = counting
        """Counters that a method may add to."""
        self.shape, self.maps = buffers.shape, buffers.maps
        self.seq_lens = torch.empty(0, dtype=torch.int64)
        """Sequence lengths of the open step's rows, ``[rows]`` int64 on the host."""
        self.is_captured = False
        """The running layer is captured in a CUDA graph, which is replayed for other rows and sequence lengths."""
        self.output: Tensor | None = None
        """``[rows, heads, head_dim]`` tensor for the result of `merge`; None: `merge` makes a new tensor."""
        self._uses_workers = uses_workers
        self._is_resident = False
        self._selections: dict[int, tuple[Selection, Tensor]] = {}
        """``(selection, scores)`` of each layer that has selected its pages in this step."""
        self._asked_layers: set[int] = set()
        on_gpu = tiers.device.type == "cuda"
        self._processors = torch.cuda.get_device_properties(tiers.device).multi_processor_count if on_gpu else 1
        self._copy_stream = torch.cuda.Stream(tiers.device) if on_gpu else None
        self._is_forked, self._copied = False, dict[int, torch.cuda.Event]()

    # --- called by the driver ---

    def open(self, seq_lens: Tensor, is_resident: bool) -> None:
        """Begin a step of rows with ``seq_lens`` tokens; ``is_resident``: frames hold all pages of all rows."""
        self.seq_lens, self._is_resident = seq_lens, is_resident

    def end_layer(self, layer: int) -> None:
        """Forget the selection of a layer that has run."""
        self._selections.pop(layer, None)
        self._asked_layers.discard(layer)

    def join(self) -> None:
        """Let the step's stream wait for all copies that this step has started in the copy stream."""
        if self._is_forked and self._copy_stream is not None:
            torch.cuda.current_stream().wait_stream(self._copy_stream)
            self._is_forked = False

    def abandon(self) -> None:
        """Forget the open step."""
        # A copy that still runs may write to frames that another request is about to fill.
        self.join()
        self._copied.clear()
        self._selections.clear()
        self._asked_layers.clear()

    # --- buffers ---

    def counters(self, layer: int) -> Tensor:
        """Return the counters of ``layer`` on the device tier, ``[COUNTERS]`` int64 (`kernels.operations.Counters`)."""
        return self.buffers.layers[layer].counters

    # --- selection ---

    def selection(self, layer: int) -> Selection | None:
        """Return the selected pages of ``layer`` in this step; None if the layer has not selected pages yet."""
        return self._selections[layer][0] if layer in self._selections else None

    def select(self, layer: int, q: Tensor) -> Selection:
        """Select the pages of ``layer`` with a query ``q`` ``[rows, heads, head_dim]``, and split them by residency.

        A layer without digests selects all pages. A row attends an earlier selection again in the same epoch (`Reuse`).
        """
        inputs, buffers, selection = self.inputs(q.shape[0]), self.buffers.layers[layer], self._config.selection
        if buffers.digests is None:
            scores = self.buffers.state.equal_scores[: q.shape[0]]
        else:
            scores = self._ops.page_scores(
                q, buffers.digests, inputs.table, inputs.num_pages, self.buffers.budgets_of(layer, inputs),
                selection.aggregate, self.shape.lists > 1, selection.bound, self._model.scale, self._config.page_size,
                reuse=buffers.reuse,
            )  # fmt: skip
        mailbox = self._cpu.mailbox(layer) if self._uses_workers else None
        self._selections[layer] = self._split(layer, scores, buffers.counters, mailbox), scores
        return self._selections[layer][0]

    def _split(
        self, layer: int, scores: Tensor, counters: Tensor | None = None, mailbox: tuple[Tensor, Tensor] | None = None
    ) -> Selection:
        """Select the pages with the highest ``scores`` and split them into resident and missing pages."""
        inputs, has_digests, config = self.inputs(scores.shape[0]), self._tiers.has_digests(layer), self._config
        buffers = self.buffers.layers[layer]
        budgets = self.buffers.budgets_of(layer, inputs) if has_digests else inputs.num_pages
        return self._ops.select_pages(
            scores, inputs.num_pages, inputs.seq_lens, budgets, inputs.requests, buffers.frame_of,
            inputs.table, config.page_size, config.sinks, config.recent, self.shape.list_shape(has_digests)[1],
            counters, mailbox, buffers.reuse,
        )  # fmt: skip

    # --- the CPU workers ---

    def ask_cpu(self, layer: int, q: Tensor, pages: Tensor | None = None, counts: Tensor | None = None) -> None:
        """Request a partial of ``layer`` from the CPU workers, without waiting for the result.

        Args:
            layer: index of the layer.
            q: predicted or true query ``[rows, heads, head_dim]``.
            pages: ``[rows, lists, n]`` int32 host pages; None: the pages of the layer's context cache.
            counts: ``[rows, lists]`` int32 pages in each list; None: the workers attend the selected pages that are
                not resident.
        """
        self._asked_layers.add(layer)
        if counts is not None:
            self._cpu.ask(layer, q, pages, counts)
        elif self.shape.frames:
            selection = self._selections[layer][0]
            self._cpu.ask(layer, q, selection.missing, selection.missing_listed, in_mailbox=True)

    def has_asked(self, layer: int) -> bool:
        """Tell whether `ask_cpu` was called for ``layer`` in this step."""
        return layer in self._asked_layers

    def take_cpu(self, layer: int, rows: int) -> Partials | None:
        """Wait for the CPU workers' partial of ``layer``; None if `ask_cpu` requested none."""
        if layer in self._selections and not self.shape.frames:
            return None
        return self._cpu.take(layer, rows)

    # --- attention on the device tier ---

    def attend_resident(self, layer: int, q: Tensor) -> Partials:
        """Attend the selected pages that are resident, or all selected pages if the device tier reads the host pool."""
        selection, buffers = self._selections[layer][0], self.buffers.layers[layer]
        kv = buffers.host if buffers.frames is None else buffers.frames
        limit = self.shape.max_frames or self.shape.list_shape(self._tiers.has_digests(layer))[1]
        return self.attend(
            q, kv, selection.frames, selection.tokens, limit, self.seq_lens if self._is_resident else None
        )

    def attend_missing(self, layer: int, q: Tensor) -> Partials | None:
        """Attend, on the device, the selected pages that are only in host memory.

        None: there are no frames, or `arrive` has made all selected pages resident.
        """
        if not self.shape.frames or self.buffers.evicts(layer):
            return None
        selection = self._selections[layer][0]
        # Missing pages are full: the page that grows is always resident.
        tokens = selection.missing_listed * self._config.page_size
        host = self.buffers.layers[layer].host
        return self._ops.merge_partials(*self.attend(q, host, selection.missing, tokens, self.shape.columns))

    def attend(
        self, q: Tensor, kv: Tensor, ids: Tensor, tokens: Tensor, limit: int | None = None,
        host_tokens: Tensor | None = None,
    ) -> Partials:  # fmt: skip
        """Attend listed pages of frames, host pool or another store (`Operations.paged_partial`).

        Args:
            q: ``[rows, heads, head_dim]``.
            kv: ``[pages, kv_heads, 2, page_size, head_dim]``.
            ids: ``[rows, lists, n]`` int32 pages of ``kv``.
            tokens: ``[rows, lists]`` int32 tokens to attend of each list.
            limit: largest number of pages in a list; None: ``n``.
            host_tokens: ``[rows]`` int64 tokens of each row, on the host, if all lists of a row are equal; FlashInfer
                can then attend, except in captured CUDA graphs. None: only the device knows the tokens.
        """
        if host_tokens is not None and self._tiers.decode is not None and not self.is_captured:
            return self._tiers.decode.attend(q, kv, ids, host_tokens)
        num_parts = self._num_parts(q, ids.shape[2] if limit is None else limit)
        return self._ops.paged_partial(q, kv, ids, tokens, self._model.scale, num_parts)

    def attend_stores(self, q: Tensor, stores: Sequence[PageLists]) -> Partials:
        """Attend lists of pages in several stores; the partials of all stores are the parts of one result.

        A merge of this result is one launch, whereas each store's own partials would need a launch more.
        """
        rows, heads, dim = q.shape
        counts = [self._num_parts(q, store.limit) for store in stores]
        out = q.new_empty(rows, heads, sum(counts), dim, dtype=torch.float32)
        lse, first = q.new_empty(rows, heads, sum(counts), dtype=torch.float32), 0
        for store, num_parts in zip(stores, counts, strict=True):
            into = out[:, :, first : first + num_parts], lse[:, :, first : first + num_parts]
            self._ops.paged_partial(
                q, store.kv(), store.ids, store.tokens, self._model.scale, num_parts, begins=store.begins, into=into
            )
            first += num_parts
        return out, lse

    def _num_parts(self, q: Tensor, limit: int) -> int:
        """Return the parts of a list of up to ``limit`` pages. A row of ``q`` has all heads or those of one KV head."""
        lists = q.shape[0] * q.shape[1] * self._model.num_kv_heads // self._model.num_heads
        return self._ops.parts_for(lists, 1, limit * self._config.page_size, self._processors)

    def merge(self, layer: int, partials: Partials, extra: Partials | None, dtype: torch.dtype) -> Tensor:
        """Merge the partials of a layer, and the model's attention sinks, to ``[rows, heads, head_dim]``.

        The first dimension of a partial counts rows, or the KV heads of all rows, row by row.

        Args:
            layer: index of the layer.
            partials: partials with a dimension of parts.
            extra: one more partial without that dimension, such as the CPU's; None: no other partial.
            dtype: dtype of the result.
        """
        partials, extra = self._by_row(*partials), None if extra is None else self._by_row(*extra)
        sinks = self._model.sink(layer)
        return self._ops.merge_partials(*partials, extra_partial=extra, dtype=dtype, sinks=sinks, into=self.output)[0]

    def _by_row(self, out: Tensor, lse: Tensor) -> Partials:
        """Join the KV heads of each row in one batch row."""
        heads = self._model.num_heads
        if out.shape[1] == heads:
            return out, lse
        return out.view(-1, heads, *out.shape[2:]), lse.view(-1, heads, *lse.shape[2:])

    # --- copies ---

    def recall(self, layer: int, at_once: bool = False) -> None:
        """Start to copy missing selected pages to the frames of the least important resident pages.

        The copied pages become resident when the next step begins, or when `arrive` is called.

        Args:
            layer: index of the layer.
            at_once: recall in every row; otherwise only in rows whose recall interval has passed.
        """
        if not self.buffers.evicts(layer):
            return
        selection, scores = self._selections[layer]
        config, inputs, buffers = self._config, self.inputs(scores.shape[0]), self.buffers.layers[layer]
        sinks, recent, budgets = config.sinks, config.recent, self.buffers.budgets_of(layer, inputs)
        # Importance is needed without recalls too, because a new page evicts the least important page.
        if not self.shape.recalls:
            self._ops.note_scores(buffers.maps, scores, inputs.num_pages, budgets, inputs.requests, sinks, recent)
            return
        absent, counts = selection.absent, selection.missing_listed
        # A frame holds a page of all KV heads, so selections per KV head are united.
        if scores.shape[1] > 1:
            absent, counts, scores = self._ops.union_pages(absent, counts, scores)
        interval, phase = (1, 0) if at_once else (config.recall_interval(layer), layer)
        self._ops.plan_recall(
            buffers.maps, buffers.copies, scores, inputs.table, (selection.frames, selection.frames_listed),
            (absent, counts), inputs.num_pages, budgets, inputs.requests, inputs.generations, inputs.ages, sinks,
            recent, interval, phase, self.buffers.state.keep[buffers.position % 2], buffers.counters,
        )  # fmt: skip
        rows, frames = scores.shape[0], self._tiers.frames.layers[layer]
        self.copy(layer, buffers.host, frames, buffers.copies.host_pages[:rows], buffers.copies.frames[:rows], at_once)

    def copy(
        self, layer: int, host: Tensor, frames: Tensor, host_pages: Tensor, frame_ids: Tensor, is_awaited: bool
    ) -> None:
        """Copy pages in the copy stream (`Operations.copy_pages`), while the step's stream goes on.

        Args:
            layer: index of the layer.
            host: store that is read.
            frames: store that is written.
            host_pages: int32 pages of ``host``.
            frame_ids: int32 pages of ``frames``, one for each host page; -1: the page is not copied.
            is_awaited: the method calls `await_copy` for this copy; otherwise the end of the step waits for the copy.
        """
        self._is_forked = self._copy_stream is not None
        with side_stream(self._copy_stream):
            self._ops.copy_pages(host, frames, host_pages, frame_ids)
            if is_awaited and self._copy_stream is not None:
                self._copied[layer] = self._copy_stream.record_event()

    def await_copy(self, layer: int) -> None:
        """Let the step's stream wait for the copy of ``layer``, but not for later copies."""
        if self._copy_stream is not None:
            torch.cuda.current_stream().wait_event(self._copied.pop(layer))

    def arrive(self, layer: int) -> None:
        """Wait for the recall of ``layer``, make its pages resident and select again."""
        if not self.buffers.evicts(layer):
            return
        self.await_copy(layer)
        position = self.buffers.layers[layer].position
        layer_slice = slice(position, position + 1)
        maps, copies = self.maps.of(layer_slice), self.buffers.state.copies.of(layer_slice)
        self._ops.commit_pages(maps, copies, self._tiers.frames.generation)
        scores = self._selections[layer][1]
        self._selections[layer] = self._split(layer, scores), scores
