"""vLLM's CUDA platform, which honours ``--attention-backend CUSTOM`` already. NOT YET RUN ON A GPU (docs/cuda.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.platforms.cuda import CudaPlatform

from hybrid_backend.engines.vllm import GPU_WORKER
from hybrid_backend.engines.vllm.platform import prepare
from hybrid_backend.engines.vllm.requests import bound_requests

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class HybridCudaPlatform(CudaPlatform):
    """Differs from the stock platform only for those who ask for our backend."""

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        config = prepare(vllm_config, super().check_and_update_config, GPU_WORKER)
        if config is not None:
            changed = bound_requests(vllm_config, config, cls.get_device_total_memory())
            if changed:
                init_logger("vllm.hybrid_backend").warning_once(changed)
