"""KV groups that stay on a GPU: layers with a sliding window, and the state of layers that keep no keys and values.

Only layers with full attention are offloaded. On the CPU engine all groups share the host pool, as they share vLLM's
own pool. On a GPU each other group gets device memory of its own, small as its blocks are bounded per request, and
with it a pool of block ids of its own, as vLLM gives its one host-backed group
(v1/core/single_type_kv_cache_manager.py, ``HiSparseSourceManager.bind_host_pool``). Its layers keep the backend and the
kernels that vLLM chooses for them.

Scheduler and workers size these pools from the same configuration, so they need not tell each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheTensor, MambaSpec, SlidingWindowSpec

from hybrid_backend.engines.vllm.blocks import NULL_BLOCKS, window_blocks
from hybrid_backend.errors import EngineError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheManager


def device_groups(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> dict[int, int]:
    """Blocks of each KV group that stays on the GPU, by the group's index; empty on a CPU.

    Raises:
        EngineError: a group holds neither full attention, nor a sliding window, nor state.
    """
    if vllm_config.device_config.device_type != "cuda":
        return {}
    found = {}
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        spec = group.kv_cache_spec
        if isinstance(spec, SlidingWindowSpec):
            found[index] = window_blocks(
                spec.sliding_window,
                spec.block_size,
                vllm_config.model_config.max_model_len,
                vllm_config.scheduler_config.max_num_seqs,
                vllm_config.max_in_flight_tokens,
            )
        elif isinstance(spec, MambaSpec):
            each = spec.max_memory_usage_bytes(vllm_config) // spec.page_size_bytes
            found[index] = vllm_config.scheduler_config.max_num_seqs * each + NULL_BLOCKS
        elif not (isinstance(spec, FullAttentionSpec) and spec.sliding_window is None):
            raise EngineError(f"the hybrid backend does not support KV groups of {type(spec).__name__} on a GPU")
    return found


def own_pools(manager: KVCacheManager, groups: Mapping[int, int]) -> None:
    """Scheduler: each of ``groups`` (`device_groups`) takes its blocks from a pool of its own."""
    shared = manager.block_pool
    for index, blocks in groups.items():
        group = manager.coordinator.single_type_managers[index]
        # Its events would be mistaken for those of the host pool's blocks, which bear the same ids.
        pool = BlockPool(blocks, group.enable_caching, shared.hash_block_size, enable_kv_cache_events=False)
        group.block_pool, group._null_block = pool, pool.null_block
        # Its blocks are not the host pool's: they do not count there, unless there are too few of them. vLLM says so
        # in the same way (``HiSparseSourceManager.get_num_blocks_to_allocate``).
        group.get_num_blocks_to_allocate = partial(_lacking, group.get_num_blocks_to_allocate, pool, shared)
        # vLLM zeroes new blocks, named without their group, so that one group's bytes are not read as another's.
        group._record_new_block_ids = False


def _lacking(needed: Callable[..., int], own: BlockPool, shared: BlockPool, *args: Any, **kwargs: Any) -> int:
    """More blocks than the shared pool has if the group's own has too few, else none."""
    return shared.num_gpu_blocks + 1 if needed(*args, **kwargs) > own.get_num_free_blocks() else 0


def allocate(
    stock: Callable[..., dict[str, Tensor]],
    groups: Mapping[int, int],
    on_host: Callable[[], AbstractContextManager[None]],
    kv_cache_config: KVCacheConfig,
    *args: Any,
    **kwargs: Any,
) -> dict[str, Tensor]:
    """Worker: the KV cache of every layer; ``groups`` (`device_groups`) in device memory, all others ``on_host``.

    ``stock``, ``kv_cache_config`` and what follows: vLLM's ``allocate_kv_cache`` (v1/worker/utils.py), its arguments.
    """
    owner = {name: index for index, group in enumerate(kv_cache_config.kv_cache_groups) for name in group.layer_names}
    mine = [each for each in kv_cache_config.kv_cache_tensors if owner[each.layers[0]] not in groups]
    with on_host():
        caches = stock(replace(kv_cache_config, kv_cache_tensors=mine), *args, **kwargs)
    for index, blocks in groups.items():
        tensors = [each for each in kv_cache_config.kv_cache_tensors if owner[each.layers[0]] == index]
        alone = [_of_blocks(each, kv_cache_config.num_blocks, blocks) for each in tensors]
        size = max(each.offset + len(each.layers) * each.layer_stride for each in alone)
        alone = [replace(each, size=size) for each in alone]
        caches |= stock(replace(kv_cache_config, num_blocks=blocks, kv_cache_tensors=alone), *args, **kwargs)
    return caches


def _of_blocks(tensor: KVCacheTensor, before: int, now: int) -> KVCacheTensor:
    """The same layers, one after the other, with so many blocks each."""
    if tensor.layer_stride % before or tensor.offset % before:
        raise EngineError("the hybrid backend expects the KV cache layer by layer (LBHNC); unset VLLM_KV_CACHE_LAYOUT")
    return replace(tensor, layer_stride=tensor.layer_stride // before * now, offset=tensor.offset // before * now)
