"""Operations that plan copies of pages of single KV heads.

A *head page* is K and V of one page and one KV head. Head pages of a store are numbered ``page * kv_heads + head``.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from hybrid_backend.kernels.contract.buffers import Selection, StreamPlan


class HeadOperations(Protocol):
    """Plan loads of the selections of KV heads, and the passage of KV heads through staging buffers."""

    def plan_load(
        self, chosen: Selection, to_select: Tensor, entries: Tensor, frames: Tensor, first: int, cached: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Plan the copies of what single KV heads have selected, and note the pages as cached.

        Args:
            chosen: selections ``[lists, 1, k]``, whose `Selection.frames` are head pages of the host pool.
            to_select: ``[lists]`` int32; 0: the list has selected nothing, so it loads nothing and keeps its pages.
            entries: ``[lists]`` int32 entry of each list in ``cached``, distinct where the list has selected.
            frames: ``[lists, n]`` int32 head pages of the frames that a load overwrites.
            first: place in a selection of the first of ``n`` pages that are loaded.
            cached: ``[entries, n]`` int32 logical pages of each entry's last load, updated in place.

        Returns:
            Head pages of the host pool and of the frames, both ``[lists, n]`` int32 (`copy_pages`); the frames are -1
            where the list loads nothing.
        """

    def plan_stream(
        self, table: Tensor, num_pages: Tensor, seq_lens: Tensor, ranks: Tensor, groups: int, group: int, pieces: int,
        capacity: int, page_size: int, first: int = 0, last: int = 1, is_framed: bool = False,
    ) -> StreamPlan:  # fmt: skip
        """Cut the pages of streamed KV heads into pieces that each fit a staging buffer, one group of heads at a time.

        A piece holds parts of several lists of head pages, one list after the other; a list is one KV head of a row.
        The number of pieces does not depend on the rows, so that a captured CUDA graph has a fixed number of copies.
        Pages for which a group has no piece left are attended in the host pool, where the device reads over the bus.

        Args:
            table: block table ``[rows, columns]`` int32, any row stride.
            num_pages: ``[rows]`` int32 pages of each sequence.
            seq_lens: ``[rows]`` int32 tokens of each sequence.
            ranks: ``[kv_heads]`` int32 position of each KV head among the streamed heads; -1: the KV head is resident
                as a whole; -2: it attends its first and last pages only.
            groups: groups of streamed heads.
            group: streamed heads of a group; the last group may have fewer.
            pieces: pieces of each group.
            capacity: head pages of a staging buffer.
            page_size: tokens of a page.
            first: first pages of a sequence that are not streamed.
            last: last pages of a sequence that are not streamed; the growing page is one of them.
            is_framed: the pages that are not streamed lie in frames. Otherwise they are attended in the host pool.
        """
