"""KV groups that stay on a GPU: layers with a sliding window, and the state of layers that keep no keys and values.

Only layers with full attention are offloaded. On the CPU engine all groups share the host pool, as they share vLLM's
own pool. On a GPU each other group gets device memory of its own, which is small since its blocks are bounded per
request, and with it a pool of block ids of its own, as vLLM gives its one host-backed group
(v1/core/single_type_kv_cache_manager.py, ``HiSparseSourceManager``). Its layers keep the backend and the kernels that
vLLM chooses for them.

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
from hybrid_backend.engines.vllm.blocks import NULL_BLOCKS, window_blocks
from hybrid_backend.errors import EngineError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput


@dataclass(frozen=True, kw_only=True)
class DeviceWindowSpec(SlidingWindowSpec):
    """``requests``: that run at once; ``in_flight``: tokens scheduled and not yet settled, of all together."""

    requests: int
    in_flight: int

    @property
    def pool_blocks(self) -> int:
        return window_blocks(self.sliding_window, self.block_size, self.requests, self.in_flight)

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        return 0  # of the memory that vLLM divides, which is the host pool


@dataclass(frozen=True, kw_only=True)
class DeviceStateSpec(MambaSpec):
    """``requests``: that run at once; ``blocks_each``: state blocks of each."""

    requests: int
    blocks_each: int

    @property
    def pool_blocks(self) -> int:
        return self.requests * self.blocks_each + NULL_BLOCKS


def on_device(specs: dict[str, KVCacheSpec], vllm_config: VllmConfig) -> dict[str, KVCacheSpec]:
    """The specs of a model's layers, by name; those that are not offloaded say what they take of the device.

    Raises:
        EngineError: a layer has neither full attention, nor a sliding window, nor state.
    """
    requests = vllm_config.scheduler_config.max_num_seqs
    found: dict[str, KVCacheSpec] = {}
    for name, spec in specs.items():
        same = {each.name: getattr(spec, each.name) for each in fields(spec)}
        if type(spec) is SlidingWindowSpec:
            found[name] = DeviceWindowSpec(**same, requests=requests, in_flight=vllm_config.max_in_flight_tokens)
        elif type(spec) is MambaSpec:
            each = spec.max_memory_usage_bytes(vllm_config) // spec.page_size_bytes
            found[name] = DeviceStateSpec(**same, requests=requests, blocks_each=each)
        elif type(spec) is FullAttentionSpec:
            found[name] = spec
        else:
            raise EngineError(
                f"the hybrid backend does not support layers of kind {type(spec).__name__} on a GPU ({name}); "
                f"{OWN_BACKEND}"
            )
    return found


class _OwnPool(SingleTypeKVCacheManager):
    """Takes its blocks from a pool of its own."""

    def __init__(self, kv_cache_spec: DeviceWindowSpec | DeviceStateSpec, block_pool: BlockPool, **kwargs: Any) -> None:
        # Without events, which would be taken for those of the host pool's blocks of the same ids.
        own = BlockPool(kv_cache_spec.pool_blocks, kwargs["enable_caching"], block_pool.hash_block_size)
        super().__init__(kv_cache_spec, block_pool=own, **kwargs)
        self._shared = block_pool
        # vLLM zeroes new blocks, so that one group's bytes are not read as another's, and names them without a group.
        self._record_new_block_ids = False

    def get_num_blocks_to_allocate(self, *args: Any, **kwargs: Any) -> int:
        """Of the shared pool: none, or more than it has if there are too few here (vLLM's own way to say so)."""
        needed = super().get_num_blocks_to_allocate(*args, **kwargs)
        return self._shared.num_gpu_blocks + 1 if needed > self.block_pool.get_num_free_blocks() else 0


class DeviceWindowManager(_OwnPool, SlidingWindowManager):
    pass


class DeviceStateManager(_OwnPool, MambaManager):
    pass


def register_specs() -> None:
    """In every process that makes managers or checks specs."""
    KVCacheSpecRegistry.register(DeviceWindowSpec, DeviceWindowManager)
    KVCacheSpecRegistry.register(DeviceStateSpec, DeviceStateManager)


def keep_to_pools(scheduled: SchedulerOutput, kv_cache_config: KVCacheConfig) -> None:
    """Make the block ids of requests that vLLM made up to warm up ids of each group's own pool: they were counted
    through all groups, as if there were one pool (v1/worker/gpu/warmup.py, ``_alloc_blocks``)."""
    new = [each.block_ids for each in scheduled.scheduled_new_reqs]
    more = [each for each in scheduled.scheduled_cached_reqs.new_block_ids if each is not None]
    for ids in (*new, *more):
        for group, blocks in zip(kv_cache_config.kv_cache_groups, ids, strict=True):
            if isinstance(group.kv_cache_spec, DeviceWindowSpec | DeviceStateSpec):
                there = group.kv_cache_spec.pool_blocks - NULL_BLOCKS
                blocks[:] = [(block - NULL_BLOCKS) % there + NULL_BLOCKS for block in blocks]


def allocate(
    stock: Callable[..., dict[str, Tensor]],
    on_host: Callable[[], AbstractContextManager[None]],
    kv_cache_config: KVCacheConfig,
    *args: Any,
    **kwargs: Any,
) -> dict[str, Tensor]:
    """The KV cache of every layer: of groups that stay on the device in its memory, of all others ``on_host``.

    ``stock``, ``kv_cache_config`` and what follows: vLLM's ``allocate_kv_cache`` (v1/worker/utils.py), its arguments.
    """
    tensors: dict[int, list[KVCacheTensor]] = {}
    for tensor in kv_cache_config.kv_cache_tensors:
        groups = enumerate(kv_cache_config.kv_cache_groups)
        owner = next(index for index, group in groups if tensor.layers[0] in group.layer_names)
        spec = kv_cache_config.kv_cache_groups[owner].kv_cache_spec
        tensors.setdefault(owner if isinstance(spec, DeviceWindowSpec | DeviceStateSpec) else -1, []).append(tensor)
    with on_host():
        caches = stock(replace(kv_cache_config, kv_cache_tensors=tensors.pop(-1)), *args, **kwargs)
    for owner, group in tensors.items():
        blocks = kv_cache_config.kv_cache_groups[owner].kv_cache_spec.pool_blocks
        alone = [_of_blocks(each, kv_cache_config.num_blocks, blocks) for each in group]
        size = max(each.offset + len(each.layers) * each.layer_stride for each in alone)
        alone = [replace(each, size=size) for each in alone]
        caches |= stock(replace(kv_cache_config, num_blocks=blocks, kv_cache_tensors=alone), *args, **kwargs)
    return caches


def _of_blocks(tensor: KVCacheTensor, before: int, now: int) -> KVCacheTensor:
    """The same layers, one after the other, with so many blocks each."""
    if tensor.layer_stride % before or tensor.offset % before:
        raise EngineError("the hybrid backend expects the KV cache layer by layer (LBHNC); unset VLLM_KV_CACHE_LAYOUT")
    return replace(tensor, layer_stride=tensor.layer_stride // before * now, offset=tensor.offset // before * now)
