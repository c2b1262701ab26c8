"""The operations over labels and pages of single KV heads in plain torch, and lists of pages in their plain form."""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_backend.kernels.operations import Counters, Selection, StreamPlan

_INF = float("inf")


def plan_load(
    chosen: Selection, to_select: Tensor, entries: Tensor, frames: Tensor, first: int, cached: Tensor
) -> tuple[Tensor, Tensor]:
    places, loads = slice(first, first + frames.shape[1]), to_select > 0
    cached[entries[loads].long()] = chosen.pages[loads, 0, places]
    return chosen.frames[:, 0, places].contiguous(), frames.where(loads[:, None], -1)


def plan_stream(
    table: Tensor, num_pages: Tensor, seq_lens: Tensor, ranks: Tensor, groups: int, group: int, pieces: int,
    capacity: int, page_size: int, first: int = 0, last: int = 1, is_framed: bool = False,
) -> StreamPlan:  # fmt: skip
    (rows, columns), kv_heads = table.shape, len(ranks)
    middle = (num_pages - first - last).clamp(min=0)[:, None]  # [rows, 1] pages
    streamed, room = middle * (ranks >= 0), pieces * capacity
    numbers, starts = torch.arange(room), torch.arange(pieces)[:, None] * capacity
    of_groups, staged = list[tuple[Tensor, ...]](), torch.zeros(rows * kv_heads, dtype=torch.int64)
    for head in range(0, groups * group, group):
        of_group = (streamed * ((ranks >= head) & (ranks < head + group))).flatten()
        ends = of_group.cumsum(0)
        begins = ends - of_group
        lists = torch.searchsorted(ends, numbers, right=True).clamp(max=len(ends) - 1)
        nth = (first + numbers - begins[lists]).clamp(max=columns - 1)
        pages = table[lists // kv_heads, nth] * kv_heads + lists % kv_heads
        places = (numbers % capacity).masked_fill(numbers >= ends[-1], -1)
        bounds = ((x - starts).clamp(0, capacity).view(pieces, rows, kv_heads) * page_size for x in (begins, ends))
        of_groups.append((pages.view(pieces, capacity), places.view(pieces, capacity), *bounds))
        staged += ends.clamp(max=room) - begins.clamp(max=room)
    empty = [torch.zeros(0, capacity)] * 2 + [torch.zeros(0, rows, kv_heads)] * 2
    tensors = [torch.cat(pieces_of) for pieces_of in zip(*of_groups, strict=True)] if groups else empty
    beyond = (first + streamed) * page_size if is_framed else seq_lens[:, None].expand(-1, kv_heads)
    rest_begins = (first + staged.view(rows, kv_heads)) * page_size * (ranks >= 0)
    framed = (seq_lens[:, None] - middle * page_size) * (ranks != -1) * is_framed
    more = (rest_begins, beyond * (ranks >= 0), seq_lens[:, None] * (ranks == -1), framed)
    return StreamPlan(*(x.int() for x in (*tensors, *more)))


def plain_lists(
    q: Tensor, kv: Tensor, ids: Tensor | None, tokens: Tensor, begins: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, ids and tokens of `paged_partial` that say the same with as many lists of pages as of tokens.

    Lists begin with their first attended token. If ``kv`` has head pages of several KV heads, each list is a row.
    """
    lists = tokens.shape[1]
    if ids is None:
        ids = torch.arange(len(kv), dtype=torch.int32).expand(len(q), 1, -1)
    if begins is None and ids.shape[1] == lists and (lists == 1 or kv.shape[1] == lists):
        return q, ids, tokens
    ids = ids.expand(-1, lists, -1)
    if begins is not None:
        places = torch.arange(ids.shape[2]) + (begins // kv.shape[3])[..., None]
        ids, tokens = ids.gather(2, places.clamp(max=ids.shape[2] - 1)), tokens - begins
    if kv.shape[1] == lists:
        return q, ids, tokens
    rows = len(q) * lists
    return q.view(rows, -1, q.shape[2]), ids.reshape(rows, 1, -1), tokens.reshape(rows, 1)


def match_labels(
    q: Tensor, labels: Tensor, weights: Tensor, thresholds: Tensor, requests: Tensor, num_pages: Tensor,
    budgets: Tensor, aggregate: str, counters: Tensor | None = None,
) -> Tensor:  # fmt: skip
    group = q.shape[1] // len(thresholds)
    live = budgets < num_pages
    owners = requests.where(live, 0).long()
    row_labels = labels[owners]
    cosines = cosine(q, row_labels).unflatten(1, (-1, group))  # [rows, kv_heads, group]
    s = weights.double().view(-1, group)
    s = s.where((s > 0).any(1, keepdim=True), 1.0)
    similarity = cosines.masked_fill(s == 0, _INF).amin(-1)
    if aggregate == "harmonic":
        mean = s.sum(-1) / (s / cosines).masked_fill(s == 0, 0.0).sum(-1)
        similarity = mean.where(similarity > 0, similarity)
    labelled = (row_labels != 0).unflatten(1, (-1, group)).flatten(2).any(-1)
    hit = labelled & ~cosines.isnan().any(-1) & (similarity >= thresholds)
    looked_up = live[:, None] & (thresholds != -_INF)
    missed: Tensor = looked_up & ~hit
    row, head = missed.repeat_interleave(group, 1).nonzero(as_tuple=True)
    labels[owners[row], head] = q[row, head]
    if counters is not None:
        counters[Counters._fields.index("lookups")] += looked_up.sum()
        counters[Counters._fields.index("hits")] += (looked_up & hit).sum()
    return num_pages[:, None] * missed


def cosine(a: Tensor, b: Tensor) -> Tensor:
    """Compute cosines in fp64, where squares of fp32 numbers neither overflow nor vanish; 0 where a vector is zero."""
    a, b = a.double(), b.double()
    lengths = ((a * a).sum(-1) * (b * b).sum(-1)).sqrt()
    return ((a * b).sum(-1) / lengths).masked_fill(lengths == 0, 0.0)
