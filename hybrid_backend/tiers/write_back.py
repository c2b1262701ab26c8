"""Prompts' tokens on their way from the device to their host pages, beside the step."""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_backend.kernels.operations import Operations
from hybrid_backend.tiers.beside import beside
from hybrid_backend.tiers.host_pool import HostPool

_UNDER_WAY = 2  # layers whose K and V wait on the device: while one crosses the bus, the next is computed


class WriteBack:
    """On a GPU one launch of few programs (`Operations.store_tokens`) in a stream of its own, from copies that stay
    where they are: the engine reuses its memory, which a graph's pieces share, as soon as the layer has run. A host
    writes at once.

    Whoever reads host pages that the open step writes calls `join` before; the step's end does.
    """

    def __init__(self, host: HostPool, operations: Operations, device: torch.device) -> None:
        self._host, self._operations = host, operations
        self._writing = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._under_way: list[tuple[torch.cuda.Event, Tensor, Tensor]] = []

    def store(self, layer: int, k: Tensor, v: Tensor, pages: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        """Begin to write the tokens of a layer.

        Args:
            k, v: ``[tokens, kv_heads, head_dim]``, any row stride.
            pages, offsets: ``[tokens]`` host page (int32, -1: none) and offset in it; they must live until `join`.

        Returns:
            ``k`` and ``v`` as they lie on the device for the rest of the layer.
        """
        view = self._host.views[layer]
        if self._writing is None:
            self._operations.append_tokens(k, v, view, pages, offsets)
            return k, v
        while len(self._under_way) >= _UNDER_WAY:
            self._await()
        k, v = (x.clone(memory_format=torch.contiguous_format) for x in (k, v))
        with beside(self._writing):
            self._operations.store_tokens(k, v, view, pages, offsets)
            self._under_way.append((self._writing.record_event(), k, v))
        return k, v

    def join(self) -> None:
        """What the current stream does from here on finds all tokens in their pages."""
        while self._under_way:
            self._await()

    def _await(self) -> None:
        """The oldest one; its copies may then be freed, to be reused in the current stream."""
        torch.cuda.current_stream().wait_event(self._under_way.pop(0)[0])
