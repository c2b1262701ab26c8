"""Method ``clo``: head-wise caches of selected pages (CLO, arXiv 2511.14510).

Per layer and KV head the device keeps the pages of the last selection. The head's *label* is the query that made this
selection. While new queries are similar to the label (equation 10 against the head's threshold, equations 7 to 9), the
head attends these pages. Otherwise it selects by the query that is predicted one layer ahead, and loads all selected
pages over the old pages. Sinks and recent pages are always on the device. The CPU computes nothing.

*Persistent* heads have all of their KV on the device. They are the heads of the first layer, whose query is never
predicted, and heads whose pages are hard to reuse (equations 11 to 13). They select by the true query in each step and
load nothing.

Deviations: pages and Quest's digests in place of tokens and hashes. The device pulls pages over the bus, where CLO's
CPU threads push them through GDRCopy, a kernel module. The budget (`budget_tokens`) is a number of tokens, and not a
share of the context.

The paper leaves two cases open. If a cosine is not positive, equation 10 is singular, and the smallest cosine counts,
which is the limit. A KV head whose query heads all have importance 0 weighs them equally. A head with an importance
below 0.857 (at power 3 and eta 0.8) has a threshold below 0, so that it practically never loads again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from hybrid_backend.attention.quality import covered_tokens
from hybrid_backend.batch import DecodeRows, ModelSpec, Step
from hybrid_backend.config import HybridConfig
from hybrid_backend.errors import ConfigError
from hybrid_backend.kernels.operations import Selection
from hybrid_backend.methods.clo.heads import cached_pages, choose_persistent, head_policy, head_scores
from hybrid_backend.methods.selective import Selective
from hybrid_backend.step.method import OwnMemory, frames_per_request, named_heads
from hybrid_backend.step.toolbox import PageLists
from hybrid_backend.tiers import TierLayout, Tiers
from hybrid_backend.tiers.heads import resident_bytes
from hybrid_backend.tiers.sizes import pages_of_a_sequence
from hybrid_backend.tiers.stream import head_pages

if TYPE_CHECKING:
    from hybrid_backend.step import Toolbox


class _Lists(NamedTuple):
    """Pages that the rows of a step attend in all layers: int32 buffers with fixed addresses.

    A *list* is one KV head of a row. Pages of one head are numbered ``page * kv_heads + head``, in the host pool and in
    frames.

    Attributes:
        seq_lens: ``[lists]`` tokens of the sequence.
        budgets: ``[lists]`` pages to attend.
        table: ``[lists, columns]`` pages of the head in the host pool.
        label: ``[lists]`` index of the list's label and cached pages: request * kv_heads + head.
        own_pages: ``[kinds, lists]`` pages that the list selects from if its head is persistent, else 0. Layers with
            the same persistent heads are of one kind.
        cached_tokens: ``[kinds, lists, 1]`` tokens to attend in frames: 0 if the head is persistent.
        ids: ``[lists, 1, frames]`` pages of the head in frames: sinks, cached and recent pages, or the whole context.
        into: ``[lists, cached]`` the pages among ``ids`` that a load overwrites.
        whole: ``[rows, 1, frames]`` all frames of the request, for layers that attend all pages.
        whole_tokens: ``[rows, 1]`` tokens of a context that fits these frames, else 0.
        beyond_tokens: ``[rows, 1]`` tokens of a context that does not fit, else 0.
    """

    seq_lens: Tensor
    budgets: Tensor
    table: Tensor
    label: Tensor
    own_pages: Tensor
    cached_tokens: Tensor
    ids: Tensor
    into: Tensor
    whole: Tensor
    whole_tokens: Tensor
    beyond_tokens: Tensor

    def first(self, rows: int, kv_heads: int) -> _Lists:
        """Return the buffers of the first ``rows`` rows."""
        lists = rows * kv_heads
        by_row = {name: getattr(self, name)[:rows] for name in ("whole", "whole_tokens", "beyond_tokens")}
        by_kind = {name: getattr(self, name)[:, :lists] for name in ("own_pages", "cached_tokens")}
        others = {name: x[:lists] for name, x in self._asdict().items() if name not in by_row | by_kind}
        return _Lists(**by_row, **by_kind, **others)


class _State(NamedTuple):
    """Labels and cached pages of all requests, in the layers that leave pages out.

    Attributes:
        labels: ``[layers, requests, heads, head_dim]`` query of the last load; zeros if there was none.
        pages: ``[layers, requests * kv_heads, cached]`` int32 logical pages of the last load.
        thresholds: ``[layers, kv_heads]`` fp32 tau; -inf for persistent heads.
        weights: ``[layers, heads]`` fp32 importance of query heads.
    """

    labels: Tensor
    pages: Tensor
    thresholds: Tensor
    weights: Tensor


class Clo(Selective):
    """Cached selections per KV head, which are loaded one layer ahead when the query has changed."""

    name = "clo"
    reads_int8 = True

    attends_selection = False  # Heads attend their cached pages.

    @classmethod
    def check(cls, config: HybridConfig, device: torch.device, num_layers: int, num_kv_heads: int) -> None:
        super().check(config, device, num_layers, num_kv_heads)
        if config.selection.steps_per_selection > 1:
            raise ConfigError(f"selection.interval: heads of {config.method} select by the rule of clo.eta; write auto")
        if frames_per_request(config) < config.budget_pages:
            raise ConfigError(
                f"frames_per_request: {config.frames_per_request} is less than the budget of {config.budget_pages} "
                f"pages, which {config.method} keeps on the device; write auto, or {config.budget_pages} or more"
            )
        scores = head_scores(config, num_layers, None, num_kv_heads)
        if not isinstance(config.clo.persistent, str):
            named_heads("clo.persistent", config.clo.persistent, num_layers, num_kv_heads)
        elif config.clo.persistent == "auto" and scores is not None and scores.similarity is None:
            raise ConfigError(
                f"clo.persistent: auto needs the mean cosines of heads, which {config.clo.heads} does not have; write "
                "none or a list of layer:head, or make the file with hybrid profile"
            )

    @classmethod
    def layout(cls, config: HybridConfig, model: ModelSpec, device: torch.device) -> TierLayout:
        head_policy(config, model)  # A file of another model's heads is refused before anything is allocated.
        return super().layout(config, model, device)

    @classmethod
    def own_memory(
        cls, config: HybridConfig, model: ModelSpec, device: torch.device, pages: int, max_requests: int
    ) -> OwnMemory:
        step, layout = super().own_memory(config, model, device, pages, max_requests), cls.layout(config, model, device)
        state, lists = _buffers(config, model, layout, pages, max_requests, torch.device("meta"))
        stores = resident_bytes(choose_persistent(config, model, layout), model, config.page_size, pages)
        return replace(step, device=step.device + stores + sum(x.nbytes for x in (*state, *lists)))

    def __init__(self, config: HybridConfig, model: ModelSpec, tiers: Tiers) -> None:
        super().__init__(config, model, tiers)
        layers = tiers.layout.digest_layers(config, model)
        pages = len(tiers.host.layers[tiers.layout.full_layers(model)[0]])
        self._row = {layer: row for row, layer in enumerate(layers)}
        heads = choose_persistent(config, model, tiers.layout)
        self._persistent = tiers.keep_heads(heads)
        self._state, self._lists = _buffers(config, model, tiers.layout, pages, tiers.frames.requests, tiers.device)
        self._first = dict[int, _Lists]()  # Keyed by the number of rows.
        thresholds, weights = head_policy(config, model)
        for layer, row in self._row.items():
            thresholds[layer, list(heads.get(layer, ()))] = -math.inf
            self._state.thresholds[row], self._state.weights[row] = thresholds[layer], weights[layer]
        kinds = _kinds(heads, layers)
        self._kind = {layer: kinds.index(heads.get(layer, ())) for layer in layers}
        persistent = [[int(head in kind) for head in range(model.num_kv_heads)] for kind in kinds]
        self._is_persistent_head = torch.tensor(persistent, dtype=torch.int32, device=tiers.device)  # [kinds, kv_heads]
        self._cached = slice(
            config.sinks, config.sinks + cached_pages(config)
        )  # Places in a selection, which is ascending.
        self._under_way = dict[int, tuple[Tensor, ...]]()  # Tensors that a copy reads until it is awaited.
        self._looked_up: set[int] = set()
        self._by_true_query: Selection | None = None
        self._is_sparse = True

    @property
    def device_bytes(self) -> int:
        return sum(x.nbytes for x in (*self._state, *self._lists))

    @property
    def pages_per_load(self) -> int:
        return cached_pages(self.config)

    def budgets(self, rows: DecodeRows) -> Tensor:
        """Return `Method.budgets`. A request's own budget is ignored: frames have the configuration's budget."""
        return super().budgets(replace(rows, budgets=None))

    # --- requests and frames ---

    def begin_step(self, step: Step) -> None:
        for row in step.prefill:  # A request that computes prompt tokens loses its frames.
            self.release(row.request_id)

    def release(self, request_id: str) -> None:
        index = self.tiers.frames.index(request_id)
        if index is not None:
            self._state.labels[:, index] = 0

    def abandon(self, step: Step) -> None:
        """Forget labels and copies of the step, because a label may name pages that were never loaded."""
        self._looked_up.clear()
        self._under_way.clear()
        for request_id in step.decode.request_ids if step.decode is not None else []:
            self.release(request_id)

    def frame_of(self, pages: Tensor) -> Tensor:
        """Return `FixedFrames.frame_of`: sinks, then the pages that a load overwrites, then a ring of later pages.

        A context that fits the frames lies in order.
        """
        frames, first = self.tiers.frames.size, self._cached.stop
        return torch.where(pages < frames, pages, first + (pages - first) % (frames - first))

    def held_pages(self, num_pages: int) -> Tensor:
        pages = torch.arange(num_pages)
        if num_pages <= self._limit:
            return pages
        return pages[(pages < self.config.sinks) | (pages >= num_pages - self.config.recent)]

    # --- the step ---

    def begin_decode(self, step: Toolbox, rows: DecodeRows) -> None:
        self._looked_up.clear()
        budgets = self.budgets(rows)
        left_out, is_sparse = (rows.num_pages - budgets).clamp(min=0), budgets < rows.num_pages
        self._is_sparse = bool(is_sparse.any())
        self._write_lists(step)
        tokens, pages, kv_heads = int(rows.seq_lens.sum()), int(rows.num_pages.sum()), self.model.num_kv_heads
        left_out_pages, sparse_rows = int(left_out.sum()), int(is_sparse.sum())
        is_beyond = rows.num_pages > self._limit
        for layer in self.tiers.layout.framed_layers(self.model):
            if layer in self._row and self.config.sparse != "never":
                loading = kv_heads - len(self._persistent.heads.get(layer, ()))
                looked_up = (
                    sparse_rows * self.pages_per_load * loading / kv_heads
                )  # Counted when the lookups are known.
                resident_pages = pages - left_out_pages - looked_up
                step.counting.count_tokens(
                    tokens - left_out_pages * self.config.page_size, resident_pages, layers=[layer]
                )
            else:
                beyond = int(rows.num_pages[is_beyond].sum())
                step.counting.count_tokens(tokens, pages - beyond, missing_pages=beyond, layers=[layer])

    def _write_lists(self, step: Toolbox) -> None:
        """Compute the lists from the step's inputs on the device tier."""
        inputs, lists, config, kv_heads = step.buffers.inputs, self._lists, self.config, self.model.num_kv_heads
        heads = torch.arange(kv_heads, dtype=torch.int32, device=self.tiers.device)

        def by_head(x: Tensor) -> Tensor:
            return (x[:, None] * kv_heads + heads.view(kv_heads, *[1] * (x.dim() - 1))).flatten(0, 1)

        for into, of in ((lists.seq_lens, inputs.seq_lens), (lists.budgets, inputs.budgets)):
            into.copy_(of.repeat_interleave(kv_heads))
        lists.table.copy_(by_head(inputs.table))
        lists.label.copy_(by_head(inputs.requests))
        left_out = (inputs.num_pages - inputs.budgets).clamp(min=0)
        tokens, own = inputs.seq_lens - left_out * config.page_size, self._is_persistent_head[:, None]
        lists.own_pages.copy_((inputs.num_pages[:, None] * own).flatten(1))
        lists.cached_tokens[..., 0] = (tokens[:, None] * (1 - own)).flatten(1)
        frames = self.tiers.frames.size
        requests, i = inputs.requests[:, None], torch.arange(frames, dtype=torch.int32, device=self.tiers.device)
        recent = inputs.num_pages[:, None] - config.recent + i - self._cached.stop
        is_recent = (left_out[:, None] > 0) & (i >= self._cached.stop)
        ids = self.tiers.frames.ids
        lists.ids[:, 0] = by_head(ids(requests, torch.where(is_recent, self.frame_of(recent), i)))
        lists.into.copy_(by_head(ids(requests, i[self._cached])))
        lists.whole[:, 0] = ids(requests, i)
        fits = inputs.num_pages <= self._limit
        lists.whole_tokens[:, 0] = inputs.seq_lens * fits
        lists.beyond_tokens[:, 0] = inputs.seq_lens * ~fits

    def lookahead(self, step: Toolbox, layer: int, q: Tensor) -> None:
        """Look up the caches of the layer's heads. Heads that miss select by ``q`` and load."""
        if self._is_persistent(layer):
            return
        self._looked_up.add(layer)
        tiers, row, inputs, lists = self.tiers, self._row[layer], step.inputs(len(q)), self._of(len(q))
        state, aggregate = self._state, self.config.clo.aggregate
        to_select = tiers.operations.match_labels(
            q, state.labels[row], state.weights[row], state.thresholds[row], inputs.requests, inputs.num_pages,
            inputs.budgets, aggregate, step.counters(layer),
        ).flatten()  # fmt: skip
        chosen = self._select(layer, q, lists, lists.table, to_select, self.config.budget_pages)
        host_pages, into = tiers.operations.plan_load(
            chosen, to_select, lists.label, lists.into, self._cached.start, state.pages[row]
        )
        self._under_way[layer] = host_pages, into
        host, frames = head_pages(tiers.host.views[layer]), head_pages(tiers.frames.layers[layer])
        step.copy(layer, host, frames, host_pages, into, is_awaited=True)

    def attend(self, step: Toolbox, layer: int, q: Tensor) -> Tensor:
        is_fixed = step.is_captured or self.tiers.is_async  # A graph needs the same launches for all rows.
        if layer not in self._row or self.config.sparse == "never" or not (is_fixed or self._is_sparse):
            return self._attend_everything(step, layer, q)
        lists, tiers, kind = self._of(len(q)), self.tiers, self._kind[layer]
        stores = []  # Each list is persistent or cached, so that it is empty in the other store.
        if layer in self._persistent.heads:
            places = self._persistent.pages(layer, step.inputs(len(q)).table).flatten(0, 1)
            chosen = self._select(layer, q, lists, places, lists.own_pages[kind], step.shape.max_list_pages)
            self._by_true_query = chosen
            store = head_pages(self._persistent.stores[layer])
            stores.append(PageLists(lambda: store, chosen.frames, chosen.tokens, chosen.frames.shape[2]))
        if not self._is_persistent(layer):
            if layer not in self._looked_up:
                self.lookahead(step, layer, q)
            step.await_copy(layer)
            self._under_way.pop(layer)
            frames = head_pages(tiers.frames.layers[layer])
            stores.append(PageLists(lambda: frames, lists.ids, lists.cached_tokens[kind], self._limit))
        self._looked_up.discard(layer)
        by_head = q.view(len(lists.label), -1, q.shape[2])
        return step.merge(layer, step.attend_stores(by_head, stores), None, q.dtype)

    def _attend_everything(self, step: Toolbox, layer: int, q: Tensor) -> Tensor:
        """Attend all pages: contexts that fit the frames in frames, longer contexts in host memory."""
        inputs, lists, host = step.inputs(len(q)), self._of(len(q)), self.tiers.host.views[layer]
        frames, columns = self.tiers.frames.layers[layer], inputs.table.shape[1]
        in_host = PageLists(lambda: host, inputs.table[:, None], lists.beyond_tokens, columns)
        in_frames = PageLists(lambda: frames, lists.whole, lists.whole_tokens, lists.whole.shape[2])
        return step.merge(layer, step.attend_stores(q, [in_frames, in_host]), None, q.dtype)

    def _is_persistent(self, layer: int) -> bool:
        """Tell whether all heads of ``layer`` are persistent, so that the layer has no cache to look up."""
        return len(self._persistent.heads.get(layer, ())) == self.model.num_kv_heads

    def _of(self, rows: int) -> _Lists:
        if rows not in self._first:
            self._first[rows] = self._lists.first(rows, self.model.num_kv_heads)
        return self._first[rows]

    def _select(self, layer: int, q: Tensor, lists: _Lists, table: Tensor, num_pages: Tensor, most: int) -> Selection:
        """Select the pages of each KV head by itself.

        Args:
            layer: the layer.
            q: ``[rows, heads, head_dim]``.
            lists: lists of these rows.
            table: ``[lists, columns]`` pages that the selection names as frames.
            num_pages: ``[lists]``; 0 leaves a list out.
            most: pages of a selection, at most.
        """
        digests, config, ops = self.tiers.digest_layer(layer), self.config, self.tiers.operations
        assert digests is not None
        scores = ops.page_scores(
            q.view(len(table), -1, q.shape[2]), head_pages(digests), lists.table, num_pages, lists.budgets,
            config.selection.aggregate, False, config.selection.bound, self.model.scale, config.page_size,
        )  # fmt: skip
        return ops.select_pages(
            scores, num_pages, lists.seq_lens, lists.budgets, lists.label, None, table, config.page_size, config.sinks,
            config.recent, most,
        )  # fmt: skip

    def covered(self, layer: int, rows: DecodeRows, r: int) -> Tensor | None:
        if layer not in self._row or self.config.sparse == "never":
            return None
        kv_heads, pages_in_all = self.model.num_kv_heads, int(rows.num_pages[r])
        request = self.tiers.frames.indices([rows.request_ids[r]])[0]
        cached = self._state.pages[self._row[layer], request * kv_heads : (request + 1) * kv_heads].cpu().long()
        always = torch.cat(
            [torch.arange(self.config.sinks), torch.arange(pages_in_all - self.config.recent, pages_in_all)]
        )
        pages = torch.cat([cached, always.expand(kv_heads, -1)], 1)
        for head in self._persistent.heads.get(layer, ()):
            assert self._by_true_query is not None
            pages[head] = self._by_true_query.pages[r * kv_heads + head, 0, : pages.shape[1]].cpu()
        return covered_tokens(pages, int(rows.seq_lens[r]), self.config.page_size)

    @property
    def _limit(self) -> int:
        """Number of pages of the longest context that is attended whole."""
        config, frames = self.config, frames_per_request(self.config)
        return min(frames, config.budget_pages) if config.sparse == "always" else frames


