"""Method ``scout``: ScoutAttention (DESIGN.md section 4).

At the input of layer l the query of layer l+1 is predicted, its pages are selected by Quest digests, and the CPU
workers start on the selected pages that are not resident, one layer ahead. Inside layer l+1 the device attends the
resident ones, the two partials merge, and every few steps (per layer) the missing important pages are recalled into
the slots of the least important resident ones, visible from the next step on.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hybrid_backend.attention.partial import PageList, Partial, merge
from hybrid_backend.attention.quality import mass_recall, query_cosine
from hybrid_backend.attention.selection import all_pages, force_pages, page_scores, select_pages
from hybrid_backend.config import HybridConfig
from hybrid_backend.methods.base import Method
from hybrid_backend.methods.in_place import InPlace
from hybrid_backend.methods.lists import page_list
from hybrid_backend.observe.stats import Stats
from hybrid_backend.step import DecodeRows, ModelSpec, Step
from hybrid_backend.tiers import TierLayout, Tiers
from hybrid_backend.tiers.transfers import Recall
from hybrid_backend.workers import Owners, Ticket, WorkerPool, kernel_name, resolve_kernel


@dataclass
class _LayerPlan:
    """One layer's selection in one step. R rows, P columns."""

    selected: Tensor  # [R, lists, k] logical pages
    scores: Tensor  # [R, P] importance, inf for forced pages
    device: PageList
    missing: PageList
    missing_pages: Tensor  # [R, P] bool: selected and not resident
    owners: Owners
    query: Tensor | None  # the predicted query, None if the real one was used
    ticket: Ticket | None


@dataclass
class _Plan:
    """What `begin_step` decides once for all layers."""

    regions: Tensor  # [R] slot region of each row
    sparse: Tensor  # [R] bool: under the budget this step
    owners: Owners  # of the CPU jobs
    fits: bool  # every row is wholly resident and dense
    everything: PageList  # all host pages of each row
    sampled: bool
    layers: dict[int, _LayerPlan] = field(default_factory=dict)


