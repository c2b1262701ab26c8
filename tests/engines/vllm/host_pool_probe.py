"""vLLM's own code beside ours, on machines that are given as files of the kernel. Prints one JSON object.

A program of its own, since importing vLLM's CPU worker changes torch for the whole process.
"""

from __future__ import annotations

import builtins
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import vllm.utils.cpu_resource_utils as readings
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.ompmultiprocessing import OMPProcessManager
from vllm.v1.worker.cpu_worker import CPUWorker

from hybrid_backend.config import HybridConfig
from hybrid_backend.engines.vllm import BACKEND
from hybrid_backend.engines.vllm.compat import binds_engines_apart
from hybrid_backend.engines.vllm.memory import room_of, size_host_pool
from hybrid_backend.errors import ConfigError
from hybrid_backend.host_memory import RESERVE, System
from hybrid_backend.memory_plan.numa import rank_nodes
from tests.unit.test_host_memory import GIB, TWO, limited, machine

Made = Callable[[Path, float], System]  # a folder, GiB that were taken since the start


def small_node(folder: Path, taken: float = 0) -> System:
    return machine(folder, 22.5 - taken, {0: (7.84, 7.5 - taken, "0-7")})


def full_node(folder: Path, taken: float = 0) -> System:
    return machine(folder, 22.5 - taken, {0: (7.84, 1.8 - taken, "0-7")})


def container(folder: Path, taken: float = 0) -> System:
    return limited(folder, limit=6, used=2 + taken, cache=1)


# Name -> machine, size that a user asks for, flag or variable that asks for it.
CASES: dict[str, tuple[Made, float | None, str]] = {
    "small node": (small_node, None, ""),
    "small node, host_pool.size": (small_node, 7, "host_pool.size"),
    "small node, flag": (small_node, 7, "--kv-cache-memory-bytes"),
    "small node, variable": (small_node, 7, "VLLM_CPU_KVCACHE_SPACE"),
    "small node, blocks": (small_node, 7, "--num-gpu-blocks-override"),
    "small node, a size that fits": (small_node, 5, "host_pool.size"),
    "full node": (full_node, None, ""),
    "container": (container, None, ""),
}


def main() -> None:
    model = sys.argv[1]
    flags = AsyncEngineArgs(model=model, enforce_eager=True, attention_backend=BACKEND, block_size=16)
    vllm_config = flags.create_engine_config()
    print(json.dumps({"cases": {name: _case(vllm_config, *case) for name, case in CASES.items()}, "nodes": _nodes()}))


