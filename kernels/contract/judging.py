"""Operations of the CPU workers that judge prompts: which tokens of a prompt each KV head keeps.

`oracle` and `cpu.operations` implement them. A device never judges, so Triton has no such operation.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor


class LayerToJudge(NamedTuple):
    """A layer of a prompt. The tensors are on the host."""

    q: Tensor
    """``[n, heads, head_dim]`` in the model's dtype: queries of the prompt's last n tokens; n may be 0."""
    host: Tensor
    """``[pages, kv_heads, 2, page_size, width]``, contiguous: host pages of the layer, of the dtype of `q` or int8."""
    store: Tensor
    """Pages that take the kept tokens of the request, in the format of `host`, as many as the prompt has."""


class PromptToJudge(NamedTuple):
    """A prompt whose K and V are in the host pool. Each KV head of each layer is judged alone."""

    layers: list[LayerToJudge]
    pages: Tensor
    """``[>= tokens / page_size]`` int32 host pages of the sequence."""
    tokens: int
    """Tokens of the sequence."""
    first: int
    """First token that is judged, a multiple of the page size. Earlier tokens count for nothing."""
    older: int
    """End of the judged tokens, a multiple of the page size, from ``first`` to ``tokens``."""
    threshold: float
    """A KV head keeps the tokens whose weight exceeds this number; in a layer without queries, all tokens."""
    scale: float
    """Factor of the logits."""


class Judgement(NamedTuple):
    """Result of judging a prompt."""

    keep_mask: Tensor
    """``[layers, kv_heads, older - first]`` bool: true for tokens that the KV head keeps."""
    recent: Tensor
    """``[layers, kv_heads, tokens - older]`` fp32: weights of the later tokens; 0 in a layer without queries."""
    counts: Tensor
    """``[layers, kv_heads]`` int32: number of tokens that the KV head keeps."""


class JudgingOperations(Protocol):
    """Weigh the tokens of a prompt by its last queries."""

    def prompt_weights(
        self, q: Tensor, kv: Tensor, pages: Tensor, tokens: int, first: int, older: int, scale: float
    ) -> Tensor:
        """Compute the mean attention weight that a prompt's last queries give to each token (HGCA, section 3.2.2).

        The softmax of each query runs over the tokens ``first`` to ``older``, and over the later tokens, each span
        alone and causally. The weights are averaged over the queries. A KV head takes the largest of its query heads.
        A NaN logit counts as -inf; a query that sees no token of a span gives it no weight.

        Args:
            q: queries ``[n, heads, head_dim]`` of the last n tokens, contiguous, in the model's dtype.
            kv: host pages ``[pages, kv_heads, 2, page_size, width]``, in the dtype of ``q`` or in 8 bits.
            pages: ``[>= tokens / page_size]`` int32 host pages of the sequence.
            tokens: tokens of the sequence.
            first: first token that is weighed.
            older: first token of the second span.
            scale: factor of the logits.

        Returns:
            ``[kv_heads, tokens - first]`` fp32.
        """
