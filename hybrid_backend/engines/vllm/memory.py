"""The host pool's size: chosen, or refused, before weights are loaded and anything is compiled."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from hybrid_backend.config import HybridConfig, format_size
from hybrid_backend.engines.vllm.nodes import KVCACHE_SPACE, rank_nodes
from hybrid_backend.errors import ConfigError
from hybrid_backend.host_memory import Room, System, check_pool, room, size_text
from hybrid_backend.model import weights_to_load

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_SIZED = "hybrid_host_pool"  # beside our configuration: the size was looked at


def size_host_pool(vllm_config: VllmConfig, config: HybridConfig, on_cpu: bool, system: System | None = None) -> None:
    """Set ``kv_cache_memory_bytes`` of each rank; the size that a user gave is checked.

    Later processes check their configuration once more, when weights or the pool itself are loaded and no longer
    available memory. So it is done once, in the process that reads the user's flags.

    Raises:
        ConfigError: the engine could not have it, or it holds less than one sequence.
    """
    if vllm_config.additional_config.get(_SIZED):
        return
    vllm_config.additional_config = {**vllm_config.additional_config, _SIZED: True}
    key, size = _asked(vllm_config, config, on_cpu)
    here = room_of(vllm_config, config, on_cpu, system or System())
    cache = vllm_config.cache_config
    asked = f"host_pool.size: auto, which is {size_text(here.auto)} here ({here.why}),"
    if size is None:
        # vLLM's own default is 92 % of the node's memory.
        cache.kv_cache_memory_bytes = size = here.auto
    else:
        check_pool(key, size, here)
        asked = f"{key}: {format_size(size)}"
    if cache.num_gpu_blocks_override is not None and vllm_config.model_config.get_sliding_window() is None:
        key, size = "--num-gpu-blocks-override", cache.num_gpu_blocks_override * _block_bytes(vllm_config)
        check_pool(key, size, here)
        asked = f"{key}: {format_size(size)}"
    _check_longest(vllm_config, asked, size, here.most)


def room_of(vllm_config: VllmConfig, config: HybridConfig, on_cpu: bool, system: System) -> Room:
    """What each rank's host pool may take on this machine."""
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    engines = max(1, parallel.data_parallel_size_local)
    ranks = parallel.local_world_size * engines
    if not on_cpu:  # weights go to the GPUs
        node = config.workers.numa
        return room(system, [node if isinstance(node, int) else None] * ranks)
    weights, uncached = weights_to_load(
        str(model.model), model.hf_config.to_dict(), str(model.dtype).removeprefix("torch."), model.revision
    )
    nodes = rank_nodes(ranks, os.environ, os.sched_getaffinity(0), system, engines)
    return room(system, nodes, -(-weights // parallel.tensor_parallel_size), uncached)


def _asked(vllm_config: VllmConfig, config: HybridConfig, on_cpu: bool) -> tuple[str, int | None]:
    """Who asked for which size of a rank's pool; None: it is ours to choose."""
    cache, wanted = vllm_config.cache_config, config.host_pool.size_bytes
    overruled = on_cpu and bool(os.environ.get(KVCACHE_SPACE))
    if wanted is not None:
        if overruled and cache.kv_cache_memory_bytes != wanted:
            raise ConfigError(
                f"host_pool.size: {format_size(wanted)} is overruled by {KVCACHE_SPACE}; unset one of the two"
            )
        cache.kv_cache_memory_bytes = wanted
        return "host_pool.size", wanted
    if cache.kv_cache_memory_bytes is None:
        return "host_pool.size", None
    return KVCACHE_SPACE if overruled else "--kv-cache-memory-bytes", cache.kv_cache_memory_bytes


def _check_longest(vllm_config: VllmConfig, asked: str, size: int, most: int) -> None:
    """Raise ConfigError unless one sequence of ``--max-model-len`` fits, in the layers with full attention; the engine
    adds up the other ones itself. ``asked``: key and value."""
    model, page, block = vllm_config.model_config, vllm_config.cache_config.block_size, _block_bytes(vllm_config)
    if model.original_max_model_len == -1:
        return  # the engine shortens it
    needed = (-(-model.max_model_len // page) + 1) * block  # one block is kept back by the engine
    if size >= needed:
        return
    least, shorter = f"{-(-needed // 2**20)} MiB", (size // block - 1) * page
    fixes = [f"at least {least}"] if needed <= most else []
    fixes += [f"--max-model-len {shorter} or less"] if shorter > 0 else []
    raise ConfigError(
        f"{asked} holds less than one sequence of --max-model-len {model.max_model_len} ({least}); "
        f"choose {' or '.join(fixes or ['a machine with more memory'])}"
    )


def _block_bytes(vllm_config: VllmConfig) -> int:
    """Of one page in all layers with full attention, on one rank."""
    model, page = vllm_config.model_config, vllm_config.cache_config.block_size
    kinds = getattr(model.hf_text_config, "layer_types", None) if model.get_sliding_window() is not None else None
    layers = model.get_num_layers_by_block_type(vllm_config.parallel_config)
    if kinds:
        layers = sum(kind != "sliding_attention" for kind in kinds)
    kept = vllm_config.cache_config.cache_dtype
    itemsize = model.dtype.itemsize if kept == "auto" else getattr(torch, kept).itemsize
    per_token = 2 * model.get_head_size() * model.get_num_kv_heads(vllm_config.parallel_config) * itemsize
    return int(page * per_token * layers)
