"""Entry point ``vllm.platform_plugins``: on a CPU build, a platform that honours ``--attention-backend CUSTOM``."""

from __future__ import annotations


def detect() -> str | None:
    """The class path of our platform where vLLM would pick its plain CPU platform, None elsewhere."""
    from vllm.platforms import cpu_platform_plugin

    if cpu_platform_plugin() != "vllm.platforms.cpu.CpuPlatform":
        return None
    return "hybrid_backend.engines.vllm.platform.HybridCpuPlatform"
