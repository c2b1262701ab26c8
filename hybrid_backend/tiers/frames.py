"""Frames of the device tier, and the request index by which a running request owns its frames."""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

from hybrid_backend.errors import EngineError
from hybrid_backend.tiers.mapped import mapped_zeros


def device_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros on the device tier.

    A CPU's kernel allocates huge pages at the first write, so that start-up does not wait for all of the memory.
    """
    if device.type != "cpu" or 0 in shape:
        return torch.zeros(shape, dtype=dtype, device=device)
    zeros, memory = mapped_zeros(shape, dtype)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return zeros


class FramePool:
    """Frames of all layers, and the request indices ``0 .. requests - 1`` that own them.

    A request keeps its index while it runs, whatever its batch row. Index i owns the frames ``i + n * requests`` of
    each layer, with n from 0 to ``size - 1``; layers in `TierLayout.layer_frames` have more. Frame ids are the same in
    all layers, but a frame may hold another page in each layer. If requests share all frames
    (`TierLayout.shares_frames`), the residency maps alone tell which request uses a frame.

    Attributes:
        layers: per layer ``[frames, kv_heads, 2, page_size, head_dim]``; empty if the device tier is the host pool.
        size: frames of each request; the mean if requests share all frames.
        generation: ``[requests]`` int64, increased when an index is released. A copy notes the generation at its start,
            and is dropped if the generation has changed at its end.
    """

    def __init__(self, layers: dict[int, Tensor], requests: int, size: int, device: torch.device) -> None:
        self.layers = layers
        self.size = size
        self.generation = torch.zeros(requests, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._free = list(range(requests - 1, -1, -1))
        self._index_of: dict[str, int] = {}
        self._reserved: dict[str, int] = {}  # Indices of running prompts, by request.
        self._lent: dict[int, str] = {}  # Free indices whose frames a prompt uses, and the prompt's request.

    @property
    def requests(self) -> int:
        """Most requests that can run at once."""
        return len(self.generation)

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers.values())

    @property
    def running(self) -> int:
        """Number of requests that have an index."""
        return len(self._index_of)

    def ids(self, indices: Tensor, slots: Tensor) -> Tensor:
        """Return the id of frame number ``slots`` of the requests ``indices``. The arguments are broadcast."""
        return indices + slots * self.requests

    def index(self, request_id: str) -> int | None:
        """Return the index of a request; None for a request without one."""
        return self._index_of.get(request_id)

    def indices(self, request_ids: list[str]) -> list[int]:
        """Return the indices of requests that all have one."""
        return [self._index_of[request_id] for request_id in request_ids]

    def allocate(self, request_id: str) -> int:
        """Give a request an index and return the index. Raise EngineError if all indices are in use."""
        index = self._reserved.pop(request_id, None)
        if index is None:
            index = self._take()
        if index is None and self._reserved:
            index = self._reserved.pop(next(iter(self._reserved)))  # That prompt goes on without frames.
        if index is None:
            raise EngineError(
                f"no frames for request {request_id}: {self.running} running requests hold all of them; the engine "
                "runs more requests than max_num_seqs"
            )
        self._index_of[request_id] = index
        return index

    def reserve(self, request_id: str) -> int | None:
        """Return the index that a request will decode with, the same one until `release`; None if none is free."""
        if request_id not in self._reserved:
            index = self._take()
            if index is None:
                return None
            self._reserved[request_id] = index
        return self._reserved[request_id]

    def _take(self) -> int | None:
        """Take a free index, one that is not lent if possible, else the one that was lent first."""
        index = next((index for index in reversed(self._free) if index not in self._lent), None)
        index = next(iter(self._lent), None) if index is None else index
        if index is not None:
            self._free.remove(index)
            self._lent.pop(index, None)
        return index

    def lend(self, request_id: str) -> int | None:
        """Lend the frames of a free index to a running prompt; None if no index is free."""
        index = next((index for index in self._free if index not in self._lent), None)
        if index is not None:
            self._lent[index] = request_id
        return index

    def lent(self, request_id: str) -> set[int]:
        """Return the indices that are lent to a running prompt. An index that a request has taken is not lent."""
        return {index for index, borrower in self._lent.items() if borrower == request_id}

    def return_lent(self, request_id: str) -> None:
        """End the loans of a running prompt."""
        for index in self.lent(request_id):
            del self._lent[index]

    def release(self, request_id: str) -> int | None:
        """Free and return the index of a request that ended, was aborted or was preempted; None for no index.

        A reserved index is freed and not returned, because its request has not decoded.
        """
        index = self._index_of.pop(request_id, None)
        if index is not None:
            self.generation[index] += 1
        freed = self._reserved.pop(request_id, None) if index is None else index
        if freed is not None:
            self._free.append(freed)
        return index
