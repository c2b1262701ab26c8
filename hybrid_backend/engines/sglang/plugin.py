"""Entry point ``sglang.srt.plugins``: the name ``hybrid``, its backend, and our two hooks.

SGLang calls it in every process (launcher, scheduler, detokenizer) and only logs what it raises, so nothing here may
fail quietly: without the name, SGLang refuses the flag; without a hook, `patches.verify` refuses to serve.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from hybrid_backend.engines.sglang import BACKEND, SGLANG_VERSION, patches


def register() -> None:
    """Make ``--attention-backend hybrid`` known."""
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES, add_attention_backend_choices
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    if BACKEND not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([BACKEND])
    register_attention_backend(BACKEND)(_create)
    if version("sglang") == SGLANG_VERSION:
        patches.register()


def _create(runner: Any) -> Any:
    """SGLang's factory of the backend, called when the model and the KV pool are there."""
    from hybrid_backend.engines.sglang.backend import HybridBackend

    return HybridBackend(runner)
