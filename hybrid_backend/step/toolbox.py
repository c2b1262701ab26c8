"""What a method may call while a step is open: operations over the buffers of one layer."""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_backend.batch import ModelSpec
from hybrid_backend.config import HybridConfig
from hybrid_backend.kernels.operations import Selection
from hybrid_backend.step.buffers import StepBuffers
from hybrid_backend.step.counting import StepCounters
from hybrid_backend.step.cpu_attention import CpuAttention
from hybrid_backend.tiers import Tiers
from hybrid_backend.tiers.beside import beside
from hybrid_backend.tiers.state import StepInputs

Partials = tuple[Tensor, Tensor]
"""``(out, lse)`` of attention over some keys (fp32, natural logarithm), in one or several parts."""


class Toolbox:
    """The operations of the open step. Nothing here decides; `Method.lookahead` and `Method.attend` do."""

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
        self._config, self._model, self._tiers, self._buffers = config, model, tiers, buffers
        self._ops, self._cpu = tiers.operations, cpu_attention
        self.counting = counting
        self.shape, self.maps = buffers.shape, buffers.maps
        self.seq_lens = torch.empty(0, dtype=torch.int64)
        """``[rows]`` int64 on the host, of the rows of the open step."""
        self.is_captured = False
        """The layer that runs is part of a captured graph, which holds for any rows and sequence lengths."""
        self.output: Tensor | None = None
        """``[rows, heads, head_dim]`` where `merge` may write the layer's result; None: into a new tensor."""
        self._uses_workers = uses_workers
        self._is_resident = False
        self._selections: dict[int, tuple[Selection, Tensor]] = {}
        self._asked_layers: set[int] = set()
        on_gpu = tiers.device.type == "cuda"
        self._processors = torch.cuda.get_device_properties(tiers.device).multi_processor_count if on_gpu else 1
        self._copy_stream = torch.cuda.Stream(tiers.device) if on_gpu else None
        self._is_forked, self._copied = False, dict[int, torch.cuda.Event]()

    # --- for the driver ---

    def open(self, seq_lens: Tensor, is_resident: bool) -> None:
        """Begin a step whose rows have ``seq_lens`` tokens; ``is_resident``: frames hold all of their pages."""
        self.seq_lens, self._is_resident = seq_lens, is_resident

    def end_layer(self, layer: int) -> None:
        """Forget what was selected for a layer that has run."""
        self._selections.pop(layer, None)
        self._asked_layers.discard(layer)

    def join(self) -> None:
        """Let the step's stream wait for copies that were forked from it."""
        if self._is_forked and self._copy_stream is not None:
            torch.cuda.current_stream().wait_stream(self._copy_stream)
            self._is_forked = False

    def abandon(self) -> None:
        """Forget the open step. A copy may be under way into frames that another request is about to fill."""
        self.join()
        self._copied.clear()
        self._selections.clear()
        self._asked_layers.clear()

    # --- step inputs and buffers ---

    @property
    def buffers(self) -> StepBuffers:
        return self._buffers

    def inputs(self, rows: int) -> StepInputs:
        """Return the step's inputs of the first ``rows`` rows."""
        return self._buffers.inputs_of(rows)

    def counters(self, layer: int) -> Tensor:
        """Return ``[COUNTERS]`` int64, the counters of ``layer`` on the device tier."""
        return self._buffers.layers[layer].counters

    def has_digests(self, layer: int) -> bool:
        """Tell whether ``layer`` selects. Without digests a layer is exact and attends every page."""
        return self._tiers.has_digests(layer)

    def changes_residency(self, layer: int) -> bool:
        """Tell whether pages of ``layer`` take turns in its frames. A layer that attends every page keeps its pages."""
        shape = self.shape
        return shape.frames > 0 and self.has_digests(layer) and shape.least_budget < shape.columns

    # --- selection ---

    def selection(self, layer: int) -> Selection | None:
        """Return the selected pages of ``layer`` in this step; None if nothing was selected yet."""
        return self._selections[layer][0] if layer in self._selections else None

    def select(self, layer: int, q: Tensor) -> Selection:
        """Select the pages of ``layer`` with ``q`` ``[rows, heads, head_dim]`` and split them by residency."""
        inputs, buffers, selection = self.inputs(len(q)), self._buffers.layers[layer], self._config.selection
        if buffers.digests is None:
            scores = self._buffers.state.equal_scores[: len(q)]
        else:
            scores = self._ops.page_scores(
                q, buffers.digests, inputs.table, inputs.num_pages, self._buffers.budgets_of(layer, inputs),
                selection.aggregate, self.shape.lists > 1, selection.bound, self._model.scale, self._config.page_size,
            )  # fmt: skip
        mailbox = self._cpu.mailbox(layer) if self._uses_workers else None
        self._selections[layer] = self._split(layer, scores, buffers.counters, mailbox), scores
        return self._selections[layer][0]

    def _split(
        self, layer: int, scores: Tensor, counters: Tensor | None = None, mailbox: tuple[Tensor, Tensor] | None = None
    ) -> Selection:
        """Return the best pages by ``scores``, split by what is resident."""
        inputs, has_digests, config = self.inputs(len(scores)), self.has_digests(layer), self._config
        budgets = self._buffers.budgets_of(layer, inputs) if has_digests else inputs.num_pages
        return self._ops.select_pages(
            scores, inputs.num_pages, inputs.seq_lens, budgets, inputs.requests, self._buffers.layers[layer].frame_of,
            inputs.table, config.page_size, config.sinks, config.recent, self.shape.listed(has_digests)[1], counters,
            mailbox,
        )  # fmt: skip

    # --- the CPU workers ---

    def ask_cpu(self, layer: int, q: Tensor, pages: Tensor | None = None, counts: Tensor | None = None) -> None:
        """Let the CPU workers attend with ``q`` ``[rows, heads, head_dim]``; returns at once.

        Args:
            layer: index of the layer.
            q: the predicted or the true query.
            pages: ``[rows, lists, n]`` int32 host pages; None: the layer's context cache.
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
        """Tell whether the CPU workers attend for ``layer`` in this step already."""
        return layer in self._asked_layers

    def take_cpu(self, layer: int, rows: int) -> Partials | None:
        """Wait for the workers' partial of ``layer``; None if they were asked for nothing."""
        if layer in self._selections and not self.shape.frames:
            return None
        return self._cpu.take(layer, rows)

    # --- attention on the device tier ---

    def attend_resident(self, layer: int, q: Tensor) -> Partials:
        """Attend the selected pages that the device tier holds, in parts for `merge`."""
        selection, buffers = self._selections[layer][0], self._buffers.layers[layer]
        kv = buffers.host if buffers.frames is None else buffers.frames
        limit = self.shape.most_frames or self.shape.listed(self.has_digests(layer))[1]
        return self.attend(
            q, kv, selection.frames, selection.tokens, limit, self.seq_lens if self._is_resident else None
        )

    def attend_missing(self, layer: int, q: Tensor) -> Partials | None:
        """Attend the selected pages that no frame holds, where they lie in host memory; None without frames."""
        if not self.shape.frames:
            return None
        selection = self._selections[layer][0]
        tokens = selection.missing_listed * self._config.page_size  # whole pages: the growing page is resident
        host = self._buffers.layers[layer].host
        return self._ops.merge_partials(*self.attend(q, host, selection.missing, tokens, self.shape.columns))

    def attend(
        self, q: Tensor, kv: Tensor, ids: Tensor, tokens: Tensor, limit: int | None = None,
        host_tokens: Tensor | None = None,
    ) -> Partials:  # fmt: skip
        """Attend listed pages of any store (`Operations.paged_partial`).

        Args:
            q: ``[rows, heads, head_dim]``.
            kv: ``[pages, kv_heads, 2, page_size, head_dim]``.
            ids: ``[rows, lists, n]`` int32 pages of ``kv``.
            tokens: ``[rows, lists]`` int32 tokens to attend of each list.
            limit: pages that a list may hold; None: as many as it has room for.
            host_tokens: ``[rows]`` int64 on the host, the tokens of each row if all of its lists have as many.
        """
        if host_tokens is not None and self._tiers.decode is not None and not self.is_captured:
            return self._tiers.decode.attend(q, kv, ids, host_tokens)
        limit = ids.shape[2] if limit is None else limit
        parts = self._ops.parts_for(len(q), kv.shape[1], limit * self._config.page_size, self._processors)
        return self._ops.paged_partial(q, kv, ids, tokens, self._model.scale, parts)

    def merge(self, layer: int, parts: Partials, other: Partials | None, dtype: torch.dtype) -> Tensor:
        """Return ``[rows, heads, head_dim]``, the attention over all ``parts``, ``other`` and the layer's sinks.

        Partials are of whole rows, or of the KV heads of each row one after the other.
        """
        parts, other = self._of_rows(*parts), None if other is None else self._of_rows(*other)
        sinks = self._model.sink(layer)
        return self._ops.merge_partials(*parts, extra_partial=other, dtype=dtype, sinks=sinks, into=self.output)[0]

    def _of_rows(self, out: Tensor, lse: Tensor) -> Partials:
        heads = self._model.num_heads
        if out.shape[1] == heads:
            return out, lse
        return out.view(-1, heads, *out.shape[2:]), lse.view(-1, heads, *lse.shape[2:])

    # --- copies ---

    def recall(self, layer: int, at_once: bool = False) -> None:
        """Start to copy missing pages over the least important resident ones.

        Args:
            layer: index of the layer.
            at_once: in every row; else in rows whose recall is due. The pages become resident with the next step, or
                by `arrive`.
        """
        if not self.changes_residency(layer):
            return
        selection, scores = self._selections[layer]
        config, inputs, buffers = self._config, self.inputs(len(scores)), self._buffers.layers[layer]
        sinks, recent, budgets = config.sinks, config.recent, self._buffers.budgets_of(layer, inputs)
        if not self.shape.recalls:  # new pages still take the least important frames
            self._ops.note_scores(buffers.maps, scores, inputs.num_pages, budgets, inputs.requests, sinks, recent)
            return
        absent, counts = selection.absent, selection.missing_listed
        if scores.shape[1] > 1:  # a selection per KV head, but frames hold pages of all heads
            absent, counts, scores = self._ops.union_pages(absent, counts, scores)
        interval, phase = (1, 0) if at_once else (config.recall_interval(layer), layer)
        self._ops.plan_recall(
            buffers.maps, buffers.copies, scores, inputs.table, (selection.frames, selection.frames_listed),
            (absent, counts), inputs.num_pages, budgets, inputs.requests, inputs.generations, inputs.ages, sinks,
            recent, interval, phase, self._buffers.state.keep[buffers.position % 2], buffers.counters,
        )  # fmt: skip
        rows, frames = len(scores), self._tiers.frames.layers[layer]
        self.copy(layer, buffers.host, frames, buffers.copies.host_pages[:rows], buffers.copies.frames[:rows], at_once)

    def copy(
        self, layer: int, host: Tensor, frames: Tensor, host_pages: Tensor, frame_ids: Tensor, is_awaited: bool
    ) -> None:
        """Copy pages (`Operations.copy_pages`) in a stream beside the step's.

        Args:
            layer: index of the layer.
            host: store that is read.
            frames: store that is written.
            host_pages: int32 pages of ``host``.
            frame_ids: int32 pages of ``frames``, as many; -1: not copied.
            is_awaited: `await_copy` will be called; else the copy is done when the step is.
        """
        self._is_forked = self._copy_stream is not None
        with beside(self._copy_stream):
            self._ops.copy_pages(host, frames, host_pages, frame_ids)
            if is_awaited and self._copy_stream is not None:
                self._copied[layer] = self._copy_stream.record_event()

    def await_copy(self, layer: int) -> None:
        """Let the step's stream wait for the copy of ``layer``, and not for the copy of the next layer."""
        if self._copy_stream is not None:
            torch.cuda.current_stream().wait_event(self._copied.pop(layer))

    def arrive(self, layer: int) -> None:
        """Wait for a recall ``at_once`` and make its pages resident."""
        if not self.changes_residency(layer):
            return
        self.await_copy(layer)
        position = self._buffers.layers[layer].position
        one_layer = slice(position, position + 1)
        maps, copies = self.maps.of(one_layer), self._buffers.state.copies.of(one_layer)
        self._ops.commit_pages(maps, copies, self._tiers.frames.generation)
        scores = self._selections[layer][1]
        self._selections[layer] = self._split(layer, scores), scores
