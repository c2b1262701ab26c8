"""The plan: memory and time of each method and of the stock engine."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import torch

from hybrid_backend.config import HybridConfig
from hybrid_backend.errors import ConfigError
from hybrid_backend.hardware import Hardware
from hybrid_backend.hardware.times import LayerTimes
from hybrid_backend.memory_plan.blocks import Blocks
from hybrid_backend.memory_plan.device import DevicePlan
from hybrid_backend.memory_plan.footprint import (
    Candidate,
    Item,
    Memory,
    MemoryRoom,
    MethodMemory,
    Place,
    StockMemory,
    default_chunk,
    largest,
)
from hybrid_backend.methods import method_names, resolve_method, with_method
from hybrid_backend.methods.apex.rule import hidden_tokens
from hybrid_backend.model import ModelShape
from hybrid_backend.tools.plan.simulate import StepTime, decode_step, simulated_methods

RamSource = Literal["asked", "machine", "free"]
MOST_BATCH, MOST_CONTEXT = 2**16, 2**27
"""Limits of the search for the largest batch and context."""
BF16_EMULATION = 5.0
"""Ratio of a prompt's time in emulated bf16 to that in fp32 (measured: docs/start/cpu.md, first tokens)."""


@dataclass(frozen=True)
class Request:
    """Input of a plan. Sizes are in bytes; ``batch`` and ``ram`` are those of all devices together.

    Attributes:
        gpu_mem: memory of one device. 0: there is no device; None: the machine's.
        ram: host memory. None: the machine's.
        hardware: rates of the machine; None if they are not known.
        machine: name of a machine without rates.
        methods: methods to plan; empty for those that serve on the device.
        all_methods: on a CPU plan those too that serve there in tests alone.
        ram_source: where ``ram`` comes from.
    """

    shape: ModelShape
    config: HybridConfig
    context: int
    batch: int
    gpu_mem: int | None
    ram: int | None
    hardware: Hardware | None = None
    machine: str | None = None
    methods: tuple[str, ...] = ()
    all_methods: bool = False
    chunk_tokens: int | None = None
    device_overhead: int | None = None
    host_overhead: int | None = None
    ram_source: RamSource = "asked"


@dataclass(frozen=True)
class Row:
    """Plan of one method. Memory is that of one device and its share of the host; batches are those of all devices.

    Attributes:
        refused: reason why the configuration rules the method out.
        why_not: reason why the batch does not fit.
        pages: pages of the KV pool.
        max_batch: largest batch at the planned context.
        max_context: longest context at the planned batch, as far as memory goes.
        step_ms: milliseconds of a step with the planned batch.
        best_tokens_per_s: tokens per second with ``max_batch``.
        device_batch: largest batch by device memory alone; None without a device.
        host_batch: largest batch by host memory alone.
        host_context: longest context by host memory alone.
        parts_ms: parts of the simulated step, with ``max_batch`` if the planned batch does not fit.
        otherwise: what the engine does if the device does not hold all exact layers whole.
        exact_tokens: longest context that a decode step attends whole; None: any.
        first_device_bytes: device memory of one sequence.
        first_host_bytes: host memory of one sequence.
    """

    name: str
    refused: str | None = None
    fits: bool = False
    why_not: str | None = None
    device_bytes: int = 0
    host_bytes: int = 0
    pages: int = 0
    items: tuple[Item, ...] = ()
    max_batch: int = 0
    max_context: int = 0
    step_ms: float | None = None
    tokens_per_s: float | None = None
    best_tokens_per_s: float | None = None
    device_batch: int | None = None
    host_batch: int | None = None
    host_context: int = 0
    parts_ms: Mapping[str, float] = field(default_factory=dict)
    otherwise: str | None = None
    exact_tokens: int | None = None
    first_device_bytes: int = 0
    first_host_bytes: int = 0


