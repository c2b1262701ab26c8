"""What methods share that attend a budget of pages, scored by digests, some of them resident in slots."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hybrid_backend.attention.partial import PageList, Partial
from hybrid_backend.attention.quality import covered_tokens, mass_recall, query_cosine
from hybrid_backend.attention.selection import all_pages, force_pages, page_scores, select_pages
from hybrid_backend.config import HybridConfig
from hybrid_backend.errors import ConfigError
from hybrid_backend.methods.base import Method, OwnMemory, decodes_in_place, is_separate, staging_tokens
from hybrid_backend.methods.in_place import InPlace, span_bytes
from hybrid_backend.methods.lists import page_list
from hybrid_backend.methods.regions import Regions
from hybrid_backend.observe.stats import Stats
from hybrid_backend.step import DecodeRows, ModelSpec, Step
from hybrid_backend.tiers import TierLayout, Tiers
from hybrid_backend.tiers.transfers import Recall
from hybrid_backend.workers import Owners, Ticket, WorkerPool, kernel_name, resolve_kernel

if TYPE_CHECKING:
    from hybrid_backend.methods.graph_step import GraphStep


@dataclass
class LayerPlan:
    """One layer's selection in one step. R rows, P columns."""

    selected: Tensor  # [R, lists, k] logical pages
    scores: Tensor  # [R, P] importance, inf for forced pages
    device: PageList
    missing: PageList
    missing_pages: Tensor  # [R, P] bool: selected and not resident
    query: Tensor | None = None  # the predicted query, None if the real one was used
    ticket: Ticket | None = None  # the CPU's partial, where a method has one


@dataclass
class StepPlan:
    """What `begin_step` decides once for all layers."""

    regions: Tensor  # [R] slot region of each row
    sparse: Tensor  # [R] bool: under the budget this step
    is_sparse: bool  # any of them
    owners: Owners  # of CPU jobs
    fits: bool  # every row is wholly resident and dense
    everything: PageList | None = None  # all host pages of each row, once a layer asked for them
    layers: dict[int, LayerPlan] = field(default_factory=dict)


