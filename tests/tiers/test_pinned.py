"""Host memory for a GPU: whole, zeroed, aligned, on the node that was asked for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hybrid_backend.errors import ConfigError
from hybrid_backend.tiers.pinned import HostMemory, node_of_pci

SIZE = 5 * 2**20 + 12345


def test_memory_is_zeroed_writable_and_aligned_to_huge_pages() -> None:
    seen: list[int] = []
    memory = HostMemory(SIZE, progress=seen.append)
    assert memory.tensor.dtype == torch.int8 and memory.tensor.shape == (SIZE,)
    assert memory.tensor.data_ptr() % 2**21 == 0
    assert not memory.tensor.any()
    memory.tensor.fill_(7)
    assert int(memory.tensor[-1]) == 7
    assert seen == [SIZE]
    memory.close()


def test_memory_lies_on_the_node_that_was_asked_for() -> None:
    try:
        memory = HostMemory(SIZE, node=0)
    except ConfigError as error:
        assert "not permitted" in str(error), error  # a container may forbid the call; the error says so
        return
    start = f"{memory.tensor.data_ptr():x}"
    maps = Path("/proc/self/numa_maps")
    if maps.exists():
        mine = [line for line in maps.read_text().splitlines() if "bind:0" in line]
        assert any(int(line.split()[0], 16) == int(start, 16) for line in mine), mine
    memory.close()


def test_a_node_that_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"workers\.numa.*node 1000"):
        HostMemory(SIZE, node=1000)


def test_memory_that_cannot_be_had_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"host_pool\.size"):
        HostMemory(2**62)


@pytest.mark.parametrize(("text", "node"), [("1\n", 1), ("-1\n", None), (None, None)])
def test_the_node_of_a_gpu_is_what_the_bus_says(tmp_path: Path, text: str | None, node: int | None) -> None:
    folder = tmp_path / "0000:3b:00.0"
    folder.mkdir()
    if text is not None:
        (folder / "numa_node").write_text(text)
    assert node_of_pci(0, 0x3B, 0, tmp_path) == node
    assert node_of_pci(0, -1, 0, tmp_path) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_reads_pinned_memory_at_the_same_address() -> None:
    memory = HostMemory(SIZE, pin=True)
    assert memory.tensor.is_pinned()
    memory.close()
