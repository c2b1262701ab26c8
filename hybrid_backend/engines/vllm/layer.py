"""Attention layer of vLLM, which gives its tokens to the runtime, and its decoder layer's input to the lookahead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor
from vllm.v1.attention.backend import AttentionImpl, AttentionType

from hybrid_backend.batch import Step
from hybrid_backend.engines.refusal import refuse
from hybrid_backend.engines.vllm.checks import LAYER_REFUSALS, Layer
from hybrid_backend.engines.vllm.outputs import UnreadRank
from hybrid_backend.runtime import HybridRuntime

if TYPE_CHECKING:
    from hybrid_backend.attention.lookahead import Predictor


@dataclass
class HybridMetadata:
    """Metadata that vLLM carries from the builder to the layers.

    Attributes:
        step: the runtime's step; None for rows that vLLM made up, for which nothing is attended.
        num_actual_tokens: tokens without padding.
        causal: always True; vLLM reads it.
    """

    step: Step | None
    num_actual_tokens: int
    causal: bool = True


class HybridImpl(AttentionImpl):
    """An attention layer. `bind` connects it to the runtime when the KV memory is allocated."""

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
        self.sinks = sinks  # A parameter, whose weights are loaded later.
        self.layer_index = -1
        self.runtime: HybridRuntime | None = None
        self.unread_rank: UnreadRank | None = None
        self.predictor: Predictor | None = None

    def bind(self, runtime: HybridRuntime, layer_index: int, unread_rank: UnreadRank | None) -> None:
        """Connect the layer to the runtime; ``unread_rank`` is set if vLLM does not read this rank's errors."""
        self.runtime, self.layer_index, self.unread_rank = runtime, layer_index, unread_rank

    def lookahead(
        self, metadata: HybridMetadata, positions: Tensor | None, hidden: Tensor, residual: Tensor | None
    ) -> None:
        """Predict this layer's query from an earlier layer's input (`hooks.lookahead_hook`)."""
        runtime, step = self.runtime, metadata.step
        if runtime is None or self.predictor is None or step is None:
            return
        if not runtime.wants_lookahead(self.layer_index, step):
            return
        rows = step.decode
        assert rows is not None
        residual = rows.gather(residual) if residual is not None and self.predictor.adds_residual else None
        if positions is not None:  # Rotary embeddings of images have several axes; tokens are the last dimension.
            positions = rows.gather(positions.movedim(-1, 0)).movedim(0, -1)
        inputs = {"positions": positions, "hidden_states": rows.gather(hidden), "residual": residual}
        runtime.lookahead(self.layer_index, step, self.predictor(inputs))

    def layer_input(self, metadata: HybridMetadata, hidden: Tensor, residual: Tensor | None) -> None:
        """Give the runtime the input of this layer's decoder layer, which it may change (`hooks.input_hook`)."""
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
        """Store the new tokens and attend.

        ``query`` and ``output`` are ``[tokens, heads, dim]``, ``key`` and ``value`` ``[tokens, kv_heads, dim]``.
        ``attn_metadata`` is None while vLLM profiles or warms up.
        """
        if attn_metadata is None or attn_metadata.step is None or self.runtime is None:
            return output.zero_()
        step = attn_metadata.step
        self.runtime.forward(self.layer_index, step, query, key, value, output)
        if self.unread_rank is not None and step.error is not None:  # Other ranks must not add an incomplete output.
            self.unread_rank.end(str(step.error))
        return output
