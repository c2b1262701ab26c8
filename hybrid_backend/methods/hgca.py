"""Method ``hgca``: dense attention of a recent window on the device, per-head sparse attention of the rest on the CPU
(HGCA, arXiv 2507.03153, algorithms 1 and 2).

The device keeps the last `hgca.window_tokens` tokens of every layer as a ring of pages and, for each of them and each
KV head, a moving average of its attention weight. When a page leaves the ring, a head keeps those of its tokens whose
average is above ``beta / (tokens of the ring)``: they are copied to the head's context cache, which the CPU attends
in parallel with the device (not ahead); the partials merge by log-sum-exp.

After a prompt (also one that continues a cached prefix) every token before the window is judged again, by the mean
weights of the prompt's last queries over all of them against ``beta / (tokens on the CPU)``: tokens drop out of the
context cache and come back. The host pool keeps every token, whatever a head attends.

The first pages (`sinks`) stay on the device beside the ring and count for nothing in judging: with them in it, the
attention sink takes so much of the weight that the rest falls below uniform (measured: docs/measurements.md).

Deviations, beside the sinks: a KV head stands for its group of query heads (`hgca.aggregate`); prompts are attended
densely through the staging buffers, which is exact; judging takes the prompt's last `hgca.append_queries` queries.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from hybrid_backend.attention.partial import Partial, merge, weighted_partial
from hybrid_backend.attention.quality import mass_recall
from hybrid_backend.config import HybridConfig
from hybrid_backend.errors import DeadlineError
from hybrid_backend.methods.base import Method, OwnMemory, is_separate, staging_tokens
from hybrid_backend.methods.lists import page_list
from hybrid_backend.methods.regions import Regions
from hybrid_backend.observe.stats import Stats
from hybrid_backend.step import DecodeRows, ModelSpec, PrefillRow, Step
from hybrid_backend.tiers import TierLayout, Tiers
from hybrid_backend.tiers.context_cache import ContextCache
from hybrid_backend.workers import Owners, Ticket, WorkerPool


@dataclass
class _Plan:
    """R rows."""

    regions: Tensor  # [R]
    owners: Owners
    first: Tensor  # [R] the ring's first logical page
    window: Tensor  # [R, 1, W] logical pages on the device, sinks first, -1 for padding; W of the longest row
    older: Tensor | None  # [R, 1, P] the logical pages between sinks and ring; None where no row has one
    tickets: list[Ticket] = field(default_factory=list)


class Hgca(Method):
    """First pages and a ring of recent ones on the device; a context cache per KV head on the CPU.

    A sink's slot is its page's number; the ring has the slots after those of the sinks.
    """

    def __init__(self, config: HybridConfig, model: ModelSpec, tiers: Tiers, workers: WorkerPool, stats: Stats) -> None:
        super().__init__(config, model, tiers, workers, stats)
        layers, regions = tiers.residency.layers, len(tiers.slots.generation)
        self._regions = Regions(tiers, config.page_size)
        self._ring = _ring(config)
        self._row = {layer: i for i, layer in enumerate(layers)}
        self._caches = {layer: ContextCache(tiers.host.layers[layer], regions) for layer in layers}
        self._average = torch.zeros(_average_shape(config, model, len(layers), regions))  # moving, by ring slot
        self._evicted = [0] * regions  # pages of the region's request that have left the ring
        self._queries: dict[str, dict[int, Tensor]] = {}  # the last queries of each request's prompt, by layer
        # Judging runs beside the model; a layer waits for its own share before it attends.
        self._judge = ThreadPoolExecutor(1, thread_name_prefix="hybrid-judge")
        self._pending: dict[int, list[Future[None]]] = {}

    @classmethod
    def runs_on(cls, config: HybridConfig, device: torch.device) -> bool:
        return True  # planned on the host; tensors go where they are needed

    @classmethod
    def layout(cls, config: HybridConfig, model: ModelSpec, device: torch.device) -> TierLayout:
        return TierLayout(
            separate=is_separate(config, device),
            slots_per_request=config.sinks + _ring(config),
            staging_tokens=staging_tokens(config),
        )

    @classmethod
    def own_memory(
        cls, config: HybridConfig, model: ModelSpec, device: torch.device, pages: int, max_requests: int
    ) -> OwnMemory:
        layers = len(cls.layout(config, model, device).full_layers(model))
        return OwnMemory(host=prod(_average_shape(config, model, layers, max_requests)) * torch.float32.itemsize)

    @classmethod
    def grown_bytes(cls, config: HybridConfig, model: ModelSpec, device: torch.device, tokens: int) -> int:
        """Every token between sinks and ring kept by some head, in caches that grew by half when it came."""
        older = max(0, -(-tokens // config.page_size) - config.sinks - _ring(config))
        layers = len(cls.layout(config, model, device).full_layers(model))
        return layers * -(-older * 3 // 2) * model.page_bytes(config.page_size)

    @property
    def host_bytes(self) -> int:
        """Of the context caches and the moving averages."""
        return self._average.nbytes + sum(cache.nbytes for cache in self._caches.values())

    def kept_tokens(self) -> list[list[int]]:
        """Per layer and KV head, the tokens in the context caches of all running requests."""
        regions = range(len(self.tiers.slots.generation))
        return [
            [sum(len(cache.positions(r)[head]) for r in regions) for head in range(self.model.num_kv_heads)]
            for cache in self._caches.values()
        ]

    # --- prompts ---

    def prefill(self, layer: int, row: PrefillRow, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        held = self._queries.setdefault(row.request_id, {})
        held[layer] = (
            torch.cat([held[layer], q])[-self.config.hgca.append_queries :]
            if layer in held
            else q[-self.config.hgca.append_queries :].clone()
        )
        return super().prefill(layer, row, q, k, v)

    # --- the step ---

    def begin_step(self, step: Step) -> None:
        self._settle_all()  # only a step that failed half-way left anything
        for row in step.prefill:
            self._forget(row.request_id)  # its region is out of date: it computes prompt tokens again
        if step.decode is None:
            return
        rows = step.decode
        found = [self._region(rows, r) for r in range(rows.count)]
        regions, sinks = torch.tensor(found), self.config.sinks
        first = (rows.num_pages - self._ring).clamp(min=sinks)
        column = torch.arange(sinks + int((rows.num_pages - first).max().clamp(min=0)))[None]
        pages = torch.where(column < sinks, column, first[:, None] + column - sinks)
        window = pages.masked_fill(pages >= rows.num_pages[:, None], -1)[:, None]
        step.plan = _Plan(
            regions=regions,
            owners=Owners(regions, self.tiers.slots.generation[regions], self.tiers.slots.generation),
            first=first,
            window=window,
            older=_between(sinks, first) if bool((first > sinks).any()) else None,
        )

    def append(self, layer: int, step: Step, kv: Tensor) -> None:
        if step.decode is not None:
            self._regions.append(layer, step.decode, step.plan.regions, step.decode.gather(kv))

    def attend(self, layer: int, step: Step, q: Tensor) -> Tensor:
        rows, plan = step.decode, step.plan
        assert rows is not None
        self._settle(layer)
        ticket = self._submit(layer, rows, plan, q.cpu())
        kv, table = self.tiers.host.layers[layer], rows.page_table
        if self.tiers.slots.separate:
            kv = self.tiers.slots.layers[layer]
            table = self.tiers.residency.slot_of(layer, plan.regions, rows.page_table.shape[1])
        pages = page_list(rows, plan.window, table, self.config.page_size)
        result, weights = weighted_partial(q, kv, pages, self.model.scale)
        self._note(layer, plan, weights)
        if ticket is not None:
            of_cpu = self._wait(layer, ticket)
            result = merge(result, Partial(*(x.to(q.device) for x in of_cpu)))
            plan.tickets.clear()
        if self.config.is_sampled(step.number, layer):
            self._sample(layer, rows, plan, q.cpu(), step.number)
        return result.out

    def release(self, request_id: str) -> None:
        self._queries.pop(request_id, None)
        self._forget(request_id)

    def abandon(self, step: Step) -> None:
        if isinstance(step.plan, _Plan):
            for ticket in step.plan.tickets:
                ticket.abandon()

    def close(self) -> None:
        self._judge.shutdown(wait=True, cancel_futures=True)
        super().close()

    # --- placement: runs in the engine's thread, once per step ---

    def _region(self, rows: DecodeRows, r: int) -> int:
        """The row's region: a new one is filled from the host pool and all older tokens are judged; in a running one
        the page that begins takes the place of the oldest, whose tokens are judged by their moving averages."""
        residency, sinks = self.tiers.residency, self.config.sinks
        region, is_new = self._regions.find(rows, r)
        pages = int(rows.num_pages[r])
        first = max(sinks, pages - self._ring)
        if is_new:
            # The step's own token is not in the host pool yet. The others are, in all layers.
            known = int(rows.seq_lens[r]) - 1
            held = torch.cat([torch.arange(min(sinks, pages)), torch.arange(first, max(first, pages))])
            queries = self._queries.pop(rows.request_ids[r], {})
            table = rows.page_table[r]
            for layer in residency.layers:
                self._regions.fill(layer, rows, r, region, self._slot(held), held, held)
                if known:
                    asked = queries.get(layer)
                    self._start(layer, region, first, known, table, asked.cpu() if asked is not None else None)
            self._evicted[region] = first
        elif self._regions.begins_page(rows, r):
            for page in range(self._evicted[region], first):
                for layer in residency.layers:
                    self._evict(layer, region, page, rows.page_table[r])
            self._evicted[region] = max(first, self._evicted[region])
            newest = torch.tensor([pages - 1])
            for layer in residency.layers:
                residency.put(layer, region, self._slot(newest), newest, newest)
            if pages > sinks:  # a step that failed half-way may have begun this page before
                self._average[:, region, self._place(pages - 1)] = 0
        return region

    def _slot(self, pages: Tensor) -> Tensor:
        """Slots (0..size) of logical pages that are on the device."""
        sinks = self.config.sinks
        return torch.where(pages < sinks, pages, sinks + (pages - sinks) % self._ring)

    def _place(self, page: int) -> int:
        """Of a page in the ring."""
        return (page - self.config.sinks) % self._ring

    def _forget(self, request_id: str) -> None:
        region = self.tiers.slots.region(request_id)
        if region is None:
            return
        self._settle_all()  # nothing may judge for a request that is gone
        self._regions.release(request_id)
        self._average[:, region] = 0
        for cache in self._caches.values():
            cache.release(region)

    # --- judging: runs in a thread of its own, a layer's jobs in order ---

    def _start(self, layer: int, region: int, first: int, known: int, table: Tensor, queries: Tensor | None) -> None:
        job = self._judge.submit(self._judge_prompt, layer, region, first, known, table, queries)
        self._pending.setdefault(layer, []).append(job)

    def _evict(self, layer: int, region: int, page: int, table: Tensor) -> None:
        average = self._average[self._row[layer], region, self._place(page)].clone()
        job = self._judge.submit(self._judge_page, layer, region, page, table, average)
        self._pending.setdefault(layer, []).append(job)

    def _judge_prompt(
        self, layer: int, region: int, first: int, known: int, table: Tensor, queries: Tensor | None
    ) -> None:
        """Which of the tokens between sinks and page ``first`` each head keeps, and the first averages of the ring's.

        ``known``: tokens of the sequence in the host pool; the queries are those of the last of them. Without queries
        (none was seen: the whole prompt came from a cache) every token is kept.
        """
        with torch.inference_mode():
            page_size, ring = self.config.page_size, self._ring
            pages = table[: -(-known // page_size)]
            sinks, older = self.config.sinks * page_size, first * page_size
            # Head by head: a long context's K of all heads, in fp32, would be larger than its bf16 KV.
            for head in range(self.model.num_kv_heads):
                kept = torch.arange(sinks, older)
                if queries is not None:
                    k = self.tiers.host.layers[layer][pages, head, 0].flatten(0, 1)[:known]
                    weights = self._mean_weights(queries, k, head, sinks, older)
                    heavy = weights[sinks:older] > self.config.hgca.beta / max(1, older - sinks)
                    kept = heavy.nonzero().flatten() + sinks
                    recent = torch.zeros(ring * page_size)
                    recent[: max(0, known - older)] = weights[older:]
                    places = torch.arange(first - self.config.sinks, first - self.config.sinks + ring) % ring
                    self._average[self._row[layer], region, places, head] = recent.view(ring, page_size)
                self._keep(layer, region, head, table, kept)

    def _mean_weights(self, queries: Tensor, k: Tensor, head: int, sinks: int, older: int) -> Tensor:
        """``[tokens]``: mean over the queries of their softmax over the sinks, over the other older tokens and over the
        recent ones, each alone: the sinks take most of many heads' attention whatever they hold, and beside them
        nothing would look heavy. ``queries``:
        ``[n, heads, head_dim]`` of the last n of the tokens whose keys are ``k`` ``[tokens, head_dim]``."""
        count, group = len(queries), self.model.num_heads // self.model.num_kv_heads
        mine = queries[:, head * group : (head + 1) * group].float().transpose(0, 1)  # [group, n, dim]
        logits = torch.matmul(mine * self.model.scale, k.float().T)
        position = torch.arange(len(k) - count, len(k))[:, None]
        logits = logits.masked_fill(torch.arange(len(k)) > position, float("-inf"))
        parts = (logits[..., :sinks], logits[..., sinks:older], logits[..., older:])
        tiers = [part.softmax(-1).nan_to_num(0.0) for part in parts]
        return self._over_group(torch.cat(tiers, -1).mean(1), 0)

    def _keep(self, layer: int, region: int, head: int, table: Tensor, positions: Tensor) -> None:
        """Copy tokens (``positions`` in the sequence with page table ``table``) to a head's context cache."""
        if not len(positions):
            return
        page_size = self.config.page_size
        pages, offsets = table[positions // page_size], positions % page_size
        kv = self.tiers.host.layers[layer][pages, head, :, offsets]
        self._caches[layer].add(region, head, kv, positions)

    def _judge_page(self, layer: int, region: int, page: int, table: Tensor, average: Tensor) -> None:
        """Algorithm 1: tokens of a page that leaves the ring stay if their average (``[kv_heads, page_size]``) is above
        beta times uniform."""
        with torch.inference_mode():
            page_size = self.config.page_size
            keep = average > self.config.hgca.beta / (self._ring * page_size)
            for head in range(self.model.num_kv_heads):
                self._keep(layer, region, head, table, keep[head].nonzero().flatten() + page * page_size)

    def _settle(self, layer: int) -> None:
        """Wait until all judging of a layer is done; what is late stays to be waited for."""
        jobs = self._pending.get(layer, [])
        while jobs:
            if wait(jobs[:1], self.config.workers.deadline_seconds).not_done:
                raise DeadlineError(
                    f"judging evicted tokens of layer {layer} did not end within "
                    f"workers.deadline_seconds={self.config.workers.deadline_seconds}"
                )
            jobs.pop(0).result()

    def _settle_all(self) -> None:
        for layer in list(self._pending):
            self._settle(layer)

    # --- attention ---

    def _submit(self, layer: int, rows: DecodeRows, plan: _Plan, q: Tensor) -> Ticket | None:
        """The CPU's part: the context caches, or every older token where the configuration wants exact attention."""
        device = int((rows.seq_lens - (plan.first - self.config.sinks) * self.config.page_size).sum())
        if plan.older is None:
            self.stats.attended(layer, device, 0)
            return None
        if self.config.sparse == "never" or layer in self.config.exact_layers:
            store = self.tiers.host.layers[layer]
            pages = page_list(rows, plan.older, rows.page_table, self.config.page_size)
        else:
            cache = self._caches[layer]
            store, pages = cache.store, cache.lists(plan.regions.tolist())
        self.stats.attended(layer, device + pages.tokens, pages.tokens)
        if not pages.ids.shape[2]:
            return None
        ticket = self.workers.submit(q, store, pages, self.model.scale, f"layer {layer}", plan.owners)
        plan.tickets.append(ticket)
        return ticket

    def _note(self, layer: int, plan: _Plan, weights: Tensor) -> None:
        """Algorithm 1: A = (1 - alpha) A + alpha A_new, the softmax over the ring's tokens without the sinks.
        ``weights``: ``[rows, heads, W, page_size]``, over both."""
        sinks = self.config.sinks
        weights, window = weights[:, :, sinks:], plan.window[:, 0, sinks:]
        (rows, heads, columns, page_size), kv_heads = weights.shape, self.model.num_kv_heads
        weights = weights / weights.sum((2, 3), keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)
        grouped = weights.view(rows, kv_heads, heads // kv_heads, columns, page_size)
        new = self._over_group(grouped, 2).transpose(1, 2).cpu()  # [rows, columns, kv_heads, page_size]
        region = plan.regions[:, None].expand(-1, columns)
        listed = window >= 0
        alpha = self.config.hgca.alpha
        where = (region[listed], (window[listed] - sinks) % self._ring)
        average = self._average[self._row[layer]]
        average[where] = (1 - alpha) * average[where] + alpha * new[listed]

    def _over_group(self, weights: Tensor, dim: int) -> Tensor:
        return weights.amax(dim) if self.config.hgca.aggregate == "max" else weights.mean(dim)

    def _wait(self, layer: int, ticket: Ticket) -> Partial:
        needed = time.perf_counter()
        partial = ticket.wait(self.config.workers.deadline_seconds)
        entry = self.stats.layers[layer]
        entry.wait_seconds += time.perf_counter() - needed
        entry.lead_seconds += needed - ticket.asked
        return partial

    def _sample(self, layer: int, rows: DecodeRows, plan: _Plan, q: Tensor, turn: int) -> None:
        """Attention mass of one of the rows with pages between sinks and ring."""
        longer = (plan.first > self.config.sinks).nonzero().flatten().tolist()
        if not longer or self.config.sparse == "never" or layer in self.config.exact_layers:
            return
        r = longer[turn % len(longer)]
        stats, heads = self.stats.layers[layer], self.model.num_kv_heads
        older = slice(self.config.sinks * self.config.page_size, int(plan.first[r]) * self.config.page_size)
        covered = torch.ones(heads, int(rows.seq_lens[r]), dtype=torch.bool)
        covered[:, older] = False
        for head, positions in enumerate(self._caches[layer].positions(int(plan.regions[r]))):
            covered[head, positions] = True
        pages = rows.page_table[r, : int(rows.num_pages[r])]
        blocks = self.tiers.host.layers[layer].flatten(0, 2)
        stats.mass_sum += mass_recall(q[r], blocks, pages, covered, heads, self.model.scale)
        stats.mass_samples += 1


def _ring(config: HybridConfig) -> int:
    """Pages of the window."""
    return max(2, -(-config.hgca.window_tokens // config.page_size))


def _average_shape(config: HybridConfig, model: ModelSpec, layers: int, regions: int) -> tuple[int, ...]:
    return (layers, regions, _ring(config), model.num_kv_heads, config.page_size)


def _between(sinks: int, first: Tensor) -> Tensor:
    """``[R, 1, max(first) - sinks]``: the logical pages from ``sinks`` to ``first`` of each row, padding (-1) last."""
    column = torch.arange(sinks, int(first.max()))[None, None]
    return torch.where(column < first[:, None, None], column, -1)
