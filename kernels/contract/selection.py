"""Operations that score pages and select them."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from hybrid_backend.kernels.contract.buffers import Reuse, Selection


class SelectionOperations(Protocol):
    """Score pages by their digests, select the best ones, look up cached selections."""

    def page_scores(
        self, q: Tensor, digests: Tensor, table: Tensor, num_pages: Tensor, budgets: Tensor, aggregate: str,
        per_head: bool, bound: float, scale: float, page_size: int = 0, query_start: Tensor | None = None,
        reuse: Reuse | None = None,
    ) -> Tensor:  # fmt: skip
        """Estimate each page's contribution to the attention as a logit, combined over query heads.

        Digests of maxima and minima estimate the page's largest logit (Quest, arXiv 2406.10774, section 3.2): a digest
        allows ``q.(max+min)/2 +- |q|.(max-min)/2``, and the estimate is the middle plus ``bound`` times the half width.
        Codes estimate the log-sum-exp of the tokens' scaled logits (`codes.estimates`), divided by ``scale``.

        ``sum`` and ``max`` combine the unscaled estimates of a KV head's group; without ``per_head`` these are then
        summed over KV heads. ``softmax`` turns each query head's scaled estimates into shares of the row's pages
        without the last (growing) one, whose share is 0, and sums the shares. All queries of a row select together:
        they combine as more query heads of each group do.

        Args:
            q: queries ``[queries, heads, head_dim]``.
            digests: digests of the layer, in any format.
            table: block table ``[rows, columns]`` int32, any row stride; entries beyond a row's pages are not read.
            num_pages: ``[rows]`` int32 pages of each sequence.
            budgets: ``[rows]`` int32 pages; a row that may select all of its pages is not scored.
            aggregate: one of `AGGREGATES`.
            per_head: one list per KV head instead of one per row.
            bound: position of the estimate between the middle (0) and the upper end (1: Quest) of the allowed range.
            scale: factor of the logits in the attention's softmax.
            page_size: tokens of a page; needed for codes.
            query_start: ``[rows + 1]`` int32 first query of each row; None: each row has one.
            reuse: selections of the layer that rows may reuse; given without ``query_start``. The result then is the
                first rows of `Reuse.scores`, in which a row that reuses its selection keeps its scores.

        Returns:
            Scores ``[rows, 1 | kv_heads, columns]`` fp32: -inf beyond a row's pages, 0 in a row that is not scored.
            With ``reuse`` the scores of padding rows are undefined.
        """

    def select_pages(
        self, scores: Tensor, num_pages: Tensor, seq_lens: Tensor, budgets: Tensor, requests: Tensor,
        frame_of: Tensor | None, table: Tensor, page_size: int, sinks: int, recent: int, max_pages: int,
        counters: Tensor | None = None, mailbox: tuple[Tensor, Tensor] | None = None, reuse: Reuse | None = None,
    ) -> Selection:  # fmt: skip
        """Select the best pages of each list, and split them by residency.

        The first ``sinks`` and the last ``recent`` pages (at least the growing one) are always selected. Of equal
        scores the first page wins. NaN counts as -inf.

        Args:
            scores: ``[rows, lists, columns]`` fp32.
            num_pages: ``[rows]`` int32 pages of each sequence.
            seq_lens: ``[rows]`` int32 tokens of each sequence.
            budgets: ``[rows]`` int32 pages, at least ``sinks + recent``; more than a row has: all.
            requests: ``[rows]`` int32 index of each row's request.
            frame_of: ``[requests, columns]`` int32 (`Maps.frame_of`). None: the device tier reads the host pool itself,
                so each page is resident, and its frame is its host page.
            table: block table ``[rows, columns]`` int32, any row stride.
            page_size: tokens of a page.
            sinks: first pages that are always selected.
            recent: last pages that are always selected.
            max_pages: pages that any list may hold; the result has that many columns.
            counters: counters of the layer (`Counters`), to which the selected pages and tokens are added.
            mailbox: ``([>= rows, lists, max_pages], [>= rows, lists])`` int32, pinned: the place where the CPU workers
                read `Selection.missing` and `Selection.missing_listed`. The result's ``missing`` then lies there only.
            reuse: selections of the layer that rows may reuse. A row that does so gets its pages of `Reuse.pages`,
                split by the residency of this call. The other rows store their pages and their epoch there.
                `Selection.pages` and `Selection.pages_listed` of the result are the first rows of ``reuse``.
        """

    def match_labels(
        self, q: Tensor, labels: Tensor, weights: Tensor, thresholds: Tensor, requests: Tensor, num_pages: Tensor,
        budgets: Tensor, aggregate: str, counters: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Decide for each KV head if its cached pages still fit the query, and relabel those that do not.

        Lookup and label update in one (CLO, arXiv 2511.14510, sections 3.1, 3.2 and 4.2). A query head's similarity is
        the cosine of its query and its label, in fp32 at least: 1 where they are equal, 0 where one of them is zero.
        ``harmonic`` (Eq. 10) is ``sum(s) / sum(s / similarity)`` over a KV head's query heads, whose weights are s.
        This mean is singular at a similarity of 0. So the smallest similarity of the heads with s > 0 replaces the mean
        if it is <= 0, which is continuous. ``min`` is that smallest similarity always. Weights that are all 0 are equal
        weights.

        A KV head hits if the result is at least its threshold. It misses without a label, and if any of its
        similarities is NaN. A row that may select all of its pages (``budgets >= num_pages``, so also a padding row) is
        not looked up, nor is a head whose threshold is -inf: it does not miss, keeps its label and is not counted.

        Args:
            q: queries ``[rows, heads, head_dim]``.
            labels: ``[requests, heads, head_dim]`` in the dtype of ``q``: queries that selected the cached pages. A KV
                head whose labels are all zero has no label. Heads that miss take ``q``.
            weights: ``[heads]`` fp32 >= 0, importance of the query heads.
            thresholds: ``[kv_heads]`` fp32; -inf: not looked up.
            requests: ``[rows]`` int32; requests of rows that are looked up are distinct.
            num_pages: ``[rows]`` int32 pages of each sequence.
            budgets: ``[rows]`` int32 pages.
            aggregate: one of `SIMILARITIES`.
            counters: counters of the layer (`Counters`), to which lookups and hits are added.

        Returns:
            ``[rows, kv_heads]`` int32 pages that the head selects from: those of the row if the head missed, else 0.
        """

    def union_pages(self, absent: Tensor, listed: Tensor, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Unite the absent pages of a row's lists, and take each page's highest score.

        Args:
            absent: ``[rows, lists, k]`` int32 logical pages (`Selection.absent`).
            listed: ``[rows, lists]`` int32 lengths of ``absent``.
            scores: ``[rows, lists, columns]`` fp32.

        Returns:
            Pages ``[rows, 1, min(lists * k, columns)]`` int32, each once and ascending; their number ``[rows, 1]``
            int32; scores ``[rows, 1, columns]`` fp32.
        """
