"""Connection between vLLM and the runtime in one worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from hybrid_backend.attention.lookahead import Layer
from hybrid_backend.batch import Batch, LayerShape, ModelSpec, Step, StepFailure
from hybrid_backend.config import HybridConfig
from hybrid_backend.engines.vllm import OWN_BACKEND
from hybrid_backend.engines.vllm.layer import HybridImpl
from hybrid_backend.engines.vllm.model_hooks import attention_layers, chunk_of, full_attention, window_of
from hybrid_backend.engines.vllm.model_runner import watch_batches, without_tokens
from hybrid_backend.engines.vllm.outputs import CheckedOutput, UnreadRank, checked
from hybrid_backend.engines.vllm.parking import parks_rows
from hybrid_backend.engines.vllm.request_budget import requested_budget
from hybrid_backend.engines.vllm.sinks import Sinks
from hybrid_backend.errors import EngineError
from hybrid_backend.runtime import HybridRuntime
from hybrid_backend.step.method import request_room
from hybrid_backend.workers import Rank

if TYPE_CHECKING:
    from vllm.config import ParallelConfig, VllmConfig
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.core.sched.output import SchedulerOutput


def rank_of(parallel: ParallelConfig) -> Rank:
    """Return this worker's place on this machine, in vLLM's order: data, then pipeline, then tensor parallel."""
    world = parallel.local_world_size
    index = (parallel.data_parallel_rank_local or 0) * world + parallel.rank % world
    return Rank(index, max(parallel.data_parallel_size_local * world, index + 1))


def global_rank(parallel: ParallelConfig) -> int:
    """Return this worker's number among the workers of all replicas; the ranks of each replica begin at 0."""
    return int(parallel.data_parallel_index * parallel.world_size + parallel.rank)