def _kinds(heads: Mapping[int, tuple[int, ...]], layers: Iterable[int]) -> list[tuple[int, ...]]:
    """Return the distinct sets of persistent heads of the layers."""
    return list(dict.fromkeys(heads.get(layer, ()) for layer in layers))


def _buffers(
    config: HybridConfig, model: ModelSpec, layout: TierLayout, pages: int, rows: int, device: torch.device
) -> tuple[_State, _Lists]:
    """Return the buffers of ``rows`` rows; on the device ``meta``, to learn their size."""
    kv_heads, columns, frames = model.num_kv_heads, pages_of_a_sequence(config, model, pages), layout.frames_per_request
    layers, lists, cached = layout.digest_layers(config, model), rows * kv_heads, cached_pages(config)
    kinds = len(_kinds(choose_persistent(config, model, layout), layers))

    def ints(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=device)

    state = _State(
        labels=torch.zeros(len(layers), rows, model.num_heads, model.head_dim, dtype=model.dtype, device=device),
        pages=ints(len(layers), lists, cached),
        thresholds=torch.zeros(len(layers), kv_heads, device=device),
        weights=torch.zeros(len(layers), model.num_heads, device=device),
    )
    return state, _Lists(
        seq_lens=ints(lists), budgets=ints(lists), table=ints(lists, columns), label=ints(lists),
        own_pages=ints(kinds, lists), cached_tokens=ints(kinds, lists, 1), ids=ints(lists, 1, frames),
        into=ints(lists, cached), whole=ints(rows, 1, frames), whole_tokens=ints(rows, 1), beyond_tokens=ints(rows, 1),
    )  # fmt: skip
