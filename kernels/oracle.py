"""The operations in plain torch, on the CPU: for tests, and for machines without a compiler.

Each function follows its contract in `operations.Operations`, and is written for reading. Attention and scores are
fp32; `reference` has them in fp64 for tests. NaN counts as -inf where a score decides an order or an importance.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from hybrid_backend.kernels.awaited_pages import await_pages
from hybrid_backend.kernels.digest_format import digest_format_of
from hybrid_backend.kernels.head_oracle import cosine, plain_lists
from hybrid_backend.kernels.head_oracle import match_labels as match_labels
from hybrid_backend.kernels.head_oracle import plan_load as plan_load
from hybrid_backend.kernels.head_oracle import plan_stream as plan_stream
from hybrid_backend.kernels.kv_format import KvFormat
from hybrid_backend.kernels.operations import AwaitedPages, Copies, Counters, Maps, Reuse, Sample, Selection
from hybrid_backend.kernels.reuse_oracle import chosen_again, scores_again, store_selection

_INF = float("inf")


def append_tokens(
    k: Tensor, v: Tensor, host: Tensor, pages: Tensor, positions: Tensor,
    frames: Tensor | None = None, requests: Tensor | None = None, frame_of: Tensor | None = None,
    digests: Tensor | None = None, heads: Tensor | None = None, awaited: AwaitedPages | None = None,
) -> None:  # fmt: skip
    await_pages(awaited, requests, pages)
    kv_format, page_size = KvFormat.of(host), host.shape[3]
    rows = pages >= 0
    k, v = (k, v) if heads is None else (k[:, heads], v[:, heads])
    k, v, pages, positions = k[rows], v[rows], pages[rows].long(), positions[rows].long()
    offset = positions % page_size
    kv_format.write(host, pages, offset, k, v)
    if frames is not None:
        assert requests is not None and frame_of is not None
        frame = frame_of[requests[rows].long(), positions // page_size].long()
        has_frame = frame >= 0
        kv_format.write(frames, frame[has_frame], offset[has_frame], k[has_frame], v[has_frame])
    if digests is None:
        return
    k = kv_format.stored(k)
    digest_format = digest_format_of(digests, k.shape[2])
    if not digest_format.covers_growing_pages:
        whole = pages[offset == page_size - 1]
        digests[whole] = digest_format.encode(kv_format.keys(host, whole))
    else:
        high, low = digests[pages].unbind(2)
        grown = torch.stack([torch.maximum(high, k), torch.minimum(low, k)], 2)
        begins = (offset == 0)[:, None, None, None]
        digests[pages] = torch.where(begins, k[:, :, None], grown)


def store_tokens(k: Tensor, v: Tensor, host: Tensor, pages: Tensor, positions: Tensor) -> None:
    append_tokens(k, v, host, pages, positions)


def extend_digests(k: Tensor, digests: Tensor, pages: Tensor, first: int, page_size: int) -> None:
    tokens, index = len(k), pages.long()
    digest_format = digest_format_of(digests, k.shape[2])
    if not digest_format.covers_growing_pages:
        digests[index] = digest_format.encode(k.unflatten(0, (-1, page_size)).transpose(1, 2))
        return
    lines = torch.full((len(index) * page_size, *k.shape[1:]), float("nan"), dtype=k.dtype)
    lines[first : first + tokens] = k
    keys = lines.unflatten(0, (-1, page_size))
    inside = torch.arange(len(index) * page_size).view(-1, page_size)
    inside = ((inside >= first) & (inside < first + tokens))[..., None, None]
    extremes = torch.stack(
        [keys.masked_fill(~inside, -_INF).amax(1), keys.masked_fill(~inside, _INF).amin(1)], 2
    )  # [pages, kv_heads, 2, head_dim]
    if first and len(index):
        old = digests[index[0]]
        high, low = extremes[0].unbind(1)
        extremes[0] = torch.stack([torch.maximum(old[:, 0], high), torch.minimum(old[:, 1], low)], 1)
    digests[index] = extremes


def build_digests(kv: Tensor, digests: Tensor, pages: Tensor, tokens: Tensor) -> None:
    kv_format = KvFormat.of(kv)
    digest_format = digest_format_of(digests, kv_format.head_dim)
    written = (pages >= 0) & (tokens >= (1 if digest_format.covers_growing_pages else kv.shape[3]))
    index = pages[written].long()
    keys = kv_format.keys(kv, index)  # [n, kv_heads, page_size, head_dim]
    if not digest_format.covers_growing_pages:
        digests[index] = digest_format.encode(keys)
        return
    keys = keys.to(digests.dtype)
    beyond = (torch.arange(kv.shape[3]) >= tokens[written][:, None])[:, None, :, None]
    digests[index] = torch.stack([keys.masked_fill(beyond, -_INF).amax(2), keys.masked_fill(beyond, _INF).amin(2)], 2)


def page_scores(
    q: Tensor, digests: Tensor, table: Tensor, num_pages: Tensor, budgets: Tensor, aggregate: str,
    per_head: bool, bound: float, scale: float, page_size: int = 0, query_start: Tensor | None = None,
    reuse: Reuse | None = None,
) -> Tensor:  # fmt: skip
    queries, _, dim = q.shape
    rows, kv_heads = len(table), digests.shape[1]
    count = num_pages[:, None]
    column = torch.arange(table.shape[1])
    listed, scored = column < count, (budgets < num_pages)[:, None]
    entries = digests[table.where(listed & scored, 0).long()]  # [rows, columns, kv_heads, ...]

    grouped = q.float().view(queries, kv_heads, -1, dim)
    if query_start is not None:
        count, entries = (x[_row_of(query_start, rows)] for x in (count, entries))
    estimates = digest_format_of(digests, dim).estimates(grouped, entries, bound, scale, page_size)
    if aggregate == "softmax":
        unshared = (column >= count - 1)[:, None, None]
        estimates = (estimates * scale).masked_fill(unshared, -_INF).softmax(-1).nan_to_num(0.0)
    scores = estimates.amax(2) if aggregate == "max" else estimates.sum(2)  # [queries, kv_heads, columns]
    if query_start is not None:
        index = _row_of(query_start, rows)[:, None, None].expand_as(scores)
        combine = "amax" if aggregate == "max" else "sum"
        scores = scores.new_zeros(rows, *scores.shape[1:]).scatter_reduce(0, index, scores, combine, include_self=False)
    if not per_head:
        scores = scores.sum(1, keepdim=True)
    scores = scores.masked_fill(~scored[:, None], 0.0).masked_fill(~listed[:, None], -_INF)
    return scores if reuse is None else scores_again(reuse, scores, num_pages)


def select_pages(
    scores: Tensor, num_pages: Tensor, seq_lens: Tensor, budgets: Tensor, requests: Tensor,
    frame_of: Tensor | None, table: Tensor, page_size: int, sinks: int, recent: int, max_pages: int,
    counters: Tensor | None = None, mailbox: tuple[Tensor, Tensor] | None = None, reuse: Reuse | None = None,
) -> Selection:  # fmt: skip
    columns = scores.shape[2]
    count, column = num_pages[:, None, None], torch.arange(columns)
    listed = column < count
    always = listed & _always(column, count, sinks, recent)
    # A stable sort keeps the order of equals, so the last sort dominates: forced pages, then all others by score.
    order = _numbers(scores).argsort(dim=-1, descending=True, stable=True)
    rank = (listed.int() + always.int()).expand_as(scores).gather(-1, order)
    order = order.gather(-1, rank.argsort(dim=-1, descending=True, stable=True))
    budget = torch.minimum(budgets, num_pages).clamp(max=max_pages)[:, None, None]
    chosen = order.argsort(-1) < budget  # the inverse of a permutation is each page's rank
    if reuse is not None:
        chosen = chosen_again(reuse, chosen, num_pages)

    owners = requests.where(num_pages > 0, 0).long()  # a padding row may have any index
    frames = (table if frame_of is None else frame_of[owners, :columns])[:, None]
    is_resident, is_missing = chosen & (frames >= 0), chosen & (frames < 0)
    resident, missing = _count(is_resident), _count(is_missing)
    tail = (num_pages * page_size - seq_lens)[:, None]  # tokens that the growing page has no content for
    tokens = torch.where(resident > 0, resident * page_size - tail, 0)
    if counters is not None:
        counters[:4] += torch.stack([resident.sum(), missing.sum(), tokens.sum(), missing.sum() * page_size])
    missing_pages = _front(table[:, None], is_missing, max_pages)
    if mailbox is not None:
        missing_pages = mailbox[0][: len(scores)].copy_(missing_pages)
        mailbox[1][: len(scores)] = missing
    pages, pages_listed = _front(column, chosen, max_pages), _count(chosen)
    if reuse is not None:
        pages, pages_listed = store_selection(reuse, pages, pages_listed)
    return Selection(
        pages, pages_listed, _front(frames, is_resident, max_pages), resident, tokens,
        missing_pages, _front(column, is_missing, max_pages), missing,
    )  # fmt: skip


def union_pages(absent: Tensor, listed: Tensor, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows, lists, k = absent.shape
    columns = scores.shape[2]
    # Entries beyond a list's length are marked in a spare last column.
    pages = absent.where(torch.arange(k) < listed[..., None], columns).flatten(1).long()
    lacks = torch.zeros(rows, columns + 1, dtype=torch.bool).scatter_(1, pages, True)[:, None, :columns]
    union = _front(torch.arange(columns), lacks, min(lists * k, columns))
    return union, _count(lacks), _numbers(scores).amax(1, keepdim=True)


def paged_partial(
    q: Tensor, kv: Tensor, ids: Tensor | None, tokens: Tensor, scale: float, num_parts: int = 1,
    query_start: Tensor | None = None, begins: Tensor | None = None, into: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attend all tokens in the first part; the other parts are empty."""
    shape = len(q), q.shape[1], num_parts
    q, ids, tokens = plain_lists(q, kv, ids, tokens, begins)
    queries, heads, dim = q.shape
    out = torch.zeros(queries, heads, num_parts, dim)
    lse = torch.full((queries, heads, num_parts), -_INF)
    for query, row in enumerate(_row_of(query_start, len(ids)).tolist()):
        if not tokens[query].any():
            continue
        logits, values, _ = _logits(q[query], kv, ids[row], tokens[query], scale)
        weights, total = _softmax(logits)
        out[query, :, 0] = (weights @ values).flatten(0, 1)
        lse[query, :, 0] = total.flatten()
    out, lse = out.view(*shape, dim), lse.view(shape)
    return (out, lse) if into is None else (into[0].copy_(out), into[1].copy_(lse))


