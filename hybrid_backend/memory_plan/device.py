"""Division of a GPU's memory between exact layers that stay on it whole, the requests that run at once, and frames."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hybrid_backend.config import HybridConfig
from hybrid_backend.errors import ConfigError
from hybrid_backend.host_memory import size_text
from hybrid_backend.memory_plan.blocks import Blocks
from hybrid_backend.memory_plan.footprint import MemoryRoom, MethodMemory, engine_items, largest
from hybrid_backend.methods import resolve_method
from hybrid_backend.model import ModelShape, spec_of

FILLED = 0.9
"""Share of the remaining bytes that become frames, because the engine's own memory is an estimate."""


@dataclass(frozen=True)
class DeviceChoice:
    """Configuration and number of requests that fit a GPU.

    Attributes:
        config: the configuration, with the whole layers and the frames that the GPU holds.
        requests: requests that run at once.
        messages: lines for the log that say what was lowered, and why.
    """

    config: HybridConfig
    requests: int
    messages: tuple[str, ...]


@dataclass(frozen=True)
class DevicePlan:
    """Division of one GPU's memory, over a host pool of a known size.

    Attributes:
        shape: the model, or one rank's part of it.
        blocks: KV blocks of that model.
        room: memory of the GPU and of the host.
        host_bytes: bytes of the host pool.
        longest: tokens of the longest sequence.
    """

    shape: ModelShape
    blocks: Blocks
    room: MemoryRoom
    host_bytes: int
    longest: int

    @property
    def pages(self) -> int:
        """Pages of the host pool."""
        return self.blocks.in_bytes(self.host_bytes) * self.blocks.pages_per_block

    def choose(self, config: HybridConfig, max_requests: int) -> DeviceChoice:
        """Choose whole layers, requests and frames, in this order.

        Args:
            config: the user's configuration.
            max_requests: requests that the user, or the engine's default, lets run at once.

        Raises:
            ConfigError: not even one request fits.
        """
        config, message = self.with_whole_layers(config.for_layers(self.shape.attention_windows), max_requests)
        messages = [] if message is None else [message]
        requests = self.requests(config, max_requests)
        first_bytes = self.needed(config, 1)
        request_text = size_text(self.needed(config, 2) - first_bytes)
        if not requests:
            raise ConfigError(
                f"frames_per_request: {config.frames_per_request}: one request needs {size_text(first_bytes)} of the "
                f"GPU's {size_text(self.room.limit('device'))} (its memory times --gpu-memory-utilization): "
                f"{request_text} for its frames, the remainder for weights, digests of the host pool and the engine; "
                "choose fewer frames or a smaller host_pool.size"
            )
        if requests < max_requests:
            messages.append(
                f"--max-num-seqs: {requests} requests run at once instead of {max_requests}: each takes {request_text} "
                "of the GPU; with a smaller frames_per_request there can be more"
            )
        return DeviceChoice(self.filled(config, requests), requests, tuple(messages))

    def needed(self, config: HybridConfig, batch: int) -> int:
        """Return the device's bytes that ``batch`` requests need, the engine's own included."""
        memory = MethodMemory(self.shape, self.blocks, self.room, config)
        engine = sum(item.bytes for item in engine_items(self.shape, self.room, batch) if item.place == "device")
        return engine + memory.windows(batch) + memory.gauges(self.pages, batch, self.longest)["hybrid_device_bytes"]

    def requests(self, config: HybridConfig, max_requests: int) -> int:
        """Return how many requests fit, at most ``max_requests``."""
        return largest(lambda batch: self.room.limit("device") - self.needed(config, batch), max_requests)

    def with_whole_layers(self, config: HybridConfig, max_requests: int) -> tuple[HybridConfig, str | None]:
        """Keep as many exact layers whole as leave memory for the longest sequences that the host pool holds.

        Returns:
            the configuration, and a line for the log about exact layers that do not fit.
        """
        model, method = spec_of(self.shape, self.longest), resolve_method(config.method)
        layers = method.layout(config, model, torch.device("cuda")).whole_layers
        if not layers or config.whole_layers != "auto":
            return config, None
        at_once = max(1, min(max_requests, self.pages // -(-self.longest // config.page_size)))
        for count in range(len(layers), -1, -1):
            chosen = config.model_copy(update={"whole_layers": layers[:count]})
            if count == 0 or self.requests(chosen, at_once) == at_once:
                break
        if count == len(layers):
            return chosen, None
        layer_text = size_text(self.pages * self.shape.page_bytes(config.page_size))
        return chosen, (
            f"exact_layers: the GPU holds {count} of {len(layers)} whole: each takes {layer_text} for the host pool's "
            f"pages, beside {at_once} requests of {self.longest} tokens. CPU workers attend the others, and the device "
            "waits for them: a smaller host_pool.size, or fewer exact_layers, would be faster"
        )

    def filled(self, config: HybridConfig, requests: int) -> HybridConfig:
        """Turn the remaining bytes into frames, at most one per page, unless the user chose their number."""
        method, model = resolve_method(config.method), spec_of(self.shape, self.longest)
        spare_bytes = int(FILLED * (self.room.limit("device") - self.needed(config, requests)))
        layout = method.layout(config, model, torch.device("cuda"))
        frame_bytes = len(layout.framed_layers(model)) * model.page_bytes(config.page_size)
        if not frame_bytes:
            return config
        return method.filled(config, min(layout.frames(requests) + spare_bytes // frame_bytes, self.pages), requests)
