"""Which configuration applies, and whether the user asked for our backend.

SGLang has no free-form option. `hybrid serve` hands its resolved configuration to all of SGLang's processes in the
environment; with a bare command line ``HYBRID_CONFIG`` or the model's name decides, in each process alike.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from hybrid_backend.config import HybridConfig, config_from_mapping, resolve_config
from hybrid_backend.config.reading import parse_json
from hybrid_backend.engines.sglang import BACKEND
from hybrid_backend.errors import ConfigError, EngineError
from hybrid_backend.host_memory import RESERVE, System, check_pool, room
from hybrid_backend.methods import with_method

ENV_RESOLVED = "HYBRID_SGLANG_CONFIG"  # JSON; set by `hybrid serve` only


def chosen(arguments: Any) -> bool:
    """Tell whether ``arguments`` (SGLang's server arguments, or a view of them) ask for our backend."""
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
    """Return the configuration for these server arguments, with the name of the method that ``auto`` stands for."""
    from sglang.srt.arg_groups.overrides import model_config_of

    resolved = os.environ.get(ENV_RESOLVED)
    if resolved:
        config = config_from_mapping(parse_json(resolved, ENV_RESOLVED, f"unset {ENV_RESOLVED}"), ENV_RESOLVED)
    else:
        config = resolve_config(str(arguments.served_model_name or arguments.model_path), None, os.environ)[0]
    # A platform gets a recorder around the arguments; the model's configuration is kept with those inside it.
    model = model_config_of(getattr(arguments, "_cfg", arguments))
    heads, kv_heads = model.num_attention_heads, model.get_num_kv_heads(1)
    return with_method(config, heads, kv_heads, model.head_dim, torch.device(arguments.device))


def host_pool_bytes(config: HybridConfig, weights: int | None = None, system: System | None = None) -> int:
    """Bytes of the host pool: ``host_pool.size``, else half of what the weights leave of the memory available now.

    Args:
        weights: bytes that are yet to be loaded; None: the engine is up, and all but the pool is there.

    Raises:
        ConfigError: more than there is, or there is none.
    """
    here = room(system or System(), [None], weights or 0, reserve=0 if weights is None else RESERVE)
    wanted = config.host_pool.size_bytes
    if wanted is not None:
        check_pool("host_pool.size", wanted, here)
        return wanted
    if not here.auto:
        raise ConfigError(f"host_pool.size: auto finds no memory ({here.why}); free some, or choose a smaller model")
    return here.auto
