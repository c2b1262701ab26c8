"""What a host pool may take, on machines that are given as files of the kernel."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hybrid_backend.config import HybridConfig, config_from_mapping, parse_size
from hybrid_backend.engines.sglang.settings import host_pool_bytes
from hybrid_backend.errors import ConfigError
from hybrid_backend.host_memory import RESERVE, System, check_pool, numbers, room, uncached_bytes
from hybrid_backend.memory_plan.numa import rank_nodes
from hybrid_backend.model import stored_bytes, weights_to_load
from hybrid_backend.tools.doctor.machine import check_ram

GIB = 2**30
AUTO = HybridConfig()


def machine(
    root: Path,
    available: float,
    nodes: dict[int, tuple[float, float, str]] | None = None,
    allowed: str = "",
    groups: dict[str, str | int] | None = None,
) -> System:
    """A machine in GiB.

    Args:
        nodes: by number: memory, free memory, CPUs. A part of what is free is file cache.
        allowed: nodes that the process may take memory from; all where empty.
        groups: files of /sys/fs/cgroup, and "self" for /proc/self/cgroup.
    """
    files: dict[str, str | int] = {
        "proc/meminfo": f"MemTotal:  99999999 kB\nMemAvailable:   {int(available * 2**20)} kB\n",
        "proc/self/status": f"Name:\tpython\nMems_allowed_list:\t{allowed or ','.join(map(str, nodes or [0]))}\n",
    }
    for node, (total, free, cpus) in (nodes or {}).items():
        folder, cache = f"sys/devices/system/node/node{node}", int(free * 2**20) // 8
        sizes = {"MemTotal": int(total * 2**20), "MemFree": int(free * 2**20) - 3 * cache, "MemUsed": 12345}
        sizes |= dict.fromkeys(("Active(file)", "Inactive(file)", "SReclaimable"), cache)
        files[f"{folder}/meminfo"] = "".join(f"Node {node} {name}: {kib} kB\n" for name, kib in sizes.items())
        files[f"{folder}/cpulist"] = f"{cpus}\n"
    for name, content in (groups or {}).items():
        files["proc/self/cgroup" if name == "self" else f"sys/fs/cgroup/{name}"] = content
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{content}".rstrip() + "\n")
    return System(root / "proc", root / "sys/fs/cgroup", root / "sys/devices/system/node")


@pytest.fixture
def small_node(tmp_path: Path) -> System:
    """24 GiB, of which the only node tells of 7.84."""
    return machine(tmp_path, 22.5, {0: (7.84, 7.5, "0-1")})


def limited(root: Path, limit: float, used: float, cache: float = 0, memory: float = 64) -> System:
    """A container, control groups version 2, on one large node."""
    files: dict[str, str | int] = {
        "self": "0::/",
        "memory.max": int(limit * GIB),
        "memory.current": int(used * GIB),
        "memory.stat": f"anon 3\ninactive_file {int(cache * GIB)}",
    }
    return machine(root, memory, {0: (memory, memory, "0-7")}, groups=files)


# --- the rule ---


def test_the_automatic_pool_is_half_of_what_the_weights_leave(tmp_path: Path) -> None:
    here = room(machine(tmp_path, 32), [None], weights=8 * GIB)
    assert (here.auto, here.most) == (12 * GIB, 24 * GIB - RESERVE)


def test_a_node_smaller_than_the_machine_bounds_the_engine_that_is_bound_to_it(small_node: System) -> None:
    bound, free = room(small_node, [0], weights=GIB // 2), room(small_node, [None], weights=GIB // 2)
    assert bound.auto == pytest.approx(3.5 * GIB, abs=8192) and bound.most == pytest.approx(5.5 * GIB, abs=8192)
    assert "on NUMA node 0" in bound.why
    assert free.auto == 11 * GIB, "an engine that takes memory anywhere is not bound"


def test_what_the_container_already_uses_is_not_there(tmp_path: Path) -> None:
    assert room(limited(tmp_path, limit=10, used=6), [None]).most == 4 * GIB - RESERVE


def test_file_cache_counts_as_free_for_the_kernel_but_not_for_vllm(tmp_path: Path) -> None:
    system = limited(tmp_path, limit=10, used=6, cache=3)
    assert room(system, [None]).most == 7 * GIB - RESERVE
    assert room(system, [0], uncached=GIB).most == 3 * GIB - RESERVE, "files that are yet to be read become cache too"
    large = limited(tmp_path, limit=10, used=6, cache=3, memory=9)
    assert room(large, [0], uncached=GIB).most == 7 * GIB - RESERVE, "vLLM ignores a limit above its node's memory"


@pytest.mark.parametrize("own", ["max", 9 * GIB], ids=["no limit of its own", "a larger one of its own"])
def test_a_limit_of_a_group_further_up_counts(tmp_path: Path, own: str | int) -> None:
    files: dict[str, str | int] = {
        "self": "0::/pods/pod7/box",
        "pods/pod7/box/memory.max": own,
        "pods/pod7/box/memory.current": GIB,
        "pods/pod7/memory.max": 8 * GIB,
        "pods/pod7/memory.current": 3 * GIB,
        "pods/memory.max": "max",
    }
    assert machine(tmp_path, 64, groups=files).available() == 5 * GIB


def test_version_1_of_control_groups_is_read_with_what_lies_below(tmp_path: Path) -> None:
    files: dict[str, str | int] = {
        "self": "4:cpu:/\n3:memory:/a/b\n0::/",
        "memory/a/b/memory.limit_in_bytes": 2**63 - 4096,
        "memory/a/b/memory.usage_in_bytes": GIB,
        "memory/a/memory.limit_in_bytes": 9 * GIB,
        "memory/a/memory.usage_in_bytes": 4 * GIB,
        "memory/a/memory.stat": f"inactive_file 0\ntotal_inactive_file {2 * GIB}",
    }
    assert machine(tmp_path, 64, groups=files).available() == 7 * GIB


def test_weights_that_leave_less_than_the_engine_needs_leave_no_pool(tmp_path: Path) -> None:
    system = machine(tmp_path, 8)
    assert room(system, [None], weights=5 * GIB).auto == 1.5 * GIB
    assert room(system, [None], weights=6 * GIB).auto == 0.5 * GIB, "the engine's own memory goes first"
    assert room(system, [None], weights=9 * GIB).most == 0


def test_ranks_share_a_node_or_have_one_each(tmp_path: Path) -> None:
    system = machine(tmp_path, 40, {0: (20, 20, "0-3"), 1: (20, 16, "4-7")})
    together, apart = room(system, [0, 0], weights=GIB), room(system, [0, 1], weights=GIB)
    assert (together.auto, together.most) == (4.5 * GIB, 9 * GIB - RESERVE)
    assert (apart.auto, apart.most) == (7.5 * GIB, 15 * GIB - RESERVE), "the smaller node"
    assert "each of 2 ranks" in together.why and "node 1" in apart.why


def test_nodes_that_the_process_may_not_use_are_not_there(tmp_path: Path) -> None:
    system = machine(tmp_path, 40, {0: (20, 20, "0-3"), 1: (20, 16, "4-7")}, allowed="1")
    assert room(system, [None]).most == 16 * GIB - RESERVE


@pytest.mark.parametrize("key", ["host_pool.size", "--kv-cache-memory-bytes", "VLLM_CPU_KVCACHE_SPACE"])
def test_a_size_that_the_node_cannot_give_is_refused_with_key_value_place_and_fix(small_node: System, key: str) -> None:
    here = room(small_node, [0], weights=GIB // 2)
    with pytest.raises(ConfigError) as refused:
        check_pool(key, 8 * GIB, here)
    told = str(refused.value)
    assert told.startswith(f"{key}: 8GiB is more than the 5.5 GiB") and "7.5 GiB available on NUMA node 0" in told
    fix = re.search(r"at most (\w+)", told)
    assert fix is not None
    check_pool(key, parse_size(fix[1]), here)


# --- which node ---

TWO = {0: (20.0, 20.0, "0-3"), 1: (20.0, 16.0, "4-7")}


@pytest.mark.parametrize(
    ("ranks", "env", "cpus", "expected"),
    [
        (1, {}, range(8), [0]),
        (2, {}, range(8), [0, 1]),
        (1, {}, range(4, 8), [1]),  # auto finds no CPU of the first node
        (1, {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}, range(5, 8), [1]),
        (2, {"VLLM_CPU_OMP_THREADS_BIND": "6-7|0-1"}, range(8), [1, 0]),
        (2, {"VLLM_CPU_OMP_THREADS_BIND": "0-1|2-3"}, range(8), [0, 0]),
        (1, {"CPU_VISIBLE_MEMORY_NODES": "1"}, range(8), [1]),
        (4, {"VLLM_CPU_SIM_MULTI_NUMA": "1"}, range(8), [0, 0, 1, 1]),
    ],
)
def test_a_rank_s_node_is_that_of_its_first_cpu(
    tmp_path: Path, ranks: int, env: dict[str, str], cpus: range, expected: list[int]
) -> None:
    assert rank_nodes(ranks, env, cpus, machine(tmp_path, 40, TWO)) == expected


def test_engines_of_data_parallelism_share_their_nodes_or_have_nodes_of_their_own(tmp_path: Path) -> None:
    system = machine(tmp_path, 40, TWO)
    assert rank_nodes(2, {}, range(8), system, engines=2) == [0, 0]
    assert rank_nodes(2, {}, range(8), system, engines=2, engines_apart=True) == [0, 1]


def test_a_machine_that_tells_of_no_nodes_has_none(tmp_path: Path) -> None:
    system = machine(tmp_path, 40)
    assert rank_nodes(2, {}, range(4), system) == [None, None]
    assert room(system, [None]).most == 40 * GIB - RESERVE


def test_the_kernels_lists_of_numbers() -> None:
    assert numbers("0-2,7\n") == [0, 1, 2, 7] and numbers("") == []


# --- weights ---

CONFIG = {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "hidden_size": 64,
    "intermediate_size": 128,
    "vocab_size": 512,
    "dtype": "bfloat16",
}


def test_weights_are_counted_as_the_engine_will_hold_them(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1000, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    assert weights_to_load(str(tmp_path), CONFIG, "bfloat16") == (2000, 0), "the file was just written: it is cached"
    assert weights_to_load(str(tmp_path), CONFIG, "float32")[0] == 4000


def test_quantised_weights_take_what_their_files_do(tmp_path: Path) -> None:
    assert stored_bytes(str(tmp_path)) == stored_bytes("nobody/no-such-model") == 0
    save_file({"a": torch.zeros(1000, dtype=torch.uint8)}, tmp_path / "model.safetensors")
    assert 1000 < stored_bytes(str(tmp_path)) < 1200


def test_weights_whose_files_are_not_here_are_counted_by_the_shape(tmp_path: Path) -> None:
    counted = weights_to_load(str(tmp_path), CONFIG, "bfloat16")
    assert counted[0] > 2 * 2 * 512 * 64 and counted[1] == counted[0], "all of them are to be read"
    assert weights_to_load(str(tmp_path), CONFIG, "float32") == (2 * counted[0], counted[1])
    for elsewhere in ("nobody/no-such-model", "/nowhere/model.gguf", "s3://bucket/model"):
        assert weights_to_load(elsewhere, CONFIG, "bfloat16") == counted
    assert weights_to_load(str(tmp_path), {**CONFIG, "quantization_config": {}, "dtype": "int4"}, "bfloat16")[0] > 0
    assert weights_to_load(str(tmp_path), {**CONFIG, "quantization_config": {"bits": 4}}, "bfloat16") == (0, 0)
    assert weights_to_load(str(tmp_path), {"model_type": "unheard of"}, "bfloat16") == (0, 0)


def test_files_that_were_not_read_yet_are_told_apart(tmp_path: Path) -> None:
    read, hole = tmp_path / "read", tmp_path / "hole"
    read.write_bytes(b"x" * 2**20)
    with hole.open("wb") as file:
        file.truncate(2**20)  # nothing is there to be cached
    assert uncached_bytes([read]) == 0
    assert uncached_bytes([read, hole, tmp_path / "absent"]) == 2**20


# --- engines and doctor go by it ---


def test_sglang_s_pool_leaves_room_for_weights_until_they_are_loaded(tmp_path: Path) -> None:
    system = machine(tmp_path, 16)
    assert host_pool_bytes(AUTO, 4 * GIB, system) == 6 * GIB
    assert host_pool_bytes(AUTO, None, system) == 8 * GIB
    wanted = config_from_mapping({"host_pool": {"size": "12GiB"}}, "test")
    assert host_pool_bytes(wanted, None, system) == 12 * GIB
    with pytest.raises(ConfigError, match=r"host_pool\.size: 12GiB is more than the 10\.5 GiB"):
        host_pool_bytes(wanted, 4 * GIB, system)
    with pytest.raises(ConfigError, match=r"host_pool\.size: auto finds no memory.*15\.5 GiB of weights"):
        host_pool_bytes(AUTO, int(15.5 * GIB), system)


def test_sglang_s_pool_keeps_a_container_s_limit_less_its_use(tmp_path: Path) -> None:
    assert host_pool_bytes(AUTO, None, limited(tmp_path, limit=10, used=6)) == 2 * GIB


def test_doctor_tells_the_number_that_the_engine_takes(small_node: System, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0})
    here = room(small_node, [0], uncached=0)
    assert f"host pool {here.auto / GIB:.1f} GiB (auto" in check_ram(None, True, small_node).text
    assert check_ram(here.most, True, small_node).state == "ok"
    refused = check_ram(here.most + 1, True, small_node)
    with pytest.raises(ConfigError) as told:
        check_pool("host_pool.size", here.most + 1, here)
    assert (refused.state, refused.fix) == ("problem", str(told.value))
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "8")
    assert check_ram(None, True, small_node).fix.startswith("VLLM_CPU_KVCACHE_SPACE: 8GiB")


def test_memory_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="meminfo: cannot be read"):
        System(proc=tmp_path).available()
    (tmp_path / "meminfo").write_text("MemTotal: 1 kB\n")
    with pytest.raises(ConfigError, match="no MemAvailable"):
        System(proc=tmp_path).available()
    assert System(proc=tmp_path).meminfo("MemTotal") == 1024
