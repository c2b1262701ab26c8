"""KV format: layout, size and encoding of the pages that hold K and V.

Pools, frames, staging buffers, copies and all sizes ask `KvFormat`, so that what is planned is what is allocated. There
are two encodings:

* plain: K and V as they are computed, in the model's dtype.
* int8: one scale per token, KV head and K or V, the largest magnitude of its ``head_dim`` numbers / 127, rounded up to
  fp16. A number is ``scale * int8``, rounded to nearest. The scales of a page's head stand behind its K and V, so that
  a page, and a head page, stays one contiguous piece. vLLM's ``int8_per_token_head`` is the same but for fp32 scales.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

SCALE_BYTES = 2
"""Bytes of a token's scale, of K or of V, of one KV head."""
Places = tuple[Tensor, Tensor, Tensor]
"""Places of tokens in a layer: ``[n]`` int64 pages, ``[n]`` KV heads, ``[n]`` offsets in the pages."""


@dataclass(frozen=True)
class KvFormat:
    """Format of one layer's pages: ``[pages, kv_heads, 2 (K, V), page_size, width]`` in ``dtype``, contiguous.

    In a plain format ``width`` is ``head_dim``. In int8 it is ``head_dim + SCALE_BYTES``, and the last three dimensions
    only count bytes: ``[2, page_size, head_dim]`` int8 numbers come first, then ``[2, page_size]`` fp16 scales
    (`parts`).
    """

    kv_heads: int
    page_size: int
    head_dim: int
    dtype: torch.dtype

    @classmethod
    def of(cls, layer: Tensor) -> KvFormat:
        """Return the format of a layer's pages.

        Raises:
            ValueError: the tensor has another layout.
        """
        if layer.dim() != 5 or layer.shape[2] != 2 or not layer.is_contiguous():
            raise ValueError(
                f"shape {tuple(layer.shape)} and strides {layer.stride()}; expected contiguous "
                "[pages, kv_heads, 2, page_size, head_dim]"
            )
        _, kv_heads, _, page_size, _ = layer.shape
        return cls(kv_heads, page_size, head_dim_of(layer), layer.dtype)

    @property
    def is_int8(self) -> bool:
        """K and V are encoded in 8 bits, with scales."""
        return self.dtype is torch.int8

    @property
    def width(self) -> int:
        """Last dimension of the pages' shape."""
        return self.head_dim + SCALE_BYTES * self.is_int8

    def with_heads(self, kv_heads: int) -> KvFormat:
        """Return the format of pages of another number of KV heads; of one head: a *head page*."""
        return replace(self, kv_heads=kv_heads)

    def shape(self, pages: int) -> tuple[int, int, int, int, int]:
        """Return the shape of ``pages`` pages."""
        return (pages, self.kv_heads, 2, self.page_size, self.width)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in one layer: K and V of all KV heads."""
        return prod(self.shape(1)) * self.dtype.itemsize

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of one token in one layer."""
        return self.page_bytes // self.page_size

    def write(self, layer: Tensor, pages: Tensor, offsets: Tensor, k: Tensor, v: Tensor) -> None:
        """Encode new tokens, and write them to pages.

        Args:
            layer: pages of this format, changed in place.
            pages: ``[tokens]`` int64 page of each token.
            offsets: ``[tokens]`` int64 offset of each token in its page.
            k: keys ``[tokens, kv_heads, head_dim]``.
            v: values, like ``k``.
        """
        kv = torch.stack([k, v], 2)
        if not self.is_int8:
            layer[pages, :, :, offsets] = kv.to(self.dtype)
            return
        numbers, scales = self.parts(layer)
        numbers[pages, :, :, offsets], scales[pages, :, :, offsets] = quantized(kv)

    def copy_tokens(self, layer: Tensor, tokens: Places, store: Tensor, places: Places) -> None:
        """Copy K and V of ``n`` tokens of single KV heads, encoded, from pages of a layer to pages of ``store``.

        Args:
            layer: pages of this format.
            tokens: which tokens of ``layer`` to copy.
            store: pages of this format, changed in place.
            places: where each token goes in ``store``.
        """
        pairs = zip(self.parts(layer), self.parts(store), strict=True) if self.is_int8 else [(layer, store)]
        (page, head, offset), (to_page, to_head, to_offset) = tokens, places
        for source, target in pairs:
            target[to_page, to_head, :, to_offset] = source[page, head, :, offset]

    def parts(self, pages: Tensor) -> tuple[Tensor, Tensor]:
        """Return views of int8 pages ``[..., 2, page_size, width]``, contiguous in their last three dimensions.

        Returns:
            The numbers ``[..., 2, page_size, head_dim]`` int8, and the scales ``[..., 2, page_size]`` fp16.
        """
        flat, size = pages.flatten(-3), 2 * self.page_size * self.head_dim
        numbers = flat[..., :size].unflatten(-1, (2, self.page_size, self.head_dim))
        return numbers, flat[..., size:].view(torch.float16).unflatten(-1, (2, self.page_size))

    def decode(self, pages: Tensor) -> tuple[Tensor, Tensor]:
        """Decode pages.

        Args:
            pages: ``[..., 2, page_size, width]`` in ``dtype``, any selection of pages and KV heads.

        Returns:
            K and V, ``[..., page_size, head_dim]`` fp32.
        """
        if not self.is_int8:
            k, v = pages.float().unbind(-3)
            return k, v
        numbers, scales = self.parts(pages)
        k, v = (x * scale.float()[..., None] for x, scale in zip(numbers.unbind(-3), scales.unbind(-2), strict=True))
        return k, v

    def keys(self, layer: Tensor, pages: Tensor) -> Tensor:
        """Return the keys ``[n, kv_heads, page_size, head_dim]`` of pages ``[n]`` of a layer; of int8 in fp32."""
        return self.decode(layer[pages])[0] if self.is_int8 else layer[pages, :, 0]

    def stored(self, x: Tensor) -> Tensor:
        """Return new keys or values ``[..., head_dim]`` as pages hold them, decoded to the dtype of ``x``."""
        if not self.is_int8:
            return x.to(self.dtype)
        numbers, scales = quantized(x)
        return (numbers * scales.float()[..., None]).to(x.dtype)


