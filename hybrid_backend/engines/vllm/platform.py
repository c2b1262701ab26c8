"""vLLM's CPU platform, with differences that show only when ``--attention-backend CUSTOM`` is chosen."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from hybrid_backend.config import HybridConfig
from hybrid_backend.engines.vllm import ASYNC_SCHEDULER, CPU_WORKER, PARKING_SCHEDULER, SCHEDULER
from hybrid_backend.engines.vllm.checks import check_engine_config
from hybrid_backend.engines.vllm.compat import check_engine
from hybrid_backend.engines.vllm.memory import size_host_pool
from hybrid_backend.engines.vllm.parking import choose_parking
from hybrid_backend.engines.vllm.request_budget import add_middleware, check_budgets
from hybrid_backend.engines.vllm.settings import attach_config, chosen

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.platforms.interface import Platform as _Platform
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.attention.selector import AttentionSelectorConfig
else:
    _Platform = object


class RequestHooks(_Platform):
    """Mixin for the platforms of all devices: requests may name a budget."""

    @classmethod
    def pre_register_and_update(cls, parser: FlexibleArgumentParser | None = None) -> None:
        super().pre_register_and_update(parser)
        add_middleware(parser)

    @classmethod
    def validate_request(cls, *arguments: Any, **keywords: Any) -> None:
        super().validate_request(*arguments, **keywords)
        check_budgets(*arguments, **keywords)


class HybridCpuPlatform(RequestHooks, CpuPlatform):
    """vLLM's CPU platform. The stock one ignores the user's backend (platforms/cpu.py, ``get_attn_backend_cls``)."""

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
    """Carry out ``check_and_update_config``: attach our configuration, size the pool, refuse what cannot work.

    Args:
        vllm_config: vLLM's configuration, which is changed.
        stock: the ``check_and_update_config`` of vLLM's own platform.
        worker_cls: class path of our worker for this device.

    Returns:
        Our configuration; None if the user chose another attention backend.
    """
    if not chosen(vllm_config):
        stock(vllm_config)
        return None
    config = attach_config(vllm_config)
    check_engine(vllm_config)
    if vllm_config.parallel_config.worker_cls == "auto":
        # The stock platform would replace "auto" by vLLM's own worker.
        vllm_config.parallel_config.worker_cls = worker_cls
    cache = vllm_config.cache_config
    if not cache.user_specified_block_size:
        cache.block_size = config.page_size
        cache.user_specified_block_size = True
    stock(vllm_config)
    check_engine_config(vllm_config, config, worker_cls)
    if vllm_config.kv_transfer_config is not None:
        # A late import: vLLM's connectors ask for the platform, which is being made when this module is imported.
        from hybrid_backend.engines.vllm.connectors import adopt

        adopt(vllm_config)
    size_host_pool(vllm_config, config, on_cpu=worker_cls == CPU_WORKER)
    scheduler = vllm_config.scheduler_config
    if choose_parking(vllm_config, config):
        scheduler.scheduler_cls = PARKING_SCHEDULER
    else:
        # The stock platform may have turned asynchronous scheduling off, so its own flag decides.
        scheduler.scheduler_cls = ASYNC_SCHEDULER if scheduler.async_scheduling else SCHEDULER
    return config