@dataclass(frozen=True)
class Plan:
    """All rows and their input. Its fields are the keys of the JSON (docs/reference/plan.md).

    Attributes:
        configured: the configuration's own method.
        device_limit: bytes that the engine may take of one device.
        host_limit: bytes that one device's server may take of the host.
        host_limit_source: where that limit comes from: asked for, all that ``--machine`` has, or free on this machine.
        has_times: the rates of the machine are known.
        prompt_s: seconds to compute a prompt of ``context`` tokens on a CPU, in the model's dtype; None on a GPU, or
            without rates.
        emulates_bf16: the CPU emulates products in half precision, which then take `BF16_EMULATION` times as long.
    """

    model: ModelShape
    machine: str | None
    configured: str
    devices: int
    context: int
    batch: int
    page_size: int
    block_bytes: int
    device_limit: int
    host_limit: int
    rows: tuple[Row, ...]
    host_limit_source: RamSource = "asked"
    has_times: bool = True
    prompt_s: float | None = None
    emulates_bf16: bool = False

    def row(self, name: str) -> Row:
        """Return the entry of the plan for the method ``name``."""
        return next(row for row in self.rows if row.name == name)


def make_plan(request: Request) -> Plan:
    """Plan each method.

    Raises:
        ConfigError: a number out of range, an unknown method, an unknown size of the machine, or a configuration that
            no method accepts.
    """
    for key, value in (("context", request.context), ("batch", request.batch)):
        if value < 1:
            raise ConfigError(f"--{key}: got {value}, expected an integer >= 1")
    devices = request.hardware.gpus if request.hardware else 1
    room = memory_room(request, devices)
    stock = StockMemory(request.shape, Blocks.of(request.shape, request.config.page_size), room)
    request = replace(request, shape=replace(request.shape, kv_dtype=request.config.kv_dtype))
    blocks = Blocks.of(request.shape, request.config.page_size)
    device = torch.device("cpu" if room.on_host else "cuda")
    settled = settled_config(request, device)
    request = replace(request, config=settled)
    if device.type != "cpu" and settled.kv_dtype != "auto" and any(request.shape.attention_windows):
        raise ConfigError(
            f"kv_dtype: {settled.kv_dtype} does not serve {request.shape.name} on a GPU, which keeps its layers with a "
            "sliding window in the engine's own pages; write kv_dtype: auto"
        )
    candidates: list[Candidate] = [stock]
    for name in request.methods or _planned_methods(settled.method, device, request.all_methods):
        resolve_method(name)
        config = request.config.model_copy(update={"method": name})
        candidates.append(MethodMemory(request.shape, blocks, room, config))
    rows = tuple(_row(candidate, request, room, devices) for candidate in candidates)
    refusals = {row.name: row.refused or "" for row in rows[1:]}
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
        block_bytes=blocks.page_bytes,
        device_limit=room.limit("device"),
        host_limit=room.limit("host"),
        rows=rows,
        host_limit_source=request.ram_source,
        has_times=request.hardware is not None,
        prompt_s=_prompt_seconds(request),
        emulates_bf16=request.hardware is not None and request.hardware.emulates_bf16,
    )


def _with_native_kernels(config: HybridConfig) -> HybridConfig:
    """Return ``config`` with the kernels that ``auto`` selects on a CPU server, whatever this machine runs."""
    if config.workers.kernel != "auto":
        return config
    return config.model_copy(update={"workers": config.workers.model_copy(update={"kernel": "native"})})


def settled_config(request: Request, device: torch.device) -> HybridConfig:
    """Return the configuration with the method and the exact layers that ``auto`` stands for on this device."""
    shape, settled = request.shape, request.config
    if request.hardware is not None and request.hardware.device == "cpu":
        settled = _with_native_kernels(settled)
    settled = with_method(settled, shape.heads, shape.kv_heads, shape.head_dim, device)
    return settled.for_layers(shape.attention_windows)


