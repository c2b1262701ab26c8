"""Entry point ``sglang.srt.platforms``: where no accelerator is, a platform on which SGLang runs without sgl_kernel."""

from __future__ import annotations

import os


def activate() -> str | None:
    """The class path of our platform, None where SGLang has a platform of its own."""
    import torch

    if torch.accelerator.is_available() or os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1":
        return None
    return "hybrid_backend.engines.sglang.platform.HybridCpuPlatform"
