"""Our configuration in SGLang's processes, and whether the user chose our backend.

SGLang has no free-form option. `hybrid serve` hands its resolved configuration to all of SGLang's processes in the
environment. With a bare command line, ``HYBRID_CONFIG`` or the model's name decides, in each process alike.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from hybrid_backend.config import HybridConfig, config_from_mapping, resolve_config
from hybrid_backend.config.reading import parse_json
from hybrid_backend.engines.sglang import BACKEND
from hybrid_backend.errors import ConfigError, EngineError
from hybrid_backend.host_memory import RESERVE, System, room
from hybrid_backend.kernels.kv_format import KvFormat
from hybrid_backend.memory_plan.host_pool import PoolSize, choose_pool
from hybrid_backend.methods import with_method

ENV_RESOLVED = "HYBRID_SGLANG_CONFIG"
"""Variable for the resolved configuration in JSON, which only `hybrid serve` sets."""


def chosen(arguments: Any) -> bool:
    """Tell whether ``arguments`` (SGLang's server arguments, or a view of them) name our backend."""
    from sglang.srt.arg_groups.overrides import attention_backends_of

    prefill, decode = attention_backends_of(arguments)
    if (prefill == BACKEND) != (decode == BACKEND):
        stock = decode if prefill == BACKEND else prefill
        raise EngineError(
            f"the backend {BACKEND!r} must serve prefill and decode, not one of them beside {stock!r}; "
            f"use --attention-backend {BACKEND}"
        )
    return bool(prefill == BACKEND)


def config_of(arguments: Any) -> HybridConfig:
    """Return the configuration for server arguments, with the name of the method that ``auto`` stands for."""
    from sglang.srt.arg_groups.overrides import model_config_of

    resolved = os.environ.get(ENV_RESOLVED)
    if resolved:
        config = config_from_mapping(parse_json(resolved, ENV_RESOLVED, f"unset {ENV_RESOLVED}"), ENV_RESOLVED)
    else:
        config = resolve_config(str(arguments.served_model_name or arguments.model_path), None, os.environ)[0]
    # SGLang hands a platform a recorder around the arguments. The model's configuration is kept with the arguments.
    model = model_config_of(getattr(arguments, "_cfg", arguments))
    heads, kv_heads = model.num_attention_heads, model.get_num_kv_heads(1)
    return with_method(config, heads, kv_heads, model.head_dim, torch.device(arguments.device))


def pool_budget(arguments: Any) -> int:
    """Return the bytes from which SGLang is to compute the tokens of its pool, once the engine is up.

    SGLang counts a token's bytes in the model's dtype. Of pages in 8 bits so many more fit the host pool.
    """
    from sglang.srt.arg_groups.overrides import model_config_of

    config, model = config_of(arguments), model_config_of(getattr(arguments, "_cfg", arguments))
    size = host_pool_bytes(config)
    if config.kv_dtype != "int8":
        return size
    plain, int8 = (KvFormat(1, config.page_size, model.head_dim, dtype) for dtype in (model.dtype, torch.int8))
    return size * plain.page_bytes // int8.page_bytes


def host_pool_bytes(config: HybridConfig, weights: int | None = None, system: System | None = None) -> int:
    """Return the bytes of the host pool: ``host_pool.size``, or half of what the weights leave of the free memory.

    Args:
        config: our configuration.
        weights: bytes that are yet to be loaded; None: the engine is up, and only the pool is not allocated.
        system: the machine.

    Raises:
        ConfigError: the machine has less memory, or none.
    """
    pool_room = room(system or System(), [None], weights or 0, reserve=0 if weights is None else RESERVE)
    size = choose_pool(PoolSize("host_pool.size", config.host_pool.size_bytes), pool_room)
    if not size:
        raise ConfigError(
            f"host_pool.size: auto finds no memory ({pool_room.why}); free some, or choose a smaller model"
        )
    return size
