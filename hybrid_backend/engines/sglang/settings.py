"""Which configuration applies, and whether the user asked for our backend.

SGLang has no free-form option. `hybrid serve` hands its resolved configuration to all of SGLang's processes in the
environment; with a bare command line ``HYBRID_CONFIG`` or the model's name decides, in each process alike.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import psutil

from hybrid_backend.config import HybridConfig, config_from_mapping, format_size, resolve_config
from hybrid_backend.engines.sglang import BACKEND
from hybrid_backend.errors import ConfigError, EngineError

ENV_RESOLVED = "HYBRID_SGLANG_CONFIG"  # JSON; set by `hybrid serve` only
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def chosen(arguments: Any) -> bool:
    """Whether ``arguments`` (SGLang's server arguments, or a view of them) ask for our backend."""
    from sglang.srt.arg_groups.overrides import attention_backends_of

    prefill, decode = attention_backends_of(arguments)
    if (prefill == BACKEND) != (decode == BACKEND):
        other = decode if prefill == BACKEND else prefill
        raise EngineError(
            f"the backend {BACKEND!r} must serve prefill and decode, not one of them beside {other!r}; "
            f"use --attention-backend {BACKEND}"
        )
    return bool(prefill == BACKEND)


def config_of(arguments: Any) -> HybridConfig:
    """The configuration for these server arguments."""
    resolved = os.environ.get(ENV_RESOLVED)
    if resolved:
        return config_from_mapping(json.loads(resolved), ENV_RESOLVED)
    name = arguments.served_model_name or arguments.model_path
    return resolve_config(str(name), None, os.environ)[0]


def host_pool_bytes(config: HybridConfig) -> int:
    """Bytes of the host pool: ``host_pool.size``, else half of the memory that is available now.

    Raises:
        ConfigError: more than there is.
    """
    available, wanted = _available_memory(), config.host_pool.size_bytes
    if wanted is None:
        return available // 2
    if wanted > available:
        raise ConfigError(
            f"host_pool.size: {format_size(wanted)} is more than the {available / 2**30:.1f} GiB of memory available; "
            "choose a smaller size"
        )
    return wanted


def _available_memory() -> int:
    """Bytes that can still be used; a container's limit counts."""
    available = int(psutil.virtual_memory().available)
    for name in _CGROUP_LIMITS:
        try:
            limit = Path(name).read_text().strip()
        except OSError:
            continue
        if limit.isdigit():
            available = min(available, int(limit))
    return available