class Selective(Method):
    """Selection with Quest digests, one layer ahead if asked for; residency in slots. Who computes what is not
    resident is the subclass's."""

    def __init__(self, config: HybridConfig, model: ModelSpec, tiers: Tiers, workers: WorkerPool, stats: Stats) -> None:
        super().__init__(config, model, tiers, workers, stats)
        self._partial = resolve_kernel(config.workers.kernel)
        self._ahead = self.looks_ahead(config, tiers.device)
        self._regions = Regions(tiers, config.page_size)
        if not tiers.slots.size:
            self.in_place = InPlace(config, model, tiers, stats)
        elif self.runs_kernels(config, tiers.device):
            from hybrid_backend.methods.device_step import DeviceStep  # late, with the kernels

            self.in_place = DeviceStep(self.launches(), config, model, tiers, workers, stats)

    @classmethod
    def runs_kernels(cls, config: HybridConfig, device: torch.device) -> bool:
        if config.device_kernels == "auto":
            return device.type == "cuda"
        return config.device_kernels == "triton"

    @classmethod
    @abstractmethod
    def launches(cls) -> type[GraphStep]:
        """Its decode step as launches on the device (imported late, with the kernels)."""

    @classmethod
    def check(cls, config: HybridConfig, device: torch.device, num_layers: int, num_kv_heads: int) -> None:
        if config.device_kernels == "triton" and not is_separate(config, device):
            raise ConfigError("device_kernels: triton works on slots: set tiers: separate, or device_kernels: auto")
        if cls.runs_kernels(config, device):
            from hybrid_backend.methods.device_step import check  # late, with the kernels

            check(config, device)
        selection = config.selection
        if selection.digest != "minmax_int8":
            return
        if not _bytes_suffice(config):
            raise ConfigError(
                "selection.digest: minmax_int8 needs selection.aggregate softmax, or sum with granularity layer"
            )
        native = kernel_name(config.workers.kernel) == "native"
        if is_separate(config, device) or cls.looks_ahead(config, device) or not native:
            raise ConfigError(
                "selection.digest: minmax_int8 is for native decoding in place (tiers unified, lookahead off, "
                "workers.kernel native); write auto or minmax"
            )

    @classmethod
    def looks_ahead(cls, config: HybridConfig, device: torch.device) -> bool:
        if config.lookahead.enabled == "auto":
            return is_separate(config, device)
        return config.lookahead.enabled

    @classmethod
    def layout(cls, config: HybridConfig, model: ModelSpec, device: torch.device) -> TierLayout:
        """With unified tiers and nobody to run ahead for, all selected pages are attended in place: no slots."""
        separate = is_separate(config, device)
        if not separate and not cls.looks_ahead(config, device) and decodes_in_place(config, model, device):
            in_bytes = config.selection.digest != "minmax" and _bytes_suffice(config)
            return TierLayout(separate=False, digests="minmax_int8" if in_bytes else "minmax")
        return TierLayout(
            separate=separate,
            slots_per_request=slots_per_request(config),
            digests="minmax",
            staging_tokens=staging_tokens(config),
        )

    @classmethod
    def own_memory(
        cls, config: HybridConfig, model: ModelSpec, device: torch.device, pages: int, max_requests: int
    ) -> OwnMemory:
        slots = cls.layout(config, model, device).slots_per_request
        if not slots or not cls.runs_kernels(config, device):
            return OwnMemory()
        from hybrid_backend.methods.device_step import own_memory  # late, with the kernels

        return own_memory(cls.launches(), config, model, pages, max_requests, slots)

    @classmethod
    def grown_bytes(cls, config: HybridConfig, model: ModelSpec, device: torch.device, tokens: int) -> int:
        layout = cls.layout(config, model, device)
        if layout.digests != "minmax_int8" or not config.selection.candidates:
            return 0
        return span_bytes(model, -(-tokens // config.page_size), len(layout.digest_layers(config, model)))

    # --- the step ---

    def begin_step(self, step: Step) -> None:
        self.tiers.transfers.finish()
        for row in step.prefill:
            self.release(row.request_id)  # if it had slots, they are out of date: it computes prompt tokens again
        if step.decode is None:
            return
        rows = step.decode
        slots = slots_per_request(self.config)
        if self.config.sparse == "never":
            sparse = torch.zeros(rows.count, dtype=torch.bool)
        else:
            limit = slots if self.config.sparse == "auto" else min(slots, self.config.budget_pages)
            sparse = rows.num_pages > limit
        if self.in_place is not None:
            self.in_place.begin_step(step, sparse)
            return
        regions = torch.tensor([self._region(rows, r) for r in range(rows.count)])
        is_sparse = bool(sparse.any())
        step.plan = StepPlan(
            regions=regions,
            sparse=sparse,
            is_sparse=is_sparse,
            owners=Owners(regions, self.tiers.slots.generation[regions], self.tiers.slots.generation),
            fits=not is_sparse and bool((rows.num_pages <= slots).all()),
        )

    def wants_lookahead(self, layer: int, step: Step) -> bool:
        if self.in_place is not None:
            return self._ahead and step.decode is not None and self.in_place.wants_lookahead(layer)
        plan: StepPlan | None = step.plan
        if not self._ahead or plan is None or layer in self.config.exact_layers:
            return False
        return plan.is_sparse or self.config.is_sampled(step.number, layer)

    def lookahead(self, layer: int, step: Step, predicted_q: Tensor) -> None:
        assert step.decode is not None
        if self.in_place is not None:
            self.in_place.lookahead(layer, predicted_q)
            return
        plan: StepPlan = step.plan
        entry = self._plan_layer(layer, step.decode, plan, predicted_q)
        entry.query = predicted_q
        plan.layers[layer] = entry
        self._start_ahead(layer, step.decode, plan, entry, predicted_q)

    def append(self, layer: int, step: Step, kv: Tensor) -> None:
        if step.decode is not None:
            self._regions.append(layer, step.decode, step.plan.regions, step.decode.gather(kv))

    def attend(self, layer: int, step: Step, q: Tensor) -> Tensor:
        assert step.decode is not None
        plan: StepPlan = step.plan
        entry = plan.layers.pop(layer, None)
        if plan.fits and not self.tiers.slots.separate and entry is None:
            everything = self._everything(step.decode, plan)
            self._count(layer, everything, None)
            self.stats.looked_up(layer, everything.pages, everything.pages)
            return self._device_partial(layer, q, everything).out
        if entry is None:
            entry = self._plan_layer(layer, step.decode, plan, q)
        out = self._attend_planned(layer, step, plan, entry, q)
        if self.config.is_sampled(step.number, layer):
            self._sample(layer, step, plan, entry, q)
        return out

    @abstractmethod
    def _start_ahead(self, layer: int, rows: DecodeRows, plan: StepPlan, entry: LayerPlan, q: Tensor) -> None:
        """The selection of ``layer`` by its predicted query ``q`` is known; the layer before it has not run yet."""

    @abstractmethod
    def _attend_planned(self, layer: int, step: Step, plan: StepPlan, entry: LayerPlan, q: Tensor) -> Tensor:
        """Attention of the layer's selection with the true query; ``[rows, heads, head_dim]`` fp32."""

    def release(self, request_id: str) -> None:
        super().release(request_id)
        self._regions.release(request_id)

    # --- placement ---

    def _region(self, rows: DecodeRows, r: int) -> int:
        """The row's region. A new one is filled at once if the request fits; else layer by layer, by importance."""
        slots, residency = self.tiers.slots, self.tiers.residency
        pages = int(rows.num_pages[r])
        region, is_new = self._regions.find(rows, r)
        if not is_new:
            if self._regions.begins_page(rows, r):
                residency.open_page(region, pages - 1)
        elif pages <= slots.size:
            every = torch.arange(pages)
            for layer in residency.layers:
                self._regions.fill(layer, rows, r, region, every, every, self._by_age(pages))
        return region

    def _by_age(self, pages: int) -> Tensor:
        """Importance where nothing better is known: the oldest page goes first, the sinks never."""
        scores = torch.arange(pages, dtype=torch.float32)
        scores[: self.config.sinks] = float("inf")
        return scores

    def _copy_in(self, layer: int, rows: DecodeRows, plan: StepPlan, entry: LayerPlan) -> int:
        """Start copying the missing pages over the least important resident ones, the most important first.

        Returns:
            The number of pages for which there was a slot.
        """
        slots, residency = self.tiers.slots, self.tiers.residency
        copied = 0
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
            copied += len(wanted)
        self.stats.layers[layer].recalled_pages += copied
        return copied

    # --- selection ---

    def _plan_layer(self, layer: int, rows: DecodeRows, plan: StepPlan, q: Tensor) -> LayerPlan:
        """Select the layer's pages with query ``q`` and split them by residency."""
        residency = self.tiers.residency
        columns = rows.page_table.shape[1]
        exact = layer in self.config.exact_layers or not plan.is_sparse
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
            local = torch.arange(len(best))
            self._regions.fill(layer, rows, r, int(plan.regions[r]), local, best, pages[best])
        if not exact:  # a request that attends everything keeps its pages by age, whatever others of its batch do
            residency.note_scores(layer, plan.regions[plan.sparse], scores[plan.sparse])
        entry = self._split(layer, rows, plan, selected, scores)
        self.stats.looked_up(layer, entry.device.pages + entry.missing.pages, entry.device.pages)
        return entry

    def _split(self, layer: int, rows: DecodeRows, plan: StepPlan, selected: Tensor, scores: Tensor) -> LayerPlan:
        """The selection by residency, as it is now."""
        columns = rows.page_table.shape[1]
        slot_of = self.tiers.residency.slot_of(layer, plan.regions, columns)
        slots = slot_of[:, None].expand(-1, selected.shape[1], -1).gather(2, selected.clamp(min=0))
        resident = (selected >= 0) & (slots >= 0)
        missing = (selected >= 0) & (slots < 0)
        table = slot_of if self.tiers.slots.separate else rows.page_table
        chosen = torch.zeros(rows.count, columns + 1, dtype=torch.bool)
        chosen.scatter_(1, torch.where(missing, selected, columns).flatten(1), True)
        return LayerPlan(
            selected=selected,
            scores=scores,
            device=page_list(rows, selected, table, self.config.page_size, resident),
            missing=page_list(rows, selected, rows.page_table, self.config.page_size, missing),
            missing_pages=chosen[:, :columns],
        )

    def _scores(self, layer: int, rows: DecodeRows, q: Tensor) -> Tensor:
        assert self.tiers.digests is not None
        digests, how = self.tiers.digests.layers[layer], self.config.selection
        scores = page_scores(q, digests, rows.page_table, rows.num_pages, how, self.model.scale)
        return force_pages(scores, rows.num_pages, self.config.sinks, self.config.recent)

    def _everything(self, rows: DecodeRows, plan: StepPlan) -> PageList:
        if plan.everything is None:
            plan.everything = page_list(rows, all_pages(rows.num_pages), rows.page_table, self.config.page_size)
        return plan.everything

    # --- attention and observation ---

    def _device_partial(self, layer: int, q: Tensor, pages: PageList) -> Partial:
        tier = self.tiers.slots if self.tiers.slots.separate else self.tiers.host
        return self._partial(q, tier.layers[layer], pages, self.model.scale)

    def _count(self, layer: int, device: PageList, missing: PageList | None) -> None:
        on_cpu = missing.tokens if missing is not None else 0
        self.stats.attended(layer, device.tokens + on_cpu, on_cpu)

    def _sample(self, layer: int, step: Step, plan: StepPlan, entry: LayerPlan, q: Tensor) -> None:
        """Cosines of all rows; attention mass, which reads all keys of a sequence, of one that leaves pages out."""
        stats, rows = self.stats.layers[layer], step.decode
        assert rows is not None
        if entry.query is not None:
            stats.cosine_sum += query_cosine(entry.query, q)
            stats.cosine_samples += 1
        partial = plan.sparse & (rows.num_pages > self.config.budget_pages)
        selecting = partial.nonzero().flatten().tolist() if layer not in self.config.exact_layers else []
        if not selecting:
            return
        r = selecting[step.number % len(selecting)]
        stats.mass_sum += mass_recall(
            q[r],
            self.tiers.host.blocks(layer),
            rows.page_table[r, : int(rows.num_pages[r])],
            covered_tokens(entry.selected[r], int(rows.seq_lens[r]), self.config.page_size),
            self.model.num_kv_heads,
            self.model.scale,
        )
        stats.mass_samples += 1


def _bytes_suffice(config: HybridConfig) -> bool:
    """Whether the native decoder can score digests in bytes as the configuration wants."""
    how = config.selection
    return how.aggregate == "softmax" or (how.aggregate == "sum" and how.granularity == "layer")


def slots_per_request(config: HybridConfig) -> int:
    """Pages that a request may keep on the device tier; a longer one is under pressure."""
    return config.automatic_slots if config.slots_per_request == "auto" else config.slots_per_request
