"""How vLLM 0.32 cuts KV memory into blocks, and how many a sequence takes (v1/core/kv_cache_utils.py,
``get_kv_cache_groups``; v1/kv_cache_interface.py, ``SlidingWindowSpec.max_admission_blocks_per_request``).

A block is one page in each layer of a group. A model whose layers are all alike is one group. Else layers of one kind
(full attention, or one sliding window) form groups of equally many layers, and every group takes blocks of its own.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from hybrid_backend.model import ModelShape

NULL_BLOCKS = 1
"""vLLM never hands out block 0 (v1/core/block_pool.py, ``null_block``)."""


WINDOWS_KEPT = 2
"""Windows of as many requests as run at once, and once more of requests that have ended: a prefix is found in the cache
only where its last window is still there."""


def window_blocks(window: int, page_size: int, requests: int, in_flight: int) -> int:
    """Blocks of a pool that one group of layers with a sliding window has for itself, on a GPU.

    Args:
        window: in tokens.
        requests: that run at once.
        in_flight: tokens scheduled and not yet settled, of all requests together; a window keeps them beside its own.
    """
    # A step's own token is in flight, and the window may begin inside a block.
    each = -(-window // page_size) + 1
    return WINDOWS_KEPT * requests * each + -(-in_flight // page_size) + NULL_BLOCKS


@dataclass(frozen=True)
class Blocks:
    """``groups[window]``: groups of that sliding window in tokens, None for full attention."""

    page_size: int
    block_bytes: int
    groups: tuple[tuple[int | None, int], ...]

    @classmethod
    def of(cls, shape: ModelShape, page_size: int) -> Blocks:
        layers = Counter(shape.attention_windows)
        fewest, most = min(layers.values()), max(layers.values())
        size = most if most < 1.5 * fewest else fewest  # vLLM: rather a few padding layers than many groups
        groups = tuple((window, -(-count // size)) for window, count in layers.items())
        return cls(page_size, size * shape.page_bytes(page_size), groups)

    def per_sequence(self, context: int, in_flight: int) -> int:
        """Blocks that a sequence of ``context`` tokens may hold. ``in_flight``: tokens scheduled and not yet settled,
        which a sliding window keeps beside its own."""
        return sum(count * self._of_group(window, context, in_flight) for window, count in self.groups)

    def pool(self, context: int, batch: int, in_flight: int) -> int:
        """Blocks of a pool that holds ``batch`` such sequences at once."""
        return batch * self.per_sequence(context, in_flight) + NULL_BLOCKS

    @property
    def offloaded(self) -> Blocks:
        """The groups with full attention alone: what a GPU's host pool holds."""
        return replace(self, groups=tuple((window, count) for window, count in self.groups if window is None))

    def in_bytes(self, size: int) -> int:
        """Blocks that fit ``size`` bytes."""
        return size // self.block_bytes

    def _of_group(self, window: int | None, context: int, in_flight: int) -> int:
        if window is None:
            return -(-context // self.page_size)
        kept = min(window - 1 + in_flight, context)
        return -(-kept // self.page_size) + 1  # the window may begin inside a block
