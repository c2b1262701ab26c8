"""Method ``clo``: head-wise caches of selected pages (CLO, arXiv 2511.14510).

Per layer and KV head the device keeps the pages of the last selection, and the query that made it as its label. While
new queries are similar enough to the label (equation 10 against the head's threshold, equations 7 to 9) the head
attends what it has; else it selects anew by the query that is predicted one layer ahead, and loads all of its pages
over the old ones. Sinks and recent pages are always there. The CPU computes nothing.

*Persistent* heads have all of their KV on the device: those of the first layer, whose query nobody predicts, and those
whose pages are hard to reuse (equations 11 to 13). They select by the true query in every step and load nothing.

Deviations: pages and Quest's digests instead of tokens and hashes; the device pulls pages over the bus, where CLO's CPU
threads push them through GDRCopy, a kernel module; the budget (`budget_tokens`) is a number of tokens, not a share of
the context.
What the paper leaves open: where a cosine is not positive equation 10 is singular, and the smallest one counts, which
is its limit; a KV head none of whose query heads matters weighs them equally. A head of an importance below 0.857 (at
power 3 and eta 0.8) has a threshold below 0: it practically never loads again.
"""

from __future__ import annotations

import math
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
from hybrid_backend.tiers import TierLayout, Tiers
from hybrid_backend.tiers.heads import resident_bytes
from hybrid_backend.tiers.sizes import pages_of_a_sequence
from hybrid_backend.tiers.stream import head_pages

if TYPE_CHECKING:
    from hybrid_backend.step import Toolbox


class _Lists(NamedTuple):
    """What a step's rows attend, the same in all layers: int32 buffers that stay where they are. A *list* is one KV
    head of a row; pages of one head are numbered ``page * kv_heads + head``, and so are those of frames."""

    num_pages: Tensor  # [lists]
    seq_lens: Tensor  # [lists]
    budgets: Tensor  # [lists]
    table: Tensor  # [lists, columns] pages of the head in the host pool
    label: Tensor  # [lists] where the list's label and cached pages are: request * kv_heads + head
    tokens: Tensor  # [lists, 1] that it attends
    ids: Tensor  # [lists, 1, frames] pages of the head in frames: sinks, cached and recent ones; or the whole context
    into: Tensor  # [lists, cached] of them those that a load overwrites
    whole: Tensor  # [rows, 1, frames] all frames of the request, for layers that attend everything
    whole_tokens: Tensor  # [rows, 1] of a context that they hold
    beyond_tokens: Tensor  # [rows, 1] of one that they do not

    def first(self, rows: int, kv_heads: int) -> _Lists:
        return _Lists(*(x[:rows] if name in _BY_ROW else x[: rows * kv_heads] for name, x in self._asdict().items()))


_BY_ROW = ("whole", "whole_tokens", "beyond_tokens")


class _State(NamedTuple):
    """Of all requests, by layer that leaves pages out."""

    labels: Tensor  # [layers, requests, heads, head_dim]: the query of the last load; zeros: none
    pages: Tensor  # [layers, requests * kv_heads + 1, cached] int32 logical pages that it loaded; the last is nobody's
    thresholds: Tensor  # [layers, kv_heads] fp32 tau; -inf: persistent
    weights: Tensor  # [layers, heads] fp32


