"""SGLang's entry points. It calls them in every process (launcher, scheduler, detokenizer)."""

from __future__ import annotations

import os
from typing import Any

from hybrid_backend.engines.lifecycle import join_server
from hybrid_backend.engines.sglang import BACKEND, compat, patches


def register() -> None:
    """``sglang.srt.plugins``: the name ``hybrid``, its backend, and the hooks of `patches.register`.

    SGLang only logs what this raises, so nothing here may fail quietly: without the name, SGLang refuses the flag;
    without a hook, `patches.verify` refuses to serve.
    """
    join_server()
    if not compat.can_register():
        return
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES, add_attention_backend_choices
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    if BACKEND not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([BACKEND])
    register_attention_backend(BACKEND)(_create)
    if not compat.missing():  # else the backend says what is
        patches.register()


def _create(runner: Any) -> Any:
    """SGLang's factory of the backend, called when the model and the KV pool are there."""
    from hybrid_backend.engines.sglang.backend import HybridBackend

    return HybridBackend(runner)


def activate() -> str | None:
    """``sglang.srt.platforms``: where there is no accelerator, the class path of a platform on which SGLang runs
    without sgl_kernel; None where SGLang has a platform of its own."""
    import torch

    if torch.accelerator.is_available() or os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1":
        return None
    return "hybrid_backend.engines.sglang.platform.HybridCpuPlatform"