def _prompt_seconds(request: Request) -> float | None:
    """Return the seconds that a CPU takes for a prompt, which every method computes densely; None on a GPU."""
    hardware, shape, tokens = request.hardware, request.shape, request.context
    if hardware is None or hardware.device != "cpu":
        return None
    times = LayerTimes.of(hardware, shape)
    weights = 2.0 * shape.layers * shape.layer_params * tokens / hardware.flops_achieved
    attention = shape.full_layers * times.prompt_attention(tokens * (tokens + 1) / 2)
    is_emulated = hardware.emulates_bf16 and shape.dtype != "float32"
    return (weights + attention) * (BF16_EMULATION if is_emulated else 1.0)


def _planned_methods(configured: str, device: torch.device, all_methods: bool) -> list[str]:
    """Name the methods that serve on the device, and the configured one, so that its refusal is shown.

    On a CPU these are the methods that attend pages in place; others copy pages from RAM to RAM there, for tests.
    """
    if device.type != "cpu":
        return [name for name in method_names() if name == configured or not resolve_method(name).attends_in_place]
    return [name for name in method_names() if all_methods or name == configured or resolve_method(name).suits_cpu]


def serve_flags(row: Row, plan: Plan) -> list[str]:
    """Return the flags of `hybrid serve` and of vLLM with which the runtime allocates what the row says."""
    return [
        f"--set=method={row.name}",
        f"--set=host_pool.size={_pool_size(row.pages * plan.block_bytes, plan.block_bytes)}",
        "--",
        "--max-num-seqs",
        str(-(-plan.batch // plan.devices)),
        "--max-model-len",
        str(plan.context),
        "--dtype",
        plan.model.dtype,
    ]


def _pool_size(least: int, block_bytes: int) -> str:
    """Write a pool's size in the largest unit of which a whole number holds ``least`` bytes and no block more."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        count = -(-least // factor)
        if count * factor < least + block_bytes:
            return f"{count}{unit}"
    return str(least)


def memory_room(request: Request, devices: int) -> MemoryRoom:
    """Return the memory of one of ``devices`` devices, and its share of the host."""
    hardware, gpu_mem, ram = request.hardware, request.gpu_mem, request.ram
    if gpu_mem is None:
        if hardware is None:
            raise ConfigError("--gpu-mem: is missing; give --gpu-mem 24GiB (0: no device) or --machine NAME")
        gpu_mem = 0 if hardware.device == "cpu" else int(hardware.device_memory_bytes.value)
    if ram is None:
        if hardware is None:
            raise ConfigError("--ram: is missing; give --ram 128GiB or --machine NAME")
        ram = int(hardware.host_ram_bytes.value)
    overheads = {"device_overhead": request.device_overhead, "host_overhead": request.host_overhead}
    room = MemoryRoom(gpu_mem, ram // devices, request.chunk_tokens or default_chunk(gpu_mem))
    return replace(room, **{name: size for name, size in overheads.items() if size is not None})


def _row(candidate: Candidate, request: Request, room: MemoryRoom, devices: int) -> Row:
    refused = candidate.refusal() if isinstance(candidate, MethodMemory) else None
    if refused is not None:
        return Row(candidate.name, refused=refused)
    exact = (
        resolve_method(candidate.name).exact_tokens(request.config) if candidate.name in method_names() else math.inf
    )
    batch = -(-request.batch // devices)
    memory, first = candidate.memory(request.context, batch), candidate.memory(request.context, 1)
    why_not = memory.missing(room)
    places: tuple[Place, ...] = ("host",) if room.on_host else ("device", "host")
    batches = {
        place: largest(partial(_spare, candidate, room, request.context, places=(place,)), MOST_BATCH)
        for place in places
    }
    max_batch = devices * min(batches.values())
    step = None if why_not else _simulated(candidate, request, request.batch)
    best = _simulated(candidate, request, max_batch) if max_batch else None
    shown = step or best
    return Row(
        name=candidate.name,
        fits=why_not is None,
        why_not=why_not,
        device_bytes=memory.at("device"),
        host_bytes=memory.at("host"),
        pages=memory.pages,
        items=memory.items,
        max_batch=max_batch,
        max_context=largest(lambda context: _spare(candidate, room, context, batch, places), MOST_CONTEXT),
        step_ms=step.seconds * 1e3 if step else None,
        tokens_per_s=step.tokens_per_s if step else None,
        best_tokens_per_s=best.tokens_per_s if best else None,
        device_batch=devices * batches["device"] if "device" in batches else None,
        host_batch=devices * batches["host"],
        host_context=largest(lambda context: _spare(candidate, room, context, batch, ("host",)), MOST_CONTEXT),
        parts_ms={part: seconds * 1e3 for part, seconds in shown.part_seconds.items()} if shown else {},
        otherwise=_otherwise(candidate, memory, request.context, batch)
        if batches.get("device", batch) < batch
        else None,
        exact_tokens=None if math.isinf(exact) else int(exact),
        first_device_bytes=first.at("device"),
        first_host_bytes=first.at("host"),
    )


def _spare(candidate: Candidate, room: MemoryRoom, context: int, batch: int, places: tuple[Place, ...]) -> int:
    """Return the free bytes of the device or the host, whichever has fewer."""
    memory = candidate.memory(context, batch)
    return min(room.limit(place) - memory.at(place) for place in places)


def _otherwise(candidate: Candidate, memory: Memory, context: int, batch: int) -> str | None:
    """Describe how the engine divides a device that is too small for a host pool of this size."""
    if not isinstance(candidate, MethodMemory):
        return None
    card = _card(candidate, memory, context)
    config, _ = card.with_whole_layers(candidate.config, batch)
    layers = config.whole_layers
    if layers == "auto" or len(layers) == len(config.exact_layers):
        return None
    return (
        f"with a host pool for all {batch} the engine would keep {len(layers)} of {len(config.exact_layers)} exact "
        f"layers whole, run {card.requests(config, batch)} at once, and wait for the CPU in the other exact layers"
    )


def _card(candidate: MethodMemory, memory: Memory, context: int) -> DevicePlan:
    """Return the division of a device beside the host pool of ``memory``."""
    pool = memory.pages * candidate.blocks.page_bytes
    return DevicePlan(candidate.shape, candidate.blocks, candidate.room, pool, context)


def _requests_on_cpu(candidate: Candidate, context: int, batch: int) -> int:
    """Count the requests that the CPU attends while the device holds as many as its memory has room for."""
    requests = candidate.cpu_requests(context, batch)
    if not requests or not isinstance(candidate, MethodMemory) or candidate.room.on_host:
        return requests
    card = _card(candidate, candidate.memory(context, batch), context)
    return replace(candidate, config=card.filled(candidate.config, batch)).cpu_requests(context, batch)


def _simulated(candidate: Candidate, request: Request, batch: int) -> StepTime | None:
    """Simulate a step; None if the machine's rates are unknown or the simulator does not know the method."""
    hardware = request.hardware
    if hardware is None or candidate.name not in simulated_methods():
        return None
    cpu_rows = hardware.gpus * _requests_on_cpu(candidate, request.context, -(-batch // hardware.gpus))
    if cpu_rows and request.shape.full_layers < request.shape.layers:
        return None  # Requests of apex on the CPU are simulated for models with full attention only.
    shape, config, cpu_rows = candidate.shape, request.config, min(batch, cpu_rows)
    device_rows, gpus = batch - cpu_rows, hardware.gpus
    if cpu_rows and device_rows and hardware.device == "gpu":
        # apex starts no request that would slow down those on the device (`Apex.room`).
        times, rows = LayerTimes.of(hardware, shape), -(-device_rows // gpus)
        hidden = hidden_tokens(times, shape.layers, rows, rows * request.context, may_overlap=True)
        cpu_rows = min(cpu_rows, gpus * int(hidden // request.context))
    rows = device_rows + cpu_rows
    return decode_step(hardware, shape, config, candidate.name, request.context, rows, cpu_rows=cpu_rows)
