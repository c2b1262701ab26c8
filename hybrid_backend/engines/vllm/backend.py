"""vLLM's attention backend contract, carried out by the runtime."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import KVCacheLayout

from hybrid_backend.engines.vllm.settings import attached_config
from hybrid_backend.errors import EngineError
from hybrid_backend.methods import resolve_method
from hybrid_backend.runtime import HybridRuntime
from hybrid_backend.step import Batch, Step, captured_step

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from hybrid_backend.attention.lookahead import QueryPredictor
    from hybrid_backend.engines.vllm.session import Session


@dataclass
class HybridMetadata:
    """What vLLM carries from the builder to the layers. No step: the rows are made up, nothing is attended."""

    step: Step | None
    num_actual_tokens: int
    causal: bool = True


class HybridBackend(AttentionBackend):
    """Selected by ``--attention-backend CUSTOM``."""

    # One call per layer stores the new tokens and attends.
    forward_includes_kv_cache_update: bool = True
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.bfloat16, torch.float16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[HybridImpl]:
        return HybridImpl

    @staticmethod
    def get_builder_cls() -> type[HybridMetadataBuilder]:
        return HybridMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return []  # any

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.LBHNC,)

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True


class HybridMetadataBuilder(AttentionMetadataBuilder[HybridMetadata]):
    """Turns a vLLM batch into a step of the runtime, once per KV cache group."""

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: Any) -> AttentionCGSupport:
        """Full graphs of decode steps, where the method's step is nothing but launches."""
        config, device = attached_config(vllm_config), torch.device(vllm_config.device_config.device_type)
        if device.type == "cuda" and resolve_method(config.method).runs_kernels(config, device):
            return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
        return AttentionCGSupport.NEVER

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        if device.type not in ("cpu", "cuda"):
            raise EngineError(f"the hybrid backend runs on vLLM's CPU and CUDA engines, not on {device.type}")
        self.session: Session | None = None  # set by the worker when the KV memory is there
        self._is_captured = self.get_cudagraph_support(vllm_config, kv_cache_spec) != AttentionCGSupport.NEVER

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> HybridMetadata:
        m = common_attn_metadata
        if self.session is None or not self.session.is_scheduled:
            return HybridMetadata(None, m.num_actual_tokens)
        query_start = m.query_start_loc_cpu.tolist()
        if m.is_prefilling is None:
            raise EngineError("vLLM did not say which rows are prefilling (CommonAttentionMetadata.is_prefilling)")
        counts = [end - start for start, end in itertools.pairwise(query_start)]
        # A batch of single tokens replays the graph of a decode step, also where one is the last token of a prompt.
        is_replayed = self._is_captured and max(counts) == 1
        batch = Batch(
            request_ids=self.session.request_ids(m),
            query_start=query_start,
            seq_lens=_lengths(m).tolist(),
            decode=[
                count == 1 and (is_replayed or not prefilling)
                for count, prefilling in zip(counts, m.is_prefilling.tolist(), strict=False)
            ],
            page_table=m.block_table_tensor,
            slot_mapping=m.slot_mapping[: query_start[-1]],
        )
        return HybridMetadata(self.session.step_for(self.layer_names, batch), m.num_actual_tokens)

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> HybridMetadata:
        """A step of as many decoding rows, whose inputs are those of whatever step is replayed."""
        return HybridMetadata(captured_step(common_attn_metadata.num_reqs), common_attn_metadata.num_actual_tokens)


def _lengths(m: CommonAttentionMetadata) -> Tensor:
    """``[rows]`` tokens of each sequence. On a GPU the host's own count, for which the device need not be waited for:
    without speculative decoding, which is refused, it is exact."""
    if m.seq_lens.device.type == "cpu" or m.seq_lens_cpu_upper_bound is None:
        return m.seq_lens
    return m.seq_lens_cpu_upper_bound


class HybridImpl(AttentionImpl):
    """One attention layer. ``bind`` connects it to the runtime when the KV memory is there."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        refused = {
            "ALiBi": alibi_slopes is not None,
            "attention with logit soft-capping": bool(logits_soft_cap),
            f"attention of type {attn_type}": attn_type != AttentionType.DECODER,
            "layers that share another layer's KV cache": kv_sharing_target_layer_name is not None,
            "attention sinks": sinks is not None,
        }
        for what, is_asked in refused.items():
            if is_asked:
                raise EngineError(f"the hybrid backend does not support {what}; leave out --attention-backend CUSTOM")
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads
        self.sliding_window = sliding_window
        self.kv_cache_dtype = kv_cache_dtype
        self.layer_index = -1
        self.runtime: HybridRuntime | None = None
        self.predictor: QueryPredictor | None = None

    def bind(self, runtime: HybridRuntime, layer_index: int) -> None:
        self.runtime = runtime
        self.layer_index = layer_index

    def lookahead(self, metadata: HybridMetadata, positions: Tensor, hidden: Tensor, residual: Tensor | None) -> None:
        """The input of an earlier layer is known (`lookahead.hook_for`)."""
        runtime, step = self.runtime, metadata.step
        if runtime is None or self.predictor is None or step is None:
            return
        if not runtime.wants_lookahead(self.layer_index, step):
            return
        rows = step.decode
        assert rows is not None
        x = rows.gather(hidden)
        if residual is not None:
            x = x + rows.gather(residual)
        runtime.lookahead(self.layer_index, step, self.predictor(rows.gather(positions), x))

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: HybridMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """``query``, ``output``: ``[tokens, heads, dim]``; ``key``, ``value``: ``[tokens, kv_heads, dim]``."""
        if attn_metadata is None or attn_metadata.step is None or self.runtime is None:
            return output.zero_()  # profiling, warm-up
        self.runtime.forward(self.layer_index, attn_metadata.step, query, key, value, output)
        return output
