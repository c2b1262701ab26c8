"""Operations that attend pages and merge partials."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from hybrid_backend.kernels.contract.buffers import Sample


class AttentionOperations(Protocol):
    """Attend listed pages, merge partials, average attention weights, sample a layer's inputs."""

    def paged_partial(
        self, q: Tensor, kv: Tensor, ids: Tensor | None, tokens: Tensor, scale: float, num_parts: int = 1,
        query_start: Tensor | None = None, begins: Tensor | None = None, into: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Attend the listed pages with the queries of each row; each list is cut into ``num_parts`` parts.

        Args:
            q: queries ``[queries, heads, head_dim]``.
            kv: frames or host pages ``[pages, kv_heads, 2, page_size, head_dim]``, or head pages ``[n, 1, ...]`` of any
                KV heads if ``tokens`` has a list per KV head.
            ids: ``[rows, 1 | kv_heads, n]`` int32 pages of ``kv``, any stride but a contiguous last dimension. Entries
                beyond the listed tokens are not read. None: all pages of ``kv`` in their order, without
                ``query_start``.
            tokens: ``[queries, 1 | kv_heads]`` int32 tokens at the beginning of its row's lists that each query
                attends; with one list of pages, too, the tokens may differ by KV head. All pages but the last one are
                full.
            scale: factor of the logits.
            num_parts: see `parts_for`.
            query_start: ``[rows + 1]`` int32 first query of each row; None: each row has one.
            begins: in the shape of ``tokens``: tokens of whole pages at the beginning of each list that are left out,
                at most ``tokens``; None: 0. Given without ``query_start``.
            into: views of the ``num_parts`` parts that take the result, in contiguous tensors of at least as many parts
                in the shape of the result; None: new tensors.

        Returns:
            ``(out [queries, heads, num_parts, head_dim], lse [queries, heads, num_parts])`` fp32. A part without tokens
            has out 0 and lse -inf.
        """

    def parts_for(self, rows: int, kv_heads: int, most_tokens: int, processors: int) -> int:
        """Return the number of parts per list that keeps the processors of the device equally busy in every batch.

        Args:
            rows: rows of the batch.
            kv_heads: KV heads of this rank.
            most_tokens: upper bound of a list's tokens, so that a captured graph keeps its shape.
            processors: streaming multiprocessors of the device.
        """

    def merge_partials(
        self, out: Tensor, lse: Tensor, extra_partial: tuple[Tensor, Tensor] | None = None,
        dtype: torch.dtype = torch.float32, sinks: Tensor | None = None, into: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Merge partials of disjoint sets of keys and the heads' sinks.

        FlashAttention-2 (arXiv 2307.08691, section 2.2) describes the merge. A head's sink is one more key with a
        learned logit and no value (gpt-oss, arXiv 2508.10925).

        Args:
            out: ``[queries, heads, parts, head_dim]`` fp32, bf16 or fp16.
            lse: ``[queries, heads, parts]`` fp32.
            extra_partial: one more partial, such as the CPU's: ``([queries, heads, head_dim], [queries, heads] fp32)``,
                pinned or on the device; out in fp32, bf16 or fp16. Its out is not read where its lse is -inf.
            dtype: dtype of the result.
            sinks: ``[heads]`` fp32 logits after the softmax's scaling; -inf, as None: no sink.
            into: ``[queries, heads, head_dim]`` in ``dtype``, which takes the result; None: a new tensor. It may be
                ``out`` itself if that has one part.

        Returns:
            ``([queries, heads, head_dim] dtype, [queries, heads] fp32)``. Empty partials change nothing. Nothing but
            empty partials gives out 0 and the sink's logit for lse (-inf without a sink), without NaN.
        """

    def page_weights(
        self, q: Tensor, kv: Tensor, ids: Tensor, places: Tensor, tokens: Tensor, lse: Tensor, average: Tensor,
        scale: float, alpha: float, largest: bool,
    ) -> None:  # fmt: skip
        """Update moving averages of attention weights (HGCA, arXiv 2507.03153, algorithm 1).

        ``A = (1 - alpha) A + alpha A_new`` for each listed token and KV head, where ``A_new`` is the mean softmax share
        over the KV head's query heads, or the largest one.

        Args:
            q: queries ``[rows, heads, head_dim]``, one per row.
            kv: frames or host pages, as in `paged_partial`.
            ids: ``[rows, 1, n]`` int32 pages of ``kv``, any stride but a contiguous last dimension.
            places: like ``ids``: the entry of ``average`` of each listed page; no two pages share one.
            tokens: ``[rows, 1]`` int32 tokens of each list.
            lse: ``[rows, heads]`` fp32 of the attention over these tokens.
            average: ``[places, kv_heads, page_size]`` fp32, updated in place.
            scale: factor of the logits.
            alpha: weight of the new shares.
            largest: take the largest share instead of the mean.
        """

    def take_sample(
        self, q: Tensor, predicted: Tensor | None, pages: Tensor, listed: Tensor, table: Tensor, num_pages: Tensor,
        sampled_row: Tensor, step_number: Tensor, arrived: Tensor, into: Sample,
    ) -> None:  # fmt: skip
        """Copy a layer's inputs of one row to the host if the step samples the layer; else write nothing.

        Args:
            q: true queries ``[rows, heads, head_dim]``.
            predicted: predicted queries, like ``q``; None: no prediction.
            pages: `Selection.pages`.
            listed: `Selection.pages_listed`.
            table: block table ``[rows, columns]`` int32, any row stride.
            num_pages: ``[rows]`` int32 pages of each sequence.
            sampled_row: ``[1]`` int32: the sampled row plus 1; 0: the layer is not sampled.
            step_number: ``[1]`` int32 number of the step.
            arrived: ``[1]`` int32 scratch: 0 before and after.
            into: sample of the layer, with as many lists of as many pages as ``pages``. Entries beyond the row's pages
                and beyond a list's length are undefined. The cosines of ``rows`` rows are written, 0 where a query is
                zero.
        """
