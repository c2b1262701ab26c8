"""SGLang's token pool as the host pool: its slot ids, allocator and radix cache stay; only the storage is ours."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from torch import Tensor

from hybrid_backend.engines.sglang import OWN_BACKEND
from hybrid_backend.errors import EngineError


class HostTokenPool(MHATokenToKVPool):
    """``pages[layer]``: ``[pages, kv_heads, 2, page_size, head_dim]``. Slot s lies in page ``s // page_size``; page 0
    is SGLang's dummy. Only the runtime reads and writes it, so SGLang's own accessors raise."""

    pages: list[Tensor]

    def _create_buffers(self) -> None:
        if self.head_dim != self.v_head_dim or self.store_dtype != self.dtype:
            raise EngineError("the hybrid backend needs K and V of one size, in a KV cache that is not quantised")
        shape = (self.size // self.page_size + 1, self.head_num, 2, self.page_size, self.head_dim)
        self.pages = [torch.zeros(shape, dtype=self.dtype, device="cpu") for _ in range(self.layer_num)]
        self.k_buffer = [page[:, :, 0] for page in self.pages]
        self.v_buffer = [page[:, :, 1] for page in self.pages]
        self._kv_buffer_descs: list[Any] = []  # for PD transfer, which is refused

    def set_kv_buffer(self, *args: Any, **kwargs: Any) -> None:
        self._refuse()

    def get_key_buffer(self, layer_id: int) -> Tensor:
        self._refuse()

    def get_value_buffer(self, layer_id: int) -> Tensor:
        self._refuse()

    def get_kv_buffer(self, layer_id: int) -> tuple[Tensor, Tensor]:
        self._refuse()

    def get_cpu_copy(self, *args: Any, **kwargs: Any) -> None:
        self._refuse()

    def load_cpu_copy(self, *args: Any, **kwargs: Any) -> None:
        self._refuse()

    def move_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise EngineError(
            "this model or feature reads or writes SGLang's KV pool by itself, which the hybrid backend does not "
            f"support; {OWN_BACKEND}"
        )
