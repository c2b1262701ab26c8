"""Method ``hgca``: a recent window on the device, older tokens on the CPU (HGCA, arXiv 2507.03153, algorithms 1 and 2).

The device keeps the last `hgca.window_tokens` tokens of each layer as a ring of pages. For each of these tokens and
each KV head it keeps a moving average of the attention weight. When a page leaves the ring, a head keeps the tokens
whose average exceeds ``beta / (tokens of the ring)``. They are copied to the head's context cache, which the CPU
attends in parallel with the device, in the same layer. The partials merge by log-sum-exp.

After a prompt, also one that continues a cached prefix, all tokens before the window are judged again. The mean weights
of the prompt's last queries are compared with ``beta / (tokens on the CPU)``. So tokens leave the context cache and
return to it. The host pool keeps all tokens.

The CPU workers judge a prompt in the background (section 3.2.2 of the paper), while the engine decodes. No step waits
for them. A request that is not judged yet attends all its older tokens in the host pool, as the paper's append does
(algorithm 2, line 4). That is exact, and costs a dense step on the CPU. Without these tokens the first tokens of an
answer would be wrong. A step takes a judgement once all layers of the prompt are judged.

The first pages (`sinks`) stay on the device beside the ring and are left out of judging. The attention sink would take
so much of the weight that all other tokens fall below uniform (docs/lab/measurements.md).

Pages that leave the ring are judged on the host between steps. The launches of a step do not depend on the result.

Deviations, beside the sinks: a KV head stands for its group of query heads by the largest of their weights. Prompts are
attended densely through the staging buffers, which is exact. Only a prompt's last `APPEND_QUERIES` queries judge.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from hybrid_backend.batch import DecodeRows, ModelSpec, PrefillRow, Step, sent
from hybrid_backend.config import HybridConfig
from hybrid_backend.kernels.operations import Judgement
from hybrid_backend.methods.hgca_judging import LeftPage, Unjudged
from hybrid_backend.step.method import Method, OwnMemory, staging_tokens
from hybrid_backend.tiers import TierLayout, Tiers
from hybrid_backend.tiers.sizes import pages_of_a_sequence
from hybrid_backend.workers import WorkerPool

if TYPE_CHECKING:
    from hybrid_backend.step import Toolbox


APPEND_QUERIES = 64
"""Number of a prompt's last queries that judge its older tokens. HGCA takes all queries; a constant bounds the cost."""


class _Lists(NamedTuple):
    """Pages that the rows of a step attend in all layers: int32 buffers on the device tier with fixed addresses.

    Attributes:
        sinks: ``[rows, 1, sinks]`` frames of the first pages.
        sink_tokens: ``[rows, 1]`` tokens in these frames.
        ring: ``[rows, 1, ring]`` frames of the ring.
        ring_tokens: ``[rows, 1]`` tokens in these frames.
        places: ``[rows, 1, ring]`` places of the ring's pages in the moving averages.
        older: ``[rows, 1, columns]`` host pages between sinks and ring, for layers that attend all of them.
        older_pages: ``[rows, 1]`` number of these pages.
    """

    sinks: Tensor
    sink_tokens: Tensor
    ring: Tensor
    ring_tokens: Tensor
    places: Tensor
    older: Tensor
    older_pages: Tensor

    def first(self, rows: int) -> _Lists:
        """Return the buffers of the first ``rows`` rows."""
        return _Lists(*(x[:rows] for x in self))


class _Running(NamedTuple):
    """A running request.

    Attributes:
        request: its index (`FramePool.index`).
        first: logical page that its ring begins with. The pages between the sinks and this page were judged.
    """

    request: int
    first: int