def parts_for(rows: int, kv_heads: int, most_tokens: int, processors: int) -> int:
    return 1


def merge_partials(
    out: Tensor, lse: Tensor, extra_partial: tuple[Tensor, Tensor] | None = None,
    dtype: torch.dtype = torch.float32, sinks: Tensor | None = None, into: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    out = out.float()
    if extra_partial is not None:
        extra_out = extra_partial[0].float().masked_fill((extra_partial[1] == -_INF)[..., None], 0.0)
        out = torch.cat([out, extra_out[:, :, None]], 2)
        lse = torch.cat([lse, extra_partial[1][:, :, None]], 2)
    if sinks is not None:
        out = functional.pad(out, (0, 0, 0, 1))
        lse = torch.cat([lse, sinks.expand(len(lse), -1)[..., None]], 2)
    weights, total = _softmax(lse)
    merged = (weights[..., None] * out).sum(2).to(dtype)
    return merged if into is None else into.copy_(merged), total


def page_weights(
    q: Tensor, kv: Tensor, ids: Tensor, places: Tensor, tokens: Tensor, lse: Tensor, average: Tensor,
    scale: float, alpha: float, largest: bool,
) -> None:  # fmt: skip
    kv_heads = kv.shape[1]
    for row in range(len(q)):
        count = int(tokens[row])
        if not count:
            continue
        logits, _, (pages, head) = _logits(q[row], kv, ids[row], tokens[row], scale)
        entries = places[row, :, : pages.shape[1]].long(), head
        shares = (logits - lse[row].view(kv_heads, -1, 1)).exp()
        new = shares.amax(1) if largest else shares.mean(1)
        old = average[entries].flatten(1)  # [kv_heads, pages * page_size]
        new = torch.where(torch.arange(old.shape[1]) < count, (1 - alpha) * old + alpha * new, old)
        average[entries] = new.view(kv_heads, -1, kv.shape[3])


def note_scores(
    maps: Maps, scores: Tensor, num_pages: Tensor, budgets: Tensor, requests: Tensor, sinks: int, recent: int
) -> None:
    live = budgets < num_pages
    frames = requests[live].long()[:, None] + torch.arange(maps.size) * len(maps.frame_of)
    pages = maps.page_of[frames].long()
    count = num_pages[live][:, None]
    best = _numbers(scores[live]).amax(1).gather(1, pages.clamp(min=0))
    best = best.masked_fill(_always(pages, count, sinks, recent), _INF)
    is_reserved = maps.importance[frames] == _INF
    maps.importance[frames] = torch.where(pages < 0, torch.where(is_reserved, _INF, -_INF), best)


def plan_recall(
    maps: Maps, copies: Copies, scores: Tensor, table: Tensor, selected: tuple[Tensor, Tensor],
    absent: tuple[Tensor, Tensor], num_pages: Tensor, budgets: Tensor, requests: Tensor, generations: Tensor,
    ages: Tensor, sinks: int, recent: int, interval: int, phase: int, keep: Tensor, counters: Tensor | None = None,
) -> None:  # fmt: skip
    note_scores(maps, scores, num_pages, budgets, requests, sinks, recent)
    rows = len(scores)
    count = len(maps.frame_of)
    copies.frames[:rows] = -1
    due = (num_pages > 0) & ((ages == 0) | ((ages + phase) % interval == 0))
    for row in due.nonzero().flatten().tolist():
        request = int(requests[row])
        importance = maps.importance[request::count]
        is_kept = importance == _INF
        for frames, listed in zip(selected[0][row], selected[1][row].tolist(), strict=True):
            is_kept[frames[:listed].long() // count] = True
        order = importance.argsort(stable=True)
        victims = order[~is_kept[order]]

        pages = absent[0][row, 0, : int(absent[1][row])].flip(0).long()  # of equals, the later one wins
        values = _numbers(scores[row, 0, pages])
        best = values.argsort(descending=True, stable=True)

        pairs = min(len(victims), len(best), copies.frames.shape[1])
        victims, best = request + victims[:pairs] * count, best[:pairs]
        old = maps.page_of[victims].long()
        maps.frame_of[request, old[old >= 0]] = -1
        maps.page_of[victims] = -1
        maps.importance[victims] = -_INF
        copies.frames[row, :pairs] = victims.int()
        copies.pages[row, :pairs] = pages[best].int()
        copies.host_pages[row, :pairs] = table[row, pages[best]]
        copies.importance[row, :pairs] = values[best]
        copies.requests[row] = request
        copies.started[row] = generations[row]
        if counters is not None:
            counters[Counters._fields.index("recalled_pages")] += pairs


def copy_pages(host: Tensor, frames: Tensor, host_pages: Tensor, frame_ids: Tensor) -> None:
    copied = frame_ids >= 0
    frames[frame_ids[copied].long()] = host[host_pages[copied].long()]


def commit_pages(maps: Maps, copies: Copies, generations: Tensor) -> None:
    current = copies.started == generations[copies.requests.long()]
    layer, row, i = ((copies.frames >= 0) & current[..., None]).nonzero(as_tuple=True)
    frame, page = copies.frames[layer, row, i], copies.pages[layer, row, i]
    maps.page_of[layer, frame.long()] = page
    maps.importance[layer, frame.long()] = copies.importance[layer, row, i]
    maps.frame_of[layer, copies.requests[layer, row].long(), page.long()] = frame
    copies.frames.fill_(-1)


def open_pages(maps: Maps, requests: Tensor, pages: Tensor, positions: Tensor, page_size: int, sinks: int) -> None:
    count = maps.frame_of.shape[1]
    begins = (pages >= 0) & (positions % page_size == 0)
    for row in begins.nonzero().flatten().tolist():
        request, page = int(requests[row]), int(positions[row]) // page_size
        layers = (maps.frame_of[:, request, page] < 0).nonzero().flatten()
        frames = request + maps.importance[layers, request::count].argmin(1) * count
        old = maps.page_of[layers, frames].long()
        maps.frame_of[layers[old >= 0], request, old[old >= 0]] = -1
        maps.page_of[layers, frames] = page
        maps.importance[layers, frames] = _INF if page < sinks else float(page)
        maps.frame_of[layers, request, page] = frames.int()


def take_sample(
    q: Tensor, predicted: Tensor | None, pages: Tensor, listed: Tensor, table: Tensor, num_pages: Tensor,
    sampled_row: Tensor, step_number: Tensor, arrived: Tensor, into: Sample,
) -> None:  # fmt: skip
    row = int(sampled_row) - 1
    if row < 0:
        return
    into.q.copy_(q[row])
    count = int(num_pages[row])
    into.table[:count] = table[row, :count]
    into.pages.copy_(pages[row])
    into.listed.copy_(listed[row])
    into.cosines[: len(q)] = float("nan") if predicted is None else cosine(predicted, q).float()
    into.number.copy_(step_number)


def _row_of(query_start: Tensor | None, rows: int) -> Tensor:
    """Return ``[queries]`` int64, the row of each query."""
    row = torch.arange(rows)
    return row if query_start is None else row.repeat_interleave(query_start.diff())


def _numbers(scores: Tensor) -> Tensor:
    return scores.masked_fill(scores.isnan(), -_INF)


def _always(page: Tensor, count: Tensor, sinks: int, recent: int) -> Tensor:
    """Return the mask of pages that are always selected, in sequences of ``count`` pages."""
    return (page < sinks) | (page >= count - max(recent, 1))


def _count(keep: Tensor) -> Tensor:
    return keep.sum(-1, dtype=torch.int32)


def _front(values: Tensor, keep: Tensor, most: int) -> Tensor:
    """Return ``[rows, lists, most]`` int32: the masked values of each list in order, then -1."""
    order = keep.int().argsort(dim=-1, descending=True, stable=True)[..., :most]
    front = values.expand_as(keep).gather(-1, order).masked_fill(~keep.gather(-1, order), -1)
    return functional.pad(front, (0, most - front.shape[-1]), value=-1).int()


def _softmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the softmax (0 where every logit is -inf) and the log-sum-exp of logits over the last dimension."""
    total = logits.logsumexp(-1)
    return logits.softmax(-1).masked_fill((total == -_INF)[..., None], 0.0), total


def _logits(
    q: Tensor, kv: Tensor, ids: Tensor, tokens: Tensor, scale: float
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Compute the logits of one query.

    Returns:
        Logits ``[kv_heads, group, n]`` fp32, -inf beyond a list's tokens; values ``[kv_heads, n, head_dim]`` fp32, 0
        beyond them; and the index of the ``n / page_size`` pages in ``kv``: page and KV head.
    """
    kv_heads, page_size = kv.shape[1], kv.shape[3]
    pages = -(-int(tokens.max()) // page_size)
    listed = torch.arange(pages) * page_size < tokens[:, None]
    place = ids[:, :pages].where(listed, 0).long().expand(kv_heads, -1), torch.arange(kv_heads)[:, None]
    keys, values = (x.flatten(1, 2) for x in KvFormat.of(kv).decode(kv[place]))
    beyond = torch.arange(pages * page_size) >= tokens[:, None]
    logits = q.float().view(kv_heads, -1, q.shape[-1]) @ keys.mT * scale
    return logits.masked_fill(beyond[:, None], -_INF), values.masked_fill(beyond[..., None], 0.0), place