class Clo(Selective):
    """Cached selections per KV head, loaded one layer ahead when the query has moved on."""

    attends_selection = False  # but what its heads have cached

    @classmethod
    def check(cls, config: HybridConfig, device: torch.device, num_layers: int, num_kv_heads: int) -> None:
        super().check(config, device, num_layers, num_kv_heads)
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
        head_policy(config, model)  # a file of other heads is refused before anything is allocated
        return super().layout(config, model, device)

    @classmethod
    def own_memory(
        cls, config: HybridConfig, model: ModelSpec, device: torch.device, pages: int, max_requests: int
    ) -> OwnMemory:
        step, layout = super().own_memory(config, model, device, pages, max_requests), cls.layout(config, model, device)
        state, lists = _buffers(config, model, layout, pages, max_requests, torch.device("meta"))
        stores = resident_bytes(choose_persistent(config, model, layout, pages), model, config.page_size, pages)
        return replace(step, device=step.device + stores + sum(x.nbytes for x in (*state, *lists)))

    def __init__(self, config: HybridConfig, model: ModelSpec, tiers: Tiers) -> None:
        super().__init__(config, model, tiers)
        layers = tiers.layout.digest_layers(config, model)
        pages = len(tiers.host.layers[tiers.layout.full_layers(model)[0]])
        self._row = {layer: row for row, layer in enumerate(layers)}
        heads = choose_persistent(config, model, tiers.layout, pages)
        self._persistent = tiers.keep_heads(heads, model)
        self._state, self._lists = _buffers(config, model, tiers.layout, pages, tiers.frames.requests, tiers.device)
        self._first = dict[int, _Lists]()  # by rows
        thresholds, weights = head_policy(config, model)
        for layer, row in self._row.items():
            thresholds[layer, list(heads.get(layer, ()))] = -math.inf
            self._state.thresholds[row], self._state.weights[row] = thresholds[layer], weights[layer]
        # 1 for each list of a head that loads; its complement for persistent ones.
        self._loads = {layer: (self._state.thresholds[row] > -math.inf).int() for layer, row in self._row.items()}
        self._cached = slice(config.sinks, config.sinks + cached_pages(config))  # of a selection, which is ascending
        self._under_way = dict[int, tuple[Tensor, ...]]()  # what a copy reads until it is awaited
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
        """A head's frames are of the configuration's budget: a request's own is not heeded."""
        return super().budgets(replace(rows, budgets=None))

    # --- requests and frames ---

    def begin_step(self, step: Step) -> None:
        for row in step.prefill:  # it loses its frames
            self.release(row.request_id)

    def release(self, request_id: str) -> None:
        index = self.tiers.frames.index(request_id)
        if index is not None:
            self._state.labels[:, index] = 0

    def abandon(self, step: Step) -> None:
        """A label may say what was not loaded."""
        self._looked_up.clear()
        self._under_way.clear()
        for request_id in step.decode.request_ids if step.decode is not None else []:
            self.release(request_id)

    def frame_of(self, pages: Tensor) -> Tensor:
        """A context that fits lies in order: sinks, what a load will overwrite, the others. Those are a ring when it is
        longer."""
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
        tokens, pages, every = int(rows.seq_lens.sum()), int(rows.num_pages.sum()), self.model.num_kv_heads
        left_out_pages, sparse_rows = int(left_out.sum()), int(is_sparse.sum())
        is_beyond = rows.num_pages > self._limit
        for layer in self.tiers.layout.framed_layers(self.model):
            if layer in self._row and self.config.sparse != "never":
                loading = every - len(self._persistent.heads.get(layer, ()))
                looked_up = sparse_rows * self.pages_per_load * loading / every  # counted when it is known who hit
                held = pages - left_out_pages - looked_up
                step.counting.count_tokens(tokens - left_out_pages * self.config.page_size, held, layers=[layer])
            else:
                beyond = int(rows.num_pages[is_beyond].sum())
                step.counting.count_tokens(tokens, pages - beyond, missing_pages=beyond, layers=[layer])

    def _write_lists(self, step: Toolbox) -> None:
        """From the step's inputs, where they lie."""
        now, lists, config, every = step.buffers.inputs, self._lists, self.config, self.model.num_kv_heads
        heads = torch.arange(every, dtype=torch.int32, device=self.tiers.device)

        def by_head(x: Tensor) -> Tensor:
            return (x[:, None] * every + heads.view(every, *[1] * (x.dim() - 1))).flatten(0, 1)

        for into, of in (
            (lists.num_pages, now.num_pages),
            (lists.seq_lens, now.seq_lens),
            (lists.budgets, now.budgets),
        ):
            into.copy_(of.repeat_interleave(every))
        lists.table.copy_(by_head(now.table))
        lists.label.copy_(by_head(now.requests))
        left_out = (now.num_pages - now.budgets).clamp(min=0)
        lists.tokens[:, 0] = (now.seq_lens - left_out * config.page_size).repeat_interleave(every)
        frames = self.tiers.frames.size
        mine, i = now.requests[:, None], torch.arange(frames, dtype=torch.int32, device=self.tiers.device)
        recent = now.num_pages[:, None] - config.recent + i - self._cached.stop
        is_recent = (left_out[:, None] > 0) & (i >= self._cached.stop)
        ids = self.tiers.frames.ids
        lists.ids[:, 0] = by_head(ids(mine, torch.where(is_recent, self.frame_of(recent), i)))
        lists.into.copy_(by_head(ids(mine, i[self._cached])))
        lists.whole[:, 0] = ids(mine, i)
        fits = now.num_pages <= self._limit
        lists.whole_tokens[:, 0] = now.seq_lens * fits
        lists.beyond_tokens[:, 0] = now.seq_lens * ~fits

    def lookahead(self, step: Toolbox, layer: int, q: Tensor) -> None:
        """Look the caches of the layer's heads up; those that miss select by ``q`` and load."""
        if self._is_persistent(layer):
            return
        self._looked_up.add(layer)
        tiers, row, now, lists = self.tiers, self._row[layer], step.inputs(len(q)), self._of(len(q))
        state, how = self._state, self.config.clo.aggregate
        missed = tiers.operations.match_labels(
            q, state.labels[row], state.weights[row], state.thresholds[row], now.requests, now.num_pages, now.budgets,
            how, step.counters(layer),
        ).flatten()  # fmt: skip
        chosen = self._select(layer, q, lists, lists.table, lists.num_pages * missed, self.config.budget_pages)
        nobody = len(state.pages[row]) - 1
        state.pages[row].index_copy_(
            0, torch.where(missed > 0, lists.label, nobody).long(), chosen.pages[:, 0, self._cached]
        )
        host_pages = chosen.frames[:, 0, self._cached].contiguous()  # the table's: where the host pool has them
        into = torch.where(missed[:, None] > 0, lists.into, -1)
        self._under_way[layer] = host_pages, into
        host, frames = head_pages(tiers.host.views[layer]), head_pages(tiers.frames.layers[layer])
        step.copy(layer, host, frames, host_pages, into, is_awaited=True)

    def attend(self, step: Toolbox, layer: int, q: Tensor) -> Tensor:
        is_fixed = step.is_captured or self.tiers.asks_by_itself  # the same launches, whatever the rows are
        if layer not in self._row or self.config.sparse == "never" or not (is_fixed or self._is_sparse):
            return self._attend_everything(step, layer, q)
        lists, tiers = self._of(len(q)), self.tiers
        by_head, loads = q.view(len(lists.label), -1, q.shape[2]), self._loads[layer].repeat(len(q))
        parts: list[tuple[Tensor, Tensor]] = []
        persistent = self._persistent.heads.get(layer, ())
        if persistent:
            store, places = self._persistent.stores[layer], self._persistent.pages(layer, step.inputs(len(q)).table)
            chosen = self._select(
                layer, q, lists, places.flatten(0, 1), lists.num_pages * (1 - loads), step.shape.most
            )  # fmt: skip
            self._by_true_query = chosen
            tokens = chosen.tokens * (1 - loads)[:, None]
            parts.append(step.attend(by_head, head_pages(store), chosen.frames, tokens))
        if not self._is_persistent(layer):
            if layer not in self._looked_up:
                self.lookahead(step, layer, q)
            step.await_copy(layer)
            self._under_way.pop(layer)
            frames = head_pages(tiers.frames.layers[layer])
            parts.append(step.attend(by_head, frames, lists.ids, lists.tokens * loads[:, None], self._limit))
        self._looked_up.discard(layer)
        # A list is of one kind, so that its other partial is empty.
        other = tiers.operations.merge_partials(*parts[1]) if len(parts) > 1 else None
        return step.merge(layer, parts[0], other, q.dtype)

    def _attend_everything(self, step: Toolbox, layer: int, q: Tensor) -> Tensor:
        """From the frames what they hold, the others where they lie in host memory."""
        now, lists, host = step.inputs(len(q)), self._of(len(q)), self.tiers.host.views[layer]
        found = step.attend(q, host, now.table[:, None], lists.beyond_tokens, now.table.shape[1])
        in_frames = step.attend(q, self.tiers.frames.layers[layer], lists.whole, lists.whole_tokens)
        return step.merge(layer, in_frames, self.tiers.operations.merge_partials(*found), q.dtype)

    def _is_persistent(self, layer: int) -> bool:
        """Tell whether all heads of ``layer`` are persistent, so that the layer has no cache to look up."""
        return len(self._persistent.heads.get(layer, ())) == self.model.num_kv_heads

    def _of(self, rows: int) -> _Lists:
        if rows not in self._first:
            self._first[rows] = self._lists.first(rows, self.model.num_kv_heads)
        return self._first[rows]

    def _select(self, layer: int, q: Tensor, lists: _Lists, table: Tensor, num_pages: Tensor, most: int) -> Selection:
        """Every KV head for itself; lists with ``num_pages`` 0 are left out. Frames are those of ``table``."""
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
        every, number = self.model.num_kv_heads, int(rows.num_pages[r])
        request = self.tiers.frames.indices([rows.request_ids[r]])[0]
        cached = self._state.pages[self._row[layer], request * every : (request + 1) * every].cpu().long()
        always = torch.cat([torch.arange(self.config.sinks), torch.arange(number - self.config.recent, number)])
        pages = torch.cat([cached, always.expand(every, -1)], 1)
        for head in self._persistent.heads.get(layer, ()):
            assert self._by_true_query is not None
            pages[head] = self._by_true_query.pages[r * every + head, 0, : pages.shape[1]].cpu()
        return covered_tokens(pages, int(rows.seq_lens[r]), self.config.page_size)

    @property
    def _limit(self) -> int:
        """Pages of the longest context that is attended whole."""
        config, frames = self.config, frames_per_request(self.config)
        return min(frames, config.budget_pages) if config.sparse == "always" else frames


def _buffers(
    config: HybridConfig, model: ModelSpec, layout: TierLayout, pages: int, rows: int, device: torch.device
) -> tuple[_State, _Lists]:
    """On ``meta``, to learn their size."""
    every, columns, frames = model.num_kv_heads, pages_of_a_sequence(config, model, pages), layout.frames_per_request
    layers, lists, cached = len(layout.digest_layers(config, model)), rows * every, cached_pages(config)

    def ints(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=device)

    state = _State(
        labels=torch.zeros(layers, rows, model.num_heads, model.head_dim, dtype=model.dtype, device=device),
        pages=ints(layers, lists + 1, cached),
        thresholds=torch.zeros(layers, every, device=device),
        weights=torch.zeros(layers, model.num_heads, device=device),
    )
    return state, _Lists(
        num_pages=ints(lists), seq_lens=ints(lists), budgets=ints(lists), table=ints(lists, columns), label=ints(lists),
        tokens=ints(lists, 1), ids=ints(lists, 1, frames), into=ints(lists, cached),
        whole=ints(rows, 1, frames), whole_tokens=ints(rows, 1), beyond_tokens=ints(rows, 1),
    )  # fmt: skip
