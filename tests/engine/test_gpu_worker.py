"""What of vLLM's CUDA worker can be tried without a GPU: the KV cache's one allocation, and the host's view of it."""

from __future__ import annotations

import pytest
import torch

from hybrid_backend.tiers.pinned import HostMemory

pytestmark = pytest.mark.engine


def test_only_the_kv_caches_allocation_goes_to_the_host() -> None:
    from hybrid_backend.engines.vllm.gpu_worker import _redirected

    asked: list[int] = []

    def make(nbytes: int) -> torch.Tensor:
        asked.append(nbytes)
        return torch.zeros(nbytes, dtype=torch.int8)

    with _redirected(make):
        buffer = torch.zeros(640, dtype=torch.int8, device="cuda:0")
        torch.zeros(8, dtype=torch.float32, device="cpu")
        torch.zeros(8, dtype=torch.int8, device="cpu")
    assert asked == [640] and buffer.device.type == "cpu"


def test_the_hosts_tensor_of_a_layer_is_the_same_memory() -> None:
    """A layer's cache is a view in the midst of the buffer, as vLLM makes it."""
    from hybrid_backend.engines.vllm.gpu_worker import HybridGPUWorker
    from hybrid_backend.engines.vllm.session import as_pages

    worker = object.__new__(HybridGPUWorker)
    pages, heads, page, dim = 6, 2, 16, 8
    layer = pages * heads * page * 2 * dim
    worker.memory = HostMemory(3 * layer * 2 + 7)
    worker.seen = worker.memory.tensor
    cache = worker.seen[layer * 2 : 2 * layer * 2].view(torch.bfloat16).view(pages, heads, page, 2 * dim)
    seen = as_pages(cache)
    mine = worker.on_host(seen)
    assert (mine.shape, mine.dtype, mine.data_ptr()) == (seen.shape, seen.dtype, seen.data_ptr())
    mine.fill_(3)
    assert bool((cache == 3).all()) and int(worker.seen.count_nonzero()) <= layer * 2
