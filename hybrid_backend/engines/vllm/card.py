"""A GPU's memory, shared out among exact layers that stay on it whole, the requests that run at once and their frames.

Sizes are the planner's (`footprint`); nothing of vLLM is imported.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hybrid_backend.config import HybridConfig
from hybrid_backend.engines.vllm.blocks import Blocks
from hybrid_backend.engines.vllm.footprint import MethodMemory, Room, engine_items, largest
from hybrid_backend.host_memory import size_text
from hybrid_backend.methods import resolve_method
from hybrid_backend.model import ModelShape, spec_of

FILLED = 0.9
"""Of the room that is left: what the engine takes is estimated."""


@dataclass(frozen=True)
class Card:
    """A GPU's memory, shared out."""

    shape: ModelShape
    blocks: Blocks
    room: Room
    host_bytes: int  # of the host pool
    longest: int  # tokens of a sequence

    @property
    def pages(self) -> int:
        return self.blocks.in_bytes(self.host_bytes)

    def needed(self, config: HybridConfig, batch: int) -> int:
        memory = MethodMemory(self.shape, self.blocks, self.room, config)
        engine = sum(item.bytes for item in engine_items(self.shape, self.room, batch) if item.place == "device")
        return engine + memory.windows(batch) + memory.gauges(self.pages, batch, self.longest)["hybrid_device_bytes"]

    def requests(self, config: HybridConfig, asked: int) -> int:
        """That fit."""
        return largest(lambda batch: self.room.limit("device") - self.needed(config, batch), asked)

    def with_whole_layers(self, config: HybridConfig, asked: int) -> tuple[HybridConfig, str | None]:
        """As many of the exact layers whole as leave room for the longest sequences that the host pool holds, and what
        to say of those that do not fit."""
        model, method = spec_of(self.shape, self.longest), resolve_method(config.method)
        wanted = method.layout(config, model, torch.device("cuda")).whole_layers
        if not wanted or config.whole_layers != "auto":
            return config, None
        at_once = max(1, min(asked, self.pages // -(-self.longest // config.page_size)))
        for count in range(len(wanted), -1, -1):
            found = config.model_copy(update={"whole_layers": wanted[:count]})
            if count == 0 or self.requests(found, at_once) == at_once:
                break
        if count == len(wanted):
            return found, None
        each = self.pages * self.shape.page_bytes(config.page_size)
        return found, (
            f"exact_layers: the GPU holds {count} of {len(wanted)} whole: each takes {size_text(each)} for the "
            f"host pool's pages, beside {at_once} requests of {self.longest} tokens. CPU workers attend the others, "
            "and the device waits for them: a smaller host_pool.size, or fewer exact_layers, would be faster"
        )

    def filled(self, config: HybridConfig, requests: int) -> HybridConfig:
        """With frames of what is left, where their number is left to us: not more than there are pages."""
        method, model = resolve_method(config.method), spec_of(self.shape, self.longest)
        room = int(FILLED * (self.room.limit("device") - self.needed(config, requests)))
        layout = method.layout(config, model, torch.device("cuda"))
        frames = len(layout.framed_layers(model)) * model.page_bytes(config.page_size)
        if not frames:
            return config
        return method.filled(config, min(layout.frames(requests) + room // frames, self.pages), requests)
