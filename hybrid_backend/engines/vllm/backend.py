"""vLLM's attention backend contract: what it supports, and how a batch becomes a step of the runtime."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config_or_none
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import KVCacheLayout

from hybrid_backend.batch import Batch, captured_step
from hybrid_backend.engines.vllm.layer import HybridImpl, HybridMetadata
from hybrid_backend.engines.vllm.settings import attached_config
from hybrid_backend.errors import EngineError
from hybrid_backend.step.operations import are_launches

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from hybrid_backend.engines.vllm.session import Session


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
        """One page: a block of the engine, which may be wider, holds a whole number of them."""
        vllm_config = get_current_vllm_config_or_none()
        return [MultipleOf(16)] if vllm_config is None else [attached_config(vllm_config).page_size]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return []  # any

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.LBHNC,)

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        return True


class HybridMetadataBuilder(AttentionMetadataBuilder[HybridMetadata]):
    """Turns a vLLM batch into a step of the runtime, once per KV cache group."""

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: Any) -> AttentionCGSupport:
        """Full graphs of decode steps, where the method's step is nothing but launches."""
        config, device = attached_config(vllm_config), torch.device(vllm_config.device_config.device_type)
        if device.type == "cuda" and are_launches(config, device):
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
        request_ids = self.session.request_ids(m)
        batch = Batch(
            request_ids=request_ids,
            query_start=query_start,
            seq_lens=_lengths(m).tolist(),
            decode=[
                count == 1 and (is_replayed or not prefilling)
                for count, prefilling in zip(counts, m.is_prefilling.tolist(), strict=False)
            ],
            page_table=m.block_table_tensor,
            slot_mapping=m.slot_mapping[: query_start[-1]],
            budgets=self.session.budgets(request_ids),
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
