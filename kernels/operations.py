"""The operations that a decode step is made of: one signature each, and what every implementation promises.

Three implementations: `oracle` (plain torch, for tests and for machines where nothing compiles), `cpu.operations`
(native C++) and `triton.operations` (a GPU, or Triton's interpreter). Each is a module with these functions; one
contract suite (tests/unit/test_operations.py) runs them all over the same cases. A method is a sequence of them, so
what the CPU tests prove is what a GPU launches.

Shapes that all of them share: pages ``[pages, kv_heads, 2 (K, V), page_size, head_dim]`` in the model's dtype; digests
of one of three kinds (`digest_kind`): ``[pages, kv_heads, 2 (max, min), head_dim]`` in the model's dtype, of the tokens
written so far, or, of whole pages only, ``[pages, kv_heads, row]`` uint8 in codes (`codes`) or in bytes
(`byte_digests`); lists ``[rows, 1 |
kv_heads, n]`` int32, one per row or one per KV head, with the number of entries that count beside them. Log-sum-exp is
in natural log everywhere.

A row is one decoding sequence. *A row of padding* has no pages (``num_pages`` 0) and writes nowhere (its page is -1):
nothing is selected, attended, planned or opened for it, whatever its request index; its partial is empty (output 0,
lse -inf). A score that is NaN counts as -inf in every operation, and 0.0 equals -0.0. What varies from step to step
lies in tensors and no operation reads one on the host or waits, so that a CUDA graph can hold them all.

A running request has an index, and owns the frames ``index``, ``index + n``, ``index + 2 n`` and so on of every layer,
where n requests may run: so a layer may have fewer frames than another.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

AGGREGATES = ("sum", "max", "softmax")
"""How the scores of query heads combine; the position is the number that kernels know them by."""

SIMILARITIES = ("harmonic", "min")
"""How the similarities of a KV head's query heads combine (`Operations.match_labels`), numbered in the same way."""


DIGESTS = ("minmax", "codes", "bytes")
"""Kinds of digests, numbered in the same way; only `minmax` are of pages that grow, too."""


def digest_kind(digests: Tensor, head_dim: int) -> str:
    """Which of `DIGESTS` these are."""
    if digests.dtype != torch.uint8:
        return "minmax"
    return "codes" if digests.shape[-1] == 4 * head_dim else "bytes"


class Maps(NamedTuple):
    """Which page each frame holds, of all layers, or of one (without the first dimension). Pages are logical: positions
    in the sequence, so requests that share a prefix may each hold a copy of the same host page."""

    frame_of: Tensor  # [layers, requests, columns] int32 frame of each logical page, -1: not resident
    page_of: Tensor  # [layers, frames * requests] int32: the inverse; -1: empty, or about to be overwritten
    importance: Tensor  # the same of fp32, of the frame's page; -inf: empty, +inf: always selected, or no such frame

    def of(self, layer: int | slice) -> Maps:
        return Maps(*(x[layer] for x in self))

    @property
    def size(self) -> int:
        """Frames of each request."""
        return self.page_of.shape[-1] // self.frame_of.shape[-2]


class Copies(NamedTuple):
    """Recalls under way, ``[layers, rows, n]`` int32, or of one layer; an entry whose frame is -1 is none."""

    frames: Tensor
    host_pages: Tensor
    pages: Tensor  # logical
    importance: Tensor  # fp32
    requests: Tensor  # [layers, rows] int32
    started: Tensor  # [layers, rows] int64 generation of the request's index when the copy began

    def of(self, layer: int | slice) -> Copies:
        return Copies(*(x[layer] for x in self))


class Counters(NamedTuple):
    """What the operations of one layer count, a row ``[len(fields)]`` int64: totals since start. Pages and tokens are
    summed over the lists of each row. Whoever knows a number adds it; an operation that is given no row counts nothing.
    """

    resident_pages: int  # selected, in a frame
    missing_pages: int  # selected, in none
    resident_tokens: int  # that those pages hold
    missing_tokens: int
    recalled_pages: int  # copies into frames that were begun
    lookups: int  # KV heads whose cached pages were looked up
    hits: int  # of them, those whose cached pages are kept
    waited: int  # nanoseconds in which the device tier stood still for the CPU
    ahead: int  # nanoseconds from asking the CPU for pages to needing the answer
    asked_at: int  # clock at the last question; 0: it was about no page


