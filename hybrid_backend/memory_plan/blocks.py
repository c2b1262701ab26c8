"""KV blocks of a model: how vLLM groups layers, and how many blocks a sequence or a pool takes.

The rules are vLLM's (``get_kv_cache_groups`` in v1/core/kv_cache_utils.py, since 0.33 in kv_cache_planning.py;
``max_admission_blocks_per_request`` of ``SlidingWindowSpec`` and ``ChunkedLocalAttentionSpec`` in
v1/kv_cache_interface.py). A block is one page in each layer of a group. A model whose layers are all alike is one
group. Otherwise layers of one kind (full attention, or one window) form groups of equally many layers, and each group
takes blocks of its own. All blocks have the same bytes: where a token takes fewer bytes in the layers of one kind
(Gemma 4), a block of these layers holds several pages.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from hybrid_backend.model import ModelShape

NULL_BLOCKS = 1
"""Blocks that vLLM never hands out: block 0 (v1/core/block_pool.py, ``null_block``)."""
CACHED_WINDOWS = 2
"""Windows per request in a pool of its own: those of running requests, and as many of requests that have ended. The
prefix cache finds a prefix only if its last window is still in the pool."""


def window_blocks(window: int, page_size: int, requests: int, in_flight: int) -> int:
    """Count the blocks of the pool that one group of sliding-window layers has for itself on a GPU.

    Args:
        window: the sliding window in tokens.
        page_size: tokens per page.
        requests: requests that run at once.
        in_flight: tokens of all requests that are scheduled and not yet settled, which a window keeps as well.
    """
    # The window includes the step's own token and may begin inside a block.
    blocks_per_window = -(-window // page_size) + 1
    return CACHED_WINDOWS * requests * blocks_per_window + -(-in_flight // page_size) + NULL_BLOCKS


@dataclass(frozen=True)
class Blocks:
    """Size and groups of a model's KV blocks.

    Attributes:
        page_size: tokens per page.
        block_bytes: bytes of one block in all layers of its group.
        groups: pairs of a sliding window in tokens (None: full attention) and the number of groups that have it.
        pages_per_block: pages in a block of the layers with full attention.
        window_pages_per_block: pages in a block of the layers with windows.
        has_chunks: the windows are chunks (`ModelShape.has_chunks`).
    """

    page_size: int
    block_bytes: int
    groups: tuple[tuple[int | None, int], ...]
    pages_per_block: int = 1
    window_pages_per_block: int = 1
    has_chunks: bool = False

    @classmethod
    def of(cls, shape: ModelShape, page_size: int) -> Blocks:
        """Group the layers of a model as vLLM does."""
        layers = Counter(shape.attention_windows)
        fewest, most = min(layers.values()), max(layers.values())
        # vLLM prefers a few padding layers to many groups.
        group_layers = most if most < 1.5 * fewest else fewest
        groups = tuple((window, -(-count // group_layers)) for window, count in layers.items())
        page_bytes = {window: shape.page_bytes(page_size, window) for window in layers}
        most_bytes = max(page_bytes.values())
        # vLLM pads pages that do not divide the largest one.
        pages = {window: most_bytes // size if most_bytes % size == 0 else 1 for window, size in page_bytes.items()}
        local_pages = next((count for window, count in pages.items() if window is not None), 1)
        return cls(page_size, group_layers * most_bytes, groups, pages.get(None, 1), local_pages, shape.has_chunks)

    @property
    def offloaded(self) -> Blocks:
        """Blocks of the groups with full attention alone, which a GPU's host pool holds."""
        return replace(self, groups=tuple((window, count) for window, count in self.groups if window is None))

    def per_sequence(self, context: int, in_flight: int) -> int:
        """Count the blocks that a sequence of ``context`` tokens may hold.

        Args:
            context: tokens of the sequence.
            in_flight: tokens that are scheduled and not yet settled, which a sliding window keeps as well.
        """
        return sum(count * self._group_blocks(window, context, in_flight) for window, count in self.groups)

    def pool(self, context: int, batch: int, in_flight: int) -> int:
        """Count the blocks of a pool that holds ``batch`` sequences of ``context`` tokens at once."""
        return batch * self.per_sequence(context, in_flight) + NULL_BLOCKS

    def pool_pages(self, context: int, batch: int, in_flight: int) -> int:
        """Count the pages of such a pool in a layer with full attention."""
        return self.pool(context, batch, in_flight) * self.pages_per_block

    @property
    def page_bytes(self) -> int:
        """Bytes of a pool per page that a layer with full attention has in it."""
        return self.block_bytes // self.pages_per_block

    def in_bytes(self, pool_bytes: int) -> int:
        """Count the blocks that fit ``pool_bytes``."""
        return pool_bytes // self.block_bytes

    def _group_blocks(self, window: int | None, context: int, in_flight: int) -> int:
        if window is None:
            return -(-context // (self.page_size * self.pages_per_block))
        block_tokens = self.page_size * self.window_pages_per_block
        if self.has_chunks:
            return -(-min(window + in_flight, context) // block_tokens)
        window_tokens = min(window - 1 + in_flight, context)
        return -(-window_tokens // block_tokens) + 1  # The window may begin inside a block.
