"""HybridRuntime: the step lifecycle that engines drive. Knows no engine; engines know nothing below it.

Data path:  engine -> `forward` -> host pool and digests (prompts), the executor (decoding rows).
Query path: engine -> `lookahead`, `forward` -> executor -> method -> operations.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from hybrid_backend.batch import Batch, ModelSpec, Step, StepFailure, make_step
from hybrid_backend.config import HybridConfig
from hybrid_backend.errors import ConfigError, WorkerError
from hybrid_backend.in_place.prompts import InPlacePrompts
from hybrid_backend.in_place.step import InPlaceStep
from hybrid_backend.in_place.windows import SlidingLayers
from hybrid_backend.methods import resolve_method, with_method
from hybrid_backend.methods.host_room import check_room
from hybrid_backend.observe.stats import Stats
from hybrid_backend.prompt_chunks import PromptChunks
from hybrid_backend.step import Executor, StepDriver
from hybrid_backend.step.operations import are_launches, fitted, resolve_flashinfer, resolve_operations
from hybrid_backend.tiers import Tiers
from hybrid_backend.tiers.host_pool import HostPool
from hybrid_backend.tiers.pinned import bus_of_gpu, node_of_gpu
from hybrid_backend.workers import ALONE, Rank, kernel_name, make_pool


class HybridRuntime:
    """One rank's hybrid attention: the tiers, the workers and the method, over the engine's KV memory.

    Per engine step: `release` for requests that are gone, `begin_step`, then for every layer `lookahead` (of the next
    layer) and `forward`; `end_step`, or `abandon` if the engine's forward raised. When the step's results are there,
    `failure` tells whether they may be used. Local (sliding-window) layers have no lookahead, and their own step if the
    engine gives them another page table.
    """

    def __init__(
        self,
        config: HybridConfig,
        model: ModelSpec,
        kv_layers: Sequence[Tensor],
        max_requests: int,
        device: torch.device,
        device_views: Sequence[Tensor] = (),
        rank: Rank = ALONE,
    ) -> None:
        """``kv_layers``: per layer ``[pages, kv_heads, 2, page_size, head_dim]`` host memory of the engine;
        ``device_views``: the same memory as the device sees it, where that is not the host; ``rank``: this process
        among the engine's on this machine, rank i on GPU i."""
        config = config.for_layers(model.windows or (None,) * model.num_layers)
        host = HostPool(kv_layers, device_views)
        self._full_layers = [layer for layer in range(model.num_layers) if model.window(layer) is None]
        if not self._full_layers:
            raise ConfigError("every layer has a sliding window: nothing to offload; use the engine's own backend")
        page_size = host.layers[self._full_layers[0]].shape[3]
        config.check_page_size(page_size, "block size", "--block-size")
        config = with_method(config, model.num_heads, model.num_kv_heads, model.head_dim, device)
        method = resolve_method(config.method)
        method.check(config, device, model.num_layers, model.num_kv_heads)
        config = fitted(config, model, device)
        self.config = config
        self.model = model
        self._stats = Stats.of(model.num_layers)
        check_room(config, model, len(host.layers[self._full_layers[0]]), max_requests, device)
        layout, operations = method.layout(config, model, device), resolve_operations(config, device)
        by_itself = are_launches(config, device)
        flashinfer = resolve_flashinfer(config, model, operations, device)
        self.tiers = Tiers.build(layout, config, model, host, max_requests, device, operations, by_itself, flashinfer)
        self.workers = make_pool(config.workers, rank if device.type != "cuda" else _on_gpus(rank, device))
        self.method = method(config, model, self.tiers)
        self._bus = bus_of_gpu(device) if device.type == "cuda" else None
        self.executor: Executor = (
            InPlaceStep(self.method, config, model, self.tiers, self._stats)
            if self.method.attends_in_place
            else StepDriver(self.method, config, model, self.tiers, self.workers, self._stats)
        )
        native = device.type == "cpu" and kernel_name(config.workers.kernel) == "native"
        prompts = InPlacePrompts.of(model, host.layers) if native else None
        self._sliding = SlidingLayers(model, host, operations, prompts, native)
        in_place = None if layout.separate else prompts
        self._prompts = PromptChunks(model, self.method, self.executor, self.tiers, in_place)
        self._steps = 0
        self._open: Step | None = None

    # --- the step ---

    def release(self, request_ids: Iterable[str]) -> None:
        """Forget requests that ended, were aborted or were preempted. Unknown ids are ignored."""
        for request_id in request_ids:
            self.method.release(request_id)
            self.executor.release(request_id)

    def preempt(self, request_ids: Iterable[str]) -> None:
        """Forget requests whose tokens of the step under way still count: the engine delivers them."""
        self._finish_for(request_ids)
        self.release(request_ids)

    def begin_step(self, batch: Batch) -> Step:
        """Start a step over the layers with full attention. A step that was left open is abandoned."""
        self._abandon_open()
        step = make_step(self._steps, self._with_late_prefixes(batch), self.config.page_size)
        self._steps += 1
        self._open = step
        try:
            self.method.begin_step(step)
            # If they had frames, these are out of date: prompt tokens are computed again, or follow a chunk of one
            # token, which was a decoding row.
            self._finish_for(row.request_id for row in step.prefill)
            for row in step.prefill:
                self.executor.release(row.request_id)
            if step.decode is not None:
                self.executor.begin(step)
        except WorkerError as error:
            self._fail(step, error)
        return step

    def _with_late_prefixes(self, batch: Batch) -> Batch:
        """Engines find a page in the prefix cache from when the token that fills it is scheduled. A row that begins to
        decode with such a page (it was preempted, and one token is left) would be given copies of it before it is
        filled: so it is a prompt of one token. In a graph all rows are decoding ones."""
        size, table, lengths = self.config.page_size, batch.page_table, batch.seq_lens
        begin = [
            r
            for r, request_id in enumerate(batch.request_ids)
            if batch.decode[r] and lengths[r] > size and lengths[r] % size == 1 and not self.executor.holds(request_id)
        ]
        if not begin:
            return batch
        counts = [end - start for start, end in pairwise(batch.query_start)]
        if self.tiers.asks_by_itself and max(counts) == 1:
            return batch
        ends = enumerate(zip(lengths, counts, strict=False))
        filled = [
            table[r, (end - count) // size : end // size]
            for r, (end, count) in ends
            if end // size > (end - count) // size
        ]
        late = set(begin) if filled else set()
        if late and table.is_cpu:  # else to look at them would be to wait for the device
            pages = torch.cat(filled)
            late = {r for r in begin if torch.isin(table[r, : lengths[r] // size], pages).any()}
        return replace(batch, decode=[each and r not in late for r, each in enumerate(batch.decode)]) if late else batch

    def begin_local_step(self, batch: Batch, page_size: int) -> Step:
        """Start the same step for local layers, which have a page table (and perhaps a page size) of their own."""
        return make_step(self._steps, batch, page_size)

    def idle(self) -> None:
        """The engine is about to compute a batch that nobody asked for, perhaps by a captured graph: one of data
        parallel engines that waits for the others. It must write nothing into the pages of the last step."""
        self.executor.idle()

    def end_step(self, step: Step) -> None:
        """All layers of the step have run."""
        if self._open is step:
            self._open = None
            self.tiers.write_back.join()
            if step.decode is not None:
                self._stats.saw_contexts(self._full_layers, int(step.decode.seq_lens.sum()))

    def abandon(self, step: Step) -> None:
        """The engine's forward raised: nothing stays under way for the step."""
        if self._open is step:
            self._abandon_open()

    def failure(self, step: Step) -> StepFailure | None:
        """What must not be used of a step whose results have come; None: all is right. A CPU that is late or fails does
        not stop the forward, which other ranks and a captured graph would not notice; its outputs say nothing."""
        if step.error is not None:
            return StepFailure(step.error, step.request_ids, step.write_pages.unique().tolist())
        return self.executor.failure(step)

    def unfinished(self, step: Step) -> list[str]:
        """Requests of a step, all of whose layers have run, that yield no token: the engine gives them the same token
        once more, and drops what it computed for them. Only where it does so (`ModelSpec.parks`)."""
        return [] if step.error is not None else self.executor.unfinished(step)

    # --- data path ---

    def forward(self, layer: int, step: Step, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """One layer: store the step's new tokens, then attend.

        ``q``, ``out``: ``[tokens, heads, head_dim]``; ``k``, ``v``: ``[tokens, kv_heads, head_dim]``.
        """
        if step.error is None:
            try:
                if self.model.window(layer) is None:
                    self._forward(layer, step, q, k, v, out)
                else:
                    self._sliding.forward(layer, step, q, k, v, out)
            except WorkerError as error:
                self._fail(step, error)
        if step.error is not None:
            out.zero_()

    def _forward(self, layer: int, step: Step, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        if step.prefill:
            self._prompts.forward(layer, step, q, k, v, out)
        if step.decode is not None:
            self.executor.decode(layer, step, q, k, v, out)

    def imported(self, pages: Tensor, tokens: Tensor | None = None) -> None:
        """Pages (``[n]`` int64 host page ids, all layers) that somebody else wrote: a KV connector. ``tokens``: ``[n]``
        int64 that each of them holds; None: all are whole."""
        if self.tiers.digests is not None:
            for layer in self.tiers.digests.layers:
                self.tiers.digests.rebuild(layer, pages, tokens)
        self.tiers.import_pages(pages)

    # --- query path ---

    def layer_input(self, layer: int, step: Step, hidden: Tensor, residual: Tensor | None) -> None:
        """What decoder layer ``layer`` is about to compute with, ``[tokens, hidden]`` of the batch: rows that go on
        from an earlier step are changed in place to what they had there."""
        if step.error is None and (step.is_captured or self._open is step):
            self.executor.layer_input(layer, step, hidden, residual)

    def wants_lookahead(self, layer: int, step: Step) -> bool:
        """Whether `lookahead` should be called for ``layer`` in this step."""
        if self.model.window(layer) is not None or step.decode is None or step.error is not None:
            return False
        return (step.is_captured or self._open is step) and self.executor.wants_lookahead(layer, step)

    def lookahead(self, layer: int, step: Step, predicted_q: Tensor) -> None:
        """The predicted query of ``layer`` is known: ``[decode rows, heads, head_dim]``. Returns at once."""
        try:
            self.executor.lookahead(layer, step, predicted_q)
        except WorkerError as error:
            self._fail(step, error)

    # --- the end ---

    @property
    def stats(self) -> Stats:
        """All counters, as far as the device has come: it may be a step behind."""
        self.executor.count()
        return self._stats

    def forget_counts(self) -> None:
        """What was served until now was no request's. Waits for the device."""
        if self.tiers.device.type == "cuda":
            torch.cuda.current_stream(self.tiers.device).synchronize()
        self.executor.count()
        self._stats.forget()
        self.tiers.forget_copies()

    def gauges(self) -> dict[str, float]:
        """What is in use now, by metric name. Brings `stats` up to date."""
        self.executor.count()
        tiers, executor = self.tiers, self.executor
        return {
            "hybrid_resident_requests": tiers.frames.running if tiers.frames.size else 0,
            "hybrid_frames_in_use": executor.resident_pages,
            "hybrid_host_pool_pages": tiers.host.pages,
            "hybrid_digest_bytes": tiers.digests.nbytes if tiers.digests else 0,
            "hybrid_frame_bytes": tiers.frames.nbytes,
            "hybrid_device_bytes": tiers.device_bytes + executor.device_bytes + self.method.device_bytes,
            "hybrid_context_cache_bytes": executor.host_bytes + tiers.cache.nbytes,
            "hybrid_persistent_heads": tiers.persistent_heads,
            "hybrid_copied_bytes": tiers.copied_bytes,
            **self._settings(),
            **executor.gauges(),
            **self.method.gauges(),
        }

    def _settings(self) -> dict[str, float]:
        """What is served, of the keys and flags that the status page advises about; the method's own are its gauges."""
        return {
            "hybrid_page_tokens": self.config.page_size,
            "hybrid_host_pool_bytes": self.tiers.host.nbytes,
            "hybrid_max_requests": self.tiers.frames.requests,
            "hybrid_worker_threads": self.workers.threads,
            "hybrid_worker_cpus": len(set(self.workers.cpus)),
            **({} if self._bus is None else {"hybrid_bus_bytes_per_second": self._bus}),
        }

    def close(self) -> None:
        """Stop all threads."""
        self._abandon_open()
        self.executor.close()
        self._sliding.close()
        self.workers.close()

    def _finish_for(self, request_ids: Iterable[str]) -> None:
        """Wait for a device that may be in a step that has these requests as decoding rows: from a release on, the CPU
        workers leave a request out, whatever step asks."""
        frames, device = self.tiers.frames, self.tiers.device
        if device.type == "cuda" and any(frames.index(request_id) is not None for request_id in request_ids):
            torch.cuda.current_stream(device).synchronize()

    def _abandon_open(self) -> None:
        step, self._open = self._open, None
        if step is not None:
            self.tiers.write_back.join()
            self.executor.abandon()
            self.method.abandon(step)

    def _fail(self, step: Step, error: WorkerError) -> None:
        """Nothing more is computed for the step, and nobody is waited for."""
        if step.is_captured or step is not self._open:
            raise error  # it stands for many steps, or for local layers, of which nobody asks `failure`
        step.error = error
        self.abandon(step)


def _on_gpus(rank: Rank, device: torch.device) -> Rank:
    """``rank`` with what is known of the ranks' GPUs; a process may see its own alone."""
    if torch.cuda.device_count() < rank.count:
        return replace(rank, on_gpu=True, node=node_of_gpu(device))
    return rank.with_gpus([node_of_gpu(torch.device("cuda", index)) for index in range(rank.count)])
