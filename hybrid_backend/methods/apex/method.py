"""Method ``apex``: whole requests on the device or on the CPU, every token attended (APEX, arXiv 2506.03296).

A request's KV lies on the device whole if it fits (`placement`). The CPU workers attend all tokens of other requests in
the host pool, except for the growing page, which the device reads in the host pool. Attention is exact: requests on the
CPU are slower, and no page is left out.

`rule` chooses a strategy in each step. In lockstep the layer waits for the CPU. With overlap the row takes the answer
in the same layer of the next step (`parking`). The paper's third strategy, asymmetric pipelining, alternates two halves
of a batch, which no stock engine does. Where the rule chooses pipelining, steps go in lockstep if the CPU's time hides
behind the device's attention, and else overlap.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hybrid_backend.batch import DecodeRows, ModelSpec, Step
from hybrid_backend.config import HybridConfig
from hybrid_backend.errors import ConfigError
from hybrid_backend.hardware import Hardware, find_hardware, hardware_of_gpu, machine_choices
from hybrid_backend.hardware.times import LayerTimes
from hybrid_backend.methods.apex.parking import Parking, parking_bytes
from hybrid_backend.methods.apex.placement import Placement
from hybrid_backend.methods.apex.questions import BoxQuestions, PoolQuestions, Questions, box_bytes
from hybrid_backend.methods.apex.rates import measured_rates
from hybrid_backend.methods.apex.residency import SharedResidency
from hybrid_backend.methods.apex.rule import Verdict, cpu_hides, hidden_tokens, judge
from hybrid_backend.step.buffers import StepBuffers
from hybrid_backend.step.method import OwnMemory, WaitingMethod, WaitingRows, frames_per_request, staging_tokens
from hybrid_backend.step.operations import are_launches
from hybrid_backend.step.request_room import RequestRoom
from hybrid_backend.step.residency import Residency
from hybrid_backend.step.toolbox import PageLists
from hybrid_backend.tiers import TierLayout, Tiers
from hybrid_backend.tiers.sizes import pages_of_a_sequence
from hybrid_backend.workers import WorkerPool

if TYPE_CHECKING:
    from hybrid_backend.step import Toolbox

_DEFAULT_MACHINE = "a10"
"""Machine of the paper's Table 1."""

SWAP_IN = 0.95
"""Share of the device's pages up to which the oldest request on the CPU comes back (NEO, arXiv 2411.01142)."""


