"""Host memory for a GPU: whole, zeroed, aligned, on the node that was asked for."""

from __future__ import annotations

import gc
import platform
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hybrid_backend.errors import ConfigError
from hybrid_backend.tiers.pinned import _SYS_MBIND, HostMemory, bus_of_pci, node_of_pci

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


def _mapping(address: int) -> tuple[str, dict[str, str]]:
    """What the kernel says of the mapping that holds an address: its permissions, and the rest by name."""
    found: tuple[str, dict[str, str]] = ("", {})
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if region := re.match(r"([0-9a-f]+)-([0-9a-f]+) (\S+) ", line):
            if found[1]:
                break
            first, last = int(region[1], 16), int(region[2], 16)
            found = (region[3], {"": line}) if first <= address < last else ("", {})
        elif found[1]:
            name, _, value = line.partition(":")
            found[1][name] = value.strip()
    return found


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="this kernel does not say")
def test_memory_is_private_and_in_huge_pages_where_the_kernel_has_them() -> None:
    memory = HostMemory(64 << 20)
    permissions, says = _mapping(memory.tensor.data_ptr() + (32 << 20))
    assert permissions == "rw-p", "shared memory is tmpfs, for which huge pages are off by default"
    enabled = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if enabled.exists() and "[never]" not in enabled.read_text():
        assert "hg" in says["VmFlags"].split(), says
        assert int(says["AnonHugePages"].split()[0]) > 0, says
    memory.close()


def test_a_child_process_has_nothing_of_memory_that_a_device_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a fork would leave this process and the device with different pages. CUDA is stood in for: it says yes."""
    runtime = SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    memory = HostMemory(SIZE, pin=True)
    _, says = _mapping(memory.tensor.data_ptr())
    assert "dc" in says["VmFlags"].split(), "not copied to children"
    memory.close()


def test_memory_lies_on_the_node_that_was_asked_for() -> None:
    try:
        memory = HostMemory(SIZE, node=_node())
    except ConfigError as error:
        assert "not permitted" in str(error), error  # a container may forbid the call; the error says so
        return
    assert f"bind:{_node()}" in (_policy(memory) or f"bind:{_node()}")
    memory.close()


def test_memory_is_only_preferred_on_a_node_that_nobody_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    memory = HostMemory(SIZE, node=_node(), strict=False)
    if not caplog.records:  # a container may forbid the call
        assert "prefer" in (_policy(memory) or "prefer")
    memory.close()


def _node() -> int:
    """A node of which this process may have memory."""
    allowed = re.search(r"^Mems_allowed_list:\s*(\d+)", Path("/proc/self/status").read_text(), re.M)
    return int(allowed[1]) if allowed else 0


def _policy(memory: HostMemory) -> str | None:
    """What the kernel says of the range; None where it does not."""
    maps, start = Path("/proc/self/numa_maps"), memory.tensor.data_ptr()
    if not maps.exists():
        return None
    lines = [line.split() for line in maps.read_text().splitlines()]
    return next(line[1] for line in lines if int(line[0], 16) == start)


# A filter that answers one system call with EPERM, as Docker's and Kubernetes' default profile does mbind, and then our
# memory under it. It lasts as long as the process, hence a child.
_FORBIDDEN = """
import ctypes, logging, struct, sys

import torch
from hybrid_backend.errors import ConfigError
from hybrid_backend.tiers.pinned import _SYS_MBIND, HostMemory
import platform

class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_char_p)]

LOAD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOW, EPERM = 0x7FFF0000, 0x00050001
is_mbind = (JUMP_IF_EQUAL, 0, 1, _SYS_MBIND[platform.machine()])
steps = [(LOAD, 0, 0, 0), is_mbind, (RETURN, 0, 0, EPERM), (RETURN, 0, 0, ALLOW)]
code = b"".join(struct.pack("HBBI", *step) for step in steps)
prctl = ctypes.CDLL(None, use_errno=True).prctl
NO_NEW_PRIVILEGES, SECCOMP, FILTER = 38, 22, 2
assert prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0) == 0
assert prctl(SECCOMP, FILTER, ctypes.byref(Program(len(steps), code)), 0, 0) == 0, ctypes.get_errno()

memory = HostMemory(5 << 20, node=0, strict=False)
memory.tensor.fill_(7)
print("auto:", int(memory.tensor.sum(dtype=torch.int64)))
try:
    HostMemory(5 << 20, node=0)
except ConfigError as error:
    print("explicit:", error)
"""


@pytest.mark.skipif(platform.machine() not in _SYS_MBIND, reason="mbind has no number here")
def test_a_container_that_forbids_binding_is_warned_of_and_refused_where_a_node_was_asked_for() -> None:
    done = subprocess.run([sys.executable, "-c", _FORBIDDEN], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    auto, explicit = done.stdout.splitlines()
    assert auto == f"auto: {7 * 5 * 2**20}", "the memory is there all the same"
    warnings = [line for line in done.stderr.splitlines() if "workers.numa: auto" in line]
    assert len(warnings) == 1 and "not permitted" in warnings[0] and "SYS_NICE" in warnings[0], done.stderr
    assert explicit.startswith("explicit: workers.numa:") and "node 0: Operation not permitted" in explicit


def test_memory_that_nobody_closed_is_unpinned_when_it_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an engine that died while it started: CUDA would take what is mapped there next for pinned."""
    pinned: list[int] = []

    class Driver:
        def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
            pinned.append(address)
            return 0

        def cudaHostUnregister(self, address: int) -> None:
            pinned.remove(address)

    monkeypatch.setattr(torch.cuda, "cudart", Driver)
    memory = HostMemory(SIZE, pin=True)
    assert pinned == [memory.tensor.data_ptr()]
    del memory
    gc.collect()
    assert pinned == []


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


@pytest.mark.parametrize(
    ("speed", "lanes", "gigabytes"),
    [
        ("16.0 GT/s PCIe\n", "16\n", 25.2),
        ("32.0 GT/s PCIe\n", "8\n", 25.2),
        ("32.0 GT/s PCIe\n", "16\n", 50.4),
        ("Unknown\n", "16\n", None),
        ("32.0 GT/s PCIe\n", "0\n", None),
        ("32.0 GT/s PCIe\n", None, None),
    ],
)
def test_what_the_bus_of_a_gpu_carries_is_by_its_speed_and_lanes(
    tmp_path: Path, speed: str, lanes: str | None, gigabytes: float | None
) -> None:
    folder = tmp_path / "0000:3b:00.0"
    folder.mkdir()
    (folder / "max_link_speed").write_text(speed)
    if lanes is not None:
        (folder / "current_link_width").write_text(lanes)
    found = bus_of_pci(0, 0x3B, 0, tmp_path)
    assert found == (None if gigabytes is None else pytest.approx(gigabytes * 1e9, rel=1e-3))
    assert bus_of_pci(0, -1, 0, tmp_path) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_reads_pinned_memory_at_the_same_address() -> None:
    memory = HostMemory(SIZE, pin=True)
    assert memory.tensor.is_pinned()
    memory.close()
