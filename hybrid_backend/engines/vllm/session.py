"""Connection between vLLM and the runtime in one worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import QKVParallelLinear
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from hybrid_backend.attention.fused_lookahead import fused
from hybrid_backend.attention.lookahead import Layer, call_names, layer_at, predictors
from hybrid_backend.batch import Batch, ModelSpec, Step, StepFailure
from hybrid_backend.config import HybridConfig
from hybrid_backend.engines.vllm import OWN_BACKEND
from hybrid_backend.engines.vllm.asked import asked_budget
from hybrid_backend.engines.vllm.hooks import LAYER_INPUT, input_hook, lookahead_hook
from hybrid_backend.engines.vllm.layer import HybridImpl
from hybrid_backend.engines.vllm.outputs import CheckedOutput, UnheardRank, checked
from hybrid_backend.engines.vllm.parking import forgo_parking, parks_rows
from hybrid_backend.engines.vllm.sinks import Sinks
from hybrid_backend.errors import EngineError
from hybrid_backend.methods import resolve_method
from hybrid_backend.runtime import HybridRuntime
from hybrid_backend.step.method import looks_ahead
from hybrid_backend.step.operations import are_launches
from hybrid_backend.workers import Rank

if TYPE_CHECKING:
    from vllm.config import ParallelConfig, VllmConfig
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig


def attention_layers(model: nn.Module) -> list[Layer]:
    """All layers that keep keys and values, in order, as the runtime counts them: ours, and those with a sliding
    window, which are the engine's own on a GPU (`device_groups`)."""
    modules = dict(model.named_modules())
    return [
        layer_at(modules, path)
        for path, module in modules.items()
        if isinstance(module, Attention) and (isinstance(module.impl, HybridImpl) or module.sliding_window is not None)
    ]


def full_attention(layers: Sequence[Layer]) -> set[str]:
    """Names of those without a sliding window."""
    return {layer.attention.layer_name for layer in layers if layer.attention.sliding_window is None}


def rank_of(parallel: ParallelConfig) -> Rank:
    """This worker among those of this machine, in vLLM's order: data parallel, then pipeline, then tensor parallel."""
    world = parallel.local_world_size
    index = (parallel.data_parallel_rank_local or 0) * world + parallel.rank % world
    return Rank(index, max(parallel.data_parallel_size_local * world, index + 1))


def global_rank(parallel: ParallelConfig) -> int:
    """This worker among those of all replicas, whose own ranks all begin at 0."""
    return int(parallel.data_parallel_index * parallel.world_size + parallel.rank)


def attach_lookahead(model: nn.Module, vllm_config: VllmConfig, config: HybridConfig, device: torch.device) -> None:
    """Predict every full-attention layer's query at the input of the decoder layer before it. Layers for which that is
    impossible look at their true queries. Call before compilation."""
    if not looks_ahead(resolve_method(config.method), config):
        return
    engine = vllm_config.model_config
    stream = torch.empty(0, engine.get_hidden_size(), dtype=engine.dtype, device=device)
    layers = {
        index: layer
        for index, layer in enumerate(attention_layers(model))
        if layer.before is not None and layer.attention.sliding_window is None and config.is_predicted(index)
    }
    predictor_of_layer, warning = predictors(layers, engine.get_head_size(), stream, (QKVParallelLinear,), layer_inputs)
    for index, predictor in predictor_of_layer.items():
        attention, decoder, before = layers[index]
        assert before is not None
        attention.impl.predictor = predictor
        if are_launches(config, device):
            attention.impl.predictor = fused(
                predictor, decoder, stream, (QKVParallelLinear,), layer_inputs, engine.max_model_len
            )
        before.register_forward_pre_hook(lookahead_hook(before, attention.layer_name, device), with_kwargs=True)
    if warning:
        init_logger("vllm.hybrid_backend").warning(warning)


def layer_inputs(positions: Tensor, hidden: Tensor, residual: Tensor | None) -> dict[str, Tensor | None]:
    return {"positions": positions, "hidden_states": hidden, "residual": residual}


def attach_inputs(model: nn.Module, vllm_config: VllmConfig, config: HybridConfig) -> None:
    """Hand every decoder layer's input over, so that rows may go on from an earlier step. Call before compilation."""
    layers = attention_layers(model)
    odd = next((layer.decoder for layer in layers if "hidden_states" not in call_names(layer.decoder)), None)
    if odd is not None:
        forgo_parking(vllm_config, config, f"{type(odd).__name__}, which is not called with hidden_states")
        return
    compilation = vllm_config.compilation_config
    if compilation.splitting_ops_contain_attention():  # piecewise graphs have no part in it
        compilation.splitting_ops.append(LAYER_INPUT)
    for attention, decoder, _ in layers:
        decoder.register_forward_pre_hook(input_hook(decoder, attention.layer_name), with_kwargs=True)


