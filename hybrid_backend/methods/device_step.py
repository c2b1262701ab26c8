"""Decoding with the device's own kernels: a `GraphStep` behind the interface that the runtime calls.

Where `Selective` decides on the host and computes with torch, this writes a step's inputs once and launches kernels;
the launches of all layers may be captured in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hybrid_backend.config import HybridConfig
from hybrid_backend.errors import ConfigError
from hybrid_backend.methods.base import OwnMemory
from hybrid_backend.methods.graph_step import DeviceState, GraphShape, GraphStep
from hybrid_backend.observe.stats import Stats
from hybrid_backend.step import DecodeRows, ModelSpec, Step, StepFailure, sent
from hybrid_backend.tiers import Tiers
from hybrid_backend.workers import NativePool, WorkerPool

_LOOKS_PER_SECOND = 2000  # of a waiting kernel under Triton's interpreter, about


@dataclass(frozen=True)
class _Plan:
    """What `begin_step` decided: rows in the order of the kernels."""

    regions: list[int]
    budgets: Tensor  # [rows] int64 pages


class DeviceStep:
    """All decoding rows of a step by kernels that run in the device's stream, layer by layer.

    Raises:
        ConfigError: the workers' kernel is not the native one, which alone serves mailboxes; there is no Triton.
    """

    def __init__(
        self,
        launches: type[GraphStep],
        config: HybridConfig,
        model: ModelSpec,
        tiers: Tiers,
        workers: WorkerPool,
        stats: Stats,
    ) -> None:
        if not isinstance(workers, NativePool):
            raise ConfigError("workers.kernel: device_kernels: triton needs the native kernel; write auto or native")
        triton = _triton()
        self._config, self._model, self._tiers, self._stats = config, model, tiers, stats
        device = tiers.device
        on_gpu = device.type == "cuda"
        digests = tiers.digests.layers if tiers.digests else {}
        shape = _shape(
            launches, config, model, len(tiers.host.layers[0]), len(tiers.slots.generation), tiers.slots.size
        )
        self.graph = launches(
            replace(
                shape,
                patience=round(
                    config.workers.deadline_seconds * (_LOOKS_PER_SECOND if triton.knobs.runtime.interpret else 1e9)
                ),
                multiprocessors=torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else 1,
            ),
            tiers.host.seen,
            [digests.get(layer) for layer in range(model.num_layers)],
            [tiers.slots.layers[layer] for layer in range(model.num_layers)],
            tiers.slots.generation,
            workers.native,
            tiers.host.layers,
        )
        self._resident: dict[int, int] = {}  # per region, the pages in its slots, of one layer

    # --- between steps ---

    def begin_step(self, step: Step, sparse: Tensor) -> None:
        """``sparse``: ``[rows]`` bool, rows under the budget.

        Does not wait for the device, but for requests that begin to decode.
        """
        rows = step.decode
        assert rows is not None
        regions = [self._region(rows, r) for r in range(rows.count)]
        self._resident.update(zip(regions, rows.num_pages.clamp(max=self._tiers.slots.size).tolist(), strict=True))
        budgets = torch.where(sparse, self._config.budget_pages, rows.num_pages)
        step.plan = plan = _Plan(regions, budgets)
        self._write(step.number, rows, plan)
        self.graph.begin(step.number + 1)

    def count(self) -> None:
        """Take over what the kernels have counted, as far as the device has come."""
        page_bytes = self._model.page_bytes(self._config.page_size)
        for layer, entry in enumerate(self._stats.layers):
            told, lists = self.graph.tally(layer), self.graph.lists(layer)
            on_cpu = 0 if self.graph.always_copies else told.missing_tokens
            entry.selected_tokens = (told.resident_tokens + told.missing_tokens) / lists
            entry.cpu_tokens = on_cpu / lists
            entry.resident_hits = told.resident_pages / lists
            entry.resident_lookups = (told.resident_pages + told.missing_pages) / lists
            self._tiers.transfers.copied_bytes += (told.recalled_pages - entry.recalled_pages) * page_bytes
            entry.recalled_pages = told.recalled_pages
            entry.wait_seconds, entry.lead_seconds = told.waited / 1e9, told.ahead / 1e9

    def failure(self, step: Step) -> StepFailure | None:
        """What went wrong for the decoding rows of a step that the device has passed."""
        rows, number = step.decode, step.number + 1  # `StepInputs.number`
        error = None if rows is None else self.graph.failure(number)
        if rows is None or error is None:
            return None
        return StepFailure(error, rows.request_ids, self.graph.written(number, rows.count))

    def _region(self, rows: DecodeRows, r: int) -> int:
        slots = self._tiers.slots
        region = slots.region(rows.request_ids[r])
        if region is None:
            region = slots.allocate(rows.request_ids[r])
            copied = self.graph.admit(region, rows.page_table[r, : int(rows.num_pages[r])])
            self._tiers.transfers.copied_bytes += copied * self._model.page_bytes(self._config.page_size)
        return region

    def _write(self, number: int, rows: DecodeRows, plan: _Plan) -> None:
        """The step's inputs, in one copy to the device beside the page table."""
        now, config = self.graph.inputs, self._config
        count, columns = rows.count, rows.page_table.shape[1]
        regions = torch.tensor(plan.regions)
        # Generations as they are now: the host may be steps ahead of the device.
        generations = self._tiers.slots.generation[regions]
        small = torch.zeros(6, len(now.regions), dtype=torch.int32)
        small[:, :count] = torch.stack(
            [rows.num_pages, rows.seq_lens, rows.seq_lens - 1, regions, generations, plan.budgets]
        )
        due = [
            self.graph.always_copies
            or (config.recall.enabled and (number + layer) % config.recall_interval(layer) == 0)
            for layer in range(self._model.num_layers)
        ]
        packed = torch.cat([small.flatten(), torch.tensor([number + 1, *due], dtype=torch.int32)])
        there = sent(packed, now.number.device)
        each = (now.num_pages, now.lengths, now.positions, now.regions, now.generations, now.budgets)
        for k, into in enumerate(each):
            into.copy_(there[k * len(into) : (k + 1) * len(into)])
        now.number.copy_(there[small.numel() : small.numel() + 1])
        now.due.copy_(there[small.numel() + 1 :])
        now.table[:count, :columns].copy_(rows.page_table)
        now.pages.fill_(-1)
        now.pages[:count].copy_(rows.page_table.gather(1, now.num_pages[:count, None].long() - 1)[:, 0])

    # --- the step ---

    def wants_lookahead(self, layer: int) -> bool:
        """Always the same, so that a captured graph holds for every step."""
        return layer not in self._config.exact_layers

    def lookahead(self, layer: int, q: Tensor) -> None:
        """``q``: predicted query of ``layer``, ``[rows, heads, head_dim]``."""
        self.graph.lookahead(layer, q.contiguous())

    def decode(self, layer: int, step: Step, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """Append, select, attend. ``q``, ``out``: ``[tokens, heads, head_dim]``; only the rows' tokens are touched."""
        rows = step.decode
        assert rows is not None
        mine = [rows.gather(x).contiguous() for x in (q, k, v)]
        result = self.graph.attend(layer, *mine)
        if rows.whole_batch:
            out[: rows.count] = result
        else:
            out.index_copy_(0, rows.tokens, result.to(out.dtype))

    # --- requests and the end ---

    def release(self, request_id: str) -> None:
        """The request is gone, or its pages are about to be others."""
        region = self._tiers.slots.release(request_id)
        if region is not None:
            self.graph.release(region)
            self._resident.pop(region, None)

    @property
    def resident_pages(self) -> int:
        """Slots that hold a page, or are about to, over all layers. As the host knows: no slot of a region is left
        empty while the request has pages that it could hold."""
        return sum(self._resident.values()) * self._model.num_layers

    @property
    def device_bytes(self) -> int:
        """Device memory of the residency maps and the step's inputs."""
        return self.graph.device_bytes

    @property
    def host_bytes(self) -> int:
        return self.graph.host_bytes

    def close(self) -> None:
        self.graph.close()


def _shape(
    launches: type[GraphStep], config: HybridConfig, model: ModelSpec, pages: int, regions: int, slots: int
) -> GraphShape:
    """Over a host pool of ``pages`` pages."""
    columns = pages if model.max_tokens is None else min(pages, -(-model.max_tokens // config.page_size))
    lists = model.num_kv_heads if config.selection.granularity == "kv_head" else 1
    return GraphShape(
        rows=regions,
        heads=model.num_heads,
        columns=columns,
        regions=regions,
        slots=slots,
        budget=columns if config.sparse == "never" else config.budget_pages,
        lists=lists,
        sinks=config.sinks,
        recent=config.recent,
        aggregate=config.selection.aggregate,
        bound=config.selection.bound,
        scale=model.scale,
        recalls=min(config.budget_pages * lists, slots) if config.recall.enabled or launches.always_copies else 1,
        predicted=config.lookahead.partial_query == "predicted",
        patience=1,
        deadline_seconds=config.workers.deadline_seconds,
    )


def own_memory(
    launches: type[GraphStep], config: HybridConfig, model: ModelSpec, pages: int, max_requests: int, slots: int
) -> OwnMemory:
    """What `DeviceStep` allocates over a host pool of ``pages`` pages. Allocates nothing."""
    shape = _shape(launches, config, model, pages, max_requests, slots)
    state = DeviceState.make(shape, model.num_layers, torch.device("meta"))
    return OwnMemory(device=state.nbytes, host=launches.planned_host_bytes(shape, model, len(config.exact_layers)))


def check(config: HybridConfig, device: torch.device) -> None:
    """Raise ConfigError for what these kernels cannot serve. A GPU may be one of another machine: no Triton is needed
    to plan for it."""
    if device.type != "cuda" and not _triton().knobs.runtime.interpret:
        raise ConfigError(
            f"device_kernels: triton needs a GPU, but the device tier is the {device.type}; write auto "
            "(or set TRITON_INTERPRET=1, which runs them slowly, for tests)"
        )


def _triton() -> Any:
    """Imported where kernels will run, not where their memory is planned.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import triton
    except ImportError as error:
        raise ConfigError(
            f"device_kernels: triton needs Triton, which cannot be imported here ({error}); pip install triton"
        ) from None
    return triton