def gather_head_pages(blocks: Tensor, head_pages: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Copy K and V out of head pages, decoded.

    Args:
        blocks: pages ``[pages * kv_heads * 2 (K, V), page_size, width]``, contiguous.
        head_pages: ``[n]`` int64 head pages: ``page * kv_heads + head``.
        dtype: dtype of what 8 bits decode to; plain pages keep theirs.

    Returns:
        K and V, ``[n, page_size, head_dim]`` each.
    """
    kv = KvFormat(1, blocks.shape[1], head_dim_of(blocks), blocks.dtype)
    if not kv.is_int8:
        gathered = blocks.index_select(0, torch.cat([2 * head_pages, 2 * head_pages + 1]))
        return gathered[: len(head_pages)], gathered[len(head_pages) :]
    k, v = kv.decode(blocks.unflatten(0, (-1, 2)).index_select(0, head_pages))
    return k.to(dtype), v.to(dtype)


def head_dim_of(pages: Tensor) -> int:
    """Return the channels of a head in pages ``[..., width]``, which may have any strides (`KvFormat`)."""
    return pages.shape[-1] - SCALE_BYTES * (pages.dtype is torch.int8)


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize ``x`` ``[..., head_dim]`` symmetrically to 8 bits, with one scale for each ``head_dim`` numbers.

    Returns:
        The numbers ``[..., head_dim]`` int8 and the scales ``[...]`` fp16. A number that is not finite, or a scale that
        fp16 cannot hold, makes the scale NaN.
    """
    x = x.float()
    exact = x.abs().amax(-1) / 127
    nearest = exact.half()
    scales = torch.where(nearest.float() < exact, (nearest.view(torch.int16) + 1).view(torch.float16), nearest)
    scales = torch.where(scales.isfinite(), scales, float("nan"))
    usable = (scales > 0)[..., None]
    numbers = torch.where(usable, x * scales.float().reciprocal()[..., None], 0.0).round().to(torch.int8)
    return numbers, scales
