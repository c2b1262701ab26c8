"""KV cache groups that stay on a GPU: sliding-window layers, and the state of layers that keep no keys and values.

Only layers with full attention are offloaded. On the CPU engine all groups share the host pool, as they share vLLM's
own pool. On a GPU each remaining group gets device memory of its own, which is small because its blocks are bounded per
request. With it comes a pool of block ids of its own, as vLLM gives its one host-backed group
(v1/core/single_type_kv_cache_manager.py, ``HiSparseSourceManager``). Its layers keep the backend and the kernels that
vLLM chooses for them.

Where K and V are in 8 bits, windows stay in the model's type, and their pages are padded to the bytes of a block of the
layers with full attention (`HybridCudaPlatform._align_heterogeneous_kv_block_size`).

The seams: the worker tells the engine each layer's spec (``Worker.get_kv_cache_spec``), the platform registers the
manager of each kind of spec (``Platform.register_custom_kv_cache_specs``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.single_type_kv_cache_manager import MambaManager, SingleTypeKVCacheManager, SlidingWindowManager
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    KVCacheTensor,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from hybrid_backend.engines.vllm import OWN_BACKEND
from hybrid_backend.errors import EngineError
from hybrid_backend.memory_plan.blocks import NULL_BLOCKS, window_blocks

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput


@dataclass(frozen=True, kw_only=True)
class DeviceWindowSpec(SlidingWindowSpec):
    """Spec of sliding-window layers that stay on the device (`window_blocks` explains the fields)."""

    requests: int
    in_flight: int

    @property
    def pool_blocks(self) -> int:
        return window_blocks(self.sliding_window, self.block_size, self.requests, self.in_flight)

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """Return 0: the layers take nothing of the memory that vLLM divides, which is the host pool."""
        return 0


@dataclass(frozen=True, kw_only=True)
class DeviceStateSpec(MambaSpec):
    """Spec of layers with a state, which stays on the device for ``requests`` requests at once."""

    requests: int
    blocks_per_request: int

    @property
    def pool_blocks(self) -> int:
        return self.requests * self.blocks_per_request + NULL_BLOCKS


def on_device(specs: dict[str, KVCacheSpec], vllm_config: VllmConfig) -> dict[str, KVCacheSpec]:
    """Replace the specs of layers that are not offloaded by specs that say what they take of the device.

    Raises:
        EngineError: a layer has neither full attention, nor a sliding window, nor state.
    """
    requests = vllm_config.scheduler_config.max_num_seqs
    result: dict[str, KVCacheSpec] = {}
    for name, spec in specs.items():
        values = {entry.name: getattr(spec, entry.name) for entry in fields(spec)}
        if type(spec) is SlidingWindowSpec:
            result[name] = DeviceWindowSpec(**values, requests=requests, in_flight=vllm_config.max_in_flight_tokens)
        elif type(spec) is MambaSpec:
            blocks = spec.max_memory_usage_bytes(vllm_config) // spec.page_size_bytes
            result[name] = DeviceStateSpec(**values, requests=requests, blocks_per_request=blocks)
        elif type(spec) is FullAttentionSpec:
            result[name] = spec
        else:
            raise EngineError(
                f"the hybrid backend does not support layers of kind {type(spec).__name__} on a GPU ({name}); "
                f"{OWN_BACKEND}"
            )
    return result


class _OwnPool(SingleTypeKVCacheManager):
    """Mixin for a manager that takes its blocks from a pool of its own."""

    def __init__(self, kv_cache_spec: DeviceWindowSpec | DeviceStateSpec, block_pool: BlockPool, **kwargs: Any) -> None:
        # The pool publishes no KV events, because vLLM would take its block ids for those of the host pool.
        own = BlockPool(kv_cache_spec.pool_blocks, kwargs["enable_caching"], block_pool.hash_block_size)
        super().__init__(kv_cache_spec, block_pool=own, **kwargs)
        self._shared = block_pool
        # vLLM zeroes new blocks, so that one group's bytes are not read as another's, and names them without a group.
        self._record_new_block_ids = False

    def get_num_blocks_to_allocate(self, *args: Any, **kwargs: Any) -> int:
        """Return 0, or more blocks than the shared pool has if the own pool has too few: vLLM then waits."""
        needed = super().get_num_blocks_to_allocate(*args, **kwargs)
        return self._shared.num_gpu_blocks + 1 if needed > self.block_pool.get_num_free_blocks() else 0


class DeviceWindowManager(_OwnPool, SlidingWindowManager):
    """Manager of `DeviceWindowSpec`."""


class DeviceStateManager(_OwnPool, MambaManager):
    """Manager of `DeviceStateSpec`."""


def register_specs() -> None:
    """Register the managers, in every process that makes managers or checks specs."""
    KVCacheSpecRegistry.register(DeviceWindowSpec, DeviceWindowManager)
    KVCacheSpecRegistry.register(DeviceStateSpec, DeviceStateManager)


def keep_to_pools(scheduled: SchedulerOutput, kv_cache_config: KVCacheConfig) -> None:
    """Map the block ids of vLLM's warm-up requests into each group's own pool.

    vLLM counts them through all groups, as if there were one pool (v1/worker/gpu/warmup.py, ``_alloc_blocks``).
    """
    new = [request.block_ids for request in scheduled.scheduled_new_reqs]
    more = [blocks for blocks in scheduled.scheduled_cached_reqs.new_block_ids if blocks is not None]
    for ids in (*new, *more):
        for group, blocks in zip(kv_cache_config.kv_cache_groups, ids, strict=True):
            if isinstance(group.kv_cache_spec, DeviceWindowSpec | DeviceStateSpec):
                usable = group.kv_cache_spec.pool_blocks - NULL_BLOCKS
                blocks[:] = [(block - NULL_BLOCKS) % usable + NULL_BLOCKS for block in blocks]


def allocate(
    stock: Callable[..., dict[str, Tensor]],
    on_host: Callable[[], AbstractContextManager[None]],
    kv_cache_config: KVCacheConfig,
    *args: Any,
    **kwargs: Any,
) -> dict[str, Tensor]:
    """Allocate the KV cache of every layer, in the host pool or, for groups that stay on the device, in its memory.

    ``stock`` is vLLM's ``allocate_kv_cache`` (v1/worker/utils.py), whose arguments follow. In a context of ``on_host``
    it allocates in the host pool.
    """
    offloaded: list[KVCacheTensor] = []
    device_tensors: dict[int, list[KVCacheTensor]] = {}  # The tensors of each group that stays on the device.
    groups = kv_cache_config.kv_cache_groups
    for tensor in kv_cache_config.kv_cache_tensors:
        owner = next(index for index, group in enumerate(groups) if tensor.layers[0] in group.layer_names)
        stays = isinstance(groups[owner].kv_cache_spec, DeviceWindowSpec | DeviceStateSpec)
        (device_tensors.setdefault(owner, []) if stays else offloaded).append(tensor)
    with on_host():
        caches = stock(replace(kv_cache_config, kv_cache_tensors=offloaded), *args, **kwargs)
    for owner, tensors in device_tensors.items():
        blocks = groups[owner].kv_cache_spec.pool_blocks
        resized = [_with_blocks(tensor, kv_cache_config.num_blocks, blocks) for tensor in tensors]
        size = max(tensor.offset + len(tensor.layers) * tensor.layer_stride for tensor in resized)
        resized = [replace(tensor, size=size) for tensor in resized]
        caches |= stock(replace(kv_cache_config, num_blocks=blocks, kv_cache_tensors=resized), *args, **kwargs)
    return caches


def _with_blocks(tensor: KVCacheTensor, old_blocks: int, new_blocks: int) -> KVCacheTensor:
    """Return the same layers, one after the other, with ``new_blocks`` blocks each."""
    if tensor.layer_stride % old_blocks or tensor.offset % old_blocks:
        raise EngineError("the hybrid backend expects the KV cache layer by layer (LBHNC); unset VLLM_KV_CACHE_LAYOUT")
    return replace(
        tensor,
        layer_stride=tensor.layer_stride // old_blocks * new_blocks,
        offset=tensor.offset // old_blocks * new_blocks,
    )
