"""Host pool: the engine's own KV blocks in host memory, which hold the complete KV cache."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hybrid_backend.errors import EngineError
from hybrid_backend.kernels.kv_format import KvFormat


class HostPool:
    """Views of the engine's KV memory, one per layer, in the layout of `KvFormat`. Page ids are the engine's block ids.

    Attributes:
        layers: tensors with the host's addresses.
        views: tensors of the same memory with the device tier's addresses.
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
        """Largest number of pages of a layer: page ids are smaller. A layer that is not in the pool has no pages."""
        return max(layer.shape[0] for layer in self.layers)

    @property
    def nbytes(self) -> int:
        """Bytes of the host pool. Memory that several layers share is counted once."""
        sizes: dict[int, int] = {}
        for layer in self.layers:
            sizes[layer.data_ptr()] = max(sizes.get(layer.data_ptr(), 0), layer.nbytes)
        return sum(sizes.values())

    def blocks(self, layer: int) -> Tensor:
        """Return the layer's device view as ``[pages * kv_heads * 2, page_size, width]`` (`KvFormat.width`).

        In a plain format, index ``(page * kv_heads + head) * 2`` of the first dimension holds K of that page and head;
        the next one V. Two such indices are a head page in every format (`gather_head_pages`).
        """
        return self._blocks[layer]
