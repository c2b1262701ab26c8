"""A decode step as operations over fixed buffers: the same on a CPU with separate tiers, on a GPU, and in a CUDA graph.

Between steps the host admits and releases requests and writes the step's inputs. Then, layer by layer, the method says
which operations run (`methods`); nothing in them is decided on the host, and rows of padding are rows without pages, so
that a graph captured once holds for every step. What the operations do is counted here, for every method.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hybrid_backend.attention.quality import covered_tokens
from hybrid_backend.config import HybridConfig
from hybrid_backend.execution.budgets import LayerBudgets
from hybrid_backend.execution.parking import Parking
from hybrid_backend.execution.partials import CpuPartials, MailboxPartials, PoolPartials
from hybrid_backend.execution.placement import Placement
from hybrid_backend.execution.policy import Policy
from hybrid_backend.execution.quality import watch
from hybrid_backend.execution.questions import BoxQuestions, PoolQuestions, Questions
from hybrid_backend.execution.residency import FixedFrames, MappedFrames, Residency, SharedFrames
from hybrid_backend.execution.samples import make_samples, watched
from hybrid_backend.kernels.cpu import STEPS
from hybrid_backend.kernels.operations import Copies, Counters, Maps, Selection
from hybrid_backend.observe.stats import Stats
from hybrid_backend.step import DecodeRows, ModelSpec, PrefillRow, Step, StepFailure, sent, whole_tokens
from hybrid_backend.tiers import Tiers
from hybrid_backend.tiers.beside import beside
from hybrid_backend.tiers.sizes import StepShape
from hybrid_backend.tiers.state import StepInputs, StepState
from hybrid_backend.workers import WorkerPool

_LOOKUPS, _HITS = Counters._fields.index("lookups"), Counters._fields.index("hits")


class _Layer(NamedTuple):
    """What the operations of one layer work on. Views of fixed buffers, made once: making one takes as long as a small
    operation."""

    host: Tensor
    frames: Tensor | None  # None, as its map: the device tier reads the host pool itself
    frame_of: Tensor | None
    digests: Tensor | None
    maps: Maps
    copies: Copies
    counters: Tensor


class DecodeStep:
    """One rank's decode steps: what is fixed, and the step that is open. Methods call the part below "for methods"."""

    def __init__(
        self,
        method: Policy[DecodeStep],
        config: HybridConfig,
        model: ModelSpec,
        tiers: Tiers,
        workers: WorkerPool,
        stats: Stats,
    ) -> None:
        self._method, self._config, self._model, self._tiers, self._stats = method, config, model, tiers, stats
        self._ops, self._layers = tiers.operations, tiers.layout.full_layers(model)
        # Of the stacked maps and counters.
        self._row = {layer: row for row, layer in enumerate(tiers.layout.framed_layers(model))}
        pages, requests = len(tiers.host.layers[self._layers[0]]), tiers.frames.requests
        sparse = tiers.layout.selecting_layers(config, model)
        factors, recalls = method.factors(config, sparse), method.recalls(config)
        self.shape = StepShape.of(config, model, tiers.layout, pages, requests, recalls, factors.values())
        self.state = StepState.make(
            requests, self.shape.columns, self.shape.most_frames, self.shape.recalls, len(self._row), tiers.device,
            len(self._row) if factors else 0,
        )  # fmt: skip
        self.inputs, self.maps = self.state.inputs, self.state.maps
        self._at = {layer: self._buffers(layer, row) for layer, row in self._row.items()}
        budgets = {layer: round(config.budget_pages * factors.get(layer, 1)) for layer in self._row}
        most = [max(budgets[layer], at.maps.size) for layer, at in self._at.items()] if self.shape.frames else None
        self._budgets = LayerBudgets(config, factors, list(self._row), most) if factors else None
        self._first: dict[int, StepInputs] = {}  # by rows
        self._partial: list[int] = []  # rows of the open step that leave pages out
        self._is_resident = False  # no row does, and frames have all of them
        self.seq_lens = torch.empty(0, dtype=torch.int64)  # of the rows of the open step, on the host
        self._into: Tensor | None = None  # where the layer that runs leaves its result
        self._selected: dict[int, tuple[Selection, Tensor]] = {}
        self._asked: set[int] = set()
        self.is_captured = False  # the layer that runs, in a graph: for any rows and sequences that there may be
        self._watch = watch(config, stats, sparse, self.shape.most_budget)
        self._residency: Residency | None = None  # None: no frames
        self.parking: Parking | None = None  # of methods that place whole requests
        self.shared: SharedFrames | None = None
        if tiers.layout.shares_frames:
            questions: Questions = (
                BoxQuestions(config, model, tiers, workers, self.shape.columns)
                if tiers.asks_by_itself
                else PoolQuestions(config, model, tiers, workers)
            )
            width = model.hidden if method.may_park(config, tiers.device) else 0
            self.parking = Parking(config, tiers, questions, width)
            placement = Placement(tiers.layout.shared_pages(requests), tiers.layout.swap_in)
            self._residency = self.shared = SharedFrames(tiers, self.maps, placement, self.parking.is_settled)
        elif self.shape.frames:
            framed = {layer: at.maps for layer, at in self._at.items()}
            self._residency = (
                FixedFrames(tiers, self.maps, method.frame_of, method.held_pages)
                if method.has_fixed_frames
                else MappedFrames(config, model, tiers, self.state, framed)
            )
        self._ages = [0] * requests  # by index, the decode steps that the request has run
        self._pages = [0] * requests  # by index, of the request
        on_gpu = tiers.device.type == "cuda"
        self._processors = torch.cuda.get_device_properties(tiers.device).multi_processor_count if on_gpu else 1
        # Pages cross the bus beside the step. So is the next layer's selection made: few programs, each of which waits
        # for memory, and the CPU waits for them; what they need is small, so they go first.
        self._copying = torch.cuda.Stream(tiers.device) if on_gpu else None
        self._looking = torch.cuda.Stream(tiers.device, priority=-1) if on_gpu else None
        # By layer, when that is done, and the query, whose memory nobody else may have until then.
        self._ahead = dict[int, tuple[torch.cuda.Event, Tensor]]()
        self._forked, self._copied = False, dict[int, torch.cuda.Event]()
        # What the host reads, pinned where there is a GPU, which may be steps behind.
        self._written = torch.zeros(STEPS, requests, dtype=torch.int32, pin_memory=on_gpu)
        self._published = torch.zeros(self.state.counters.shape, dtype=torch.int64, pin_memory=on_gpu)
        self._counted = torch.zeros_like(self.state.counters, device="cpu")  # of them, by `count`
        self.partials: CpuPartials = (
            MailboxPartials(config, model, tiers, workers, self.shape)
            if tiers.asks_by_itself and method.uses_workers and self._row
            else PoolPartials(config, model, tiers, workers)
        )
        self.samples = make_samples(
            self, method, config, model, tiers, stats, self.shape, self.state, self._row, self.partials.failure
        )

    def _buffers(self, layer: int, row: int) -> _Layer:
        tiers, maps, frames = self._tiers, self.maps.of(row), self._tiers.frames.layers.get(layer)
        count = tiers.layout.frames(tiers.frames.requests, layer)
        maps = Maps(maps.frame_of, maps.page_of[:count], maps.importance[:count])
        return _Layer(
            tiers.host.views[layer], frames, None if frames is None else maps.frame_of, tiers.digest_layer(layer), maps,
            self.state.copies.of(row), self.state.counters[row],
        )  # fmt: skip

    # --- between steps, on the host ---

    def begin(self, step: Step) -> None:
        """Open a step that has decoding rows. Does not wait for the device, but for requests that begin to decode."""
        rows = step.decode
        assert rows is not None
        self.abandon()
        indices = [self._index(rows, r) for r in range(rows.count)]
        number = step.number + 1
        self._write(number, rows, indices)
        now = self.inputs
        if self._method.uses_workers:
            self.partials.begin(now, rows.count)
        self._written[number % STEPS].copy_(now.pages, non_blocking=True)
        if self._residency is not None:
            self._tiers.copied_pages += self._residency.open(rows, indices)
        if self._tiers.whole.stores:
            self.count_tokens(int(rows.seq_lens.sum()), int(rows.num_pages.sum()), layers=self._tiers.whole.stores)
        self._method.begin_decode(self, rows)

    def abandon(self) -> None:
        """Forget the open step; perhaps its forward raised."""
        for layer in list(self._ahead):
            self._await_lookahead(layer)
        self._join()  # a copy may be under way into frames that somebody else is about to fill
        self._copied.clear()
        self.partials.abandon()
        self._selected.clear()
        self._asked.clear()
        self.samples.abandon()

    def idle(self) -> None:
        """What a captured graph computes from here on, until a step begins, is of rows of padding. The number stays:
        nobody is asked, and waits end at once."""
        self.inputs.small[:-1].zero_()
        self.inputs.pages.fill_(-1)
        if self.parking is not None:
            self.parking.idle()

    def failure(self, step: Step) -> StepFailure | None:
        """What went wrong for the decoding rows of a step that the device has passed."""
        rows, number = step.decode, step.number + 1
        if rows is None:
            return None
        error, failed = self.partials.failure(number), list(range(rows.count))
        if error is None and self.parking is not None:
            found = self.parking.failures(number, [self._tiers.frames.index(name) for name in rows.request_ids])
            error, failed = next(iter(found.values()), None), list(found)
        if error is None:
            return None
        written = self._written[number % STEPS].tolist()
        return StepFailure(error, [rows.request_ids[r] for r in failed], [written[r] for r in failed])

    def unfinished(self, step: Step) -> list[str]:
        """Requests of a step that yield no token yet; waits for the device where there may be any."""
        rows = step.decode
        if rows is None or self.parking is None or not self.parking.may_park:
            return []
        indices = self._tiers.frames.indices(rows.request_ids)
        return [rows.request_ids[r] for r in self.parking.unfinished(step.number + 1, rows, indices)]

    def holds(self, request_id: str) -> bool:
        return self._tiers.frames.index(request_id) is not None

    def release(self, request_id: str) -> None:
        """The request is gone, or its pages are about to be others."""
        index = self._tiers.frames.release(request_id)
        if index is not None:
            self._ages[index] = self._pages[index] = 0
            if self.parking is not None:
                self.parking.release(index)
        if self._residency is not None:
            self._residency.release(request_id, index)

    def saw_prompt(self, layer: int, row: PrefillRow, q: Tensor) -> None:
        """A prompt chunk was attended in ``layer``."""
        if self._residency is not None:
            self._residency.saw_prompt(layer, row, q)

    def _index(self, rows: DecodeRows, r: int) -> int:
        frames, request_id = self._tiers.frames, rows.request_ids[r]
        index, pages = frames.index(request_id), int(rows.num_pages[r])
        if index is None:
            index = frames.allocate(request_id)
            if self._residency is not None:
                table = rows.page_table[r : r + 1, :pages].int()
                self._tiers.copied_pages += self._residency.admit(request_id, index, table, pages)
        self._pages[index] = pages
        return index

    def _write(self, number: int, rows: DecodeRows, indices: list[int]) -> None:
        """The step's inputs, in one copy to the device beside the page table."""
        now, count = self.inputs, rows.count
        requests, budgets = torch.tensor(indices), self._method.budgets(rows)
        if self._watch is not None:
            budgets = watched(self._watch, self.samples, budgets, rows)
        leaves_out = judged = budgets < rows.num_pages
        if self._watch is not None:  # which judges by all samples
            judged = leaves_out & ~rows.has_own_budget
        self._partial = leaves_out.nonzero().flatten().tolist()
        sampled = self.samples.begin(number, rows, judged.nonzero().flatten().tolist(), indices)
        self._is_resident = not self._partial and int(rows.num_pages.max()) <= self.shape.frames
        self.seq_lens = rows.seq_lens
        columns = {
            "num_pages": rows.num_pages, "seq_lens": rows.seq_lens, "positions": rows.seq_lens - 1,
            "requests": requests, "budgets": budgets, "ages": torch.tensor([self._ages[index] for index in indices]),
            # As they are now: the host may be steps ahead of the device.
            "generations": self._tiers.frames.generation[requests],
        }  # fmt: skip
        there = torch.zeros(now.small.shape, dtype=torch.int32)
        by_row, in_layers, numbered = now.parts(there, self.shape.rows, len(now.sampled))
        for at, name in enumerate(now.PER_ROW):
            by_row[at, :count] = columns[name]
        if self._budgets is not None:
            by_row[len(now.PER_ROW) :, :count] = self._budgets.of_rows(budgets, rows.num_pages)
        if sampled is not None:
            in_layers.copy_(sampled)
        numbered.fill_(number)
        now.small.copy_(sent(there, now.small.device))
        now.table[:count, : rows.page_table.shape[1]].copy_(rows.page_table)
        now.pages.fill_(-1)
        now.pages[:count].copy_(rows.page_table.gather(1, now.num_pages[:count, None].long() - 1)[:, 0])
        for index in indices:
            self._ages[index] += 1

    # --- the step, layer by layer ---

    def layer_input(self, layer: int, step: Step, hidden: Tensor, residual: Tensor | None) -> None:
        """What a decoder layer is about to compute with: ``[tokens, hidden]``, of which rows may be changed."""
        if step.decode is None or self.parking is None or not (self.parking.may_park or step.is_captured):
            return
        self.parking.layer_input(layer, step.decode, hidden, residual)

    def wants_lookahead(self, layer: int, step: Step) -> bool:
        """The same in every step where graphs are captured; elsewhere only where pages are left out, or sampled."""
        if not self._method.looks_ahead(self._config, self._tiers.device) or not self._method.predicts(layer):
            return False
        if not self._config.is_predicted(layer):
            return False
        if step.is_captured or self._tiers.asks_by_itself or step.decode is None:
            return True
        return bool(self._partial) or self._config.is_sampled(step.number, layer)

    def lookahead(self, layer: int, step: Step, q: Tensor) -> None:
        """``q``: predicted query of ``layer``, ``[rows, heads, head_dim]``, before the layer before it runs."""
        q = q.contiguous()
        self.samples.keep(layer, step, q)
        with beside(self._looking):
            self._method.lookahead(self, layer, q)
            if self._looking is not None:
                self._ahead[layer] = self._looking.record_event(), q

    def decode(self, layer: int, step: Step, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """Store the rows' tokens and attend. ``q``, ``out``: ``[tokens, heads, head_dim]``; ``k``, ``v``: ``[tokens,
        kv_heads, head_dim]``; only the decoding rows' tokens are touched."""
        rows, self.is_captured = step.decode, step.is_captured
        assert rows is not None
        q, k, v = rows.gather(q).contiguous(), *(whole_tokens(rows.gather(x)) for x in (k, v))
        self._into = out[: rows.count] if rows.whole_batch and out.dtype == q.dtype else None
        result = self._decode_whole(layer, q, k, v) if layer not in self._row else self._decode(layer, q, k, v)
        selected = self._selected.get(layer)
        self.samples.take(layer, step, q, None if selected is None else selected[0])
        self._selected.pop(layer, None)
        self._asked.discard(layer)
        if layer == self._layers[-1]:
            self._end()
        if result is self._into:
            return
        if rows.whole_batch:
            out[: rows.count] = result
        else:
            out.index_copy_(0, rows.tokens.to(out.device), result.to(out.dtype))

    def _decode(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        now, at = self.now(len(q)), self._at[layer]
        self._await_lookahead(layer)  # before the digests change
        pages = now.pages if self.parking is None else self.parking.stored(now.pages)
        self._ops.append_tokens(
            k, v, at.host, pages, now.positions, at.frames, now.requests, at.frame_of, at.digests
        )  # fmt: skip
        self._method.append(layer, pages, now.positions, k, v)
        return self._method.attend(self, layer, q)

    def _await_lookahead(self, layer: int) -> None:
        if layer in self._ahead:
            torch.cuda.current_stream().wait_event(self._ahead.pop(layer)[0])

    def _decode_whole(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """A layer that lies on the device tier whole."""
        now, whole = self.now(len(q)), self._tiers.whole
        self._ops.append_tokens(k, v, self._tiers.host.views[layer], now.pages, now.positions)
        whole.append(layer, now.pages, now.positions, k, v)
        parts = self.attend(q, whole.stores[layer], now.table[:, None], now.seq_lens[:, None], known=self.seq_lens)
        return self.merge(layer, parts, None, q.dtype)

    def _end(self) -> None:
        """The last layer: what was forked from the stream joins it, and the host may read the counters."""
        self._join()
        if self.parking is not None:
            self.parking.end(self.inputs.number)
        self._published.copy_(self.state.counters, non_blocking=True)

    def _join(self) -> None:
        if self._forked and self._copying is not None:
            torch.cuda.current_stream().wait_stream(self._copying)
            self._forked = False

    # --- for methods: operations of the open step ---

    def place(self, rows: DecodeRows, parks: bool) -> None:
        """Of a step that has begun: ``parks``: rows of requests that are not on the device go on in a later step (if
        they ask), else they wait inside the layers."""
        assert self.parking is not None
        indices = self._tiers.frames.indices(rows.request_ids)
        self.parking.begin(rows, indices, self.are_on_cpu(rows), parks)

    def are_on_cpu(self, rows: DecodeRows) -> Tensor:
        """``[rows]`` bool on the host, of methods that place whole requests."""
        assert self.shared is not None
        return torch.tensor([name not in self.shared.placement for name in rows.request_ids])

    def now(self, rows: int) -> StepInputs:
        """The step's inputs, of so many rows."""
        if rows not in self._first:
            self._first[rows] = self.inputs.first(rows)
        return self._first[rows]

    def is_selected(self, layer: int) -> bool:
        return layer in self._selected

    def is_asked(self, layer: int) -> bool:
        return layer in self._asked

    def has_digests(self, layer: int) -> bool:
        """Else the layer is exact: it attends every page."""
        return self._tiers.has_digests(layer)

    def _budgets_of(self, layer: int, now: StepInputs) -> Tensor:
        """``[rows]`` int32 pages that the layer may attend."""
        return now.budgets if self._budgets is None else now.layer_budgets[self._row[layer]]

    def counters(self, layer: int) -> Tensor:
        return self._at[layer].counters

    def changes_residency(self, layer: int) -> bool:
        """Whether pages of the layer take turns in its frames: not where every step attends all of them."""
        return self.shape.frames > 0 and self.has_digests(layer) and self.shape.least_budget < self.shape.columns

    def select(self, layer: int, q: Tensor) -> Selection:
        """Select the layer's pages with ``q`` and split them by residency."""
        now, at, how = self.now(len(q)), self._at[layer], self._config.selection
        if at.digests is None:
            scores = self.state.equal_scores[: len(q)]
        else:
            scores = self._ops.page_scores(
                q, at.digests, now.table, now.num_pages, self._budgets_of(layer, now), how.aggregate,
                self.shape.lists > 1, how.bound, self._model.scale, self._config.page_size,
            )  # fmt: skip
        mailbox = self.partials.mailbox(layer) if self._method.uses_workers else None
        self._selected[layer] = self._split(layer, scores, at.counters, mailbox), scores
        return self._selected[layer][0]

    def _split(
        self, layer: int, scores: Tensor, counters: Tensor | None = None, mailbox: tuple[Tensor, Tensor] | None = None
    ) -> Selection:
        """The best pages by residency, as it is now."""
        now, has_digests, config = self.now(len(scores)), self.has_digests(layer), self._config
        budgets = self._budgets_of(layer, now) if has_digests else now.num_pages
        return self._ops.select_pages(
            scores, now.num_pages, now.seq_lens, budgets, now.requests, self._at[layer].frame_of,
            now.table, config.page_size, config.sinks, config.recent, self.shape.listed(has_digests)[1], counters,
            mailbox,
        )  # fmt: skip

    def ask(self, layer: int, q: Tensor) -> None:
        """Let the CPU workers attend what is selected and not resident, with ``q``."""
        self._asked.add(layer)
        if self.shape.frames:
            chosen = self._selected[layer][0]
            self.ask_for(layer, q, chosen.missing, chosen.missing_listed, is_told=True)

    def ask_for(self, layer: int, q: Tensor, pages: Tensor | None, listed: Tensor, is_told: bool = False) -> None:
        """Let them attend listed host pages (`CpuPartials.ask`), or, with None, what the context cache holds.
        ``is_told``: `select` has listed them where the workers look."""
        self.partials.ask(layer, q, pages, listed, is_told, self.inputs.number, self._at[layer].counters)

    def answer(self, layer: int, rows: int) -> tuple[Tensor, Tensor] | None:
        """Their partial, once it is there; None: they were asked for nothing."""
        if layer in self._selected and not self.shape.frames:
            return None
        return self.partials.answer(layer, rows, self.inputs.number, self._at[layer].counters)

    def attend_resident(self, layer: int, q: Tensor) -> tuple[Tensor, Tensor]:
        """Attention over the selected pages that the device tier holds, in parts (for `merge`)."""
        chosen, at = self._selected[layer][0], self._at[layer]
        kv = at.host if at.frames is None else at.frames
        most = self.shape.most_frames or self.shape.listed(self.has_digests(layer))[1]
        return self.attend(q, kv, chosen.frames, chosen.tokens, most, self.seq_lens if self._is_resident else None)

    def attend_missing(self, layer: int, q: Tensor) -> tuple[Tensor, Tensor] | None:
        """Attention over the selected pages that no frame holds, read where they lie in host memory."""
        if not self.shape.frames:
            return None
        chosen = self._selected[layer][0]
        tokens = chosen.missing_listed * self._config.page_size  # the growing page is resident: these are whole
        parts = self.attend(q, self._at[layer].host, chosen.missing, tokens, self.shape.columns)
        return self._ops.merge_partials(*parts)

    def attend(
        self, q: Tensor, kv: Tensor, ids: Tensor, tokens: Tensor, most: int | None = None, known: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Attention over listed pages of any store (`Operations.paged_partial`). ``most``: pages that a list may hold,
        None: as many as it has room for. ``known``: ``tokens`` of each row's lists, which are the same, on the host;
        None: the device decides."""
        if known is not None and self._tiers.decode is not None and not self.is_captured:
            return self._tiers.decode.attend(q, kv, ids, known)
        most = ids.shape[2] if most is None else most
        parts = self._ops.parts_for(len(q), kv.shape[1], most * self._config.page_size, self._processors)
        return self._ops.paged_partial(q, kv, ids, tokens, self._model.scale, parts)

    def merge(
        self, layer: int, parts: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor] | None, dtype: torch.dtype
    ) -> Tensor:
        """``[rows, heads, head_dim]``: attention over all parts, the other partial and the layer's sinks. Partials of
        whole rows, or of their KV heads one after the other."""
        parts, other = self._of_rows(*parts), None if other is None else self._of_rows(*other)
        sinks = self._model.sink(layer)
        return self._ops.merge_partials(*parts, extra_partial=other, dtype=dtype, sinks=sinks, into=self._into)[0]

    def _of_rows(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        heads = self._model.num_heads
        if out.shape[1] == heads:
            return out, lse
        return out.view(-1, heads, *out.shape[2:]), lse.view(-1, heads, *lse.shape[2:])

    def recall(self, layer: int, at_once: bool = False) -> None:
        """Start copying missing pages over the least important resident ones, in rows whose recall is due (``at_once``:
        in every row). They become visible with the next step, or by `arrive`."""
        if not self.changes_residency(layer):
            return
        chosen, scores = self._selected[layer]
        config, now, at = self._config, self.now(len(scores)), self._at[layer]
        sinks, recent, budgets = config.sinks, config.recent, self._budgets_of(layer, now)
        if not self.shape.recalls:  # pages that begin take the least important frames all the same
            self._ops.note_scores(at.maps, scores, now.num_pages, budgets, now.requests, sinks, recent)
            return
        absent, listed = chosen.absent, chosen.missing_listed
        if scores.shape[1] > 1:  # a selection per KV head, but frames hold pages of all heads
            absent, listed, scores = self._ops.union_pages(absent, listed, scores)
        interval, phase = (1, 0) if at_once else (config.recall_interval(layer), layer)
        self._ops.plan_recall(
            at.maps, at.copies, scores, now.table, (chosen.frames, chosen.frames_listed), (absent, listed),
            now.num_pages, budgets, now.requests, now.generations, now.ages, sinks, recent, interval, phase,
            self.state.keep[self._row[layer] % 2], at.counters,
        )  # fmt: skip
        rows, frames = len(scores), self._tiers.frames.layers[layer]
        self.copy(layer, at.host, frames, at.copies.host_pages[:rows], at.copies.frames[:rows], is_awaited=at_once)

    def copy(
        self, layer: int, host: Tensor, frames: Tensor, host_pages: Tensor, frame_ids: Tensor, is_awaited: bool
    ) -> None:
        """Copy pages (`Operations.copy_pages`) in the stream beside the step's. ``is_awaited``: `await_copy` will be
        called; else it is done when the step is."""
        self._forked = self._copying is not None
        with beside(self._copying):
            self._ops.copy_pages(host, frames, host_pages, frame_ids)
            if is_awaited and self._copying is not None:
                self._copied[layer] = self._copying.record_event()

    def await_copy(self, layer: int) -> None:
        """Wait, inside the stream, for this layer's copy, not for that of the next."""
        if self._copying is not None:
            torch.cuda.current_stream().wait_event(self._copied.pop(layer))

    def arrive(self, layer: int) -> None:
        """`await_copy`, of a recall at once; then its pages are resident."""
        if not self.changes_residency(layer):
            return
        self.await_copy(layer)
        one = slice(self._row[layer], self._row[layer] + 1)
        self._ops.commit_pages(self.maps.of(one), self.state.copies.of(one), self._tiers.frames.generation)
        scores = self._selected[layer][1]
        self._selected[layer] = self._split(layer, scores), scores

    # --- what is counted ---

    def count_step(self, strategy: str, wanted: str) -> None:
        """How the rows on the CPU are attended in this step, and how a rule would have it."""
        self._stats.steps[strategy, wanted] += 1

    def count_tokens(
        self,
        resident: float,
        pages: float,
        on_cpu: float | Sequence[float] = 0,
        missing_pages: float = 0,
        layers: Iterable[int] | None = None,
    ) -> None:
        """Count what the operations do not see, because the method itself made the lists: tokens that the device tier
        and the CPU attend (``on_cpu``: of every layer, or one number per layer), pages that the device tier has and
        lacks. Summed over rows; of a row the mean over its lists. ``layers``: None: all with full attention."""
        for i, layer in enumerate(self._layers if layers is None else layers):
            mine = on_cpu if isinstance(on_cpu, int | float) else on_cpu[i]
            self._stats.attended(layer, resident + mine, mine)
            self._stats.looked_up(layer, pages + missing_pages, pages)

    def count(self) -> None:
        """Add what the operations have counted since the last time, as far as the device has come."""
        self.samples.count()
        published = self._published.clone()
        new = published - self._counted
        if bool((new[:, _LOOKUPS] < new[:, _HITS]).any()):
            return  # the device is writing them just now
        self._counted = published
        for layer, row in self._row.items():
            entry, found = self._stats.layers[layer], Counters(*new[row].tolist())
            lists = self.shape.lists if self.has_digests(layer) else 1
            on_cpu = found.missing_tokens if self._method.uses_workers or self.parking is not None else 0
            self._stats.attended(layer, (found.resident_tokens + found.missing_tokens) / lists, on_cpu / lists)
            self._stats.looked_up(
                layer, (found.resident_pages + found.missing_pages) / lists, found.resident_pages / lists
            )
            entry.recalled_pages += found.recalled_pages
            entry.wait_seconds += found.waited / 1e9
            entry.lead_seconds += found.ahead / 1e9
            self._tiers.copied_pages += found.recalled_pages
            self._looked_up(layer, found)

    def _looked_up(self, layer: int, found: Counters) -> None:
        """KV heads by their caches: a head that misses lacked the pages that it loads."""
        entry, pages, every = self._stats.layers[layer], self._method.pages_per_load, self._model.num_kv_heads
        entry.head_lookups += found.lookups
        entry.head_hits += found.hits
        loaded = (found.lookups - found.hits) * pages
        entry.loaded_head_pages += loaded
        self._tiers.copied_head_pages += loaded
        self._stats.looked_up(layer, found.lookups * pages / every, found.hits * pages / every)

    def covered(self, layer: int, rows: DecodeRows, r: int) -> Tensor | None:
        """`Method.covered`, by what was selected."""
        if layer not in self._selected or not self.has_digests(layer):
            return None
        chosen = self._selected[layer][0]
        listed = torch.arange(chosen.pages.shape[2]) < chosen.pages_listed[r, :, None]
        pages = chosen.pages[r].long().masked_fill(~listed, -1)
        return covered_tokens(pages, int(rows.seq_lens[r]), self._config.page_size)

    def gauges(self) -> dict[str, float]:
        watched = {} if self._watch is None else self._watch.gauges()
        if self.parking is None or self.shared is None:
            return watched
        return watched | {
            "hybrid_resident_requests": self.shared.placement.requests,
            "hybrid_parked_rows": self.parking.parked_rows,
            "hybrid_late_rows": self.parking.late_rows,
            "hybrid_moved_requests": self.shared.moved,
        }

    @property
    def resident_pages(self) -> int:
        """Frames that hold a page, or are about to, over all layers. As the host knows: no frame of a request is left
        empty while it has pages that it could hold."""
        if self.shared is not None:
            return self.shared.resident_pages * len(self._tiers.frames.layers)
        sizes = Counter(at.maps.size for at in self._at.values())
        return sum(layers * min(pages, size) for size, layers in sizes.items() for pages in self._pages)

    @property
    def device_bytes(self) -> int:
        return self.state.nbytes + (0 if self.parking is None else self.parking.nbytes)

    @property
    def host_bytes(self) -> int:
        asking = self.partials.host_bytes + (0 if self.parking is None else self.parking.questions.host_bytes)
        return asking + self.samples.host_bytes

    def close(self) -> None:
        self.samples.close()
        self.partials.close()
        if self.parking is not None:
            self.parking.close()
