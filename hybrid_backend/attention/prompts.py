"""Attention of prompts: each chunk causally over itself, and without a mask over all that came before it. The partials
merge exactly, so no ``[chunk, context]`` mask is ever built."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from hybrid_backend.attention.partial import Partial, with_sinks
from hybrid_backend.attention.prefill import KVBlock, flash
from hybrid_backend.batch import ModelSpec, sent
from hybrid_backend.kernels.operations import Operations


class Prompts(ABC):
    """``head_axis``: where partials have their heads: 0: ``[heads, tokens, head_dim]``, 1: ``[tokens, heads,
    head_dim]``; ``lse`` without the last dimension. ``out`` may be of the queries' type."""

    head_axis: ClassVar[int]

    def __init__(self, operations: Operations, model: ModelSpec) -> None:
        self._operations, self._model = operations, model

    @abstractmethod
    def own(self, q: Tensor, k: Tensor, v: Tensor, chunks: Sequence[tuple[int, int]]) -> list[Partial]:
        """Each chunk over itself, causally.

        Args:
            q: ``[tokens, heads, head_dim]``; k, v: ``[tokens, kv_heads, head_dim]``.
            chunks: which tokens (from, to) each is, ascending.
        """

    @abstractmethod
    def over(self, q: Tensor, block: KVBlock) -> Partial:
        """All queries over all tokens of a block.

        Args:
            q: ``[chunk, heads, head_dim]`` of the query heads of the block's KV heads.
        """

    def attend(self, q: Tensor, own: Partial, before: Iterable[KVBlock], sinks: Tensor | None = None) -> Tensor:
        """A chunk over itself and all that came before it.

        Args:
            q: ``[chunk, heads, head_dim]``.
            own: of `own`; may be overwritten.
            before: earlier tokens; together the blocks hold every (token, KV head) that counts once.
            sinks: ``[heads]`` fp32 (`with_sinks`).

        Returns:
            ``[chunk, heads, head_dim]`` in fp32, or in the queries' type where nothing was merged.
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
        """In one pass, from then on in place: ``a`` is in fp32 then."""
        out, lse = a.out.contiguous(), a.lse.contiguous()
        other = b.out.contiguous(), b.lse.contiguous()
        into = out if out.dtype == torch.float32 else None
        return Partial(*self._operations.merge_partials(out[:, :, None], lse[:, :, None], other, into=into))

    def _merged_some(self, partial: Partial, q: Tensor, block: KVBlock) -> Partial:
        """Of some KV heads, in place."""
        axis, group = self.head_axis, self._model.num_heads // self._model.num_kv_heads
        some = sent(torch.tensor(block.heads), q.device)
        mine = (some[:, None] * group + torch.arange(group, device=q.device)).flatten()
        out, lse = partial.out.float(), partial.lse
        taken = Partial(out.index_select(axis, mine), lse.index_select(axis, mine))
        found = self._merged(taken, self.over(q.index_select(1, mine), block))
        return Partial(out.index_copy_(axis, mine, found.out), lse.index_copy_(axis, mine, found.lse))


class TorchPrompts(Prompts):
    """By PyTorch's flash attention."""

    head_axis = 0

    def own(self, q: Tensor, k: Tensor, v: Tensor, chunks: Sequence[tuple[int, int]]) -> list[Partial]:
        group, found = q.shape[1] // k.shape[1], []
        for start, end in chunks:
            own_k, own_v = (x[start:end].transpose(0, 1).repeat_interleave(group, 0) for x in (k, v))
            found.append(flash(q[start:end].transpose(0, 1), own_k, own_v, True, self._model.scale))
        return found

    def over(self, q: Tensor, block: KVBlock) -> Partial:
        """The queries of a group attend the same keys: they are folded into the query length."""
        chunk, heads, dim = q.shape
        kv_heads = len(block.heads)
        folded = q.view(chunk, kv_heads, -1, dim).permute(1, 2, 0, 3).reshape(kv_heads, -1, dim)
        out, lse = flash(folded, block.k, block.v, False, self._model.scale)
        return Partial(out.reshape(heads, chunk, dim), lse.reshape(heads, chunk))
