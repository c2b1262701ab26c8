"""SGLang's token pool as the host pool: its slot ids, allocator and radix cache stay, and only the storage is ours."""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from torch import Tensor

from hybrid_backend.engines.sglang import OWN_BACKEND
from hybrid_backend.errors import EngineError
from hybrid_backend.kernels.kv_format import KvFormat


class HostTokenPool(MHATokenToKVPool):
    """Token pool in host memory. Only the runtime reads and writes it, so SGLang's own accessors raise.

    Attributes:
        pages: pages of each layer (`KvFormat`). Slot s lies in page ``s // page_size``; page 0 is SGLang's dummy.
    """

    pages: list[Tensor]
    kv_dtype: ClassVar[torch.dtype | None] = None
    """Dtype of the pages; None: the model's."""

    def _create_buffers(self) -> None:
        if self.head_dim != self.v_head_dim or self.store_dtype != self.dtype:
            raise EngineError("the hybrid backend needs K and V of one size, in a KV cache that SGLang leaves alone")
        kv = KvFormat(self.head_num, self.page_size, self.head_dim, self.kv_dtype or self.dtype)
        shape = kv.shape(self.size // self.page_size + 1)
        self.pages = [torch.zeros(shape, dtype=kv.dtype, device="cpu") for _ in range(self.layer_num)]
        self.k_buffer = [page[:, :, 0] for page in self.pages]
        self.v_buffer = [page[:, :, 1] for page in self.pages]
        self._kv_buffer_descs: list[Any] = []  # SGLang reads it for PD transfer, which this pool refuses.

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise EngineError(
            "this model or feature reads or writes SGLang's KV pool by itself, which the hybrid backend does not "
            f"support; {OWN_BACKEND}"
        )

    set_kv_buffer = get_key_buffer = get_value_buffer = get_kv_buffer = _refuse
    get_cpu_copy = load_cpu_copy = move_kv_cache = _refuse


class Int8HostTokenPool(HostTokenPool):
    """The same with pages in 8 bits (``kv_dtype: int8``). SGLang's dtype of the pool stays the model's."""

    kv_dtype = torch.int8
