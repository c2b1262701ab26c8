"""The decode step of all methods with a device tier of their own: on a CPU, on a GPU, and in a CUDA graph.

Between steps the host admits and releases requests and writes the step's inputs. Then, layer by layer, the method says
which operations run. The host decides nothing in them, and padding rows are rows without pages, so that a graph that is
captured once holds for every step.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from hybrid_backend.attention.quality import covered_tokens
from hybrid_backend.batch import DecodeRows, ModelSpec, PrefillRow, Step, StepFailure, whole_tokens
from hybrid_backend.config import HybridConfig
from hybrid_backend.errors import WorkerError
from hybrid_backend.kernels.cpu import STEPS
from hybrid_backend.observe.stats import Stats
from hybrid_backend.step.buffers import StepBuffers
from hybrid_backend.step.counting import StepCounters
from hybrid_backend.step.cpu_attention import CpuAttention, MailboxCpuAttention, PoolCpuAttention
from hybrid_backend.step.inputs import InputWriter
from hybrid_backend.step.method import (
    FixedFrames,
    HeadLoads,
    KnowsAttended,
    Method,
    WaitingMethod,
    WaitingRows,
    factors_of,
    looks_ahead,
    step_shape,
)
from hybrid_backend.step.quality import watch
from hybrid_backend.step.residency import FixedResidency, MappedResidency, Residency
from hybrid_backend.step.samples import make_samples, watched
from hybrid_backend.step.toolbox import Toolbox
from hybrid_backend.tiers import Tiers
from hybrid_backend.tiers.beside import beside
from hybrid_backend.workers import WorkerPool


class StepDriver:
    """Decode steps of one rank."""

    def __init__(
        self,
        method: Method,
        config: HybridConfig,
        model: ModelSpec,
        tiers: Tiers,
        workers: WorkerPool,
        stats: Stats,
    ) -> None:
        self._method, self._config, self._model, self._tiers = method, config, model, tiers
        kind, sparse = type(method), tiers.layout.selecting_layers(config, model)
        pages = len(tiers.host.layers[tiers.layout.full_layers(model)[0]])
        shape = step_shape(kind, config, model, tiers.layout, pages, tiers.frames.requests)
        self.buffers = StepBuffers(config, model, tiers, shape, factors_of(kind, config, sparse))
        self._looks_ahead = looks_ahead(kind, config)
        self._partial_rows: list[int] = []
        self._watch = watch(config, stats, sparse, shape.most_budget)
        self.waiting: WaitingRows | None = None
        self._residency: Residency | None = None
        if isinstance(method, WaitingMethod):
            self.waiting, self._residency = method.open_rows(self.buffers, workers)
        elif isinstance(method, FixedFrames):
            self._residency = FixedResidency(tiers, self.buffers.maps, method.frame_of, method.held_pages)
        elif shape.frames:
            maps = {layer: buffers.maps for layer, buffers in self.buffers.layers.items()}
            self._residency = MappedResidency(config, model, tiers, self.buffers.state, maps)
        on_gpu = tiers.device.type == "cuda"
        # The selection of the next layer runs beside this layer: few programs, which wait for memory. The CPU waits for
        # them, so they have priority.
        self._lookahead_stream = torch.cuda.Stream(tiers.device, priority=-1) if on_gpu else None
        # By layer: when the selection is done, and the query, whose memory must not be reused until then.
        self._lookaheads = dict[int, tuple[torch.cuda.Event, Tensor]]()
        self.cpu_attention: CpuAttention = (
            MailboxCpuAttention(config, model, tiers, workers, self.buffers)
            if tiers.asks_by_itself and method.uses_workers and self.buffers.layers
            else PoolCpuAttention(config, model, tiers, workers, self.buffers)
        )
        pages_per_load = method.pages_per_load if isinstance(method, HeadLoads) else 0
        asks_cpu = method.uses_workers or self.waiting is not None
        self._counting = StepCounters(stats, model, tiers, self.buffers, asks_cpu, pages_per_load)
        self.toolbox = Toolbox(
            config, model, tiers, self.buffers, self._counting, self.cpu_attention, method.uses_workers
        )
        indices = {layer: buffers.position for layer, buffers in self.buffers.layers.items()}
        self.samples = make_samples(
            config, model, tiers, stats, self.buffers, indices, self.cpu_attention.failure, self._covered,
            attends_selection=method.attends_selection, has_predictions=self._looks_ahead,
        )  # fmt: skip
        self._inputs = InputWriter(config, tiers, self.buffers)

    # --- between steps, on the host ---

    def begin(self, step: Step) -> None:
        """Open a step that has decode rows. Waits for copies of requests that begin to decode, not for the device."""
        rows = step.decode
        assert rows is not None
        rows.check_one_query()
        self.abandon()
        indices = [self._admit(rows, r) for r in range(rows.count)]
        self._write_inputs(step.number + 1, rows, indices)
        if self._method.uses_workers:
            self.cpu_attention.begin(rows.count)
        if self._residency is not None:
            self._tiers.copied_pages += self._residency.open(rows, indices)
        if self._tiers.whole.stores:
            layers = self._tiers.whole.stores
            self._counting.count_tokens(int(rows.seq_lens.sum()), int(rows.num_pages.sum()), layers=layers)
        self._method.begin_decode(self.toolbox, rows)

    def _admit(self, rows: DecodeRows, r: int) -> int:
        """Return the index of the row's request, which gets frames if it begins to decode."""
        frames, request_id = self._tiers.frames, rows.request_ids[r]
        index, pages = frames.index(request_id), int(rows.num_pages[r])
        if index is None:
            index = frames.allocate(request_id)
            if self._residency is not None:
                table = rows.page_table[r : r + 1, :pages].int()
                self._tiers.copied_pages += self._residency.admit(request_id, index, table, pages)
        self._inputs.pages_of_index[index] = pages
        return index

    def _write_inputs(self, number: int, rows: DecodeRows, indices: list[int]) -> None:
        budgets = self._method.budgets(rows)
        if self._watch is not None:
            budgets = watched(self._watch, self.samples, budgets, rows)
        leaves_out = judged = budgets < rows.num_pages
        if self._watch is not None:  # judges by all samples, so rows with a budget of their own do not count
            judged = leaves_out & ~rows.has_own_budget
        self._partial_rows = leaves_out.nonzero().flatten().tolist()
        sampled = self.samples.begin(number, rows, judged.nonzero().flatten().tolist(), indices)
        self._inputs.write(number, rows, indices, budgets, sampled)
        is_resident = not self._partial_rows and int(rows.num_pages.max()) <= self.buffers.shape.frames
        self.toolbox.open(rows.seq_lens, is_resident)

    def abandon(self) -> None:
        """Forget the open step, whose forward may have raised."""
        for layer in list(self._lookaheads):
            self._await_lookahead(layer)
        self.toolbox.abandon()
        self.cpu_attention.abandon()
        self.samples.abandon()

    def idle(self) -> None:
        """Make all rows padding until a step begins. The step number stays, so that no wait of a graph blocks."""
        self._inputs.clear()
        if self.waiting is not None:
            self.waiting.idle()

    def failure(self, step: Step) -> StepFailure | None:
        """Return what went wrong for the decode rows of a step that the device has passed."""
        rows, number = step.decode, step.number + 1
        if rows is None:
            return None
        error: WorkerError | None = self.cpu_attention.failure(number)
        failed_rows = list(range(rows.count))
        if error is None and self.waiting is not None:
            errors = self.waiting.failures(number, [self._tiers.frames.index(name) for name in rows.request_ids])
            error, failed_rows = next(iter(errors.values()), None), list(errors)
        if error is None:
            return None
        written = self._inputs.written_pages[number % STEPS].tolist()
        return StepFailure(error, [rows.request_ids[r] for r in failed_rows], [written[r] for r in failed_rows])

    def unfinished(self, step: Step) -> list[str]:
        """Return the requests of a step that yield no token yet; waits for the device where there may be any."""
        rows = step.decode
        if rows is None or self.waiting is None or not self.waiting.may_park:
            return []
        indices = self._tiers.frames.indices(rows.request_ids)
        return [rows.request_ids[r] for r in self.waiting.unfinished(step.number + 1, rows, indices)]

    def holds(self, request_id: str) -> bool:
        """Tell whether the request decodes already, so that nothing is copied when its next step begins."""
        return self._tiers.frames.index(request_id) is not None

    def release(self, request_id: str) -> None:
        """Forget a request that is gone, or whose pages are about to change."""
        index = self._tiers.frames.release(request_id)
        if index is not None:
            self._inputs.release(index)
            if self.waiting is not None:
                self.waiting.release(index)
        if self._residency is not None:
            self._residency.release(request_id, index)

    def saw_prompt(self, layer: int, row: PrefillRow, q: Tensor) -> None:
        """Take note of a prompt chunk that was attended in ``layer``."""
        if self._residency is not None:
            self._residency.saw_prompt(layer, row, q)

    # --- the step, layer by layer ---

    def layer_input(self, layer: int, step: Step, hidden: Tensor, residual: Tensor | None) -> None:
        """Restore rows that waited at this layer in ``hidden`` and ``residual`` ``[tokens, hidden]``."""
        if step.decode is None or self.waiting is None or not (self.waiting.may_park or step.is_captured):
            return
        self.waiting.layer_input(layer, step.decode, hidden, residual)

    def wants_lookahead(self, layer: int, step: Step) -> bool:
        """Tell whether ``layer`` needs a predicted query; in graphs the answer is the same for every step."""
        if not self._looks_ahead or not self._config.is_predicted(layer):
            return False
        if step.is_captured or self._tiers.asks_by_itself or step.decode is None:
            return True
        return bool(self._partial_rows) or self._config.is_sampled(step.number, layer)

    def lookahead(self, layer: int, step: Step, q: Tensor) -> None:
        """Start the work of ``layer`` with its predicted query ``[rows, heads, head_dim]``."""
        q = q.contiguous()
        self.samples.keep(layer, step, q)
        with beside(self._lookahead_stream):
            self._method.lookahead(self.toolbox, layer, q)
            if self._lookahead_stream is not None:
                self._lookaheads[layer] = self._lookahead_stream.record_event(), q

    def decode(self, layer: int, step: Step, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """Store the decode rows' tokens and attend; other tokens of ``out`` are not touched.

        Args:
            layer: index of a layer with full attention.
            step: the open step.
            q: ``[tokens, heads, head_dim]`` of the batch.
            k: ``[tokens, kv_heads, head_dim]``.
            v: the same shape as ``k``.
            out: the same shape as ``q``.
        """
        rows, toolbox = step.decode, self.toolbox
        assert rows is not None
        toolbox.is_captured = step.is_captured
        q, k, v = rows.gather(q).contiguous(), *(whole_tokens(rows.gather(x)) for x in (k, v))
        toolbox.output = out[: rows.count] if rows.whole_batch and out.dtype == q.dtype else None
        is_whole = layer not in self.buffers.layers
        result = self._decode_whole(layer, q, k, v) if is_whole else self._decode(layer, q, k, v)
        self.samples.take(layer, step, q, toolbox.selection(layer))
        toolbox.end_layer(layer)
        if layer == self.buffers.full_layers[-1]:
            self._end_step()
        if result is toolbox.output:
            return
        if rows.whole_batch:
            out[: rows.count] = result
        else:
            out.index_copy_(0, rows.tokens.to(out.device), result.to(out.dtype))

    def _decode(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        inputs, buffers = self.buffers.inputs_of(len(q)), self.buffers.layers[layer]
        self._await_lookahead(layer)  # the lookahead reads digests that the new tokens change
        pages = inputs.pages if self.waiting is None else self.waiting.stored(inputs.pages)
        self._tiers.operations.append_tokens(
            k, v, buffers.host, pages, inputs.positions, buffers.frames, inputs.requests, buffers.frame_of,
            buffers.digests,
        )  # fmt: skip
        self._tiers.append_heads(layer, pages, inputs.positions, k, v)
        return self._method.attend(self.toolbox, layer, q)

    def _await_lookahead(self, layer: int) -> None:
        if layer in self._lookaheads:
            torch.cuda.current_stream().wait_event(self._lookaheads.pop(layer)[0])

    def _decode_whole(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store and attend in a layer that lies on the device tier whole."""
        inputs, whole, toolbox = self.buffers.inputs_of(len(q)), self._tiers.whole, self.toolbox
        host = self._tiers.host.views[layer]
        self._tiers.operations.append_tokens(k, v, host, inputs.pages, inputs.positions)
        whole.append(layer, inputs.pages, inputs.positions, k, v)
        ids, tokens = inputs.table[:, None], inputs.seq_lens[:, None]
        parts = toolbox.attend(q, whole.stores[layer], ids, tokens, host_tokens=toolbox.seq_lens)
        return toolbox.merge(layer, parts, None, q.dtype)

    def _end_step(self) -> None:
        """Join what was forked from the step's stream, and let the host read the counters."""
        self.toolbox.join()
        if self.waiting is not None:
            self.waiting.end(self.buffers.inputs.number)
        self._counting.publish()

    # --- what it holds ---

    def count(self) -> None:
        """Bring the counters up to date, as far as the device has come."""
        self.samples.count()
        self._counting.count()

    def _covered(self, layer: int, rows: DecodeRows, r: int) -> Tensor | None:
        """Return ``[lists, tokens]`` bool: tokens that row ``r`` attended in ``layer``; None: all of them."""
        if isinstance(self._method, KnowsAttended):
            return self._method.covered(layer, rows, r)
        selection = self.toolbox.selection(layer)
        if selection is None or not self._tiers.has_digests(layer):
            return None
        is_listed = torch.arange(selection.pages.shape[2]) < selection.pages_listed[r, :, None]
        pages = selection.pages[r].long().masked_fill(~is_listed, -1)
        return covered_tokens(pages, int(rows.seq_lens[r]), self._config.page_size)

    def gauges(self) -> dict[str, float]:
        """Return gauges by the name of a metric."""
        gauges = {} if self._watch is None else self._watch.gauges()
        return gauges if self.waiting is None else gauges | self.waiting.gauges()

    @property
    def resident_pages(self) -> int:
        """Frames that hold a page, or are about to, over all layers.

        The host knows them without the device: a request leaves no frame empty while it has pages to fill it.
        """
        if self._residency is not None and (shared := self._residency.shared_pages) is not None:
            return shared * len(self._tiers.frames.layers)
        sizes = Counter(buffers.maps.size for buffers in self.buffers.layers.values())
        pages_of_requests = self._inputs.pages_of_index
        return sum(layers * min(pages, size) for size, layers in sizes.items() for pages in pages_of_requests)

    @property
    def device_bytes(self) -> int:
        return self.buffers.state.nbytes + (0 if self.waiting is None else self.waiting.device_bytes)

    @property
    def host_bytes(self) -> int:
        waiting = 0 if self.waiting is None else self.waiting.host_bytes
        return self.cpu_attention.host_bytes + waiting + self.samples.host_bytes

    def close(self) -> None:
        """Stop threads and give native memory back."""
        self.samples.close()
        self.cpu_attention.close()
        if self.waiting is not None:
            self.waiting.close()
