"""Attention of prefill chunks: causal over the chunk itself, and without a mask over all earlier tokens.

The two partials merge exactly, so that no mask of shape ``[chunk, context]`` is needed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from hybrid_backend.attention.partial import Partial, with_sinks
from hybrid_backend.attention.prefill import KVBlock, flash
from hybrid_backend.batch import ModelSpec, sent
from hybrid_backend.kernels.operations import Operations


class Prompts(ABC):
    """Attention of prefill chunks by one implementation. `Partial.out` may have the dtype of the queries."""

    head_axis: ClassVar[int]
    """Dimension of the heads: 0: out is ``[heads, tokens, head_dim]``; 1: out is ``[tokens, heads, head_dim]``."""

    def __init__(self, operations: Operations, model: ModelSpec) -> None:
        self._operations, self._model = operations, model

    @abstractmethod
    def own(self, q: Tensor, k: Tensor, v: Tensor, chunks: Sequence[tuple[int, int]]) -> list[Partial]:
        """Compute the causal attention of each chunk over its own tokens.

        Args:
            q: queries of the batch, ``[tokens, heads, head_dim]``.
            k: keys of the batch, ``[tokens, kv_heads, head_dim]``.
            v: values of the batch, shaped like ``k``.
            chunks: ``(start, end)`` tokens of each chunk in the batch, ascending. Each chunk gets a partial.
        """

    @abstractmethod
    def over(self, q: Tensor, block: KVBlock) -> Partial:
        """Compute the attention of all queries ``q`` ``[chunk, heads, head_dim]`` over all tokens of a block.

        ``q`` has only the query heads that belong to the KV heads of the block.
        """

    def attend(self, q: Tensor, own: Partial, before: Iterable[KVBlock], sinks: Tensor | None = None) -> Tensor:
        """Compute the attention of a chunk over its own and all earlier tokens.

        Args:
            q: ``[chunk, heads, head_dim]``.
            own: attention of the chunk over its own tokens (`own`), which may be overwritten.
            before: blocks of earlier tokens. Each token of each KV head must be in exactly one block.
            sinks: ``[heads]`` fp32 logits of attention sinks (`with_sinks`); None: no sinks.

        Returns:
            ``[chunk, heads, head_dim]`` fp32; without earlier tokens in the dtype of ``own``.
        """
        partial = own
        for block in before:
            if len(block.heads) == self._model.num_kv_heads:
                partial = self._merged(partial, self.over(q, block))
            else:
                partial = self._merged_some(partial, q, block)
        if sinks is not None:
            partial = with_sinks(partial, sinks if self.head_axis else sinks[:, None])
        return partial.out if self.head_axis else partial.out.transpose(0, 1)

    def _merged(self, a: Partial, b: Partial) -> Partial:
        """Merge two partials to fp32, in place if ``a`` is fp32."""
        out, lse = a.out.contiguous(), a.lse.contiguous()
        extra = b.out.contiguous(), b.lse.contiguous()
        into = out if out.dtype == torch.float32 else None
        return Partial(*self._operations.merge_partials(out[:, :, None], lse[:, :, None], extra, into=into))

    def _merged_some(self, partial: Partial, q: Tensor, block: KVBlock) -> Partial:
        """Merge the attention over a block of some KV heads into the heads of ``partial`` that attend the block."""
        axis, group = self.head_axis, self._model.num_heads // self._model.num_kv_heads
        kv_heads = sent(torch.tensor(block.heads), q.device)
        heads = (kv_heads[:, None] * group + torch.arange(group, device=q.device)).flatten()
        out, lse = partial.out.float(), partial.lse
        selected = Partial(out.index_select(axis, heads), lse.index_select(axis, heads))
        merged = self._merged(selected, self.over(q.index_select(1, heads), block))
        return Partial(out.index_copy_(axis, heads, merged.out), lse.index_copy_(axis, heads, merged.lse))


@runtime_checkable
class PagedPrompts(Protocol):
    """Prompts that attend pages on the device where they lie, a chunk and its earlier tokens in one call."""

    def over_pages(
        self, q: Tensor, kv: Tensor, chunks: Sequence[tuple[int, int]], lists: Sequence[tuple[Tensor, int]]
    ) -> list[Partial]:
        """Compute the causal attention of each chunk over listed pages, whose last tokens are the chunk's own.

        Args:
            q: queries of the batch, ``[tokens, heads, head_dim]``.
            kv: ``[pages, kv_heads, 2, page_size, head_dim]`` on the device.
            chunks: ``(start, end)`` tokens of each chunk in the batch, ascending.
            lists: ``(ids, tokens)`` of each chunk: pages of ``kv`` ``[n]`` int32, all full but the last one, and the
                number of tokens in these pages.

        Returns:
            A partial for each chunk.
        """


class TorchPrompts(Prompts):
    """Attention of prefill chunks by PyTorch's flash attention."""

    head_axis = 0

    def own(self, q: Tensor, k: Tensor, v: Tensor, chunks: Sequence[tuple[int, int]]) -> list[Partial]:
        group, partials = q.shape[1] // k.shape[1], []
        for start, end in chunks:
            own_k, own_v = (x[start:end].transpose(0, 1).repeat_interleave(group, 0) for x in (k, v))
            partials.append(flash(q[start:end].transpose(0, 1), own_k, own_v, True, self._model.scale))
        return partials

    def over(self, q: Tensor, block: KVBlock) -> Partial:
        # The query heads of a KV head become additional query tokens, so that K and V need not be repeated.
        chunk, heads, dim = q.shape
        kv_heads = len(block.heads)
        folded = q.view(chunk, kv_heads, -1, dim).permute(1, 2, 0, 3).reshape(kv_heads, -1, dim)
        out, lse = flash(folded, block.k, block.v, False, self._model.scale)
        return Partial(out.reshape(heads, chunk, dim), lse.reshape(heads, chunk))
