"""vLLM's platforms, with differences that show only when ``--attention-backend CUSTOM`` is asked for."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from hybrid_backend.config import HybridConfig
from hybrid_backend.engines.vllm import ASYNC_SCHEDULER, CPU_WORKER, SCHEDULER
from hybrid_backend.engines.vllm.checks import available_memory, check_engine_config
from hybrid_backend.engines.vllm.settings import attach_config, chosen

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.selector import AttentionSelectorConfig


class HybridCpuPlatform(CpuPlatform):
    """The stock platform ignores the backend that the user names (platforms/cpu.py, get_attn_backend_cls)."""

    @classmethod
    def get_attn_backend_cls(
        cls,
        selected_backend: AttentionBackendEnum,
        attn_selector_config: AttentionSelectorConfig,
        num_heads: int | None = None,
    ) -> str:
        if selected_backend == AttentionBackendEnum.CUSTOM:
            return str(selected_backend.get_path())
        return str(super().get_attn_backend_cls(selected_backend, attn_selector_config, num_heads))

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        prepare(vllm_config, super().check_and_update_config, CPU_WORKER)


def prepare(vllm_config: VllmConfig, stock: Callable[[VllmConfig], None], worker_cls: str) -> HybridConfig | None:
    """A platform's ``check_and_update_config``: attach our configuration, size the pool, refuse what cannot work.

    ``stock``: what the platform itself does. Returns our configuration, None where another backend was asked for.
    """
    if not chosen(vllm_config):
        stock(vllm_config)
        return None
    config = attach_config(vllm_config)
    cache, on_cpu = vllm_config.cache_config, worker_cls == CPU_WORKER
    if not cache.user_specified_block_size:
        cache.block_size = config.page_size
        cache.user_specified_block_size = True
    if config.host_pool.size_bytes is not None:
        cache.kv_cache_memory_bytes = config.host_pool.size_bytes
    elif cache.kv_cache_memory_bytes is None and not (on_cpu and os.environ.get("VLLM_CPU_KVCACHE_SPACE")):
        # vLLM's own default asks for 92 % of the machine's memory and does not start if anything else runs there.
        cache.kv_cache_memory_bytes = available_memory() // 2 // vllm_config.parallel_config.local_world_size
    stock(vllm_config)
    check_engine_config(vllm_config, config, worker_cls)
    scheduler = vllm_config.scheduler_config  # after the stock platform, which may turn asynchronous scheduling off
    scheduler.scheduler_cls = ASYNC_SCHEDULER if scheduler.async_scheduling else SCHEDULER
    return config
