"""Agreement of our ``kv_dtype`` with vLLM's ``--kv-cache-dtype``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hybrid_backend.config import HybridConfig
from hybrid_backend.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import CacheConfig

INT8 = "int8_per_token_head"
"""vLLM's name for what our ``kv_dtype: int8`` is: the same scales, and the same bytes of a token."""


def agree_on_kv_dtype(cache: CacheConfig, config: HybridConfig) -> HybridConfig:
    """Let either setting of 8 bits set the other one, before vLLM's platform and the layers read it.

    Args:
        cache: vLLM's, whose ``cache_dtype`` may be changed.
        config: our configuration.

    Returns:
        ``config``, with ``kv_dtype: int8`` where vLLM's flag asks for it.

    Raises:
        ConfigError: the two contradict each other.
    """
    flag = str(cache.cache_dtype)
    if flag == INT8:
        return config.model_copy(update={"kv_dtype": "int8"})
    if config.kv_dtype == "int8":
        if flag != "auto":
            raise ConfigError(
                f"kv_dtype: int8 contradicts --kv-cache-dtype {flag}; leave one of them out, or write --kv-cache-dtype "
                f"{INT8}"
            )
        cache.cache_dtype = INT8
    return config


def page_dtype(cache_dtype: str, model_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of pages for vLLM's ``cache_dtype``."""
    if cache_dtype == INT8:
        return torch.int8
    dtype: torch.dtype = model_dtype if cache_dtype == "auto" else getattr(torch, cache_dtype)
    return dtype
