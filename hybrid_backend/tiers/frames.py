"""The device tier's memory: frames for every running request, found by an index that it keeps while it runs."""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

from hybrid_backend.errors import EngineError
from hybrid_backend.tiers.mapped import mapped_zeros


def device_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros on the device tier. Where that is the CPU, the system maps them as they are first written, in huge pages: a
    server that starts does not wait for frames that it may never fill.
    """
    if device.type != "cpu" or 0 in shape:
        return torch.zeros(shape, dtype=dtype, device=device)
    zeros, memory = mapped_zeros(shape, dtype)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return zeros


class FramePool:
    """Indices ``0 .. requests``, handed out by request id, never by batch row; index i owns the frames ``i + n *
    requests`` of every layer, ``size`` of them and in some layers more (`TierLayout.layer_frames`). Frame ids are the
    same in every layer, the pages in them are not. Where requests share all frames (`TierLayout.shares_frames`) the
    maps alone say whose a frame is, and ``size`` is a mean.

    ``layers[l]``: ``[frames, kv_heads, 2, page_size, head_dim]``; empty where the device tier reads the host pool
    itself.

    ``generation[i]`` grows each time index i is released: work in flight remembers the generation that it was started
    under and is dropped when that is no longer the current one.
    """

    def __init__(self, layers: dict[int, Tensor], requests: int, size: int, device: torch.device) -> None:
        self.layers = layers
        self.size = size
        self.generation = torch.zeros(requests, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._free = list(range(requests - 1, -1, -1))
        self._index_of: dict[str, int] = {}

    @property
    def requests(self) -> int:
        """Requests that may run at once."""
        return len(self.generation)

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers.values())

    @property
    def running(self) -> int:
        """Requests that have an index."""
        return len(self._index_of)

    def ids(self, indices: Tensor, slots: Tensor) -> Tensor:
        """The frames that the indices own, by their places among those: both are broadcast."""
        return indices + slots * self.requests

    def index(self, request_id: str) -> int | None:
        return self._index_of.get(request_id)

    def indices(self, request_ids: list[str]) -> list[int]:
        """Of requests that have one."""
        return [self._index_of[request_id] for request_id in request_ids]

    def allocate(self, request_id: str) -> int:
        """An index for a request that has none. The engine never runs more requests than there are."""
        if not self._free:
            raise EngineError(
                f"no frames for request {request_id}: {self.running} running requests hold all of them; the engine "
                "runs more requests than max_num_seqs"
            )
        index = self._free.pop()
        self._index_of[request_id] = index
        return index

    def release(self, request_id: str) -> int | None:
        """Free the index of a request that ended, was aborted or was preempted; None if it had none."""
        index = self._index_of.pop(request_id, None)
        if index is not None:
            self.generation[index] += 1
            self._free.append(index)
        return index
