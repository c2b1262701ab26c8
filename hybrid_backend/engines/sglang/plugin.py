"""SGLang's entry points, which it calls in every process (launcher, scheduler, detokenizer)."""

from __future__ import annotations

import os
from typing import Any

from hybrid_backend.engines.lifecycle import join_server
from hybrid_backend.engines.sglang import BACKEND, compat, patches


def register() -> None:
    """Register the name ``hybrid``, its backend, and the hooks of `patches.register`.

    The entry point of ``sglang.srt.plugins``. SGLang only logs what this function raises, so nothing in it may fail
    quietly: without the name, SGLang refuses the flag; without a hook, `patches.verify` refuses to serve.
    """
    join_server()
    if not compat.can_register():
        return
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES, add_attention_backend_choices
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    if BACKEND not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([BACKEND])
    register_attention_backend(BACKEND)(_create)
    if not compat.SGLANG.missing(compat.installed()):  # If not, the backend's check reports what is missing.
        patches.register()


def _create(runner: Any) -> Any:
    """Build the backend, when the model and the KV pool are allocated."""
    from hybrid_backend.engines.sglang.backend import HybridBackend

    return HybridBackend(runner)


def activate() -> str | None:
    """Return the class path of a platform on which SGLang runs without sgl_kernel, if there is no accelerator.

    The entry point of ``sglang.srt.platforms``. It returns None if SGLang has a platform of its own.
    """
    import torch

    if torch.accelerator.is_available() or os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1":
        return None
    return "hybrid_backend.engines.sglang.platform.HybridCpuPlatform"