class Selection(NamedTuple):
    """Lists ``[rows, lists, k]`` int32 with their lengths ``[rows, lists]`` int32; ascending by logical page. What lies
    beyond a list's length is undefined."""

    pages: Tensor  # logical pages, all that were selected
    pages_listed: Tensor
    frames: Tensor  # of the resident ones
    frames_listed: Tensor
    tokens: Tensor  # that the resident ones hold: the growing page is always resident, and last
    missing: Tensor  # host page ids of the others, which are whole
    absent: Tensor  # their logical pages
    missing_listed: Tensor


class Sample(NamedTuple):
    """What a layer computed with in a step that samples it, for the host: in pinned memory where there is a GPU. Of all
    layers, or of one (without the first dimension)."""

    q: Tensor  # [layers, heads, head_dim] true query of the sampled row
    table: Tensor  # [layers, columns] int32 its host pages
    pages: Tensor  # [layers, lists, k] int32 logical pages that it selected
    listed: Tensor  # [layers, lists] int32 how many
    cosines: Tensor  # [layers, rows, heads] fp32 of the predicted and true queries of all rows; NaN: none was predicted
    number: Tensor  # [layers, 1] int32 of the step, written when all else is there

    def of(self, layer: int) -> Sample:
        return Sample(*(x[layer] for x in self))

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self)


