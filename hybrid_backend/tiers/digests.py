"""Digests of all host pages: channel-wise max and min of K (Quest, arXiv 2406.10774, section 3.2), or codes of K."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hybrid_backend.batch import PrefillRow, sent
from hybrid_backend.kernels import codes
from hybrid_backend.kernels.cpu import digests as native
from hybrid_backend.kernels.digest_format import CODES, DigestFormat
from hybrid_backend.kernels.kv_format import KvFormat
from hybrid_backend.kernels.operations import Operations
from hybrid_backend.tiers.host_pool import HostPool


class Digests:
    """Digests of the host pool: one per (layer, page, KV head), indexed by host page id.

    A prefix-cache hit needs no new digests, because a digest stays valid as long as the host page does.

    Attributes:
        layers: per layer the digests that operations read. The digest of a page covers exactly the tokens written so
            far; a token at offset 0 starts a new digest. If a format has digests of whole pages only
            (`DigestFormat.covers_growing_pages`), the digest of a growing page is undefined.
        byte_copies: per layer the byte digests of whole pages that the native decoder reads (`kernels.cpu.digests`);
            empty if the format has no byte digests (`DigestFormat.has_byte_copy`).
    """

    def __init__(
        self,
        host: HostPool,
        layers: list[int],
        operations: Operations,
        digest_format: DigestFormat,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """Allocate the digests of ``layers``, all zero. ``dtype`` is the model's."""
        self._host, self._operations, self._format = host, operations, digest_format
        self._kv = {layer: KvFormat.of(host.layers[layer]) for layer in layers}
        self.layers: dict[int, Tensor] = {}
        self.byte_copies: dict[int, Tensor] = {}
        for layer in layers:
            kv = self._kv[layer]
            shape = digest_format.shape(len(host.layers[layer]), kv.kv_heads, kv.head_dim)
            self.layers[layer] = torch.zeros(shape, dtype=digest_format.dtype(dtype), device=device)
            if digest_format is CODES:
                codes.rotation(kv.head_dim, self.layers[layer].device)  # A captured graph cannot copy it to the device.
            if digest_format.has_byte_copy:
                self.byte_copies[layer] = native.empty_byte_digests(self.layers[layer])

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for store in (self.layers, self.byte_copies) for layer in store.values())

    def extend(
        self, layer: int, row: PrefillRow, k: Tensor, join: Callable[[], None], begun_page: Tensor | None = None
    ) -> None:
        """Update the digests of the pages that a prompt chunk writes, from its keys ``k``.

        Digests are of keys as pages hold them, so keys of pages in 8 bits are rounded to these first. A CPU reads them
        from the host pool instead.

        Args:
            layer: layer with digests.
            row: the prompt chunk.
            k: ``[chunk, kv_heads, head_dim]``, which need not be in the host pool yet.
            join: function that waits until all tokens of the step are in the host pool (`WriteBack.join`).
            begun_page: ``[kv_heads, 2, page_size, width]`` page on the device that an earlier chunk began, with the
                tokens of this chunk; None: the page is read from the host pool.
        """
        kv = self._kv[layer]
        if kv.is_int8 and k.is_cpu:
            self._extend_encoded(layer, row, join)
            return
        if kv.is_int8:  # Formats of whole pages are computed of decoded keys in fp32, as `build_digests` does.
            k = kv.stored(k if self._format.covers_growing_pages else k.float())
        page_size, before = kv.page_size, row.seq_len - len(k)
        whole, first = row.seq_len // page_size - before // page_size, before % page_size
        pages = row.written
        if not self._format.covers_growing_pages:
            pages = pages[:whole]
            if first and whole:  # The first page began in an earlier chunk, whose keys are not in `k`.
                if begun_page is None:
                    join()
                    self.rebuild(layer, pages[:1])
                else:
                    begun_keys = kv.decode(begun_page)[0] if kv.is_int8 else begun_page[:, 0]
                    keys = begun_keys.transpose(0, 1).contiguous()
                    self._operations.extend_digests(keys, self.layers[layer], pages[:1], 0, page_size)
                pages, k, first = pages[1:], k[page_size - first :], 0
            k = k[: len(pages) * page_size]
        if len(pages):
            self._operations.extend_digests(k, self.layers[layer], pages, first, page_size)
        self._copy_bytes(layer, row.written[:whole])

    def _extend_encoded(self, layer: int, row: PrefillRow, join: Callable[[], None]) -> None:
        join()
        pages, page_size = row.written, self._host.layers[layer].shape[3]
        tokens = torch.full_like(pages, page_size)
        tokens[-1:] = (row.seq_len - 1) % page_size + 1
        self.rebuild(layer, pages, tokens)

    def rebuild(self, layer: int, pages: Tensor, tokens: Tensor | None = None) -> None:
        """Recompute the digests of ``pages`` (``[n]`` host page ids) from the keys in the host pool.

        ``tokens`` has the number of tokens in each page, ``[n]``; None means that all pages are whole.
        """
        page_size = self._host.layers[layer].shape[3]
        whole = pages if tokens is None else pages[tokens == page_size]
        if tokens is None or not self._format.covers_growing_pages:  # Growing pages have no digest.
            pages, tokens = whole, torch.full_like(whole, page_size)
        ids, counts = (sent(numbers.int(), self.layers[layer].device) for numbers in (pages, tokens))
        self._operations.build_digests(self._host.views[layer], self.layers[layer], ids, counts)
        self._copy_bytes(layer, whole)

    def _copy_bytes(self, layer: int, pages: Tensor) -> None:
        if layer in self.byte_copies:
            native.write_byte_digests(self.byte_copies[layer], self.layers[layer], pages)