def check_groups(model: nn.Module, kv_cache_config: KVCacheConfig) -> None:
    """Before memory is allocated. The runtime's pages are those of one table per request.

    Raises:
        EngineError: vLLM has put the layers with full attention into several groups with pages of their own.
    """
    full = full_attention(attention_layers(model))
    groups = sum(not full.isdisjoint(group.layer_names) for group in kv_cache_config.kv_cache_groups)
    if groups > 1:
        raise EngineError(
            f"vLLM splits the {len(full)} full-attention layers into {groups} KV cache groups, since layers of other "
            f"kinds are fewer; not supported: {OWN_BACKEND}, or, where the others have sliding "
            "windows, add --disable-hybrid-kv-cache-manager"
        )


class Session:
    """Built when the KV memory exists; owns the runtime, knows which request each row of a batch belongs to."""

    def __init__(
        self,
        runner: Any,
        vllm_config: VllmConfig,
        config: HybridConfig,
        device: torch.device,
        on_host: Callable[[Tensor], Tensor],
    ) -> None:
        """``on_host``: the host's tensor over the memory of a layer's KV cache, which the device may see as its own."""
        self._runner = runner
        layers = attention_layers(runner.get_model())
        if not layers:
            raise EngineError(
                "vLLM gave no layer to the hybrid backend, as its platform is not ours; "
                "unset VLLM_TARGET_DEVICE and VLLM_PLUGINS, which keep platform plugins out"
            )
        full = next((layer.attention for layer in layers if layer.attention.sliding_window is None), None)
        if full is None:
            raise EngineError("the model has no layer with full attention: nothing to offload")
        attentions = [layer.attention for layer in layers]
        ours = [attention for attention in attentions if isinstance(attention.impl, HybridImpl)]
        shapes = {(a.num_heads, a.num_kv_heads, a.head_size, a.impl.scale) for a in ours}
        if len(shapes) != 1:
            raise EngineError(f"layers of different shape are not supported: {sorted(shapes)}")
        self._sinks = Sinks([attention.impl for attention in attentions])
        model = ModelSpec(
            num_layers=len(layers),
            num_heads=full.num_heads,
            num_kv_heads=full.num_kv_heads,
            head_dim=full.head_size,
            scale=full.impl.scale,
            dtype=full.kv_cache_torch_dtype,
            windows=tuple(a.sliding_window for a in attentions),
            max_tokens=vllm_config.model_config.max_model_len,
            hidden=vllm_config.model_config.get_hidden_size(),
            parks=parks_rows(vllm_config),
            layer_weight_bytes=sum(weight.nbytes for weight in layers[0].decoder.parameters()),
            sinks=self._sinks.layers,
        )
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
        self._unheard = UnheardRank() if vllm_config.parallel_config.rank else None  # vLLM takes the output of one only
        self._full_layers = full_attention(layers)
        # The engine may have widened its blocks (for the state of layers that are not ours); pages are as configured.
        self.pages_per_block = vllm_config.cache_config.block_size // config.page_size
        for index, attention in enumerate(attentions):
            if attention in ours:
                attention.impl.bind(self.runtime, index, self._unheard)
        for groups in runner.attn_groups:
            for group in groups:
                for builder in group.metadata_builders:
                    builder.session = self  # builders of other backends do not ask for it
        self._batch: Any = None  # of the V2 runner
        if not hasattr(runner, "input_batch"):
            self._watch_batches(runner.model_state)
        self._budgets: dict[str, int] = {}  # of requests that asked for one
        self._step: Step | None = None  # that runs, or ran last
        self._unfinished: list[str] = []  # of it
        self.is_scheduled = False

    def request_ids(self, metadata: CommonAttentionMetadata) -> list[str]:
        """Request of each row."""
        batch = getattr(self._runner, "input_batch", self._batch)
        if batch is None:
            raise EngineError("vLLM's model runner did not say which request each row belongs to")
        return list(batch.req_ids[: metadata.num_reqs])

    def hear(self, scheduled: SchedulerOutput) -> None:
        """Take note of the budgets that requests ask for, and forget those of requests that are gone.

        A preempted request comes back as it was. A streaming session comes as a new request with each piece of its
        input: the last piece says which budget holds.
        """
        for request_id in scheduled.finished_req_ids:
            self._budgets.pop(request_id, None)
        for request in scheduled.scheduled_new_reqs:
            if tokens := asked_budget(request.sampling_params):
                self._budgets[request.req_id] = tokens
            else:
                self._budgets.pop(request.req_id, None)

    def budgets(self, request_ids: Sequence[str]) -> list[int]:
        """`Batch.budgets`."""
        return [self._budgets.get(request_id, 0) for request_id in request_ids] if self._budgets else []

    def _watch_batches(self, state: Any) -> None:
        """vLLM's V1 runner keeps its input batch. The V2 runner has one per step, which it hands to the model's state
        (v1/worker/gpu/model_states/interface.py, ``ModelState.prepare_attn``): not all of them tell the builders."""
        prepare = state.prepare_attn

        def prepared(input_batch: Any, *args: Any, **kwargs: Any) -> Any:
            self._batch = input_batch
            return prepare(input_batch, *args, **kwargs)

        state.prepare_attn = prepared

    def step_for(self, layer_names: Sequence[str], batch: Batch) -> Step:
        """The runtime's step for one KV cache group: the full-attention group's is the one that methods plan."""
        if self._full_layers.isdisjoint(layer_names):
            page_size = self._page_size(layer_names[0])
            return self.runtime.begin_local_step(batch, page_size)
        self._step = self.runtime.begin_step(batch)
        return self._step

    @contextmanager
    def scheduled(self) -> Iterator[None]:
        """A batch of the scheduler runs. Other batches are the model runner's own: warm-up, the capture of graphs."""
        self._step, self.is_scheduled = None, True
        self._sinks.refresh()
        try:
            yield
        except BaseException as error:
            step = self._step
            if step is not None:
                self.runtime.abandon(step)
                if self._unheard is not None and step.error is not None and not isinstance(error, SystemExit):
                    self._unheard.end(str(step.error))  # compiled code has turned that exit into an error of its own
            raise
        finally:
            self.is_scheduled = False
        if self._step is not None:
            self.runtime.end_step(self._step)
        elif self._unheard is not None:
            self._unheard.check(None)

    @contextmanager
    def sampled(self) -> Iterator[None]:
        """The model runner samples: rows that yield no token are not heard, and take nothing from their generators.

        vLLM has no seam for it. ``GPUModelRunner._bookkeeping_sync`` (v1/worker/gpu_model_runner.py) drops what it
        sampled for rows of ``discard_request_mask``, which is made for prompts in chunks; it rewinds their generators,
        which those of a CPU refuse. So they are taken away meanwhile; and so are prompts' log-probabilities, which
        would be handed over with a token that is not there.
        """
        step = self._step
        unfinished = [] if step is None or not self.runtime.model.parks else self.runtime.unfinished(step)
        self._unfinished = unfinished
        if not unfinished:
            yield
            return
        batch = self._runner.input_batch
        rows = [batch.req_id_to_index[name] for name in unfinished]
        self._runner.discard_request_mask.np[rows] = True
        asked = self._runner.num_prompt_logprobs
        generators = {row: batch.generators.pop(row) for row in rows if row in batch.generators}
        logprobs = {name: asked.pop(name) for name in unfinished if name in asked}
        try:
            yield
        finally:
            batch.generators.update(generators)
            asked.update(logprobs)

    def checked(self, output: ModelRunnerOutput | AsyncModelRunnerOutput | None) -> Any:
        """The output of the last step; when it is there, whether it may be used."""
        step, self._step = self._step, None
        if step is None:
            return output
        if isinstance(output, AsyncModelRunnerOutput):
            output = CheckedOutput(output, lambda: self.failure(step))
        elif output is not None:
            output = checked(output, self.failure(step), self._unfinished)
        if self._unheard is not None:
            self._unheard.check(output)
        return output

    def failure(self, step: Step) -> StepFailure | None:
        """`HybridRuntime.failure`, with the engine's blocks for pages."""
        failure = self.runtime.failure(step)
        if failure is None:
            return None
        return replace(failure, pages=sorted({page // self.pages_per_block for page in failure.pages}))

    def imported(self, pages: Tensor, tokens: Tensor | None = None) -> None:
        """A connector has brought pages from a server with vLLM's own CPU backend. (`HybridRuntime.imported`)"""
        # Not at the top: it is of the CPU engine alone.
        from hybrid_backend.engines.vllm.stock_pages import to_ours

        for layer in self.runtime.tiers.host.layers:
            to_ours(layer, pages)
        self.runtime.imported(pages, tokens)

    def _page_size(self, layer_name: str) -> int:
        context = self._runner.compilation_config.static_forward_context
        return int(context[layer_name].kv_cache.shape[2])


def as_pages(kv_cache: Tensor) -> Tensor:
    """vLLM's view of a layer, ``[pages, kv_heads, page_size, 2 * head_dim]``, in our layout (the bytes are ours)."""
    pages, heads, page_size, width = kv_cache.shape
    return kv_cache.view(pages, heads, 2, page_size, width // 2)