class Session:
    """Owner of the runtime, built when the KV memory is allocated. It knows which request each row belongs to.

    Attributes:
        runtime: the runtime of this worker.
        pages_per_block: pages in one block of the layers with full attention. vLLM widens blocks until all layers'
            blocks have the same bytes: for the state of layers that are not ours, and for local layers of another
            shape.
        is_scheduled: a batch of the scheduler runs, and not a warm-up or a capture of the model runner.
    """

    def __init__(
        self,
        runner: Any,
        vllm_config: VllmConfig,
        config: HybridConfig,
        device: torch.device,
        on_host: Callable[[Tensor], Tensor],
        block_size: int,
    ) -> None:
        """Build the runtime for vLLM's model runner.

        Args:
            runner: the model runner, whose KV cache is allocated.
            vllm_config: vLLM's configuration.
            config: our configuration.
            device: device of the model runner.
            on_host: returns the host's tensor over the memory of a layer's KV cache, which the device may see as its
                own.
            block_size: tokens in a block of the layers with full attention.
        """
        self._runner = runner
        layers = attention_layers(runner.get_model())
        attentions = [layer.attention for layer in layers]
        ours = [attention for attention in attentions if isinstance(attention.impl, HybridImpl)]
        full = _full_layer(attentions)
        self._sinks = Sinks([attention.impl for attention in attentions])
        model = _model_spec(layers, full, vllm_config, self._sinks)
        views = [as_pages(a.kv_cache if a in ours else full.kv_cache[:0]) for a in attentions]
        self.runtime = HybridRuntime(
            config,
            model,
            [on_host(view) for view in views],
            vllm_config.scheduler_config.max_num_seqs,
            device,
            views,
            rank_of(vllm_config.parallel_config),
        )
        # vLLM reads the output of the first rank only.
        self._unread_rank = UnreadRank() if vllm_config.parallel_config.rank else None
        self._full_layers = full_attention(layers)
        self._chunk_layers = {attention.layer_name for attention in attentions if chunk_of(attention) is not None}
        self.pages_per_block = block_size // config.page_size
        for index, attention in enumerate(attentions):
            if attention in ours:
                attention.impl.bind(self.runtime, index, self._unread_rank)
        for groups in runner.attn_groups:
            for group in groups:
                for builder in group.metadata_builders:
                    builder.session = self  # Builders of other backends ignore the attribute.
        self._batch: Any = None  # The input batch of the V2 runner.
        watch_batches(runner, self._set_batch)
        self._budgets: dict[str, int] = {}  # The budgets of requests that name one.
        self._step: Step | None = None  # The step that runs, or ran last.
        self._unfinished: list[str] = []  # The requests of that step whose rows wait.
        self.is_scheduled = False

    def request_ids(self, metadata: CommonAttentionMetadata) -> list[str]:
        """Return the request of each row."""
        batch = getattr(self._runner, "input_batch", self._batch)
        if batch is None:
            raise EngineError("vLLM's model runner did not say which request each row belongs to")
        return list(batch.req_ids[: metadata.num_reqs])

    def note_budgets(self, scheduled: SchedulerOutput) -> None:
        """Note the budgets that new requests name, and forget those of requests that have ended.

        A preempted request comes back unchanged. A streaming session comes as a new request with each piece of its
        input, and the last piece says which budget holds.
        """
        for request_id in scheduled.finished_req_ids:
            self._budgets.pop(request_id, None)
        for request in scheduled.scheduled_new_reqs:
            if tokens := requested_budget(request.sampling_params):
                self._budgets[request.req_id] = tokens
            else:
                self._budgets.pop(request.req_id, None)

    def budgets(self, request_ids: Sequence[str]) -> list[int]:
        """Return `Batch.budgets` of these requests."""
        return [self._budgets.get(request_id, 0) for request_id in request_ids] if self._budgets else []

    def step_for(self, layer_names: Sequence[str], batch: Batch) -> Step:
        """Begin the runtime's step for one KV cache group. Methods plan the step of the full-attention group."""
        if self._full_layers.isdisjoint(layer_names):
            layer = self._runner.compilation_config.static_forward_context[layer_names[0]]
            return self.runtime.begin_local_step(batch, int(layer.kv_cache.shape[2]))
        self._step = self.runtime.begin_step(batch)
        return self._step

    def has_chunks(self, layer_names: Sequence[str]) -> bool:
        """Tell whether these layers, which share their metadata, attend within chunks of the sequence."""
        return not self._chunk_layers.isdisjoint(layer_names)

    @contextmanager
    def scheduled(self) -> Iterator[None]:
        """Run a batch of the scheduler in the context. Other batches are warm-ups and captures of the model runner."""
        self._step, self.is_scheduled = None, True
        self._sinks.refresh()
        try:
            yield
        except BaseException as error:
            step = self._step
            if step is not None:
                self.runtime.abandon(step)
                # Compiled code turns the SystemExit of `UnreadRank.end` into another error.
                if self._unread_rank is not None and step.error is not None and not isinstance(error, SystemExit):
                    self._unread_rank.end(str(step.error))
            raise
        finally:
            self.is_scheduled = False
        if self._step is not None:
            self.runtime.end_step(self._step)
        elif self._unread_rank is not None:
            self._unread_rank.check(None)

    def sampled(self) -> AbstractContextManager[None]:
        """Return a context in which the model runner samples, and drops the tokens of rows that wait."""
        step = self._step
        has_parked_rows = step is not None and self.runtime.model.parks
        self._unfinished = self.runtime.unfinished(step) if step is not None and has_parked_rows else []
        return without_tokens(self._runner, self._unfinished)

    def checked(self, output: ModelRunnerOutput | AsyncModelRunnerOutput | None) -> Any:
        """Return the output of the last step, which says when it has arrived whether it may be used."""
        step, self._step = self._step, None
        if step is None:
            return output
        room = request_room(self.runtime.method)
        if isinstance(output, AsyncModelRunnerOutput):
            output = CheckedOutput(output, lambda: self.failure(step), room)
        elif output is not None:
            output = checked(output, self.failure(step), self._unfinished, room)
        if self._unread_rank is not None:
            self._unread_rank.check(output)
        return output

    def failure(self, step: Step) -> StepFailure | None:
        """Return `HybridRuntime.failure`, with the engine's blocks in the place of pages."""
        failure = self.runtime.failure(step)
        if failure is None:
            return None
        return replace(failure, pages=sorted({page // self.pages_per_block for page in failure.pages}))

    def imported(self, pages: Tensor, tokens: Tensor | None = None) -> None:
        """Take over pages that a connector brought from a server with vLLM's own CPU backend.

        ``pages`` is ``[n]`` int64; ``tokens`` is ``[n]``, the tokens in each page, or None if all are full.
        """
        # The module exists in the CPU engine only.
        from hybrid_backend.engines.vllm.stock_pages import to_ours

        for layer in self.runtime.tiers.host.layers:
            to_ours(layer, pages)
        self.runtime.imported(pages, tokens)

    def _set_batch(self, batch: Any) -> None:
        self._batch = batch


def _full_layer(attentions: Sequence[Any]) -> Any:
    """Return a layer with full attention.

    Raises:
        EngineError: no layer has full attention.
    """
    if not attentions:
        raise EngineError(
            "vLLM gave no layer to the hybrid backend, as its platform is not ours; "
            "unset VLLM_TARGET_DEVICE and VLLM_PLUGINS, which keep platform plugins out"
        )
    full = next((attention for attention in attentions if window_of(attention) is None), None)
    if full is None:
        raise EngineError("the model has no layer with full attention: nothing to offload")
    return full


def _shape(attentions: Sequence[Any], kind: str) -> LayerShape | None:
    """Return the shape of all these layers with our backend; None if there are none.

    Raises:
        EngineError: the layers have different shapes.
    """
    ours = [attention for attention in attentions if isinstance(attention.impl, HybridImpl)]
    shapes = {LayerShape(a.num_heads, a.num_kv_heads, a.head_size, a.impl.scale) for a in ours}
    if len(shapes) > 1:
        raise EngineError(f"{kind} layers of different shape are not supported: {sorted(shapes)}; {OWN_BACKEND}")
    return shapes.pop() if shapes else None


def _model_spec(layers: Sequence[Layer], full: Any, vllm_config: VllmConfig, sinks: Sinks) -> ModelSpec:
    """Return the model as the runtime sees it; ``full`` is a layer with full attention."""
    attentions = [layer.attention for layer in layers]
    full_shape = _shape([a for a in attentions if window_of(a) is None], "full-attention")
    window_shape = _shape([a for a in attentions if window_of(a) is not None], "sliding-window")
    assert full_shape is not None
    pages = full.kv_cache_torch_dtype
    return ModelSpec(
        num_layers=len(layers),
        **full_shape._asdict(),
        dtype=vllm_config.model_config.dtype if pages is torch.int8 else pages,
        windows=tuple(map(window_of, attentions)),
        max_tokens=vllm_config.model_config.max_model_len,
        hidden=vllm_config.model_config.get_hidden_size(),
        parks=parks_rows(vllm_config),
        layer_weight_bytes=sum(weight.nbytes for weight in layers[0].decoder.parameters()),
        sinks=sinks.layers,
        window_shape=None if window_shape == full_shape else window_shape,
        kv_dtype=pages if pages is torch.int8 else None,
    )


def as_pages(kv_cache: Tensor) -> Tensor:
    """View vLLM's ``[pages, kv_heads, page_size, 2 * head_dim]`` as ``[pages, kv_heads, 2, page_size, head_dim]``."""
    pages, heads, page_size, width = kv_cache.shape
    return kv_cache.view(pages, heads, 2, page_size, width // 2)
