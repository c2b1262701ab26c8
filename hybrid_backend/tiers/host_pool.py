"""The complete KV cache in host memory: the engine's own block pool, page by page."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hybrid_backend.errors import EngineError
from hybrid_backend.kernels.kv_format import KvFormat


class HostPool:
    """Per-layer views of the engine's KV memory.

    A layer has the layout of `KvFormat`. Page ids are the engine's block ids. ``layers``: as the host sees them;
    ``views``: as the device tier does.
    """

    def __init__(self, layers: Sequence[Tensor], views: Sequence[Tensor] = ()) -> None:
        for index, layer in enumerate(layers):
            try:
                KvFormat.of(layer)
            except ValueError as error:
                raise EngineError(f"KV cache of layer {index} has {error}") from None
        self.layers = list(layers)
        self.views = list(views or layers)
        self._blocks = [layer.flatten(0, 2) for layer in self.views]

    @property
    def pages(self) -> int:
        """In each layer; layers that are not in the pool have none."""
        return max(layer.shape[0] for layer in self.layers)

    @property
    def nbytes(self) -> int:
        """Layers may lie in the same memory."""
        sizes: dict[int, int] = {}
        for layer in self.layers:
            sizes[layer.data_ptr()] = max(sizes.get(layer.data_ptr(), 0), layer.nbytes)
        return sum(sizes.values())

    def blocks(self, layer: int) -> Tensor:
        """``[pages * kv_heads * 2, page_size, head_dim]``: row ``(page * kv_heads + head) * 2 + (0 K | 1 V)``; as the
        device tier sees it."""
        return self._blocks[layer]
