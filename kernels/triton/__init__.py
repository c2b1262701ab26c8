"""Triton kernels of the device tier, each with a plain-torch oracle and a test under Triton's interpreter.

Shapes that all of them share: pages ``[pages, kv_heads, 2 (K, V), page_size, head_dim]``, digests
``[pages, kv_heads, 2 (max, min), head_dim]``, lists of pages ``[rows, 1 | kv_heads, k]`` int32 (one per row, or one per
KV head) with the number of entries that count beside them. Nothing here synchronises or reads a tensor's values on the
host, so every call can be captured in a CUDA graph: what varies from step to step lies in tensors, and rows of a padded
batch are rows without pages.

Sizes of what the kernels keep are asked for where there is no Triton (`hybrid plan`): it is imported with the first
kernel that somebody asks this package for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hybrid_backend.kernels.triton.maps import Copies, Maps, Tally

if TYPE_CHECKING:
    from hybrid_backend.kernels.triton.launchers import *  # noqa: F403

__all__ = ["Copies", "Maps", "Tally"]


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(import_module(f"{__name__}.launchers"), name)
