"""vLLM's entry points, which it calls in every process (API server, engine core, workers). Imports are late."""

from __future__ import annotations

from hybrid_backend.engines.lifecycle import join_server
from hybrid_backend.engines.vllm import ALIAS
from hybrid_backend.engines.vllm.compat import can_register


def register() -> None:
    """Register ``--attention-backend CUSTOM``, vLLM's only name for plugins, and ``hybrid`` as another name for it.

    The entry point of ``vllm.general_plugins``. A backend that is registered under a name of its own would not survive
    unpickling in the engine core; an alias does, since CUSTOM is what is pickled.
    """
    join_server()
    if not can_register():
        return
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, "hybrid_backend.engines.vllm.backend.HybridBackend")
    AttentionBackendEnum._member_map_[ALIAS] = AttentionBackendEnum.CUSTOM


def detect() -> str | None:
    """Return the class path of our platform if vLLM would pick its plain CPU or CUDA platform, None otherwise.

    The entry point of ``vllm.platform_plugins``.
    """
    if not can_register():
        return None
    from vllm.platforms import cpu_platform_plugin, cuda_platform_plugin

    if cpu_platform_plugin() == "vllm.platforms.cpu.CpuPlatform":
        return "hybrid_backend.engines.vllm.platform.HybridCpuPlatform"
    if cuda_platform_plugin() == "vllm.platforms.cuda.CudaPlatform":
        return "hybrid_backend.engines.vllm.cuda_platform.HybridCudaPlatform"
    return None
