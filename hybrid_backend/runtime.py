"""`HybridRuntime`, the interface between an engine's adapter (vLLM, SGLang) and the hybrid attention of one rank.

Prefill chunks: adapter -> `HybridRuntime.forward` -> `PromptChunks` -> host pool and digests.
Decode rows: adapter -> `HybridRuntime.lookahead` and `forward` -> executor -> method -> operations.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from hybrid_backend.batch import Batch, ModelSpec, Step, StepFailure, make_step, with_late_prefixes
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
from hybrid_backend.workers import ALONE, Rank, WorkerPool, kernel_name, make_pool


class HybridRuntime:
    """Hybrid attention of one tensor-parallel rank over the engine's KV memory.

    The engine calls, in each scheduler step:

    1. `release` for requests that ended, then `begin_step`.
    2. For each layer `forward`; before a layer's `forward`, `lookahead` with the predicted query of the next layer.
    3. `end_step`; or `abandon`, if the engine's forward pass raised.
    4. `failure`, once the step's outputs have arrived, to learn whether the outputs may be used.

    Sliding-window layers have no lookahead. If the engine gives these layers their own page table, they also have
    their own step (`begin_local_step`).
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
        """Build the tiers, the CPU workers and the method.

        Args:
            config: what the user configured.
            model: shapes of the model on this rank.
            kv_layers: the engine's KV memory on the host; per layer ``[pages, kv_heads, 2, page_size, head_dim]``.
            max_requests: most requests that run at once.
            device: device that the engine computes on.
            device_views: ``kv_layers`` as addressed by the device. Empty if the device is the CPU.
            rank: this process among the engine's ranks on this machine; rank i computes on GPU i.

        Raises:
            ConfigError: the configuration does not fit the model, the device or the memory.
        """
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
        is_async = are_launches(config, device)
        flashinfer = resolve_flashinfer(config, model, operations, device)
        self.tiers = Tiers.build(layout, config, model, host, max_requests, device, operations, is_async, flashinfer)
        self.workers = make_pool(config.workers, rank if device.type != "cuda" else _with_gpus(rank, device))
        self.method = method(config, model, self.tiers)
        self._bus_bytes_per_second = bus_of_gpu(device) if device.type == "cuda" else None
        self.executor: Executor = (
            InPlaceStep(self.method, config, model, self.tiers, self._stats)
            if self.method.attends_in_place
            else StepDriver(self.method, config, model, self.tiers, self.workers, self._stats)
        )
        has_native = device.type == "cpu" and kernel_name(config.workers.kernel) == "native"
        prompts = InPlacePrompts.of(model, host.layers) if has_native else None
        self._sliding = SlidingLayers(model, host, operations, prompts, has_native)
        in_place = None if layout.separate else prompts
        self._prompts = PromptChunks(model, self.method, self.executor, self.tiers, in_place)
        self._steps = 0
        self._open: Step | None = None

    def release(self, request_ids: Iterable[str]) -> None:
        """Forget requests that ended, were aborted or were preempted. Unknown ids are ignored."""
        for request_id in request_ids:
            self.method.release(request_id)
            self.executor.release(request_id)

    def preempt(self, request_ids: Iterable[str]) -> None:
        """Forget preempted requests once the running step has ended. The engine still delivers that step's tokens."""
        self._wait_for_decodes(request_ids)
        self.release(request_ids)

    def begin_step(self, batch: Batch) -> Step:
        """Start a step over the layers with full attention. A step that is still open is abandoned first."""
        self._abandon_open()
        batch = with_late_prefixes(batch, self.config.page_size, self.executor.holds, self.tiers.is_async)
        step = make_step(self._steps, batch, self.config.page_size)
        self._steps += 1
        self._open = step
        try:
            self.method.begin_step(step)
            # A prefill chunk makes the request's frames stale: its tokens are recomputed after a preemption, or the
            # chunk before had one token and was run as a decode row.
            self._wait_for_decodes(row.request_id for row in step.prefill)
            for row in step.prefill:
                if self.executor.holds(row.request_id):
                    self.executor.release(row.request_id)
            if step.decode is not None:
                self.executor.begin(step)
            if step.prefill and self.executor.residency is not None:
                self.executor.residency.begin_prompts(step)
        except WorkerError as error:
            self._fail(step, error)
        return step

    def begin_local_step(self, batch: Batch, page_size: int) -> Step:
        """Return the step of the sliding-window layers, whose page table and page size may be their own."""
        step = make_step(self._steps, batch, page_size)
        if step.decode is not None:
            step.decode = step.decode.by_query(page_size)
        return step

    def idle(self) -> None:
        """Prepare for a dummy batch of the engine, so that the dummy batch writes nothing into pages of the last step.

        A data-parallel rank without requests computes dummy batches, perhaps with a CUDA graph, until all ranks end.
        """
        self.executor.idle()

    def end_step(self, step: Step) -> None:
        """Close a step after all its layers have run."""
        if self._open is step:
            self._open = None
            self.tiers.write_back.join()
            if step.decode is not None:
                self._stats.saw_contexts(self._full_layers, int(step.decode.seq_lens.sum()))

    def abandon(self, step: Step) -> None:
        """Drop the pending work of a step whose forward pass raised in the engine."""
        if self._open is step:
            self._abandon_open()

    def failure(self, step: Step) -> StepFailure | None:
        """Return which outputs and pages of a step must not be used; None if the step succeeded.

        A CPU worker that fails or is late does not stop the forward pass, because neither the other ranks nor a CUDA
        graph would notice. The engine therefore calls this method once the step's outputs have arrived.
        """
        if step.error is not None:
            return StepFailure(step.error, step.request_ids, step.write_pages.unique().tolist())
        return self.executor.failure(step)

    def unfinished(self, step: Step) -> list[str]:
        """Return the requests that yield no token in a step, although all layers have run.

        The engine drops the outputs of these requests and schedules the same token again. The list is empty if the
        engine does not support parked decode rows (`ModelSpec.parks`).
        """
        return [] if step.error is not None else self.executor.unfinished(step)

    def forward(self, layer: int, step: Step, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """Store the K and V of a step's new tokens, then attend in one layer.

        Args:
            layer: index among the model's attention layers.
            step: what `begin_step`, or `begin_local_step` for a sliding-window layer, returned.
            q: ``[tokens, heads, head_dim]`` queries of the batch.
            k: ``[tokens, kv_heads, head_dim]``.
            v: like ``k``.
            out: like ``q``; receives the attention output, or zeros once the step has failed.
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
        """Update digests and device copies of host pages that a KV connector wrote.

        Args:
            pages: ``[n]`` int64 host page ids, the same in all layers.
            tokens: ``[n]`` int64 number of tokens in each page. None: all pages are full.
        """
        if self.tiers.digests is not None:
            for layer in self.tiers.digests.layers:
                self.tiers.digests.rebuild(layer, pages, tokens)
        self.tiers.import_pages(pages)

    def layer_input(self, layer: int, step: Step, hidden: Tensor, residual: Tensor | None) -> None:
        """Replace the decoder layer's input in rows that resume a token which an earlier step left unfinished.

        Args:
            layer: index of the decoder layer that is about to run.
            step: the open step, or the step of a CUDA graph.
            hidden: ``[tokens, hidden]`` hidden states of the batch, changed in place.
            residual: like ``hidden``. None: the layer takes no residual.
        """
        if step.error is None and (step.is_captured or self._open is step):
            self.executor.layer_input(layer, step, hidden, residual)

    def wants_lookahead(self, layer: int, step: Step) -> bool:
        """Tell whether the engine should call `lookahead` for ``layer`` in this step."""
        if self.model.window(layer) is not None or step.decode is None or step.error is not None:
            return False
        return (step.is_captured or self._open is step) and self.executor.wants_lookahead(layer, step)

    def lookahead(self, layer: int, step: Step, predicted_q: Tensor) -> None:
        """Select pages and start the CPU workers for a layer ahead of its `forward`. Does not wait for the workers.

        Args:
            layer: index of the layer that will attend.
            step: the open step, or the step of a CUDA graph.
            predicted_q: ``[decode rows, heads, head_dim]`` predicted queries of ``layer``.
        """
        try:
            self.executor.lookahead(layer, step, predicted_q)
        except WorkerError as error:
            self._fail(step, error)

    @property
    def pages(self) -> int:
        """Number of pages of each layer with full attention in the host pool."""
        return len(self.tiers.host.layers[self._full_layers[0]])

    @property
    def stats(self) -> Stats:
        """Counters since start. On a GPU the counters may lack the last step, because reading them does not wait."""
        self.executor.count()
        return self._stats

    def forget_counts(self) -> None:
        """Reset all counters, so that warm-up steps do not appear in them. Waits for the device."""
        if self.tiers.device.type == "cuda":
            torch.cuda.current_stream(self.tiers.device).synchronize()
        self.executor.count()
        self._stats.forget()
        self.tiers.reset_copied()

    def gauges(self) -> dict[str, float]:
        """Return the gauges of this rank by metric name, and bring `stats` up to date."""
        self.executor.count()
        tiers, executor = self.tiers, self.executor
        return {
            "hybrid_resident_requests": tiers.frames.running if tiers.frames.size else 0,
            "hybrid_frames_in_use": executor.resident_pages,
            "hybrid_host_pool_pages": self.pages,
            "hybrid_digest_bytes": tiers.digests.nbytes if tiers.digests else 0,
            "hybrid_frame_bytes": tiers.frames.nbytes,
            "hybrid_device_bytes": tiers.device_bytes + executor.device_bytes + self.method.device_bytes,
            "hybrid_context_cache_bytes": executor.host_bytes + tiers.cache.nbytes + tiers.cache.whole_bytes,
            "hybrid_persistent_heads": tiers.persistent_heads,
            "hybrid_copied_bytes": tiers.copied_bytes,
            **_settings(self.config, tiers, self.workers, self._bus_bytes_per_second),
            **executor.gauges(),
            **self.method.gauges(),
        }

    def close(self) -> None:
        """Stop all threads of the runtime."""
        self._abandon_open()
        self.executor.close()
        self._sliding.close()
        self.workers.close()

    def _wait_for_decodes(self, request_ids: Iterable[str]) -> None:
        """Wait for the GPU if one of the requests has frames, that is, if a running step may hold its decode row.

        CPU workers skip a request as soon as it is released, even when a step that was launched before needs it.
        """
        frames, device = self.tiers.frames, self.tiers.device
        if device.type == "cuda" and any(frames.index(request_id) is not None for request_id in request_ids):
            torch.cuda.current_stream(device).synchronize()

    def _abandon_open(self) -> None:
        """Drop the pending work of the open step, if there is an open step."""
        step, self._open = self._open, None
        if step is not None:
            self.tiers.write_back.join()
            self.tiers.prompt_fills.join()
            self.executor.abandon()
            self.method.abandon(step)

    def _fail(self, step: Step, error: WorkerError) -> None:
        """Record a worker's error in the open step, whose later layers then compute nothing."""
        # The engine calls `failure` for open steps only, so an error in any other step is raised.
        if step.is_captured or step is not self._open:
            raise error
        step.error = error
        self.abandon(step)


def _settings(config: HybridConfig, tiers: Tiers, workers: WorkerPool, bus: float | None) -> dict[str, float]:
    """Return the effective settings that the status page gives advice on, by metric name.

    ``bus`` is the bandwidth of a GPU's bus in bytes/s; None: the device is the host.
    """
    return {
        "hybrid_page_tokens": config.page_size,
        "hybrid_host_pool_bytes": tiers.host.nbytes,
        "hybrid_max_requests": tiers.frames.requests,
        "hybrid_worker_threads": workers.threads,
        "hybrid_worker_cpus": len(set(workers.cpus)),
        **({} if bus is None else {"hybrid_bus_bytes_per_second": bus}),
    }


def _with_gpus(rank: Rank, device: torch.device) -> Rank:
    """Add the NUMA node of the rank's GPU to ``rank``."""
    # A rank that sees only its own GPU cannot tell which ranks share the NUMA node.
    if torch.cuda.device_count() < rank.count:
        return replace(rank, on_gpu=True, node=node_of_gpu(device))
    return rank.with_gpus([node_of_gpu(torch.device("cuda", index)) for index in range(rank.count)])