class Operations(Protocol):
    """What a module of operations offers. Tensors are contiguous unless said otherwise; outputs that are made are
    new."""

    def append_tokens(
        self, k: Tensor, v: Tensor, host: Tensor, pages: Tensor, positions: Tensor,
        frames: Tensor | None = None, requests: Tensor | None = None, frame_of: Tensor | None = None,
        digests: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Write one new token per row: to its host page, its frame and its digest.

        Args:
            k, v: ``[rows, kv_heads, head_dim]``, any row stride.
            host: ``[pages, kv_heads, 2, page_size, head_dim]``: host pages as the device tier sees them.
            pages: ``[rows]`` int32 host page of the token, -1: a row of padding. Tokens are distinct.
            positions: ``[rows]`` int32 or int64 position of the token in its sequence.
            frames: of the layout of ``host``; ``requests``: ``[rows]`` int32; ``frame_of``: ``[requests, columns]``.
            digests: a token at offset 0 makes its page new, whatever it held; codes and bytes change when a page gets
                its last token. Only with digests must the rows' pages be distinct.
        """

    def store_tokens(self, k: Tensor, v: Tensor, host: Tensor, pages: Tensor, positions: Tensor) -> None:
        """Write a prompt's tokens to their host pages, beside the step: by few programs, since they wait for the bus.

        Args:
            k, v: ``[tokens, kv_heads, head_dim]``, contiguous, as they are when the stream has come to this.
            host, pages, positions: as in `append_tokens`.
        """

    def extend_digests(self, k: Tensor, digests: Tensor, pages: Tensor, first: int, page_size: int) -> None:
        """Take the keys of a prompt chunk, consecutive tokens of one sequence, into the digests of their pages. A page
        whose first token is among them is new, whatever it held.

        Args:
            k: ``[tokens, kv_heads, head_dim]``, any row stride.
            digests: updated in place.
            pages: ``[n]`` int32 host pages of the tokens, distinct and in order.
            first: tokens that the first of them held before. For codes and bytes 0, and the tokens fill all pages.
        """

    def build_digests(self, kv: Tensor, digests: Tensor, pages: Tensor, tokens: Tensor) -> None:
        """Compute digests anew, for pages that came from elsewhere.

        Args:
            kv: ``[pages, kv_heads, 2, page_size, head_dim]``.
            digests: updated in place; codes and bytes are, of whole pages.
            pages: ``[n]`` int32 host pages, -1: none; ``tokens``: ``[n]`` int32 tokens of each that were written.
        """

    def page_scores(
        self, q: Tensor, digests: Tensor, table: Tensor, num_pages: Tensor, budgets: Tensor, aggregate: str,
        per_head: bool, bound: float, scale: float, page_size: int = 0,
    ) -> Tensor:  # fmt: skip
        """Estimates of what each page adds to the attention, as a logit, combined over query heads.

        Of maxima and minima the largest logit (Quest, arXiv 2406.10774, section 3.2): a digest allows ``q.(max+min)/2
        +- |q|.(max-min)/2``; the estimate is the middle plus ``bound`` times the half width (1: Quest's upper end). Of
        codes the log-sum-exp of the tokens' scaled logits (`codes.estimates`), over ``scale``.

        ``sum``, ``max``: of a KV head's group, unscaled; without ``per_head`` then summed over KV heads. ``softmax``:
        every query head's scaled scores become shares over the row's pages but the last (growing) one, whose share is
        0, and shares are added up.

        Args:
            q: ``[rows, heads, head_dim]``.
            table: ``[rows, columns]`` int32 host page ids, any row stride; entries beyond a row's pages are not read.
            num_pages, budgets: ``[rows]`` int32 pages; a row that may take all of its pages is not scored.
            aggregate: one of `AGGREGATES`; ``per_head``: a list per KV head instead of one.
            scale: of the attention's softmax; page_size: tokens of a page, for codes.

        Returns:
            ``[rows, 1 | kv_heads, columns]`` fp32, -inf beyond a row's pages, 0 in a row that is not scored.
        """

    def select_pages(
        self, scores: Tensor, num_pages: Tensor, seq_lens: Tensor, budgets: Tensor, requests: Tensor,
        frame_of: Tensor | None, table: Tensor, page_size: int, sinks: int, recent: int, most: int,
        counters: Tensor | None = None, mailbox: tuple[Tensor, Tensor] | None = None,
    ) -> Selection:  # fmt: skip
        """The best pages of each list, the first ``sinks`` and last ``recent`` (at least the growing one) always among
        them, and where they are. Of equal scores the first page wins; NaN counts as -inf.

        Args:
            scores: ``[rows, lists, columns]`` fp32.
            num_pages, seq_lens: ``[rows]`` int32 pages and tokens of each sequence.
            budgets: ``[rows]`` int32 pages, at least ``sinks + recent``; more than a row has: all.
            requests: ``[rows]`` int32; ``frame_of``: ``[requests, columns]`` int32. None: the device tier reads the
                host pool itself; then every page is resident, and its frame is its host page.
            table: ``[rows, columns]`` int32, any row stride.
            most: pages that any list may hold; the result has that many columns.
            counters: ``[COUNTERS]`` int64 of the layer: what was selected is added.
            mailbox: ``([>= rows, lists, most], [>= rows, lists])`` int32, pinned: where the CPU workers look for
                `Selection.missing` and `Selection.missing_listed`. The result's ``missing`` then lies there only.
        """

    def match_labels(
        self, q: Tensor, labels: Tensor, weights: Tensor, thresholds: Tensor, requests: Tensor, num_pages: Tensor,
        budgets: Tensor, aggregate: str, counters: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Whether the pages that each KV head has cached still answer this query, and which query they answer from now
        on: lookup and label update in one (CLO, arXiv 2511.14510, sections 3.1, 3.2 and 4.2).

        A query head's similarity is the cosine of its query and its label, in fp32 at least: 1 where they are equal, 0
        where one of them is zero. ``harmonic`` (Eq. 10): ``sum(s) / sum(s / similarity)`` over a KV head's query heads,
        whose weights are s. It is singular where a similarity is 0, and no mean where one is negative: where a
        similarity of those with s > 0 is <= 0 it is the smallest of them, which is continuous. ``min``: the smallest
        similarity of those with s > 0, always. Weights that are all 0 are equal weights.

        A KV head hits if that is at least its threshold. It misses without a label, and if any of its similarities is
        NaN.

        A row that may attend all of its pages (``budgets >= num_pages``, so also a row of padding) is not looked up,
        nor is a head whose threshold is -inf: it does not miss, keeps its label and is not counted.

        Args:
            q: ``[rows, heads, head_dim]``.
            labels: ``[requests, heads, head_dim]`` in the dtype of ``q``: the queries that the cached pages were
                selected with. A KV head whose labels are all zero has none yet. Heads that miss take ``q``.
            weights: ``[heads]`` fp32 >= 0, importance of the query heads.
            thresholds: ``[kv_heads]`` fp32, -inf: not looked up.
            requests, num_pages, budgets: ``[rows]`` int32; requests of rows that are looked up are distinct.
            aggregate: one of `SIMILARITIES`.
            counters: ``[COUNTERS]`` int64 of the layer: lookups and hits are added.

        Returns:
            ``[rows, kv_heads]`` int32, 1: the head missed.
        """

    def union_pages(self, absent: Tensor, listed: Tensor, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What any list of a row lacks, each page once and ascending, and every page's highest score.

        Args:
            absent: ``[rows, lists, k]`` int32 logical pages, ``listed`` ``[rows, lists]`` int32 of them valid.
            scores: ``[rows, lists, columns]`` fp32.

        Returns:
            ``(pages [rows, 1, min(lists * k, columns)] int32, how many [rows, 1] int32, scores [rows, 1, columns])``.
        """

    def paged_partial(
        self, q: Tensor, kv: Tensor, ids: Tensor, tokens: Tensor, scale: float, parts: int = 1
    ) -> tuple[Tensor, Tensor]:
        """Attention of one query per row over its listed pages; a list is cut into ``parts``.

        Args:
            q: ``[rows, heads, head_dim]``; kv: ``[pages, kv_heads, 2, page_size, head_dim]``: frames, or host pages.
            ids: ``[rows, 1 | kv_heads, n]`` int32, any stride but for the last dimension's; what lies beyond the listed
                tokens is not read.
            tokens: ``[rows, 1 | kv_heads]`` int32 tokens of each list: all its pages are full but the last one.
            scale: multiplies the logits.
            parts: see `parts_for`.

        Returns:
            ``(out [rows, heads, parts, head_dim], lse [rows, heads, parts])`` fp32. A part without tokens is out 0, lse
            -inf.
        """

    def parts_for(self, rows: int, kv_heads: int, most_tokens: int, processors: int) -> int:
        """Into how many parts lists are cut, so that every batch keeps all processors of the device as busy.

        Args:
            most_tokens: that a list can hold: a bound, so that a captured graph keeps its shape.
            processors: streaming multiprocessors of the device.
        """

    def merge_partials(
        self, out: Tensor, lse: Tensor, other: tuple[Tensor, Tensor] | None = None,
        dtype: torch.dtype = torch.float32, sinks: Tensor | None = None, into: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Attention over the union of disjoint sets of keys (FlashAttention-2, arXiv 2307.08691, section 2.2), and over
        each head's sink: one more key, of a learned logit and no value (gpt-oss, arXiv 2508.10925).

        Args:
            out: ``[rows, heads, parts, head_dim]`` fp32, bf16 or fp16; ``lse``: ``[rows, heads, parts]`` fp32.
            other: ``([rows, heads, head_dim], [rows, heads] fp32)``: the CPU's partial, in any of these types, pinned
                or on the device. What its ``out`` holds where its ``lse`` is -inf is not read.
            dtype: of the result.
            sinks: ``[heads]`` fp32 logits, as they come out of the softmax's scaling; -inf, as None: no sink.
            into: ``[rows, heads, head_dim]`` in ``dtype``, takes the result; None: a new tensor does. It may be ``out``
                itself where that has one part.

        Returns:
            ``([rows, heads, head_dim] dtype, [rows, heads] fp32)``. Empty partials change nothing; nothing but empty
            ones gives out 0 and the sink's logit for lse (-inf without one), without NaN.
        """

    def page_weights(
        self, q: Tensor, kv: Tensor, ids: Tensor, places: Tensor, tokens: Tensor, lse: Tensor, average: Tensor,
        scale: float, alpha: float, largest: bool,
    ) -> None:  # fmt: skip
        """Moving averages of attention weights (HGCA, arXiv 2507.03153, algorithm 1): ``A = (1 - alpha) A + alpha
        A_new`` for every listed token and KV head; ``A_new`` is the mean (``largest``: the largest) softmax share over
        the KV head's query heads.

        Args:
            q, kv, scale: as in `paged_partial`.
            ids: ``[rows, 1, n]`` int32 pages of ``kv``, any stride but for the last dimension's; ``tokens``: ``[rows,
                1]`` int32.
            places: like ``ids``, the entry of ``average`` of each listed page; no two pages share one.
            lse: ``[rows, heads]`` fp32 of the attention over these tokens.
            average: ``[places, kv_heads, page_size]`` fp32, updated in place.
        """

    def note_scores(
        self, maps: Maps, scores: Tensor, num_pages: Tensor, budgets: Tensor, requests: Tensor, sinks: int, recent: int
    ) -> None:
        """Refresh the importance of the resident pages of one layer: a page's highest score of any list, +inf for the
        first ``sinks`` and last ``recent`` pages, -inf for empty frames. Rows that may attend all of their pages keep
        theirs.

        Args:
            maps: of the layer; scores: ``[rows, lists, columns]``; num_pages, budgets, requests: ``[rows]`` int32.
        """

    def plan_recall(
        self, maps: Maps, copies: Copies, scores: Tensor, table: Tensor, selected: tuple[Tensor, Tensor],
        absent: tuple[Tensor, Tensor], num_pages: Tensor, budgets: Tensor, requests: Tensor, generations: Tensor,
        ages: Tensor, sinks: int, recent: int, interval: int, phase: int, keep: Tensor, counters: Tensor | None = None,
    ) -> None:  # fmt: skip
        """`note_scores`, then pair the most important absent pages of one layer with its least important frames, for
        the rows that are due:
        in their first step, and whenever ``(age + phase) % interval`` is 0. The frames hold nothing from now on; frames
        whose page is selected, or always is (importance +inf), are not taken. Of equals the lower frame goes first, and
        the page that is listed later comes first.

        Args:
            maps, copies: of the layer; the first ``rows`` rows of ``copies`` are overwritten.
            scores: ``[rows, 1, columns]``; table: ``[rows, columns]`` int32 host pages, any row stride.
            selected: frames ``[rows, lists, k]`` of selected pages, and how many ``[rows, lists]``.
            absent: logical pages ``[rows, 1, n]`` that were selected and are not resident, and how many ``[rows, 1]``
                (of several lists: `union_pages`).
            num_pages, budgets, requests, sinks, recent: as in `note_scores`.
            generations: ``[rows]`` int32 of the rows' indices when the host opened the step: by now a request may be
                released, and the copies are its own, not those of who comes after it.
            ages: ``[rows]`` int32 decode steps that the row's request has run before this one.
            keep: ``[>= rows, >= frames]`` int32 scratch.
            counters: ``[COUNTERS]`` int64 of the layer: the copies are added.
        """

    def copy_pages(self, host: Tensor, frames: Tensor, host_pages: Tensor, frame_ids: Tensor) -> None:
        """Copy whole pages into the frames that were chosen for them.

        Args:
            host: ``[pages, kv_heads, 2, page_size, head_dim]`` as the device tier sees them; frames: the same layout.
            host_pages, frame_ids: int32 of the same shape; an entry whose frame is -1 is none.
        """

    def commit_pages(self, maps: Maps, copies: Copies, generations: Tensor) -> None:
        """Make the copied pages of all given layers visible, once. To run when the copies are done.

        A page whose request was released since (the generation of its index, ``generations`` ``[requests]`` int64,
        moved on) stays invisible.
        """

    def open_pages(
        self, maps: Maps, requests: Tensor, pages: Tensor, positions: Tensor, page_size: int, sinks: int
    ) -> None:
        """Give every page that this step begins a frame in all layers: the least important one, the lowest of equals.
        Its importance is its number, so that where importance is age the youngest page outranks the others; of the
        first ``sinks`` pages it is +inf. A page that has a frame already (a step that failed half-way opened it) keeps
        it.

        Args:
            maps: of all layers.
            requests: ``[rows]`` int32; pages: ``[rows]`` int32 host page of the row's new token, -1: a row of padding;
                positions: ``[rows]`` int32 of the new token in its sequence.
        """

    def take_sample(
        self, q: Tensor, predicted: Tensor | None, pages: Tensor, listed: Tensor, table: Tensor, num_pages: Tensor,
        wanted: Tensor, number: Tensor, arrived: Tensor, into: Sample,
    ) -> None:  # fmt: skip
        """Hand over to the host what one layer computed with, if the step samples it; else nothing is written.

        Args:
            q: ``[rows, heads, head_dim]`` true queries.
            predicted: the same of the predicted ones; None: there were none.
            pages, listed: `Selection.pages` and `Selection.pages_listed`.
            table: ``[rows, columns]`` int32 host pages, any row stride; num_pages: ``[rows]`` int32.
            wanted: ``[1]`` int32, the sampled row plus 1; 0: the layer is not sampled.
            number: ``[1]`` int32 of the step.
            arrived: ``[1]`` int32 scratch, 0; 0 again afterwards.
            into: of the layer, with as many lists of as many pages as ``pages``. What lies beyond the row's pages and
                beyond a list's length is undefined. The cosines of ``rows`` rows are written, 0 where a query is zero.
        """
