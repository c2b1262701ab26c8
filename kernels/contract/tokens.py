"""Operations that write new tokens and keep the pages' digests up to date."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from hybrid_backend.kernels.contract.buffers import AwaitedPages


class TokenOperations(Protocol):
    """Write new tokens to host pages, frames and digests."""

    def append_tokens(
        self, k: Tensor, v: Tensor, host: Tensor, pages: Tensor, positions: Tensor,
        frames: Tensor | None = None, requests: Tensor | None = None, frame_of: Tensor | None = None,
        digests: Tensor | None = None, heads: Tensor | None = None, awaited: AwaitedPages | None = None,
    ) -> None:  # fmt: skip
        """Write one new token per row to its host page, its frame and its page's digest.

        A row whose pages are on their way to frames (``awaited``) first waits until they are there, or until no time is
        left. Operations that run later find the pages in the frames.

        Args:
            k: keys ``[rows, kv_heads, head_dim]``, any row stride.
            v: values, like ``k``.
            host: ``[pages, kv_heads, 2, page_size, head_dim]``: host pages as the device tier sees them. With ``heads``
                it has pages of these heads only.
            pages: ``[rows]`` int32 host page of the token; -1: a padding row. Tokens are distinct.
            positions: ``[rows]`` int32 or int64 position of the token in its sequence.
            frames: frames in the layout of ``host``; None: host pages only.
            requests: ``[rows]`` int32, given with ``frames``.
            frame_of: ``[requests, columns]`` int32 (`Maps.frame_of`), given with ``frames``.
            digests: digests of the layer. A token at offset 0 resets its page's digest. Formats of whole pages are
                written when a page gets its last token. The rows' pages must be distinct if digests are given.
            heads: ``[n]`` int64 KV heads of ``k`` and ``v`` to write, in the order of ``host``; None: all. Given
                without frames and digests.
            awaited: pages that rows wait for, given with ``frames``; None: no row waits.
        """

    def store_tokens(self, k: Tensor, v: Tensor, host: Tensor, pages: Tensor, positions: Tensor) -> None:
        """Write a prompt's tokens to their host pages while a step runs: by few programs, since they wait for the bus.

        Args:
            k: keys ``[tokens, kv_heads, head_dim]``, contiguous. They are read when the stream runs this operation.
            v: values, like ``k``.
            host: host pages, as in `append_tokens`.
            pages: host page of each token, as in `append_tokens`.
            positions: position of each token, as in `append_tokens`.
        """

    def extend_digests(self, k: Tensor, digests: Tensor, pages: Tensor, first: int, page_size: int) -> None:
        """Add the keys of a prompt chunk, consecutive tokens of one sequence, to the digests of their pages.

        The digest of a page whose first token is in the chunk is reset.

        Args:
            k: keys ``[tokens, kv_heads, head_dim]``, any row stride.
            digests: digests of the layer, updated in place.
            pages: ``[n]`` int32 host pages of the tokens, distinct and in order.
            first: tokens that the first page held before. For formats of whole pages it is 0, and the tokens
                fill all pages.
            page_size: tokens of a page.
        """

    def build_digests(self, kv: Tensor, digests: Tensor, pages: Tensor, tokens: Tensor) -> None:
        """Compute the digests of pages from their keys, for pages that another server or tier filled.

        Args:
            kv: ``[pages, kv_heads, 2, page_size, head_dim]``.
            digests: digests of the layer, updated in place; pages that are not whole get none of the formats of whole
                pages.
            pages: ``[n]`` int32 host pages; -1: no page.
            tokens: ``[n]`` int32 tokens of each page that were written.
        """
