"""Entry point ``vllm.general_plugins``: register the attention backend under vLLM's one name for plugins.

vLLM calls it in every process (API server, engine core, workers).
"""

from __future__ import annotations


def register() -> None:
    """Register ``--attention-backend CUSTOM``. A dynamic name would not survive unpickling in the engine core."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, "hybrid_backend.engines.vllm.backend.HybridBackend")
