"""The device tier's memory: a fixed region of slots for every running request."""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_backend.errors import EngineError
from hybrid_backend.step import ModelSpec


def slot_shape(model: ModelSpec, page_size: int, slots: int) -> tuple[int, ...]:
    """Of one layer's slots."""
    return (slots, model.num_kv_heads, 2, page_size, model.head_dim)


class SlotPool:
    """Regions of ``slots_per_request`` slots, handed out by request id, never by batch row.

    Slot ids are the same in every layer; region ``r`` owns the slots ``r * size .. (r + 1) * size``. With
    ``separate`` tiers a slot holds a copy of a page; with ``unified`` tiers (the device tier is the host itself) it
    is book-keeping only and the page is read in place.

    ``generation[r]`` grows each time region r is released: work in flight remembers the generation that it was
    started under and is dropped when it no longer matches.
    """

    def __init__(
        self,
        model: ModelSpec,
        page_size: int,
        regions: int,
        size: int,
        layers: list[int],
        separate: bool,
        device: torch.device,
    ) -> None:
        self.size = size
        self.generation = torch.zeros(regions, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._free = list(range(regions - 1, -1, -1))
        self._region_of: dict[str, int] = {}
        shape = slot_shape(model, page_size, regions * size)
        self.layers: dict[int, Tensor] = (
            {layer: torch.zeros(shape, dtype=model.dtype, device=device) for layer in layers} if separate else {}
        )

    @property
    def separate(self) -> bool:
        return bool(self.layers)

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers.values())

    @property
    def regions_in_use(self) -> int:
        return len(self._region_of)

    def region(self, request_id: str) -> int | None:
        return self._region_of.get(request_id)

    def allocate(self, request_id: str) -> int:
        """The request's region. The engine never runs more requests than there are regions."""
        if not self._free:
            raise EngineError(
                f"no free slot region for request {request_id}: {self.regions_in_use} running requests hold all; "
                "the engine runs more requests than max_num_seqs"
            )
        region = self._free.pop()
        self._region_of[request_id] = region
        return region

    def release(self, request_id: str) -> int | None:
        """Free the region of a request that ended, was aborted or was preempted; None if it had none."""
        region = self._region_of.pop(request_id, None)
        if region is not None:
            self.generation[region] += 1
            self._free.append(region)
        return region
