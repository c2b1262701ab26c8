"""Capacity of a server: blocks of KV, requests that run at once, tokens of a step, and frames."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from hybrid_backend.config import HybridConfig
from hybrid_backend.hardware import Hardware
from hybrid_backend.memory_plan.blocks import NULL_BLOCKS, Blocks
from hybrid_backend.memory_plan.device import DevicePlan
from hybrid_backend.memory_plan.footprint import MemoryRoom, MethodMemory, engine_items
from hybrid_backend.methods import resolve_method
from hybrid_backend.model import ModelShape, spec_of
from hybrid_backend.tools.plan.report import Request, make_plan, memory_room, settled_config

GIB = 2**30


@dataclass(frozen=True)
class Server:
    """The server of one device.

    Attributes:
        method: ``stock`` or the name of a method.
        hardware: the machine, all devices.
        shape: the model.
        config: configuration with the frames and whole layers of this device.
        blocks: KV blocks; a hybrid server counts the layers with full attention alone.
        pool_blocks: blocks that requests can take.
        max_requests: requests that run at once (``--max-num-seqs``).
        chunk_tokens: tokens of one step (``--max-num-batched-tokens``).
        in_flight: tokens that are scheduled and not yet settled.
        frame_tokens: tokens in the frames of one request, per layer.
        framed_layers: layers with full attention that are not whole.
        whole_layers: layers whose pages are all on the device.
        staging_tokens: tokens of a staging buffer.
    """

    method: str
    hardware: Hardware
    shape: ModelShape
    config: HybridConfig
    blocks: Blocks
    pool_blocks: int
    max_requests: int
    chunk_tokens: int
    in_flight: int
    frame_tokens: int = 0
    framed_layers: int = 0
    whole_layers: int = 0
    staging_tokens: int = 0

    @property
    def is_hybrid(self) -> bool:
        """True if the KV pool is in host memory."""
        return self.method != "stock"

    def blocks_of(self, tokens: int) -> int:
        """Count the blocks of a request with ``tokens`` tokens in its KV cache."""
        return self.blocks.per_sequence(tokens, self.in_flight)

    def holds(self, tokens: int) -> bool:
        """Tell whether a request of ``tokens`` tokens fits at all."""
        return self.max_requests > 0 and self.blocks_of(tokens) <= self.pool_blocks


def step_tokens(hardware: Hardware) -> int:
    """Return vLLM 0.32's ``--max-num-batched-tokens`` of a server (engine/arg_utils.py, ``get_batch_defaults``)."""
    size = hardware.device_memory_bytes.value
    if size >= 160 * GIB:
        return 16384
    return 8192 if size >= 70 * GIB and "a100" not in hardware.name.lower() else 2048


def default_requests(hardware: Hardware) -> int:
    """Return vLLM 0.32's ``--max-num-seqs`` of a server, by the same rule."""
    return 1024 if step_tokens(hardware) > 2048 else 256


def servers(request: Request, method: str, max_requests: int | None) -> tuple[Server, Server]:
    """Return the stock server and the server of ``method`` on one device.

    Args:
        request: machine and model. ``context`` is the longest sequence that either server must hold.
        method: the method.
        max_requests: requests that run at once on one device, at most; None: the engine's default.
    """
    hardware = request.hardware
    assert hardware is not None
    most = default_requests(hardware) if max_requests is None else max_requests
    request = replace(request, chunk_tokens=step_tokens(hardware), batch=hardware.gpus)
    room = memory_room(request, hardware.gpus)
    blocks = Blocks.of(request.shape, request.config.page_size)
    engine = sum(item.bytes for item in engine_items(request.shape, room, 1) if item.place == "device")
    pool = max(0, blocks.in_bytes(max(0, room.limit("device") - engine)) - NULL_BLOCKS)
    stock = Server(
        "stock", hardware, request.shape, request.config, blocks, pool, most, room.chunk_tokens, room.in_flight
    )
    return stock, _hybrid(stock, request, method, room)


def _hybrid(stock: Server, request: Request, method: str, room: MemoryRoom) -> Server:
    """Return the server of ``method``: its pool holds as many of the longest sequences as it runs at once."""
    planned = make_plan(replace(request, methods=(method,))).row(method)
    config = settled_config(request, torch.device("cuda")).model_copy(update={"method": method})
    server = replace(stock, method=method, config=config, blocks=stock.blocks.offloaded, pool_blocks=0, max_requests=0)
    most = min(stock.max_requests, planned.max_batch // stock.hardware.gpus)
    if not most:
        return server
    memory = MethodMemory(request.shape, stock.blocks, room, config)
    pages = memory.memory(request.context, most).pages
    card = DevicePlan(request.shape, stock.blocks, room, pages * stock.blocks.page_bytes, request.context)
    choice = card.choose(config, most)
    model = spec_of(request.shape, request.context)
    layout = resolve_method(method).layout(choice.config, model, torch.device("cuda"))
    return replace(
        server,
        config=choice.config,
        pool_blocks=pages // stock.blocks.pages_per_block - NULL_BLOCKS,
        max_requests=choice.requests,
        frame_tokens=layout.frames_of(choice.requests) * config.page_size,
        framed_layers=len(layout.framed_layers(model)),
        whole_layers=len(layout.whole_layers),
        staging_tokens=max(1, layout.buffer_tokens(config.page_size, pages)),
    )
