"""Size of the host pool in vLLM's configuration, set or checked before weights are loaded and anything is compiled."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from hybrid_backend.config import HybridConfig, format_size
from hybrid_backend.engines.vllm.compat import binds_engines_apart
from hybrid_backend.engines.vllm.kv_dtype import page_dtype
from hybrid_backend.engines.vllm.layer_kinds import full_shape, has_local_layers, local_layers
from hybrid_backend.engines.vllm.settings import add_option
from hybrid_backend.errors import ConfigError
from hybrid_backend.host_memory import Room, System, room
from hybrid_backend.kernels.kv_format import KvFormat
from hybrid_backend.memory_plan.host_pool import LongestSequence, PoolSize, choose_pool
from hybrid_backend.memory_plan.numa import KVCACHE_SPACE, rank_nodes
from hybrid_backend.model import weights_to_load

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_SIZED_KEY = "hybrid_host_pool"
"""Key beside our configuration that says that the size was chosen."""


def size_host_pool(vllm_config: VllmConfig, config: HybridConfig, on_cpu: bool, system: System | None = None) -> None:
    """Set ``kv_cache_memory_bytes`` of each rank, or check the size that a user chose.

    Later processes check their configuration again, when weights or the pool itself are loaded and no longer available
    memory. So the size is chosen once, in the process that reads the user's flags.

    Raises:
        ConfigError: the machine does not have the memory, or the pool holds less than one sequence.
    """
    if vllm_config.additional_config.get(_SIZED_KEY):
        return
    add_option(vllm_config, _SIZED_KEY, True)
    size = _chosen_size(vllm_config, config, on_cpu)
    pool_room = room_of(vllm_config, config, on_cpu, system or System())
    cache, model = vllm_config.cache_config, vllm_config.model_config
    # vLLM's own default is 92 % of the node's memory.
    cache.kv_cache_memory_bytes = choose_pool(size, pool_room)
    block_bytes = _block_bytes(vllm_config)
    if cache.num_gpu_blocks_override is not None and not has_local_layers(model):
        size = PoolSize("--num-gpu-blocks-override", cache.num_gpu_blocks_override * block_bytes)
        choose_pool(size, pool_room)
    if model.original_max_model_len != -1:  # Otherwise vLLM shortens the longest sequence to what fits.
        LongestSequence(model.max_model_len, cache.block_size, block_bytes).check_fits(size, pool_room)


def room_of(vllm_config: VllmConfig, config: HybridConfig, on_cpu: bool, system: System) -> Room:
    """Return the memory that each rank's host pool may take on this machine."""
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    engines = max(1, parallel.data_parallel_size_local)
    ranks = parallel.local_world_size * engines
    if not on_cpu:  # With GPUs the weights take no host memory.
        node = config.workers.numa
        return room(system, [node if isinstance(node, int) else None] * ranks)
    weights, uncached = weights_to_load(
        str(model.model), model.hf_config.to_dict(), str(model.dtype).removeprefix("torch."), model.revision
    )
    nodes = rank_nodes(ranks, os.environ, os.sched_getaffinity(0), system, engines, binds_engines_apart())
    return room(system, nodes, -(-weights // parallel.tensor_parallel_size), uncached)


def _chosen_size(vllm_config: VllmConfig, config: HybridConfig, on_cpu: bool) -> PoolSize:
    """Return the size of a rank's pool that the user chose, and by which setting."""
    cache, configured = vllm_config.cache_config, config.host_pool.size_bytes
    is_overruled = on_cpu and bool(os.environ.get(KVCACHE_SPACE))
    if configured is not None:
        if is_overruled and cache.kv_cache_memory_bytes != configured:
            raise ConfigError(
                f"host_pool.size: {format_size(configured)} is overruled by {KVCACHE_SPACE}; unset one of the two"
            )
        return PoolSize("host_pool.size", configured)
    if cache.kv_cache_memory_bytes is None:
        return PoolSize("host_pool.size")
    return PoolSize(KVCACHE_SPACE if is_overruled else "--kv-cache-memory-bytes", cache.kv_cache_memory_bytes)


def _block_bytes(vllm_config: VllmConfig) -> int:
    """Return the bytes of one block in all layers with full attention, on one rank."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    kinds = local_layers(model)
    layers = kinds.count(False) if kinds else model.get_num_layers_by_block_type(vllm_config.parallel_config)
    dtype = page_dtype(str(cache.cache_dtype), model.dtype)
    shape = full_shape(vllm_config)
    return KvFormat(shape.kv_heads, cache.block_size, shape.head_dim, dtype).page_bytes * layers