def _case(vllm_config: Any, make: Made, asked: float | None, key: str) -> dict[str, Any]:
    cache, config = vllm_config.cache_config, HybridConfig()
    cache.kv_cache_memory_bytes, cache.num_gpu_blocks_override = None, None
    vllm_config.additional_config = {}
    size = None if asked is None else int(asked * GIB)
    if key == "host_pool.size":
        config = HybridConfig.model_validate({"host_pool": {"size": size}})
    elif key == "--num-gpu-blocks-override":
        cache.num_gpu_blocks_override = int(size or 0) // (16 * 30 * 3 * 64 * 2 * 2)
    elif key:
        cache.kv_cache_memory_bytes = size
        if key.startswith("VLLM"):
            os.environ[key] = str(asked)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        system = make(root, 0)
        found: dict[str, Any] = {"node": system.nodes()[0].free, "vllm": _reading(root)}
        here = room_of(vllm_config, config, True, system)
        try:
            size_host_pool(vllm_config, config, on_cpu=True, system=system)
        except ConfigError as error:
            found["error"] = str(error)
        os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
        found["size"] = size or cache.kv_cache_memory_bytes
        make(root, (here.weights + RESERVE) / GIB)  # as it is when vLLM looks
        found["granted"] = _granted(vllm_config, root, found["size"])
        found["old rule granted"] = _granted(vllm_config, root, int(22.5 * GIB) // 2)
        if "error" not in found:  # the engine's core checks its configuration again, when everything is loaded
            size_host_pool(vllm_config, config, on_cpu=True, system=machine(root, 0.01))
            found["kept"] = cache.kv_cache_memory_bytes == found["size"]
    return found


def _reading(root: Path) -> int:
    with _Files(root):
        return int(readings.get_memory_node_info(0).available_memory)


def _granted(vllm_config: Any, root: Path, size: int) -> bool:
    """What vLLM's worker says once weights are loaded; True: it takes the size as it is."""
    worker = CPUWorker.__new__(CPUWorker)
    worker.cache_config, worker.compilation_config = vllm_config.cache_config, vllm_config.compilation_config
    vllm_config.cache_config.kv_cache_memory_bytes, before = size, vllm_config.cache_config.kv_cache_memory_bytes
    try:
        with _Files(root):
            return bool(worker.determine_available_memory() == size)
    except ValueError as error:
        assert "on kv cache allocation is less than requested memory" in str(error), error
        return False
    finally:
        vllm_config.cache_config.kv_cache_memory_bytes = before


def _nodes() -> list[tuple[list[Any], list[Any]]]:
    """Ours and vLLM's, for two nodes of four CPUs."""
    compared = [_second_engine()]
    for ranks, env, cpus in (
        (1, {}, range(8)),
        (2, {}, range(8)),
        (1, {"CPU_VISIBLE_MEMORY_NODES": "1"}, range(8)),
        (2, {"VLLM_CPU_OMP_THREADS_BIND": "6-7|0-1"}, range(8)),
        (2, {"VLLM_CPU_SIM_MULTI_NUMA": "1"}, range(8)),
        (1, {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}, range(5, 8)),
    ):
        with tempfile.TemporaryDirectory() as folder:
            ours = rank_nodes(ranks, env, cpus, machine(Path(folder), 40, TWO))
            os.environ.update(env)
            parallel = SimpleNamespace(
                local_world_size=ranks, data_parallel_rank_local=0, _api_process_count=1, assigned_physical_gpu_ids=None
            )
            with _Files(Path(folder), cpus):
                manager = OMPProcessManager(SimpleNamespace(parallel_config=parallel, kv_transfer_config=None))
            lists = [[] if manager.skip_setup else own for own in manager.cpu_lists or [[]] * ranks]
            compared.append((ours, [min(own or cpus) // 4 for own in lists]))
            for name in env:
                del os.environ[name]
    return compared


def _second_engine() -> tuple[list[Any], list[Any]]:
    """The node of the second of two engines of data parallelism, to which vLLM assigns device 1."""
    with tempfile.TemporaryDirectory() as folder:
        ours = rank_nodes(2, {}, range(8), machine(Path(folder), 40, TWO), 2, binds_engines_apart())
        parallel = SimpleNamespace(
            local_world_size=1, data_parallel_rank_local=1, _api_process_count=1, assigned_physical_gpu_ids=[1]
        )
        with _Files(Path(folder)):
            manager = OMPProcessManager(SimpleNamespace(parallel_config=parallel, kv_transfer_config=None))
    return ours[1:], [min(own) // 4 for own in manager.cpu_lists]


class _Files:
    """vLLM's readings come from the files in a folder meanwhile."""

    def __init__(self, root: Path, cpus: range = range(8)) -> None:
        self._root, self._cpus = root, cpus

    def _there(self, path: str) -> str:
        return f"{self._root}{path.replace(str(os.getpid()), 'self')}"

    def _open(self, path: str) -> IO[str]:
        return builtins.open(self._there(path))

    def __enter__(self) -> None:
        self._before = (os.path.exists, os.sched_getaffinity, readings._get_cpu_list)
        readings.open = self._open
        os.path.exists = lambda path: self._before[0](self._there(path))
        os.sched_getaffinity = lambda _: set(self._cpus)
        readings._get_cpu_list = lambda: [readings.LogicalCPUInfo(i, i, i // 4) for i in range(8)]
        readings.get_cgroup_memory_limit.cache_clear()

    def __exit__(self, *_: object) -> None:
        os.path.exists, os.sched_getaffinity, readings._get_cpu_list = self._before
        del readings.open


if __name__ == "__main__":
    main()
