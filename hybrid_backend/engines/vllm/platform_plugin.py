"""Entry point ``vllm.platform_plugins``: the platform of the build that is installed, with our checks."""

from __future__ import annotations


def detect() -> str | None:
    """The class path of our platform where vLLM would pick its plain CPU or CUDA platform, None elsewhere."""
    from vllm.platforms import cpu_platform_plugin, cuda_platform_plugin

    if cpu_platform_plugin() == "vllm.platforms.cpu.CpuPlatform":
        return "hybrid_backend.engines.vllm.platform.HybridCpuPlatform"
    if cuda_platform_plugin() == "vllm.platforms.cuda.CudaPlatform":
        return "hybrid_backend.engines.vllm.cuda_platform.HybridCudaPlatform"
    return None