class Scout(Method):
    """The flagship: resident pages on the device, the important rest on the CPU, one layer ahead."""

    def __init__(self, config: HybridConfig, model: ModelSpec, tiers: Tiers, workers: WorkerPool, stats: Stats) -> None:
        super().__init__(config, model, tiers, workers, stats)
        self._partial = resolve_kernel(config.workers.kernel)
        self._ahead = config.lookahead.enabled is True or (config.lookahead.enabled == "auto" and tiers.slots.separate)
        if not tiers.slots.size:
            assert tiers.digests is not None
            self.in_place = InPlace(config, model, tiers, stats, tiers.digests.layers)

    @classmethod
    def looks_ahead(cls, config: HybridConfig, device: torch.device) -> bool:
        if config.lookahead.enabled == "auto":
            return _is_separate(config, device)
        return config.lookahead.enabled

    @classmethod
    def layout(cls, config: HybridConfig, model: ModelSpec, device: torch.device) -> TierLayout:
        """With unified tiers and nobody to run ahead for, all selected pages are attended in place: no slots."""
        separate = _is_separate(config, device)
        alone = not separate and not cls.looks_ahead(config, device)
        native = kernel_name(config.workers.kernel) == "native"
        if alone and native and InPlace.supports(model, config.page_size, device):
            return TierLayout(slots_per_request=0, digests=True, separate=False)
        return TierLayout(slots_per_request=_slots(config), digests=True, separate=separate)

    # --- the step ---

    def begin_step(self, step: Step) -> None:
        self.tiers.transfers.finish()
        for row in step.prefill:
            self.release(row.request_id)  # if it had slots, they are out of date: it computes prompt tokens again
        if step.decode is None:
            return
        rows = step.decode
        slots = _slots(self.config)
        if self.config.sparse == "never":
            sparse = torch.zeros(rows.count, dtype=torch.bool)
        else:
            limit = slots if self.config.sparse == "auto" else min(slots, self.config.budget_pages)
            sparse = rows.num_pages > limit
        if self.in_place is not None:
            self.in_place.begin_step(step, sparse)
            return
        regions = torch.tensor([self._region(rows, r) for r in range(rows.count)])
        interval = self.config.metrics.sample_interval
        step.plan = _Plan(
            regions=regions,
            sparse=sparse,
            owners=Owners(regions, self.tiers.slots.generation[regions], self.tiers.slots.generation),
            fits=not bool(sparse.any()) and bool((rows.num_pages <= slots).all()),
            everything=page_list(rows, all_pages(rows.num_pages), rows.page_table, self.config.page_size),
            sampled=interval > 0 and step.number % interval == 0,
        )

    def wants_lookahead(self, layer: int, step: Step) -> bool:
        plan: _Plan | None = step.plan
        if not self._ahead or plan is None or layer in self.config.exact_layers:
            return False
        return bool(plan.sparse.any()) or plan.sampled

    def lookahead(self, layer: int, step: Step, predicted_q: Tensor) -> None:
        assert step.decode is not None
        plan: _Plan = step.plan
        entry = self._plan_layer(layer, step.decode, plan, predicted_q)
        entry.query = predicted_q
        plan.layers[layer] = entry
        if self.config.lookahead.partial_query == "predicted" and bool(plan.sparse.any()):
            entry.ticket = self._submit(layer, entry, predicted_q)

    def append(self, layer: int, step: Step, kv: Tensor) -> None:
        if not self.tiers.slots.separate:
            return
        assert step.decode is not None
        rows, regions = step.decode, step.plan.regions
        mine = self.tiers.residency.held(layer, regions) == (rows.num_pages - 1)[:, None]
        warm = mine.any(1)  # a cold layer is filled from the host pool when it first attends
        slots = regions * self.tiers.slots.size + mine.int().argmax(1)
        offsets = (rows.seq_lens - 1) % self.config.page_size
        self.tiers.slots.layers[layer][slots[warm], :, :, offsets[warm]] = kv[warm]

    def attend(self, layer: int, step: Step, q: Tensor) -> Tensor:
        assert step.decode is not None
        plan: _Plan = step.plan
        entry = plan.layers.pop(layer, None)
        if plan.fits and not self.tiers.slots.separate and entry is None:
            self._count(layer, plan.everything, None)
            return self._device_partial(layer, q, plan.everything).out
        if entry is None:
            entry = self._plan_layer(layer, step.decode, plan, q)
        if entry.ticket is None:
            entry.ticket = self._submit(layer, entry, q)
        result = self._device_partial(layer, q, entry.device)
        if entry.ticket is not None:
            result = merge(result, self._wait(layer, entry.ticket))
        self._count(layer, entry.device, entry.missing)
        if plan.sampled:
            self._sample(layer, step.decode, entry, q)
        if self._recall_due(layer, step.number):
            self._recall(layer, step.decode, plan, entry)
        return result.out

    def release(self, request_id: str) -> None:
        region = self.tiers.slots.release(request_id)
        if region is not None:
            self.tiers.residency.reset(region)

    def abandon(self, step: Step) -> None:
        if isinstance(step.plan, _Plan):
            for entry in step.plan.layers.values():
                if entry.ticket is not None:
                    entry.ticket.abandon()

    # --- placement ---

    def _region(self, rows: DecodeRows, r: int) -> int:
        """The row's region. A new one is filled at once if the request fits; else layer by layer, by importance."""
        slots, residency = self.tiers.slots, self.tiers.residency
        pages = int(rows.num_pages[r])
        region = slots.region(rows.request_ids[r])
        if region is None:
            region = slots.allocate(rows.request_ids[r])
            if pages <= slots.size:
                for layer in residency.layers:
                    self._fill(layer, rows, r, region, torch.arange(pages), self._by_age(pages))
        elif int(rows.seq_lens[r] - 1) % self.config.page_size == 0:
            residency.open_page(region, pages - 1)
        return region

    def _by_age(self, pages: int) -> Tensor:
        """Importance where nothing better is known: the oldest page goes first, the sinks never."""
        scores = torch.arange(pages, dtype=torch.float32)
        scores[: self.config.sinks] = float("inf")
        return scores

    def _fill(self, layer: int, rows: DecodeRows, r: int, region: int, pages: Tensor, scores: Tensor) -> None:
        """Make ``pages`` resident in an empty region, now."""
        slots, residency = self.tiers.slots, self.tiers.residency
        local = torch.arange(len(pages))
        target = region * slots.size + local
        host_pages = rows.page_table[r, pages]
        self.tiers.transfers.copy(
            Recall(layer, region, int(slots.generation[region]), host_pages, target, lambda: None)
        )
        residency.put(layer, region, local, pages, scores)

    def _recall_due(self, layer: int, step_number: int) -> bool:
        """Every ``intervals[layer]`` steps; layers take turns, so that copies spread over the steps."""
        if not self.config.recall.enabled or layer in self.config.exact_layers:
            return False
        return (step_number + layer) % self.config.recall_interval(layer) == 0

    def _recall(self, layer: int, rows: DecodeRows, plan: _Plan, entry: _LayerPlan) -> None:
        slots, residency = self.tiers.slots, self.tiers.residency
        for r in entry.missing_pages.any(1).nonzero().flatten().tolist():
            region = int(plan.regions[r])
            wanted = entry.missing_pages[r].nonzero().flatten()
            wanted = wanted[entry.scores[r, wanted].argsort(descending=True)]
            local = residency.victims(layer, region, entry.selected[r].flatten(), len(wanted))
            wanted = wanted[: len(local)]
            if not len(wanted):
                continue
            scores = entry.scores[r, wanted]
            residency.clear(layer, region, local)

            def commit(region: int = region, local: Tensor = local, pages: Tensor = wanted, s: Tensor = scores) -> None:
                residency.put(layer, region, local, pages, s)

            self.tiers.transfers.submit(
                Recall(
                    layer=layer,
                    region=region,
                    generation=int(slots.generation[region]),
                    host_pages=rows.page_table[r, wanted],
                    slots=region * slots.size + local,
                    commit=commit,
                )
            )
            self.stats.layers[layer].recalled_pages += len(wanted)

    # --- selection ---

    def _plan_layer(self, layer: int, rows: DecodeRows, plan: _Plan, q: Tensor) -> _LayerPlan:
        """Select the layer's pages with query ``q`` and split them by residency."""
        residency = self.tiers.residency
        columns = rows.page_table.shape[1]
        exact = layer in self.config.exact_layers or not bool(plan.sparse.any())
        if exact:
            selected = all_pages(rows.num_pages)
            scores = self._by_age(columns).expand(rows.count, -1)
        else:
            lists = self._scores(layer, rows, q)
            budget = torch.where(plan.sparse, self.config.budget_pages, rows.num_pages)
            selected = select_pages(lists, budget)
            scores = lists.amax(1)
        for r in (~residency.is_warm(layer, plan.regions)).nonzero().flatten().tolist():
            pages = scores[r, : int(rows.num_pages[r])]
            best = pages.topk(min(self.tiers.slots.size, len(pages))).indices
            self._fill(layer, rows, r, int(plan.regions[r]), best, pages[best])
        if not exact:
            residency.note_scores(layer, plan.regions, scores)
        slot_of = residency.slot_of(layer, plan.regions, columns)
        slots = slot_of[:, None].expand(-1, selected.shape[1], -1).gather(2, selected.clamp(min=0))
        resident = (selected >= 0) & (slots >= 0)
        missing = (selected >= 0) & (slots < 0)
        table = slot_of if self.tiers.slots.separate else rows.page_table
        chosen = torch.zeros(rows.count, columns + 1, dtype=torch.bool)
        chosen.scatter_(1, torch.where(missing, selected, columns).flatten(1), True)
        self.stats.looked_up(layer, int((selected >= 0).sum()), int(resident.sum()))
        return _LayerPlan(
            selected=selected,
            scores=scores,
            device=page_list(rows, selected, table, self.config.page_size, resident),
            missing=page_list(rows, selected, rows.page_table, self.config.page_size, missing),
            missing_pages=chosen[:, :columns],
            owners=plan.owners,
            query=None,
            ticket=None,
        )

    def _scores(self, layer: int, rows: DecodeRows, q: Tensor) -> Tensor:
        assert self.tiers.digests is not None
        scores = page_scores(q, self.tiers.digests.layers[layer], rows.page_table, self.config.selection)
        return force_pages(scores, rows.num_pages, self.config.sinks, self.config.recent)

    # --- attention ---

    def _device_partial(self, layer: int, q: Tensor, pages: PageList) -> Partial:
        tier = self.tiers.slots if self.tiers.slots.separate else self.tiers.host
        return self._partial(q, tier.layers[layer], pages, self.model.scale)

    def _submit(self, layer: int, entry: _LayerPlan, q: Tensor) -> Ticket | None:
        if not entry.missing.ids.shape[2]:
            return None
        return self.workers.submit(
            q, self.tiers.host.layers[layer], entry.missing, self.model.scale, f"layer {layer}", entry.owners
        )

    def _wait(self, layer: int, ticket: Ticket) -> Partial:
        needed = time.perf_counter()
        partial = ticket.wait(self.config.workers.deadline_seconds)
        entry = self.stats.layers[layer]
        entry.wait_seconds += time.perf_counter() - needed
        entry.lead_seconds += max(0.0, needed - ticket.span()[0])
        return partial

    # --- observation ---

    def _count(self, layer: int, device: PageList, missing: PageList | None) -> None:
        on_cpu = missing.tokens if missing is not None else 0
        self.stats.attended(layer, device.tokens + on_cpu, on_cpu)

    def _sample(self, layer: int, rows: DecodeRows, entry: _LayerPlan, q: Tensor) -> None:
        stats = self.stats.layers[layer]
        if entry.query is not None:
            stats.cosine_sum += query_cosine(entry.query, q)
            stats.cosine_samples += 1
        for r in range(rows.count):
            stats.mass_sum += mass_recall(
                q[r],
                self.tiers.host.blocks(layer),
                rows.page_table[r, : int(rows.num_pages[r])],
                int(rows.seq_lens[r]),
                entry.selected[r],
                self.model.num_kv_heads,
                self.model.scale,
            )
            stats.mass_samples += 1


def _slots(config: HybridConfig) -> int:
    """Pages that a request may keep on the device tier; a longer one is under pressure."""
    return config.automatic_slots if config.slots_per_request == "auto" else config.slots_per_request


def _is_separate(config: HybridConfig, device: torch.device) -> bool:
    return config.tiers == "separate" or (config.tiers == "auto" and device.type != "cpu")
