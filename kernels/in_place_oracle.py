"""The decode step that selects and attends pages in place (`kernels.cpu.Decoder`), in plain torch and for one layer.

Tests hold the native decoder to this module step by step. It is written for reading: it keeps a request's keys and
values in the order of its tokens, so it knows no page table, no page ids and no instruction set. Attention and scores
are fp64, but for the estimates of `codes`. Digests are rounded exactly as `digest_format` says, since that selects.

A decode step of a layer that selects is:

1. The step's key and value are appended. A page that became whole gets its digest.
2. The step chooses its candidates: all pages, or a shortlist that an earlier step left, and all newer pages.
3. Every query head scores the candidates by their digests. Scores of heads combine to one score per page.
4. The pages of the budget with the best scores are selected; the first (sinks) and the last (recent) pages always are.
5. The query attends all tokens of the selected pages.

The growing last page has no digest: it is always selected and never scored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hybrid_backend.kernels import codes
from hybrid_backend.kernels.digest_format import CODES, MINMAX_AND_INT8, DigestFormat

SPAN_PAGES = 8
"""Consecutive whole pages that share one second-level digest."""
SHORTLIST_BUDGETS = 4
"""A look at all pages leaves a shortlist of this many budgets for the steps until the next look."""
BEST_BUDGETS = 2
"""Budgets in the second shortlist, which a step at an even position leaves for the next one (codes)."""


@dataclass(frozen=True)
class InPlaceSettings:
    """Settings that decide which pages a layer selects, for a model of ``heads`` query heads.

    `SelectionConfig` describes ``selection_interval``, ``candidates``, ``bound``, ``aggregate`` and ``per_head``.
    """

    heads: int
    scale: float
    page_size: int
    sinks: int
    recent: int
    digest: DigestFormat = MINMAX_AND_INT8
    """`MINMAX`, `MINMAX_AND_INT8` (scored by the byte digests) or `CODES`."""
    aggregate: str = "softmax"
    per_head: bool = False
    bound: float = 0.5
    candidates: int = 8
    selection_interval: int = 8
    threads: int = 1
    """Threads of the native decoder, whose choice between one and two levels depends on them."""
    score_tolerance: float = 1e-4
    """Relative rounding error of a score; closer scores count as tied."""


def _code_estimates(query: Tensor, rows: Tensor, page_size: int, scale: float) -> Tensor:
    grouped = query.double().unflatten(0, (rows.shape[1], -1))[:, :, None]
    estimates = codes.estimates(grouped, rows.transpose(0, 1)[:, None], page_size, scale)
    return (estimates / scale).flatten(0, 1).double()


@dataclass(frozen=True)
class CodeFunctions:
    """Functions that encode and score digests in codes.

    Kernels round sums and queries by rules of their own. So tests that hold a decoder to its choice of pages replace
    these functions by those of its kernels, which have tests of their own.
    """

    encode: Callable[[Tensor], Tensor] = codes.encode
    """Encode keys of pages ``[n, kv_heads, page_size, head_dim]`` as digests ``[n, kv_heads, row]``."""
    estimates: Callable[[Tensor, Tensor, int, float], Tensor] = _code_estimates
    """Estimate the log-sum-exp of the logits of each page's tokens, ``[heads, n]``, not scaled, from a query ``[heads,
    head_dim]``, digests ``[n, kv_heads, row]``, page size and scale."""


class Ranking(NamedTuple):
    """The best pages among some candidates: one list of a shortlist or of a selection.

    ``chosen`` is this oracle's own choice. Any implementation whose scores differ by rounding alone chooses all of
    ``certain`` and nothing beyond ``possible``. All three are ascending page numbers.
    """

    chosen: Tensor
    certain: Tensor
    possible: Tensor

    @classmethod
    def exactly(cls, pages: Tensor) -> Ranking:
        """Return a ranking that no rounding can change."""
        return cls(pages, pages, pages)

    def with_newer(self, first: int, end: int) -> Ranking:
        """Return this ranking with the pages ``first`` to ``end - 1`` appended."""
        return Ranking(*(torch.cat([pages, torch.arange(first, end)]) for pages in self))

    def admits(self, pages: Sequence[int]) -> bool:
        """Tell if ``pages`` are a valid choice: right in number, all certain pages, none that is impossible."""
        selected = set(pages)
        is_complete = len(pages) == len(selected) == len(self.chosen) and selected >= set(self.certain.tolist())
        return is_complete and selected <= set(self.possible.tolist())


class _Shortlist(NamedTuple):
    """Shortlist of an earlier step: one ranking per list, made when the sequence had ``num_pages`` pages."""

    rankings: list[Ranking]
    num_pages: int

    def candidates(self, num_pages: int) -> list[Ranking]:
        return [ranking.with_newer(self.num_pages, num_pages) for ranking in self.rankings]


class InPlaceOracle:
    """Layer of one request: its keys and values, their digests, and the shortlists between two looks.

    Args:
        settings: settings of the server.
        layer: index of the layer; layers look at all their pages in turn.
        sinks: ``[heads]`` logits of one more key of each head, whose value is 0; None: none.
        code_functions: functions that encode and score digests in codes.
    """

    def __init__(
        self,
        settings: InPlaceSettings,
        layer: int,
        sinks: Tensor | None = None,
        code_functions: CodeFunctions = CodeFunctions(),
    ) -> None:
        self.settings, self._layer, self._sinks = settings, layer, sinks
        self._code_functions = code_functions
        self._keys = self._values = torch.empty(0)
        self.tokens = 0
        self._bounds = torch.empty(0)  # [whole pages, kv_heads, 2 (max, min), head_dim]
        self._codes = torch.empty(0, dtype=torch.uint8)  # [whole pages, kv_heads, row]
        self.forget_selections()

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Write the next tokens of the request, ``[tokens, kv_heads, head_dim]`` in the cache's type."""
        end = self.tokens + len(keys)
        if end > len(self._keys):
            empty = keys.new_empty(2 * end, *keys.shape[1:])
            self._keys, self._values = (torch.cat([tokens.to(empty), empty]) for tokens in self.written)
        self._keys[self.tokens : end], self._values[self.tokens : end] = keys, values
        self.tokens = end
        self._summarize()

    @property
    def written(self) -> tuple[Tensor, Tensor]:
        """Keys and values of all tokens, ``[tokens, kv_heads, head_dim]``."""
        empty = self._keys.new_empty(0, *self._keys.shape[1:])
        return (self._keys[: self.tokens], self._values[: self.tokens]) if self.tokens else (empty, empty)

    def forget_selections(self) -> None:
        """Make the next decode step look at all pages, since the request was preempted or computes a prompt chunk."""
        self._look: _Shortlist | None = None
        self._best: _Shortlist | None = None
        self._budget = 0  # pages, of the last step that selected

    def decode(self, query: Tensor, budget: int | None, rows: int = 1) -> list[Ranking]:
        """Select pages for the token that was appended last.

        Args:
            query: ``[heads, head_dim]``.
            budget: pages to attend; None: the layer is exact.
            rows: rows that decode in this step.

        Returns:
            One list of pages, or one per KV head.
        """
        num_pages = -(-self.tokens // self.settings.page_size)
        if budget is None or budget >= num_pages:
            return [Ranking.exactly(torch.arange(num_pages))]
        budget = max(budget, self.settings.sinks + self.settings.recent)
        position = self.tokens + self._layer
        if self._is_look_due(position, num_pages, budget):
            selection = self._look_at_all_pages(query, budget, num_pages, rows)
        else:
            assert self._look is not None
            is_second = self._best is not None and position % 2 == 1
            shortlist = self._best if is_second and self._best is not None else self._look
            candidates = shortlist.candidates(num_pages)
            scores = [self._scores(query, ranking, i) for i, ranking in enumerate(candidates)]
            selection = self._best_of_each(scores, candidates, budget)
            if self.settings.digest is CODES and not is_second:
                best = self._best_of_each(scores, candidates, BEST_BUDGETS * budget)
                self._best = _Shortlist(best, num_pages)
        self._budget = budget
        return selection

    def attend(self, query: Tensor, pages: Sequence[Sequence[int]]) -> Tensor:
        """Attend all tokens of ``pages`` with ``query``, in fp64: one list of pages, or one per KV head."""
        keys, values = self.written
        kv_heads, size = keys.shape[1], self.settings.page_size
        group = self.settings.heads // kv_heads
        out = torch.empty(query.shape, dtype=torch.float64)
        for kv_head in range(kv_heads):
            listed = torch.tensor(pages[kv_head if len(pages) > 1 else 0])
            tokens = (listed[:, None] * size + torch.arange(size)).flatten()
            tokens = tokens[tokens < self.tokens]
            heads = slice(kv_head * group, (kv_head + 1) * group)
            logits = query[heads].double() @ keys[tokens, kv_head].double().T * self.settings.scale
            if self._sinks is not None:
                logits = torch.cat([logits, self._sinks[heads, None].double()], 1)
            out[heads] = logits.softmax(-1)[:, : len(tokens)] @ values[tokens, kv_head].double()
        return out

    # --- steps 2 and 4 ---

    def _is_look_due(self, position: int, num_pages: int, budget: int) -> bool:
        interval = self.settings.selection_interval
        return (
            interval == 1
            or self._look is None
            or self._budget != budget
            or num_pages - self._look.num_pages > interval
            or position % interval == 0
        )

    def _look_at_all_pages(self, query: Tensor, budget: int, num_pages: int, rows: int) -> list[Ranking]:
        lists = self._keys.shape[1] if self.settings.per_head else 1
        shortlist_pages = SHORTLIST_BUDGETS * budget
        candidates = [Ranking.exactly(torch.arange(num_pages))] * lists
        if self.settings.digest is CODES:
            coarse = [self._scores(query, ranking, i, coarse=True) for i, ranking in enumerate(candidates)]
            candidates = self._best_of_each(coarse, candidates, shortlist_pages)
        elif self._reads_spans(budget, num_pages, rows):
            candidates = [self._pages_of_best_spans(query, budget, num_pages, i) for i in range(lists)]
        scores = [self._scores(query, ranking, i) for i, ranking in enumerate(candidates)]
        self._look = _Shortlist(self._best_of_each(scores, candidates, shortlist_pages), num_pages)
        if self.settings.digest is CODES:
            self._best = _Shortlist(self._best_of_each(scores, candidates, BEST_BUDGETS * budget), num_pages)
        return self._best_of_each(scores, candidates, budget)

    def _reads_spans(self, budget: int, num_pages: int, rows: int) -> bool:
        """Tell if two levels read less than one: spans and candidates against one thread's share of all pages."""
        settings = self.settings
        if not settings.candidates or not settings.digest.has_byte_copy:
            return False
        return num_pages // SPAN_PAGES + settings.candidates * budget < num_pages // max(1, settings.threads // rows)

    def _pages_of_best_spans(self, query: Tensor, budget: int, num_pages: int, index: int) -> Ranking:
        """Pages of the best spans, and all that belong to no whole span or are always selected."""
        spans = (num_pages - 1) // SPAN_PAGES
        count = min(-(-self.settings.candidates * budget // SPAN_PAGES), spans)
        whole = self._bounds[: spans * SPAN_PAGES].unflatten(0, (spans, SPAN_PAGES))
        digests = torch.stack([whole[:, :, :, 0].amax(1), whole[:, :, :, 1].amin(1)], 2)
        all_spans = Ranking.exactly(torch.arange(spans))
        scores = self._combined(self._logits_in_bytes(query, digests), torch.ones(spans, dtype=torch.bool), index)
        best = _ranked(scores, all_spans, count, torch.zeros(spans, dtype=torch.bool), self._tolerance(scores))
        pages = torch.arange(num_pages)
        is_candidate = self._is_forced(pages, num_pages) | (pages >= spans * SPAN_PAGES)
        return Ranking(*(pages[is_candidate | torch.isin(pages // SPAN_PAGES, selected)] for selected in best))

    def _best_of_each(self, scores: list[Tensor], candidates: list[Ranking], count: int) -> list[Ranking]:
        num_pages = -(-self.tokens // self.settings.page_size)
        return [
            _ranked(score, ranking, count, self._is_forced(ranking.possible, num_pages), self._tolerance(score))
            for score, ranking in zip(scores, candidates, strict=True)
        ]

    def _is_forced(self, pages: Tensor, num_pages: int) -> Tensor:
        """Pages that are selected whatever their scores."""
        return (pages < self.settings.sinks) | (pages >= num_pages - max(self.settings.recent, 1))

    def _tolerance(self, scores: Tensor) -> Tensor:
        """Return the rounding error of each score: relative to a share, or to the largest sum of logits."""
        sizes = scores.abs()
        sizes = sizes + 1e-6 * sizes.amax() if self.settings.aggregate == "softmax" else sizes.amax().expand_as(sizes)
        return self.settings.score_tolerance * sizes

    # --- step 3 ---

    def _summarize(self) -> None:
        """Make the digests of pages that became whole."""
        size, settings = self.settings.page_size, self.settings
        first, end = len(self._codes if settings.digest is CODES else self._bounds), self.tokens // size
        if first == end:
            return
        pages = self._keys[first * size : end * size].unflatten(0, (end - first, size)).transpose(1, 2)
        if settings.digest is CODES:
            rows = self._code_functions.encode(pages)
            self._codes = torch.cat([self._codes, rows]) if first else rows
            return
        bounds = torch.stack([pages.amax(2), pages.amin(2)], 2).float()
        self._bounds = torch.cat([self._bounds, bounds]) if first else bounds

    def _scores(self, query: Tensor, candidates: Ranking, index: int, coarse: bool = False) -> Tensor:
        """Scores of all possible candidates in list ``index``. The last page, which has no digest, gets 0."""
        pages = candidates.possible[:-1]
        if self.settings.digest is CODES:
            rows = self._codes[pages]
            size, scale = self.settings.page_size, self.settings.scale
            estimates = self._code_functions.estimates
            logits = self._middles(query, rows) if coarse else estimates(query, rows, size, scale)
        elif self.settings.digest.has_byte_copy:
            logits = self._logits_in_bytes(query, self._bounds[pages])
        else:
            logits = self._by_head(self._weights(query).double(), self._bounds[pages].double().flatten(2))
        is_own = torch.isin(pages, candidates.chosen)
        return torch.nn.functional.pad(self._combined(logits, is_own, index), (0, 1))

    def _weights(self, query: Tensor) -> Tensor:
        """Weights of a page's maxima and minima in a logit, which is their ``middle + bound * half-width``.

        Returns:
            ``[heads, 2 * head_dim]``. Sums over heads need ``[kv_heads, 2 * head_dim]``, the sum of each head's rows.
        """
        middle, half = query.float() / 2, query.float().abs() * (self.settings.bound / 2)
        weights = torch.cat([middle + half, middle - half], 1)
        if self.settings.aggregate == "sum":
            weights = torch.sum(weights.unflatten(0, (self._keys.shape[1], -1)), 1)
        return weights

    def _by_head(self, weights: Tensor, pages: Tensor) -> Tensor:
        """Products of each query head with its KV head's row of each page: ``[heads, n]``."""
        grouped = weights.unflatten(0, (pages.shape[1], -1))
        return torch.einsum("hgd,nhd->hgn", grouped, pages).flatten(0, 1)

    def _logits_in_bytes(self, query: Tensor, bounds: Tensor) -> Tensor:
        """Logits by ``bounds`` of pages or spans, ``[n, kv_heads, 2, head_dim]``. Bounds and weights become bytes."""
        pages, page_steps = _in_bytes(bounds)
        weights, steps = _in_bytes(self._weights(query).unflatten(1, (2, -1)))  # [heads, 2, head_dim]
        products = [
            self._by_head(weights[:, i], pages[:, :, i]) * self._by_head(steps[:, i, None], page_steps[:, :, i, None])
            for i in (0, 1)
        ]
        return products[0] + products[1]

    def _middles(self, query: Tensor, rows: Tensor) -> Tensor:
        """Quick logits of codes: q, rounded to bytes, times the page's middle, plus a share of the page's spread."""
        middles, spread, *_ = codes.decode(rows, self.settings.page_size)
        rounded, step = _in_bytes(query.float())
        length = query.double().square().sum(-1, keepdim=True).sqrt()
        widths = self._by_head(length, spread.double()[..., None])
        return self._by_head(rounded * step[:, None], middles.double()) + self.settings.bound * widths

    def _combined(self, logits: Tensor, is_own: Tensor, index: int) -> Tensor:
        """Combine logits ``[heads, n]`` to one score per page, of all heads or of KV head ``index`` alone.

        With softmax a head's logits become shares of the oracle's own candidates (``is_own``).
        """
        settings, kv_heads = self.settings, self._keys.shape[1]
        grouped = logits.unflatten(0, (kv_heads, -1))
        if settings.aggregate == "softmax":
            scaled = grouped * settings.scale
            grouped = (scaled - scaled[..., is_own].logsumexp(-1, keepdim=True)).exp()
        by_kv_head = grouped.amax(1) if settings.aggregate == "max" else grouped.sum(1)
        return by_kv_head[index] if settings.per_head else torch.sum(by_kv_head, 0)


def _in_bytes(values: Tensor) -> tuple[Tensor, Tensor]:
    """``[..., n]`` as whole numbers of -127 to 127, and the step of each row, ``[...]``; both fp64."""
    steps = values.abs().amax(-1) / 127
    inverse = torch.where(steps > 1e-37, 1 / steps, 0.0)
    return (values * inverse[..., None]).round().double(), steps.double()


def _ranked(scores: Tensor, candidates: Ranking, count: int, is_forced: Tensor, tolerance: Tensor) -> Ranking:
    """Rank the ``count`` best candidates; ``scores``, ``is_forced`` and ``tolerance`` have a value per possible page.

    A page is certain if, within rounding, fewer than ``count`` other candidates are as good; it is possible if fewer
    than ``count`` certain candidates are better. Of equal scores the earlier page is chosen.
    """
    pages = candidates.possible
    is_own, is_certain = torch.isin(pages, candidates.chosen), torch.isin(pages, candidates.certain)
    infinite = torch.tensor(float("inf"), dtype=scores.dtype)
    scores = torch.where(is_forced, infinite, scores)
    order = torch.where(is_own, scores, -infinite).argsort(descending=True, stable=True)
    chosen = pages[order[: min(count, int(is_own.sum()))].sort().values]

    # The rounding errors of two compared scores add up.
    margin = torch.where(is_forced, torch.zeros_like(scores), 2 * tolerance)
    ascending = scores.sort().values
    as_good = len(scores) - torch.searchsorted(ascending, scores - margin) - 1
    certain_scores = scores[is_certain].sort().values
    better = len(certain_scores) - torch.searchsorted(certain_scores, scores + margin, right=True)
    return Ranking(chosen, pages[is_certain & (as_good < count)], pages[better < count])


def layer_budgets(budget: int, num_pages: int, factors: Sequence[float], least: int) -> list[float]:
    """Pages that each selecting layer attends of a request of ``num_pages`` pages that leaves pages out.

    Layers share in proportion to their ``factors``. Their mean is ``budget``, as far as every layer attends at least
    ``least`` pages and at most all of them.
    """
    low, high = 0.0, float(num_pages) / min(factors)
    for _ in range(60):
        middle = (low + high) / 2
        pages = [min(max(middle * factor, least), num_pages) for factor in factors]
        low, high = (middle, high) if sum(pages) < budget * len(factors) else (low, middle)
    return pages
