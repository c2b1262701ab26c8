"""Copies of new K and V of prompt chunks from the device to host pages, in parallel with the step."""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_backend.kernels.operations import Operations
from hybrid_backend.tiers.host_pool import HostPool
from hybrid_backend.tiers.side_stream import side_stream

_MAX_PENDING = 2  # Layers whose K and V wait on the device: while one is copied, the next is computed.


class WriteBack:
    """Writes new K and V of prompt chunks to the host pool, on a GPU asynchronously in a separate CUDA stream.

    A GPU writes from a copy of K and V, because the engine reuses the originals' memory as soon as the layer has run.
    One launch of few thread blocks (`Operations.store_tokens`) leaves the other processors to the step. A CPU writes
    synchronously, without a copy.

    A reader of host pages that the running step writes must call `join` first. The step calls `join` at its end.
    """

    def __init__(self, host: HostPool, operations: Operations, device: torch.device) -> None:
        self._host, self._operations = host, operations
        self._writing = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._pending: list[tuple[torch.cuda.Event, Tensor, Tensor]] = []

    def store(self, layer: int, k: Tensor, v: Tensor, pages: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        """Begin to write K and V of new tokens to host pages.

        Args:
            layer: layer of the model.
            k: ``[tokens, kv_heads, head_dim]``, any row stride.
            v: as ``k``.
            pages: ``[tokens]`` int32 host page of each token, -1 for none; must stay allocated until `join`.
            offsets: ``[tokens]`` offset of each token in its page; must stay allocated until `join`.

        Returns:
            ``k`` and ``v``, or the copies on the device, which the layer can read until its end.
        """
        view = self._host.views[layer]
        if self._writing is None:
            self._operations.append_tokens(k, v, view, pages, offsets)
            return k, v
        while len(self._pending) >= _MAX_PENDING:
            self._await_oldest()
        k, v = (x.clone(memory_format=torch.contiguous_format) for x in (k, v))
        with side_stream(self._writing):
            self._operations.store_tokens(k, v, view, pages, offsets)
            self._pending.append((self._writing.record_event(), k, v))
        return k, v

    def join(self) -> None:
        """Make the current CUDA stream wait until all tokens are in their host pages."""
        while self._pending:
            self._await_oldest()

    def _await_oldest(self) -> None:
        """Make the current stream wait for the oldest write, and free the copies that the write read."""
        torch.cuda.current_stream().wait_event(self._pending.pop(0)[0])
