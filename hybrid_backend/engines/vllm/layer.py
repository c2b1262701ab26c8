"""One attention layer of vLLM: hands its tokens to the runtime, and its decoder layer's input to the lookahead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor
from vllm.v1.attention.backend import AttentionImpl, AttentionType

from hybrid_backend.batch import Step
from hybrid_backend.engines.refusal import refuse
from hybrid_backend.engines.vllm.checks import LAYER_REFUSALS, Layer
from hybrid_backend.engines.vllm.outputs import UnheardRank
from hybrid_backend.runtime import HybridRuntime

if TYPE_CHECKING:
    from hybrid_backend.attention.lookahead import Predictor


@dataclass
class HybridMetadata:
    """What vLLM carries from the builder to the layers. No step: the rows are made up, nothing is attended."""

    step: Step | None
    num_actual_tokens: int
    causal: bool = True


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
        refuse(LAYER_REFUSALS, Layer(alibi_slopes, logits_soft_cap, attn_type, kv_sharing_target_layer_name))
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads
        self.sliding_window = sliding_window
        self.kv_cache_dtype = kv_cache_dtype
        self.sinks = sinks  # a parameter, whose weights are loaded later
        self.layer_index = -1
        self.runtime: HybridRuntime | None = None
        self.unheard: UnheardRank | None = None
        self.predictor: Predictor | None = None

    def bind(self, runtime: HybridRuntime, layer_index: int, unheard: UnheardRank | None) -> None:
        self.runtime, self.layer_index, self.unheard = runtime, layer_index, unheard

    def lookahead(
        self, metadata: HybridMetadata, positions: Tensor | None, hidden: Tensor, residual: Tensor | None
    ) -> None:
        """The input of an earlier layer is known (`hooks.lookahead_hook`)."""
        runtime, step = self.runtime, metadata.step
        if runtime is None or self.predictor is None or step is None:
            return
        if not runtime.wants_lookahead(self.layer_index, step):
            return
        rows = step.decode
        assert rows is not None
        residual = rows.gather(residual) if residual is not None and self.predictor.adds_residual else None
        if positions is not None:  # of several axes (rotary embedding of images), tokens are the last dimension
            positions = rows.gather(positions.movedim(-1, 0)).movedim(0, -1)
        inputs = {"positions": positions, "hidden_states": rows.gather(hidden), "residual": residual}
        runtime.lookahead(self.layer_index, step, self.predictor(inputs))

    def layer_input(self, metadata: HybridMetadata, hidden: Tensor, residual: Tensor | None) -> None:
        """What this layer's decoder layer is about to compute with (`hooks.input_hook`)."""
        if self.runtime is not None and metadata.step is not None:
            self.runtime.layer_input(self.layer_index, metadata.step, hidden, residual)

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
        step = attn_metadata.step
        self.runtime.forward(self.layer_index, step, query, key, value, output)
        if self.unheard is not None and step.error is not None:  # before other ranks add what is missing here
            self.unheard.end(str(step.error))
        return output
