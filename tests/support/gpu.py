"""A GPU that is really there: what the tests of `far_device` need of it, so that they run on either."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

ON_GPU = torch.cuda.is_available()  # before far_device says that it is
DEVICE = torch.device("cuda", 0)


class _Bytes:
    """Memory as CUDA array interface."""

    def __init__(self, x: Tensor) -> None:
        self.kept = x
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (x.nbytes,), "typestr": "|i1", "data": (x.data_ptr(), False), "version": 2,
        }  # fmt: skip


def there(x: Tensor) -> Tensor:
    """``x``, contiguous and pinned, as a tensor of the GPU over the same memory."""
    seen = torch.as_tensor(_Bytes(x), device=DEVICE)
    assert seen.data_ptr() == x.data_ptr(), "the GPU sees pinned memory at another address"
    return seen.view(x.dtype).view(x.shape)


def views(layers: list[Tensor]) -> list[Tensor]:
    """KV memory as the GPU sees it. Puts pinned copies into ``layers``."""
    layers[:] = [layer.pin_memory() for layer in layers]
    return [there(layer) for layer in layers]


@contextmanager
def busy() -> Iterator[None]:
    """Whoever waits for the GPU is an error."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
