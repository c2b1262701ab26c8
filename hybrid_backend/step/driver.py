"""The decode step of all methods that do not attend in place: on a CPU, on a GPU, and in a CUDA graph.

Between steps the host admits and releases requests and writes the step inputs. Then the method launches the same
operations for each layer in every step. The operations read the step inputs on the device, and a padding row has no
pages. A CUDA graph is therefore captured once and replayed for every step.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from hybrid_backend.attention.quality import covered_tokens
from hybrid_backend.batch import DecodeRows, ModelSpec, Step, StepFailure, whole_tokens
from hybrid_backend.config import HybridConfig
from hybrid_backend.kernels.cpu import STEPS
from hybrid_backend.observe.stats import Stats
from hybrid_backend.step.admission import Filling
from hybrid_backend.step.buffers import StepBuffers
from hybrid_backend.step.counting import StepCounters
from hybrid_backend.step.cpu_attention import CpuAttention, MailboxCpuAttention, PoolCpuAttention
from hybrid_backend.step.inputs import InputWriter
from hybrid_backend.step.method import (
    AttendsPrompts,
    FixedFrames,
    HeadLoads,
    KnowsAttended,
    Method,
    TakesWorkers,
    WaitingMethod,
    WaitingRows,
    factors_of,
    looks_ahead,
    step_shape,
)
from hybrid_backend.step.quality import watch
from hybrid_backend.step.residency import FixedResidency, MappedResidency, Residency
from hybrid_backend.step.samples import BoxSamples, HostSamples, Samples, sampled_layers, watched
from hybrid_backend.step.toolbox import Toolbox
from hybrid_backend.tiers import Tiers
from hybrid_backend.tiers.side_stream import side_stream
from hybrid_backend.workers import WorkerPool


class StepDriver:
    """Runs the decode steps of one rank with a `Method`."""

    def __init__(
        self,
        method: Method,
        config: HybridConfig,
        model: ModelSpec,
        tiers: Tiers,
        workers: WorkerPool,
        stats: Stats,
    ) -> None:
        """Allocate the buffers of the decode steps."""
        self._method, self._config, self._model, self._tiers = method, config, model, tiers
        kind, sparse = type(method), tiers.layout.selecting_layers(config, model)
        pages = len(tiers.host.layers[tiers.layout.full_layers(model)[0]])
        shape = step_shape(kind, config, model, tiers.layout, pages, tiers.frames.requests)
        self.buffers = StepBuffers(config, model, tiers, shape, factors_of(kind, config, sparse))
        self._looks_ahead = looks_ahead(kind, config)
        self._sparse_rows: list[int] = []
        """Rows of the open step that leave pages out."""
        self._watch = watch(config, stats, sparse, shape.max_budget)
        self.waiting: WaitingRows | None = None
        """Rows that may wait for the CPU from one step to the next; None: the method never lets rows wait."""
        self.residency: Residency | None = None
        if isinstance(method, WaitingMethod):
            self.waiting, self.residency = method.open_rows(self.buffers, workers)
        else:
            self.residency = _residency(method, config, model, tiers, self.buffers)
        if isinstance(method, TakesWorkers):
            method.take_workers(workers)
        on_gpu = tiers.device.type == "cuda"
        # The selection of the next layer runs in a stream of its own, while this layer computes. The CPU workers wait
        # for the selection, so the stream has priority.
        self._lookahead_stream = torch.cuda.Stream(tiers.device, priority=-1) if on_gpu else None
        self._lookaheads = dict[int, tuple[torch.cuda.Event, Tensor]]()
        """Event at the end of each layer's lookahead, and the query, whose memory stays allocated until that event."""
        self.cpu_attention: CpuAttention = (
            MailboxCpuAttention(config, model, tiers, workers, self.buffers)
            if tiers.is_async and method.uses_workers and self.buffers.layers
            else PoolCpuAttention(config, model, tiers, workers, self.buffers)
        )
        pages_per_load = method.pages_per_load if isinstance(method, HeadLoads) else 0
        asks_cpu = method.uses_workers or self.waiting is not None
        self._counting = StepCounters(stats, model, tiers, self.buffers, asks_cpu, pages_per_load)
        self.toolbox = Toolbox(
            config, model, tiers, self.buffers, self._counting, self.cpu_attention, method.uses_workers
        )
        self.samples = self._make_samples(stats)
        self._inputs = InputWriter(config, tiers, self.buffers)

    def _make_samples(self, stats: Stats) -> Samples:
        """Return the samples of this device tier. A GPU samples only methods that attend the selected pages."""
        config, model, tiers = self._config, self._model, self._tiers
        can_sample = tiers.is_async and self._method.attends_selection
        layers = sampled_layers(config, model, tiers.layout) if can_sample else []
        if not layers:
            return HostSamples(config, model, tiers, stats, self._covered)
        failure = self.cpu_attention.failure
        return BoxSamples(config, model, tiers, stats, self.buffers, layers, self._looks_ahead, failure)

    # --- between steps, on the host ---

    def begin(self, step: Step) -> None:
        """Open a step that has decode rows, and admit the requests that begin to decode."""
        rows = step.decode
        assert rows is not None
        rows.check_one_query()
        self.abandon()
        indices = [self._admit(rows, r) for r in range(rows.count)]
        self._write_inputs(step.number + 1, rows, indices)
        if self._method.uses_workers:
            self.cpu_attention.begin(rows.count)
        if self.residency is not None:
            self._tiers.copied_pages += self.residency.open(rows, indices)
            self.buffers.awaited_fills.begin()
        if self._tiers.whole.stores:
            layers = self._tiers.whole.stores
            self._counting.count_tokens(int(rows.seq_lens.sum()), int(rows.num_pages.sum()), layers=layers)
        self._method.begin_decode(self.toolbox, rows)

    def _admit(self, rows: DecodeRows, r: int) -> int:
        """Return the index of the request of row ``r``, after admitting the request if it begins to decode."""
        frames, request_id = self._tiers.frames, rows.request_ids[r]
        index, pages = frames.index(request_id), int(rows.num_pages[r])
        if index is None:
            index = frames.allocate(request_id)
            if self.residency is not None:
                table = rows.page_table[r : r + 1, :pages].int()
                self._tiers.copied_pages += self.residency.admit(request_id, index, table, int(rows.seq_lens[r]))
                if self.residency.lacks(index):
                    self._inputs.defer_recall(index)
        self._inputs.pages_of_index[index] = pages
        return index

    def _write_inputs(self, number: int, rows: DecodeRows, indices: list[int]) -> None:
        """Write budgets, sampled rows and all other inputs of step ``number`` to the device tier."""
        budgets = self._method.budgets(rows)
        if self._watch is not None:
            budgets = watched(self._watch, self.samples, budgets, rows)
        leaves_out = judged = budgets < rows.num_pages
        # The watch averages all samples, so a row whose request asked for its own budget must not be sampled.
        if self._watch is not None:
            judged = leaves_out & ~rows.has_own_budget
        self._sparse_rows = leaves_out.nonzero().flatten().tolist()
        sampled = self.samples.begin(number, rows, judged.nonzero().flatten().tolist(), indices)
        self._inputs.write(number, rows, indices, budgets, sampled)
        is_resident = not self._sparse_rows and int(rows.num_pages.max()) <= self.buffers.shape.frames
        if self.residency is not None and any(map(self.residency.lacks, indices)):
            is_resident = False
        self.toolbox.open(rows.seq_lens, is_resident)

    def abandon(self) -> None:
        """Cancel the work of the open step, whose forward pass may have raised an error."""
        for layer in list(self._lookaheads):
            self._await_lookahead(layer)
        self.toolbox.abandon()
        self.cpu_attention.abandon()
        self.samples.abandon()

    def idle(self) -> None:
        """Make all rows padding rows until a step begins."""
        self._inputs.clear()
        if self.waiting is not None:
            self.waiting.idle()

    def failure(self, step: Step) -> StepFailure | None:
        """Return the error of the decode rows of a step that the device has finished, if any."""
        rows, number = step.decode, step.number + 1
        if rows is None:
            return None
        indices = [self._tiers.frames.index(name) for name in rows.request_ids]
        error, failed_rows = self.cpu_attention.failure(number), list(range(rows.count))
        if error is None:
            error, failed_rows = self.buffers.awaited_fills.failure(number, rows.request_ids, indices)
        if error is None and self.waiting is not None:
            errors = self.waiting.failures(number, indices)
            error, failed_rows = next(iter(errors.values()), None), list(errors)
        if error is None:
            return None
        # The queries after a missing partial are wrong, and so are the selections that they made.
        self._inputs.select_again(indices)
        written = self._inputs.written_pages[number % STEPS].tolist()
        return StepFailure(error, [rows.request_ids[r] for r in failed_rows], [written[r] for r in failed_rows])

    def unfinished(self, step: Step) -> list[str]:
        """Return the requests of a step that yield no token yet. The call waits for the device if rows may wait."""
        rows = step.decode
        if rows is None or self.waiting is None or not self.waiting.may_park:
            return []
        indices = self._tiers.frames.indices(rows.request_ids)
        return [rows.request_ids[r] for r in self.waiting.unfinished(step.number + 1, rows, indices)]

    def holds(self, request_id: str) -> bool:
        """Tell whether the request has decoded before, so that its next step copies nothing to the device tier."""
        return self._tiers.frames.index(request_id) is not None

    def release(self, request_id: str) -> None:
        """Forget a request that ended or whose pages are about to change. Unknown ids are ignored."""
        index = self._tiers.frames.release(request_id)
        if index is not None:
            self._inputs.release(index)
            self.buffers.awaited_fills.release(index)
            if self.waiting is not None:
                self.waiting.release(index)
        if self.residency is not None:
            self.residency.release(request_id, index)

    # --- the step, layer by layer ---

    def layer_input(self, layer: int, step: Step, hidden: Tensor, residual: Tensor | None) -> None:
        """Restore, in ``hidden`` and ``residual`` ``[tokens, hidden]``, the rows that waited at this layer."""
        if step.decode is None or self.waiting is None or not (self.waiting.may_park or step.is_captured):
            return
        self.waiting.layer_input(layer, step.decode, hidden, residual)

    def wants_lookahead(self, layer: int, step: Step) -> bool:
        """Tell whether ``layer`` needs a predicted query. With CUDA graphs the answer is the same in every step."""
        if not self._looks_ahead or not self._config.is_predicted(layer):
            return False
        if step.is_captured or self._tiers.is_async or step.decode is None:
            return True
        return bool(self._sparse_rows) or self._config.is_sampled(step.number, layer)

    def lookahead(self, layer: int, step: Step, q: Tensor) -> None:
        """Start the selection of ``layer`` with its predicted query ``q`` ``[rows, heads, head_dim]``."""
        q = q.contiguous()
        self.samples.keep(layer, step, q)
        with side_stream(self._lookahead_stream):
            self._method.lookahead(self.toolbox, layer, q)
            if self._lookahead_stream is not None:
                self._lookaheads[layer] = self._lookahead_stream.record_event(), q

    def decode(self, layer: int, step: Step, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """Store K and V of the decode rows of a batch and write their attention to ``out`` (`Executor.decode`)."""
        rows, toolbox = step.decode, self.toolbox
        assert rows is not None
        toolbox.is_captured = step.is_captured
        q, k, v = rows.gather(q).contiguous(), *(whole_tokens(rows.gather(x)) for x in (k, v))
        toolbox.output = out[: rows.count] if rows.whole_batch and out.dtype == q.dtype else None
        has_buffers = layer in self.buffers.layers
        result = self._decode(layer, q, k, v) if has_buffers else self._decode_on_device(layer, q, k, v)
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
        """Store K and V of the decode rows in a layer that the method attends, and return the attention."""
        inputs, buffers = self.buffers.inputs_of(q.shape[0]), self.buffers.layers[layer]
        # The lookahead reads the digests that `append_tokens` changes.
        self._await_lookahead(layer)
        pages = inputs.pages if self.waiting is None else self.waiting.stored(len(q))
        self._tiers.operations.append_tokens(
            k, v, buffers.host, pages, inputs.positions, buffers.frames, inputs.requests, buffers.frame_of,
            buffers.digests, awaited=buffers.awaited,
        )  # fmt: skip
        self._tiers.append_heads(layer, pages, inputs.positions, k, v)
        return self._method.attend(self.toolbox, layer, q)

    def _await_lookahead(self, layer: int) -> None:
        """Let the step's stream wait for the lookahead of ``layer``."""
        if layer in self._lookaheads:
            torch.cuda.current_stream().wait_event(self._lookaheads.pop(layer)[0])

    def _decode_on_device(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store K and V of the decode rows in a layer whose whole KV is on the device, and return the attention."""
        inputs, whole, toolbox = self.buffers.inputs_of(q.shape[0]), self._tiers.whole, self.toolbox
        host = self._tiers.host.views[layer]
        self._tiers.operations.append_tokens(k, v, host, inputs.pages, inputs.positions)
        whole.append(layer, inputs.pages, inputs.positions, k, v)
        ids, tokens = inputs.table[:, None], inputs.seq_lens[:, None]
        partials = toolbox.attend(q, whole.stores[layer], ids, tokens, host_tokens=toolbox.seq_lens)
        return toolbox.merge(layer, partials, None, q.dtype)

    def _end_step(self) -> None:
        """Join the copy stream with the step's stream, and publish the counters to the host."""
        self.toolbox.join()
        if self.waiting is not None:
            self.waiting.end(self.buffers.inputs.number)
        self._counting.publish()

    # --- counters and memory ---

    def count(self) -> None:
        """Bring the counters up to date, without waiting for the device."""
        self.samples.count()
        self._counting.count()

    def _covered(self, layer: int, rows: DecodeRows, r: int) -> Tensor | None:
        """Return the tokens that row ``r`` attended in ``layer``, ``[lists, tokens]`` bool; None: all tokens."""
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
        """Pages in frames, summed over requests and layers.

        The host computes the number without the device: a request fills its frames as long as it has pages.
        """
        if self.residency is not None and (shared := self.residency.shared_pages) is not None:
            return shared * len(self._tiers.frames.layers)
        sizes = Counter(buffers.maps.size for buffers in self.buffers.layers.values())
        pages_of_requests = self._inputs.pages_of_index
        return sum(layers * min(pages, size) for size, layers in sizes.items() for pages in pages_of_requests)

    @property
    def device_bytes(self) -> int:
        """Device memory of the decode steps' buffers, in bytes."""
        return self.buffers.state.nbytes + (0 if self.waiting is None else self.waiting.device_bytes)

    @property
    def host_bytes(self) -> int:
        """Host memory of mailboxes, waiting rows and samples, in bytes."""
        waiting = 0 if self.waiting is None else self.waiting.host_bytes
        return self.cpu_attention.host_bytes + waiting + self.samples.host_bytes

    def close(self) -> None:
        """Stop threads and free native memory."""
        self.samples.close()
        self.cpu_attention.close()
        if self.waiting is not None:
            self.waiting.close()


def _residency(
    method: Method, config: HybridConfig, model: ModelSpec, tiers: Tiers, buffers: StepBuffers
) -> Residency | None:
    """Return what decides the frames of the pages of a method whose rows never wait; None: there are no frames."""
    if isinstance(method, FixedFrames):
        keeps_prompts = not isinstance(method, AttendsPrompts)
        return FixedResidency(tiers, buffers, method.frame_of, method.held_pages, keeps_prompts)
    if not buffers.shape.frames:
        return None
    fillings = {layer: _filling(method, buffers, layer) for layer in buffers.layers}
    is_guessing = looks_ahead(type(method), config) and config.lookahead.partial_query == "predicted"
    guessed = [layer for layer in fillings if is_guessing and method.uses_workers and config.is_predicted(layer)]
    return MappedResidency(config, model, tiers, buffers, fillings, guessed)


def _filling(method: Method, buffers: StepBuffers, layer: int) -> Filling:
    """Return what becomes of pages that a request does not find on the device when it begins to decode."""
    if not method.attends_selection:
        return "at once"  # The method attends a window that it expects in the frames.
    if not method.uses_workers and buffers.evicts(layer):
        return "recall"  # The device attends all selected pages itself, and the method recalls those it selects.
    return "later"