class Hgca(Method):
    """First pages and a ring of recent ones on the device; a context cache per KV head on the CPU."""

    name = "hgca"
    suits_gpu = False
    uses_workers = True
    reads_int8 = True
    attends_selection = False  # Layers attend sinks, ring and context caches.

    def __init__(self, config: HybridConfig, model: ModelSpec, tiers: Tiers) -> None:
        super().__init__(config, model, tiers)
        full = tiers.layout.full_layers(model)
        self._ring, self._cached = _ring(config), [full.index(layer) for layer in tiers.cache.stores]
        # A_gpu of algorithm 1 of each layer with a context cache. Each request has a place for each page of its ring:
        # the page's number after the sinks, modulo the size of the ring.
        self._average, self._lists = _buffers(
            config, model, tiers.layout, len(tiers.host.layers[full[0]]), tiers.frames.requests, tiers.device
        )
        self._running: dict[str, _Running] = {}
        self._unjudged: dict[str, Unjudged] = {}
        self._workers: WorkerPool | None = None
        self._queries: dict[str, dict[int, tuple[int, Tensor]]] = {}
        """Prompt length so far and the prompt's last queries, by request and layer."""

    @classmethod
    def layout(cls, config: HybridConfig, model: ModelSpec, device: torch.device) -> TierLayout:
        return TierLayout(
            separate=True,
            frames_per_request=config.sinks + _ring(config),
            staging_tokens=staging_tokens(config),
            context_caches=True,
        )

    @classmethod
    def own_memory(
        cls, config: HybridConfig, model: ModelSpec, device: torch.device, pages: int, max_requests: int
    ) -> OwnMemory:
        step = super().own_memory(config, model, device, pages, max_requests)
        layout = cls.layout(config, model, device)
        average, lists = _buffers(config, model, layout, pages, max_requests, torch.device("meta"))
        cached = bool(layout.cached_layers(config, model))
        whole = max_requests * (pages_of_a_sequence(config, model, pages) + 1) * 4 * cached  # `ContextCache.whole`
        device_bytes = step.device + average.nbytes + sum(x.nbytes for x in lists)
        return replace(step, device=device_bytes, host=step.host + whole)

    @classmethod
    def grown_bytes(cls, config: HybridConfig, model: ModelSpec, device: torch.device, tokens: int) -> int:
        """Return `Method.grown_bytes` if all heads keep all tokens between sinks and ring."""
        older = max(0, -(-tokens // config.page_size) - config.sinks - _ring(config))
        cached = len(cls.layout(config, model, device).cached_layers(config, model))
        return cached * older * model.page_bytes(config.page_size)

    @classmethod
    def exact_tokens(cls, config: HybridConfig) -> float:
        """Return `Method.exact_tokens`: first pages and window."""
        if config.sparse == "never":
            return math.inf
        return config.sinks * config.page_size + config.hgca.window_tokens

    @property
    def device_bytes(self) -> int:
        return self._average.nbytes + sum(x.nbytes for x in self._lists)

    def take_workers(self, workers: WorkerPool) -> None:
        self._workers = workers

    def kept_tokens(self) -> list[list[int]]:
        """Return the tokens in the context caches of all running requests, per layer with a cache and KV head."""
        tokens: list[list[int]] = self.tiers.cache.tokens.sum(1).tolist()
        return tokens

    def budgets(self, rows: DecodeRows) -> Tensor:
        if self.config.sparse == "never":
            return rows.num_pages
        return rows.num_pages.clamp(max=self.config.sinks + self._ring)

    # --- prompts and requests ---

    def saw_prompt(self, layer: int, row: PrefillRow, q: Tensor) -> None:
        if layer in self.tiers.cache.stores:
            queries_of_layer = self._queries.setdefault(row.request_id, {})
            tokens, before = queries_of_layer.get(layer, (-1, q))
            # If not, the chunk is the prompt's first, perhaps after a preemption.
            goes_on = tokens == row.seq_len - len(q)
            queries_of_layer[layer] = (
                row.seq_len,
                torch.cat([before, q])[-APPEND_QUERIES:] if goes_on else q[-APPEND_QUERIES:].clone(),
            )

    def begin_step(self, step: Step) -> None:
        for row in step.prefill:  # A request that computes prompt tokens is judged anew.
            self._forget(row.request_id)

    def release(self, request_id: str) -> None:
        self._queries.pop(request_id, None)
        self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        unjudged, running = self._unjudged.pop(request_id, None), self._running.pop(request_id, None)
        if unjudged is not None:
            unjudged.abandon()
        if running is not None:
            self.tiers.cache.release(running.request)

    # --- the step ---

    def attend(self, step: Toolbox, layer: int, q: Tensor) -> Tensor:
        config, tiers, lists = self.config, self.tiers, self._lists.first(len(q))
        row = tiers.cache.row.get(layer)  # None if the layer attends all older pages.
        step.ask_cpu(layer, q, lists.older if row is None else None, lists.older_pages)
        kv = tiers.frames.layers[layer]
        out, lse = step.attend(q, kv, lists.ring, lists.ring_tokens, self._ring)
        if row is not None:
            tiers.operations.page_weights(
                q, kv, lists.ring, lists.places, lists.ring_tokens, lse.logsumexp(-1), self._average[row],
                self.model.scale, config.hgca.alpha, True,
            )  # fmt: skip
        if config.sinks:
            sinks = step.attend(q, kv, lists.sinks, lists.sink_tokens, config.sinks)
            out, lse = torch.cat([out, sinks[0]], 2), torch.cat([lse, sinks[1]], 2)
        return step.merge(layer, (out, lse), step.take_cpu(layer, len(q)), q.dtype)

    def covered(self, layer: int, rows: DecodeRows, r: int) -> Tensor | None:
        if layer not in self.tiers.cache.stores:
            return None
        running, page_size = self._running[rows.request_ids[r]], self.config.page_size
        if self.tiers.cache.whole[running.request]:
            return None
        covered = torch.ones(self.model.num_kv_heads, int(rows.seq_lens[r]), dtype=torch.bool)
        covered[:, self.config.sinks * page_size : running.first * page_size] = False
        for head, positions in enumerate(self.tiers.cache.positions(layer, running.request)):
            covered[head, positions] = True
        return covered

    # --- between steps ---

    def begin_decode(self, step: Toolbox, rows: DecodeRows) -> None:
        config, cache, page_size = self.config, self.tiers.cache, self.config.page_size
        first = (rows.num_pages - self._ring).clamp(min=config.sinks)
        requests = self.tiers.frames.indices(rows.request_ids)
        if cache.stores:
            self._judge(rows, requests, first.tolist())
        self._write_lists(step)
        older = (first - config.sinks) * page_size
        on_cpu = torch.full((len(step.maps.page_of),), float(older.sum()))
        whole_tokens = int(cache.whole[requests].sum()) * page_size
        on_cpu[self._cached] = cache.tokens[:, requests].sum((1, 2)) / self.model.num_kv_heads + whole_tokens
        step.counting.count_tokens(int((rows.seq_lens - older).sum()), 0, on_cpu.tolist())

    def _write_lists(self, step: Toolbox) -> None:
        """Compute the lists from the step's inputs on the device tier."""
        lists, inputs, ring, config = self._lists, step.buffers.inputs, self._ring, self.config
        requests, page_size = inputs.requests[:, None].long(), config.page_size
        first = (inputs.num_pages - ring).clamp(min=config.sinks)[:, None]
        pages = first + torch.arange(ring, device=first.device, dtype=torch.int32)
        reachable = pages.clamp(max=inputs.table.shape[1] - 1).long()
        frame_of = step.maps.frame_of[0]  # All layers have the same map.
        lists.ring[:, 0] = frame_of[requests, reachable]
        lists.sinks[:, 0] = frame_of[requests[:, 0], : config.sinks]
        lists.places[:, 0] = inputs.requests[:, None] * ring + (pages - config.sinks) % ring
        lists.ring_tokens.copy_((inputs.seq_lens[:, None] - first * page_size).clamp(min=0))
        lists.sink_tokens.copy_(inputs.seq_lens[:, None].clamp(max=config.sinks * page_size))
        lists.older_pages.copy_(first - config.sinks)
        if lists.older.shape[2]:
            lists.older[:, 0] = inputs.table.roll(-config.sinks, 1)

    # --- judging ---

    def _judge(self, rows: DecodeRows, requests: list[int], first: list[int]) -> None:
        """Begin to judge prompts, judge the pages that leave a ring, and take the judgements that have arrived.

        A step in which a page leaves a ring waits for a GPU. No step waits for the workers.
        """
        ring, sinks, page_size = self._ring, self.config.sinks, self.config.page_size
        left: list[tuple[int, int]] = []
        for r, (request_id, request, page) in enumerate(zip(rows.request_ids, requests, first, strict=True)):
            running = self._running.get(request_id)
            if running is None:
                self._begin_judging(rows, r, request, page)
            else:
                left += [(r, before) for before in range(running.first, page)]
            self._running[request_id] = _Running(request, page)
        if left:
            self._judge_pages(rows, left)
        for r, request_id in enumerate(rows.request_ids):
            unjudged = self._unjudged.get(request_id)
            judgement = None if unjudged is None else unjudged.poll(self.config.workers.deadline_seconds)
            if unjudged is not None and judgement is not None:
                del self._unjudged[request_id]
                self._take(unjudged, judgement, self._running[request_id], int(rows.seq_lens[r]))
        newest = rows.num_pages - 1
        # If a step fails, the retried step opens the same page again.
        begins = ((rows.seq_lens - 1) % page_size == 0) & (newest >= sinks)
        if bool(begins.any()):
            places = torch.tensor(requests) * ring + (newest - sinks) % ring
            self._average.index_fill_(1, sent(places[begins], self.tiers.device), 0.0)

    def _begin_judging(self, rows: DecodeRows, r: int, request: int, first: int) -> None:
        """Prepare to judge a prompt by its last queries, and let the request attend its older pages whole.

        If the whole prompt came from a cache there are no queries, and all tokens are kept.
        """
        config, cache, page_size = self.config, self.tiers.cache, self.config.page_size
        queries = self._queries.pop(rows.request_ids[r], {})
        self._average[:, request * self._ring : (request + 1) * self._ring].zero_()
        older = first - config.sinks
        if int(rows.seq_lens[r]) - 1 < first * page_size:
            return  # The prompt has no token after the sinks.
        cache.whole_pages[request, :older].copy_(rows.page_table[r, config.sinks : first].int(), non_blocking=True)
        cache.attend_whole(request, older, older * page_size)
        none = torch.empty(0, self.model.num_heads, self.model.head_dim, dtype=self.model.dtype)
        layers = [queries[layer][1] if layer in queries else none for layer in cache.row]
        assert self._workers is not None
        unjudged = Unjudged(self.tiers, self._workers, rows, r, request, first, config.sinks)
        self._unjudged[rows.request_ids[r]] = unjudged
        unjudged.prepare(layers, config.hgca.beta / max(1, older * page_size), self.model.scale)

    def _judge_pages(self, rows: DecodeRows, left: list[tuple[int, int]]) -> None:
        """Keep the tokens of leaving pages whose average is above beta times uniform (algorithm 1).

        The pages of a request whose prompt is not judged yet are attended whole until then.

        Args:
            rows: decode rows of the step.
            left: pairs of a row and a page that leaves its ring.
        """
        device, sinks, cache = self.tiers.device, self.config.sinks, self.tiers.cache
        row, page = torch.tensor(left).T
        requests = torch.tensor([self._running[rows.request_ids[r]].request for r, _ in left])
        places = requests * self._ring + (page - sinks) % self._ring
        averages = self._average.index_select(1, sent(places, device)).cpu()  # [layers, left, kv_heads, page_size]
        host_pages = rows.page_table[sent(row, device), sent(page, device)].cpu()
        for i, (request, (r, page_number)) in enumerate(zip(requests.tolist(), left, strict=True)):
            average, host_page = averages[:, i], host_pages[i : i + 1]
            unjudged = self._unjudged.get(rows.request_ids[r])
            if unjudged is None:
                self._keep_tokens(request, page_number, average, host_page)
                continue
            steps = int(rows.seq_lens[r]) - unjudged.started_tokens
            unjudged.left.append(LeftPage(page_number, host_page, average, steps))
            cache.whole_pages[request, page_number - sinks] = host_page[0]
            cache.whole[request] += 1

    def _keep_tokens(self, request: int, page: int, average: Tensor, host_page: Tensor) -> None:
        """Append the tokens of a page that left the ring to the lists of the KV heads whose averages are high enough.

        Args:
            request: request index.
            page: logical page.
            average: ``[layers, kv_heads, page_size]`` on the host.
            host_page: ``[1]`` host page.
        """
        page_size = self.config.page_size
        keep = average > self.config.hgca.beta / (self._ring * page_size)
        self.tiers.cache.add(request, page * page_size, keep, host_page)

    def _take(self, unjudged: Unjudged, judgement: Judgement, running: _Running, seq_len: int) -> None:
        """Give a request the lists of its judged prompt, and add the prompt's weights to the averages of the ring.

        The averages have followed the steps since the prompt, so the weights count as if these steps had come after
        them: ``A = (1 - alpha)^n A_prompt`` plus what the n steps added.
        """
        ring, sinks, page_size, cache = self._ring, self.config.sinks, self.config.page_size, self.tiers.cache
        decay, recent = 1 - self.config.hgca.alpha, judgement.recent
        padded = functional.pad(recent, (0, ring * page_size - recent.shape[2]))
        weights = padded.unflatten(2, (ring, page_size)).transpose(1, 2)  # [layers, ring, kv_heads, page_size]
        cache.take(running.request, sinks * page_size, judgement)
        for page, host_page, average, steps in unjudged.left:
            place = page - unjudged.first
            started = weights[:, place] * decay**steps if place < ring else 0.0
            self._keep_tokens(running.request, page, average + started, host_page)
        cache.attend_lists(running.request)
        # The pages of the prompt's ring that have not left it.
        pages = torch.arange(running.first, max(running.first, unjudged.first + ring))
        if len(pages):
            places = running.request * ring + (pages - sinks) % ring
            added = weights[:, pages - unjudged.first] * decay ** (seq_len - unjudged.started_tokens)
            self._average.index_add_(1, sent(places, self.tiers.device), sent(added, self.tiers.device))


def _ring(config: HybridConfig) -> int:
    """Return the pages of the window."""
    return max(2, -(-config.hgca.window_tokens // config.page_size))


def _buffers(
    config: HybridConfig, model: ModelSpec, layout: TierLayout, pages: int, requests: int, device: torch.device
) -> tuple[Tensor, _Lists]:
    """Return the averages and the lists; on the device ``meta``, to learn their size.

    The averages are ``[layers, requests * ring, kv_heads, page_size]`` fp32.
    """
    ring, columns = _ring(config), pages_of_a_sequence(config, model, pages)
    cached = len(layout.cached_layers(config, model))
    all_older = columns if cached < len(layout.full_layers(model)) else 0
    shapes = [(min(config.sinks, columns),), (), (ring,), (), (ring,), (all_older,), ()]
    lists = _Lists(*(torch.zeros((requests, 1, *shape), dtype=torch.int32, device=device) for shape in shapes))
    return torch.zeros(cached, requests * ring, model.num_kv_heads, config.page_size, device=device), lists
