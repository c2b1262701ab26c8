"""vLLM's attention backend contract: what the backend supports, and how a batch becomes a step of the runtime."""

from __future__ import annotations

import itertools
from dataclasses import replace
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

from hybrid_backend.batch import Batch, Step, captured_step
from hybrid_backend.engines.vllm.kv_dtype import INT8
from hybrid_backend.engines.vllm.layer import HybridImpl, HybridMetadata
from hybrid_backend.engines.vllm.settings import attached_config
from hybrid_backend.errors import EngineError
from hybrid_backend.kernels.kv_format import KvFormat
from hybrid_backend.step.operations import are_launches

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from hybrid_backend.engines.vllm.session import Session


class HybridBackend(AttentionBackend):
    """The backend of ``--attention-backend CUSTOM``."""

    # One call per layer stores the new tokens and attends.
    forward_includes_kv_cache_update: bool = True
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.bfloat16, torch.float16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16", INT8]

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """Return a layer's KV cache specification with the size of its pages: in 8 bits scales belong to them."""
        if spec.dtype != torch.int8 or spec.state_content_bytes is not None:
            return spec
        kv = KvFormat(1, 1, spec.head_size, spec.dtype)
        return replace(spec, state_content_bytes=kv.token_bytes)

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
        """Return the page size: a block of the engine, which may be wider, holds a whole number of pages."""
        vllm_config = get_current_vllm_config_or_none()
        return [MultipleOf(16)] if vllm_config is None else [attached_config(vllm_config).page_size]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Return an empty list, with which vLLM accepts any head_dim."""
        return []

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
        """Return support for full graphs of decode steps, if the method's step consists of kernel launches only."""
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
        self.session: Session | None = None  # The worker sets it when the KV memory is allocated.
        speculative = vllm_config.speculative_config
        self._most_queries = 1 if speculative is None else 1 + speculative.num_speculative_tokens
        """Most query tokens of a decode row: the last token and the drafts of the next ones."""
        self._is_captured = self.get_cudagraph_support(vllm_config, kv_cache_spec) != AttentionCGSupport.NEVER

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> HybridMetadata:
        """Begin a step of the runtime for a batch of the scheduler; other batches have no step."""
        metadata = common_attn_metadata
        if self.session is None or not self.session.is_scheduled:
            return HybridMetadata(None, metadata.num_actual_tokens)
        query_start = metadata.query_start_loc_cpu.tolist()
        counts = [end - start for start, end in itertools.pairwise(query_start)]
        if self.session.has_chunks(self.layer_names):
            return HybridMetadata(self._chunk_step(metadata, query_start, counts), metadata.num_actual_tokens)
        if metadata.is_prefilling is None:
            raise EngineError("vLLM did not say which rows are prefilling (CommonAttentionMetadata.is_prefilling)")
        # A batch of single tokens replays the graph of a decode step, also if a row's token is the last of a prompt.
        is_replayed = self._is_captured and max(counts) == 1
        request_ids = self.session.request_ids(metadata)
        batch = Batch(
            request_ids=request_ids,
            query_start=query_start,
            seq_lens=_sequence_lengths(metadata).tolist(),
            # A row with more tokens than drafts allow computes an answer again that was preempted. A row that pads the
            # batch has no token.
            decode=[
                1 <= count <= self._most_queries and (is_replayed or not is_prefilling)
                for count, is_prefilling in zip(counts, metadata.is_prefilling.tolist(), strict=False)
            ],
            page_table=metadata.block_table_tensor,
            slot_mapping=metadata.slot_mapping[: query_start[-1]],
            budgets=self.session.budgets(request_ids),
        )
        return HybridMetadata(self.session.step_for(self.layer_names, batch), metadata.num_actual_tokens)

    def _chunk_step(self, metadata: CommonAttentionMetadata, query_start: list[int], counts: list[int]) -> Step:
        """Return the step of layers that attend within chunks of the sequence (Llama 4).

        vLLM has cut each request at the ends of its chunks: a row holds a piece's query tokens, the tokens of its chunk
        so far and the pages of that chunk alone (`make_local_attention_virtual_batches`). Such a row is attended as the
        row of a short sequence, and it does not matter whose it is.
        """
        assert self.session is not None
        batch = Batch(
            request_ids=[""] * len(counts),
            query_start=query_start,
            seq_lens=_sequence_lengths(metadata).tolist(),
            decode=[count == 1 for count in counts],
            page_table=metadata.block_table_tensor,
            slot_mapping=metadata.slot_mapping[: query_start[-1]],
        )
        return self.session.step_for(self.layer_names, batch)

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> HybridMetadata:
        """Return a step of as many decode rows, whose inputs are those of whichever step is replayed."""
        return HybridMetadata(captured_step(common_attn_metadata.num_reqs), common_attn_metadata.num_actual_tokens)


def _sequence_lengths(metadata: CommonAttentionMetadata) -> Tensor:
    """Return ``[rows]`` tokens of each sequence.

    On a GPU the host's own count is used, for which nothing waits for the device. It is exact without speculative
    decoding, which is refused.
    """
    if metadata.seq_lens.device.type == "cpu" or metadata.seq_lens_cpu_upper_bound is None:
        return metadata.seq_lens
    return metadata.seq_lens_cpu_upper_bound