class Apex(WaitingMethod):
    """Whole requests: on the device if they fit, else on the CPU."""

    name = "apex"
    reads_int8 = True
    suits_gpu = False

    def __init__(self, config: HybridConfig, model: ModelSpec, tiers: Tiers) -> None:
        super().__init__(config, model, tiers)
        self._times = LayerTimes(
            _machine(config.apex.hardware, tiers.device),
            weight_bytes=max(1, model.layer_weight_bytes),
            dtype_bytes=model.dtype.itemsize,
            token_bytes=model.kv_format(config.page_size).token_bytes,
            attention_flops_per_pair=4 * model.num_heads * model.head_dim,
        )
        pages = len(tiers.host.views[tiers.layout.full_layers(model)[0]])
        self._frames = _frame_table(config, model, pages, tiers.frames.requests, tiers.device)
        self._prompt_tokens = self._prompt_attended = 0  # Prompts of the open step.
        self._verdict = Verdict("gpu", 0.0, 0.0)  # Verdict of the last step with rows on the CPU.
        self._room: RequestRoom | None = None

    @classmethod
    def check(cls, config: HybridConfig, device: torch.device, num_layers: int, num_kv_heads: int) -> None:
        super().check(config, device, num_layers, num_kv_heads)
        tokens = config.apex.device_tokens
        if isinstance(tokens, int) and tokens < config.page_size:
            raise ConfigError(
                f"apex.device_tokens: {tokens} is less than one page of page_size {config.page_size}; write "
                f"{config.page_size} or more, or auto"
            )
        if config.apex.hardware != "auto":
            _machine(config.apex.hardware, device)

    @classmethod
    def may_park(cls, config: HybridConfig) -> bool:
        return config.apex.strategy in ("auto", "overlap")

    @classmethod
    def needs_parking(cls, config: HybridConfig) -> bool:
        return config.apex.strategy == "overlap"

    @classmethod
    def exact_tokens(cls, config: HybridConfig) -> float:
        return math.inf

    @classmethod
    def layout(cls, config: HybridConfig, model: ModelSpec, device: torch.device) -> TierLayout:
        tokens = config.apex.device_tokens
        return TierLayout(
            separate=True,
            frames_per_request=frames_per_request(config),
            staging_tokens=staging_tokens(config),
            shares_frames=True,
            device_pages=0 if tokens == "auto" else tokens // config.page_size,
            swap_in=SWAP_IN,
        )

    @classmethod
    def filled(cls, config: HybridConfig, device_pages: int, requests: int) -> HybridConfig:
        if config.apex.device_tokens != "auto":
            return config
        tokens = device_pages * config.page_size
        return config.model_copy(update={"apex": config.apex.model_copy(update={"device_tokens": tokens})})

    @classmethod
    def own_memory(
        cls, config: HybridConfig, model: ModelSpec, device: torch.device, pages: int, max_requests: int
    ) -> OwnMemory:
        own = super().own_memory(config, model, device, pages, max_requests)
        table = _frame_table(config, model, pages, max_requests, torch.device("meta"))
        width = model.hidden if cls.may_park(config) else 0
        device_bytes, host_bytes = table.nbytes + parking_bytes(max_requests, width), 0
        if are_launches(config, device):
            boxes, host_bytes = box_bytes(model, max_requests, pages_of_a_sequence(config, model, pages))
            device_bytes += boxes
        return replace(own, device=own.device + device_bytes, host=own.host + host_bytes)

    def open_rows(self, buffers: StepBuffers, workers: WorkerPool) -> tuple[WaitingRows, Residency]:
        config, model, tiers, shape = self.config, self.model, self.tiers, buffers.shape
        questions: Questions = (
            BoxQuestions(config, model, tiers, workers, shape.columns)
            if tiers.is_async
            else PoolQuestions(config, model, tiers, workers)
        )
        placement = Placement(tiers.layout.shared_pages(shape.rows), tiers.layout.swap_in)
        self._parking = Parking(config, tiers, questions, model.hidden if self.may_park(config) else 0)
        self._residency = SharedResidency(tiers, buffers, placement, self._parking.is_settled)
        if config.apex.hardware == "auto" and tiers.device.type == "cuda":
            deadline = config.workers.deadline_seconds
            hardware = measured_rates(self._times.hardware, model, tiers, workers, deadline)
            self._times = replace(self._times, hardware=hardware)
        return self._parking, self._residency

    @property
    def device_bytes(self) -> int:
        return self._frames.nbytes

    def gauges(self) -> dict[str, float]:
        return {
            "hybrid_speed_ratio": self._verdict.ratio,
            "hybrid_speed_bound": self._verdict.bound,
            "hybrid_resident_requests": self._residency.placement.requests,
            "hybrid_moved_requests": self._residency.moved,
        }

    def budgets(self, rows: DecodeRows) -> Tensor:
        return rows.num_pages

    # --- the step ---

    def begin_step(self, step: Step) -> None:
        chunks = [(row.end - row.start, row.seq_len) for row in step.prefill]
        self._prompt_tokens = sum(tokens for tokens, _ in chunks)
        self._prompt_attended = sum(tokens * (2 * length - tokens + 1) // 2 for tokens, length in chunks)

    def begin_decode(self, step: Toolbox, rows: DecodeRows) -> None:
        placement = self._residency.placement
        on_cpu = torch.tensor([name not in placement for name in rows.request_ids])
        strategy = self._strategy(rows, on_cpu)
        self._room = self._room_beside(rows, on_cpu)
        indices = self.tiers.frames.indices(rows.request_ids)
        pages = step.inputs(rows.count).pages
        self._parking.begin(rows, indices, on_cpu, parks=strategy == "overlap", pages=pages)
        step.counting.count_strategy(strategy, self._verdict.strategy if bool(on_cpu.any()) else "gpu")
        requests = step.inputs(rows.count).requests.long()
        self._frames[: rows.count] = step.maps.frame_of[0][requests]
        by_device = ~on_cpu | (self.config.apex.strategy == "gpu")
        missing = int((rows.num_pages * (by_device & on_cpu)).sum())  # The device reads these pages over the bus.
        step.counting.count_tokens(
            int((rows.seq_lens * by_device).sum()), int((rows.num_pages * ~on_cpu).sum()), 0, missing
        )

    def _strategy(self, rows: DecodeRows, on_cpu: Tensor) -> str:
        config, cpu_rows = self.config.apex, int(on_cpu.sum())
        device_rows, device_tokens = rows.count - cpu_rows, int((rows.seq_lens * ~on_cpu).sum())
        if not cpu_rows or config.strategy == "gpu":
            return "gpu"
        self._verdict = verdict = judge(
            self._times, device_rows, device_tokens, cpu_rows, self._prompt_tokens, self._prompt_attended
        )
        if not self.model.parks or config.strategy == "lockstep":
            return "lockstep"
        if config.strategy == "overlap":
            return "overlap"
        if verdict.strategy == "pipeline":
            hides = cpu_hides(self._times, device_rows, device_tokens, int((rows.seq_lens * on_cpu).sum()))
            return "lockstep" if hides else "overlap"
        return "overlap" if cpu_rows >= config.min_cpu_per_gpu * device_rows else "lockstep"

    def room(self) -> RequestRoom | None:
        return self._room

    def _room_beside(self, rows: DecodeRows, on_cpu: Tensor) -> RequestRoom | None:
        """Return the tokens that may run beside the decode rows of a step."""
        if self.tiers.device.type != "cuda" or self.config.apex.strategy == "gpu":
            return None  # A device tier that is the CPU shares its cores with the workers, so that nothing is hidden.
        device_rows = rows.count - int(on_cpu.sum())
        if not device_rows:
            return None
        may_overlap = self.model.parks and self.may_park(self.config)
        device_tokens = int((rows.seq_lens * ~on_cpu).sum())
        hidden = hidden_tokens(self._times, self.model.num_layers, device_rows, device_tokens, may_overlap=may_overlap)
        return RequestRoom(self._residency.placement.pages * self.config.page_size, int(hidden))

    def attend(self, step: Toolbox, layer: int, q: Tensor) -> Tensor:
        inputs, cpu, host = step.inputs(len(q)), self._parking, self.tiers.host.views[layer]
        rows, frames, frame_ids = cpu.rows_of(len(q)), self.tiers.frames.layers[layer], self._frames[: len(q), None]
        stores = [PageLists(lambda: frames, frame_ids, rows.device_tokens[:, None], frame_ids.shape[2])]
        if not (step.is_captured or not cpu.is_idle):
            return step.merge(layer, step.attend_stores(q, stores), None, q.dtype)
        if self.config.apex.strategy == "gpu":
            tokens = (inputs.seq_lens * rows.on_cpu)[:, None]
            stores.append(PageLists(lambda: host, inputs.table[:, None], tokens, inputs.table.shape[1]))
            return step.merge(layer, step.attend_stores(q, stores), None, q.dtype)
        answers: list[tuple[Tensor, Tensor]] = []

        def host_after_answers() -> Tensor:
            """Return the host pool when the device has attended its own rows and the CPU has answered."""
            answers.append(cpu.take(layer, inputs, step.counters(layer)))
            return host

        cpu.ask(layer, q, inputs)
        # The growing page is attended in the step that takes the answer, so `take` sets its tokens.
        stores.append(PageLists(host_after_answers, inputs.pages.view(-1, 1, 1), rows.growing[:, None], 1))
        partials = step.attend_stores(q, stores)
        return step.merge(layer, partials, answers[0], q.dtype)


def _machine(name: str, device: torch.device) -> Hardware:
    """Return the machine that ``apex.hardware`` names."""
    if name != "auto":
        try:
            machine = find_hardware(name)
        except ConfigError as error:
            raise ConfigError(f"apex.{error}") from None
        if device.type != "cpu" and machine.device == "cpu":
            fix = f"write auto, or {machine_choices('gpu')}"
            raise ConfigError(f"apex.hardware: {name} is a CPU server, whose rates are not those of this GPU; {fix}")
        return machine
    gpu = torch.cuda.get_device_properties(device).name if device.type == "cuda" else ""
    return hardware_of_gpu(gpu) or find_hardware(_DEFAULT_MACHINE)


def _frame_table(config: HybridConfig, model: ModelSpec, pages: int, requests: int, device: torch.device) -> Tensor:
    """Return ``[requests, columns]`` int32 for the frames of a step's rows, which are the same in all layers."""
    columns = pages_of_a_sequence(config, model, pages)
    return torch.full((requests, columns), -1, dtype=torch.int32, device=device)
