"""What of vLLM's CUDA worker can be tried without a GPU: the KV cache's one allocation, and the host's view of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hybrid_backend.config import HybridConfig
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


@pytest.mark.parametrize(("numa", "expected"), [("auto", (7, False)), (1, (1, True))])
def test_only_a_node_that_the_user_names_is_insisted_on(
    monkeypatch: pytest.MonkeyPatch, numa: int | str, expected: tuple[int, bool]
) -> None:
    """A container with the usual system call filter must start with `auto`."""
    from hybrid_backend.engines.vllm import gpu_worker

    asked: list[tuple[int, bool]] = []

    def memory(nbytes: int, node: int, *, strict: bool, **_: object) -> HostMemory:
        asked.append((node, strict))
        raise MemoryError  # there is no GPU to pin it for

    monkeypatch.setattr(gpu_worker, "HostMemory", memory)
    monkeypatch.setattr(gpu_worker, "node_of_gpu", lambda device: 7)
    worker: Any = object.__new__(gpu_worker.HybridGPUWorker)
    worker.hybrid_config = HybridConfig.model_validate({"workers": {"numa": numa}})
    worker.device, worker.rank = torch.device("cuda:0"), 0
    with pytest.raises(MemoryError):
        worker._host_pool(4096)
    assert asked == [expected]


def test_the_hosts_tensor_of_a_layer_is_the_same_memory() -> None:
    """A layer's cache is a view in the midst of the buffer, as vLLM makes it."""
    from hybrid_backend.engines.vllm.gpu_worker import HybridGPUWorker
    from hybrid_backend.engines.vllm.session import as_pages

    worker = object.__new__(HybridGPUWorker)
    pages, heads, page, dim = 6, 2, 16, 8
    layer = pages * heads * page * 2 * dim
    worker.memory = HostMemory(3 * layer * 2 + 7)
    worker.device_view = worker.memory.tensor
    cache = worker.device_view[layer * 2 : 2 * layer * 2].view(torch.bfloat16).view(pages, heads, page, 2 * dim)
    seen = as_pages(cache)
    mine = worker.on_host(seen)
    assert (mine.shape, mine.dtype, mine.data_ptr()) == (seen.shape, seen.dtype, seen.data_ptr())
    mine.fill_(3)
    assert bool((cache == 3).all()) and int(worker.device_view.count_nonzero()) <= layer * 2
