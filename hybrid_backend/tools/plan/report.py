"""The plan itself: every method against stock, in memory and in time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import NamedTuple

import torch

from hybrid_backend.config import HybridConfig
from hybrid_backend.engines.vllm.blocks import Blocks
from hybrid_backend.engines.vllm.card import Card
from hybrid_backend.engines.vllm.footprint import (
    Candidate,
    Item,
    Memory,
    MethodMemory,
    Place,
    Room,
    StockMemory,
    default_chunk,
    largest,
)
from hybrid_backend.errors import ConfigError
from hybrid_backend.hardware import Hardware
from hybrid_backend.methods import method_names, resolve_method, with_method
from hybrid_backend.model import ModelShape
from hybrid_backend.tools.plan.simulate import StepTime, WhatIf, decode_step, simulated_methods

MOST_BATCH, MOST_CONTEXT = 2**16, 2**27
"""Where the search for the largest batch and context ends."""


@dataclass(frozen=True)
class Request:
    """What is to be planned. Sizes in bytes; ``batch`` and ``ram`` of all devices together."""

    shape: ModelShape
    config: HybridConfig
    context: int
    batch: int
    gpu_mem: int | None  # 0: no device of its own; None: the machine's
    ram: int | None
    hardware: Hardware | None = None
    machine: str | None = None  # name of a machine whose rates are not known
    methods: tuple[str, ...] = ()  # empty: all
    chunk_tokens: int | None = None
    device_overhead: int | None = None
    host_overhead: int | None = None


@dataclass(frozen=True)
class Row:
    """One method. Memory is of one device and its share of the host; batches are of all devices."""

    name: str
    refused: str | None = None  # why this configuration cannot serve the model with it
    fits: bool = False
    why_not: str | None = None
    device_bytes: int = 0
    host_bytes: int = 0
    pages: int = 0  # of the KV pool
    items: tuple[Item, ...] = ()
    max_batch: int = 0  # at the context
    max_context: int = 0  # at the batch, as far as memory goes
    step_ms: float | None = None  # at context and batch, that is, per token of one sequence
    tokens_per_s: float | None = None
    best_tokens_per_s: float | None = None  # at max_batch
    device_batch: int | None = None  # what the devices' memory alone would hold; None: there is none
    host_batch: int | None = None  # what the host's memory alone would hold
    host_context: int = 0  # the longest that the host's memory holds at the batch
    parts_ms: Mapping[str, float] = field(default_factory=dict)  # of the step, by the simulator's names
    otherwise: str | None = None  # what the engine makes of it where the device does not hold all exact layers whole


@dataclass(frozen=True)
class Plan:
    """All rows, and what they rest on."""

    model: ModelShape
    machine: str | None
    configured: str  # the configuration's own method
    devices: int
    context: int
    batch: int
    page_size: int
    block_bytes: int
    device_limit: int  # bytes that the engine may take of one device
    host_limit: int
    rows: tuple[Row, ...]
    has_times: bool = True  # the machine's rates are known

    def as_dict(self) -> dict[str, object]:
        """For JSON; docs/plan.md names the keys."""
        return asdict(self)

    def row(self, name: str) -> Row:
        return next(row for row in self.rows if row.name == name)


def make_plan(request: Request) -> Plan:
    """Plan every method.

    Raises:
        ConfigError: a number out of range, an unknown method, a size that neither the user nor a machine gives, or a
            configuration that every method refuses.
    """
    for key, value in (("context", request.context), ("batch", request.batch)):
        if value < 1:
            raise ConfigError(f"--{key}: got {value}, expected an integer >= 1")
    devices = request.hardware.gpus if request.hardware else 1
    room = _room(request, devices)
    blocks = Blocks.of(request.shape, request.config.page_size)
    device = torch.device("cpu" if room.on_host else "cuda")
    shape = request.shape
    settled = with_method(request.config, shape.heads, shape.kv_heads, shape.head_dim, device)
    request = replace(request, config=settled)
    names = request.methods or tuple(method_names())
    candidates: list[Candidate] = [StockMemory(request.shape, blocks, room)]
    for name in names:
        resolve_method(name)
        config = request.config.model_copy(update={"method": name})
        candidates.append(MethodMemory(request.shape, blocks, room, config))
    rows = tuple(_row(candidate, request, room, devices) for candidate in candidates)
    refusals = {row.name: row.refused or "" for row in rows[1:]}  # of all methods, without stock
    if all(refusals.values()):
        raise ConfigError(refusals.get(request.config.method) or next(iter(refusals.values())))
    return Plan(
        model=request.shape,
        machine=request.hardware.name if request.hardware else request.machine,
        configured=request.config.method,
        devices=devices,
        context=request.context,
        batch=request.batch,
        page_size=request.config.page_size,
        block_bytes=blocks.block_bytes,
        device_limit=room.limit("device"),
        host_limit=room.limit("host"),
        rows=rows,
        has_times=request.hardware is not None,
    )


def changed(request: Request, what_if: WhatIf) -> Request:
    """The same request where something is different."""
    hardware = request.hardware
    if hardware is None and any(x is not None for x in (what_if.cores, what_if.dram, what_if.pcie, what_if.gpus)):
        raise ConfigError("--what-if: what is different about which machine? give --machine NAME or a profile's file")
    return replace(
        request,
        hardware=what_if.apply(hardware) if hardware else None,
        context=what_if.context or request.context,
        batch=what_if.batch or request.batch,
    )


def serve_flags(row: Row, plan: Plan) -> list[str]:
    """The flags of `hybrid serve` and of vLLM with which the runtime allocates what the row says."""
    return [
        f"--set=method={row.name}",
        f"--set=host_pool.size={row.pages * plan.block_bytes}",
        "--",
        "--max-num-seqs",
        str(-(-plan.batch // plan.devices)),
        "--max-model-len",
        str(plan.context),
        "--dtype",
        plan.model.dtype,
    ]


def _room(request: Request, devices: int) -> Room:
    hardware = request.hardware
    on_cpu = hardware is not None and hardware.device == "cpu"
    gpu_mem, ram = request.gpu_mem, request.ram
    if gpu_mem is None:
        if hardware is None:
            raise ConfigError("--gpu-mem: is missing; give --gpu-mem 24GiB (0: no device) or --machine NAME")
        gpu_mem = 0 if on_cpu else int(hardware.device_memory_bytes.value)
    if ram is None:
        if hardware is None:
            raise ConfigError("--ram: is missing; give --ram 128GiB or --machine NAME")
        ram = int(hardware.host_ram_bytes.value)
    room = Room(gpu_mem, ram // devices, request.chunk_tokens or default_chunk(gpu_mem))
    if request.device_overhead is not None:
        room = replace(room, device_overhead=request.device_overhead)
    if request.host_overhead is not None:
        room = replace(room, host_overhead=request.host_overhead)
    return room


def _row(candidate: Candidate, request: Request, room: Room, devices: int) -> Row:
    refused = candidate.refusal() if isinstance(candidate, MethodMemory) else None
    if refused is not None:
        return Row(candidate.name, refused=refused)
    mine = -(-request.batch // devices)
    memory = candidate.memory(request.context, mine)
    why_not = memory.missing(room)
    places: tuple[Place, ...] = ("host",) if room.on_host else ("device", "host")
    by_place = {
        place: largest(partial(_spare, candidate, room, request.context, places=(place,)), MOST_BATCH)
        for place in places
    }
    max_batch = devices * min(by_place.values())
    times = _times(candidate, request, max_batch, why_not is None)
    return Row(
        name=candidate.name,
        fits=why_not is None,
        why_not=why_not,
        device_bytes=memory.at("device"),
        host_bytes=memory.at("host"),
        pages=memory.pages,
        items=memory.items,
        max_batch=max_batch,
        max_context=largest(lambda context: _spare(candidate, room, context, mine, places), MOST_CONTEXT),
        step_ms=times.step_ms,
        tokens_per_s=times.tokens_per_s,
        best_tokens_per_s=times.best_tokens_per_s,
        device_batch=devices * by_place["device"] if "device" in by_place else None,
        host_batch=devices * by_place["host"],
        host_context=largest(lambda context: _spare(candidate, room, context, mine, ("host",)), MOST_CONTEXT),
        parts_ms=times.parts_ms,
        otherwise=_otherwise(candidate, memory, request.context, mine) if by_place.get("device", mine) < mine else None,
    )


def _spare(candidate: Candidate, room: Room, context: int, batch: int, places: tuple[Place, ...]) -> int:
    """Bytes that are left over in the place that has the fewest."""
    memory = candidate.memory(context, batch)
    return min(room.limit(place) - memory.at(place) for place in places)


def _otherwise(candidate: Candidate, memory: Memory, context: int, batch: int) -> str | None:
    """How the engine would share out a device that is too small for a host pool of this size."""
    if not isinstance(candidate, MethodMemory):
        return None
    pool = memory.pages * candidate.blocks.block_bytes
    card = Card(candidate.shape, candidate.blocks, candidate.room, pool, context)
    config, _ = card.with_whole_layers(candidate.config, batch)
    layers = config.whole_layers
    if layers == "auto" or len(layers) == len(config.exact_layers):
        return None
    return (
        f"with a host pool for all {batch} the engine would keep {len(layers)} of {len(config.exact_layers)} exact "
        f"layers whole, run {card.requests(config, batch)} at once, and wait for the CPU in the other exact layers"
    )


class _Times(NamedTuple):
    step_ms: float | None = None
    tokens_per_s: float | None = None
    best_tokens_per_s: float | None = None
    parts_ms: Mapping[str, float] = {}


def _times(candidate: Candidate, request: Request, max_batch: int, fits: bool) -> _Times:
    """Of what fits; the simulator itself does not ask."""
    hardware = request.hardware
    if hardware is None or candidate.name not in simulated_methods():
        return _Times()

    def simulated(batch: int) -> StepTime | None:
        on_cpu = hardware.gpus * candidate.cpu_requests(request.context, -(-batch // hardware.gpus))
        if on_cpu and request.shape.full_layers < request.shape.layers:
            return None  # whole requests on the CPU are simulated for models with full attention alone
        return decode_step(
            hardware, request.shape, request.config, candidate.name, request.context, batch, cpu_rows=min(batch, on_cpu)
        )

    now = simulated(request.batch) if fits else None
    best = simulated(max_batch) if max_batch else None
    shown = now or best
    return _Times(
        step_ms=now.seconds * 1e3 if now else None,
        tokens_per_s=now.tokens_per_s if now else None,
        best_tokens_per_s=best.tokens_per_s if best else None,
        parts_ms={part: seconds * 1e3 for part, seconds in shown.parts.items()} if shown else {},
    )
