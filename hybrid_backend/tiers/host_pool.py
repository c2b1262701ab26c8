"""The complete KV cache in host memory: the engine's own block pool, seen page by page."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hybrid_backend.errors import EngineError


class HostPool:
    """Per-layer views of the engine's KV memory.

    Layout of a layer: ``[pages, kv_heads, 2, page_size, head_dim]``, K before V, token-major, contiguous. Page ids
    are the engine's block ids. ``seen``: the same memory as the device sees it, where that is not the host.
    """

    def __init__(self, layers: Sequence[Tensor], seen: Sequence[Tensor] = ()) -> None:
        for index, layer in enumerate(layers):
            if layer.dim() != 5 or layer.shape[2] != 2 or not layer.is_contiguous():
                raise EngineError(
                    f"KV cache of layer {index} has shape {tuple(layer.shape)} and strides {layer.stride()}; "
                    "expected contiguous [pages, kv_heads, 2, page_size, head_dim]"
                )
        self.layers = list(layers)
        self.seen = list(seen or layers)
        self._blocks = [layer.flatten(0, 2) for layer in self.seen]

    def blocks(self, layer: int) -> Tensor:
        """``[pages * kv_heads * 2, page_size, head_dim]``: row ``(page * kv_heads + head) * 2 + (0 K | 1 V)``; as the
        device sees it."""
        return self._blocks[layer]

    def write(self, layer: int, pages: Tensor, offsets: Tensor, kv: Tensor) -> None:
        """Store new tokens. ``pages``, ``offsets``: ``[tokens]`` int64; ``kv``: ``[tokens, kv_heads, 2, head_dim]``."""
        if not kv.is_cuda:
            self.layers[layer][pages, :, :, offsets] = kv
            return
        from hybrid_backend.kernels.triton import append_tokens  # late: Triton is there where CUDA is

        k, v = (kv[:, :, i].contiguous() for i in (0, 1))
        append_tokens(k, v, self.seen[layer], pages.int(), offsets)
