"""Our configuration in vLLM's: ``additional_config["hybrid"]``, which is part of vLLM's compile-cache key."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from hybrid_backend.config import HybridConfig, config_from_mapping, find_config, resolve_config
from hybrid_backend.engines.vllm import ADDITIONAL_CONFIG_KEY, BACKEND
from hybrid_backend.engines.vllm.kv_dtype import agree_on_kv_dtype
from hybrid_backend.engines.vllm.layer_kinds import full_shape
from hybrid_backend.errors import ConfigError
from hybrid_backend.methods import with_method

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def chosen(vllm_config: VllmConfig) -> bool:
    """Tell whether the user chose our backend."""
    backend = vllm_config.attention_config.backend
    return backend is not None and backend.name == BACKEND


def attach_config(vllm_config: VllmConfig) -> HybridConfig:
    """Resolve the configuration in the process that reads the user's flags, and store it for all other processes.

    Sources, best first: ``--additional-config '{"hybrid": PATH or MAPPING}'``, ``HYBRID_CONFIG``, the model's name.
    """
    additional: Any = vllm_config.additional_config
    if not isinstance(additional, dict):
        raise ConfigError(
            "--additional-config: expected a JSON object, as the hybrid backend stores its settings there"
        )
    model = vllm_config.model_config.served_model_name or vllm_config.model_config.model
    name = model[0] if isinstance(model, list) else model
    explicit = additional.get(ADDITIONAL_CONFIG_KEY)
    if explicit is None or isinstance(explicit, str):
        config, _ = resolve_config(str(name), explicit, os.environ)
    else:
        config = config_from_mapping(explicit, f"--additional-config: {ADDITIONAL_CONFIG_KEY}")
        if unread := unread_file(str(name), explicit):
            logging.getLogger("vllm.hybrid_backend").info(unread)
    config = agree_on_kv_dtype(vllm_config.cache_config, config)
    config = _with_method(vllm_config, config)
    replace_config(vllm_config, config)
    return config


def unread_file(model_name: str, mapping: Mapping[str, object]) -> str:
    """Return a line for the log that ``mapping`` replaces the shipped file which fits the model's name.

    A mapping with all keys is a resolved configuration, as `hybrid serve` passes one. It replaces nothing, and the text
    is empty.
    """
    if HybridConfig.model_fields.keys() <= mapping.keys():
        return ""
    file = find_config(model_name)
    return (
        f"hybrid backend: additional_config[{ADDITIONAL_CONFIG_KEY!r}] is the whole configuration: "
        f"{file.parent.name}/{file.name}, which fits {model_name}, is not read, and keys that are left out have their "
        "defaults"
    )


def _with_method(vllm_config: VllmConfig, config: HybridConfig) -> HybridConfig:
    """Return ``config`` with the name of the method that ``method: auto`` stands for on the engine's device."""
    device = torch.device(vllm_config.device_config.device_type)
    return with_method(config, *full_shape(vllm_config), device)


def replace_config(vllm_config: VllmConfig, config: HybridConfig) -> None:
    """Store ``config`` in the place of the configuration that `attach_config` stored."""
    add_option(vllm_config, ADDITIONAL_CONFIG_KEY, config.model_dump(mode="json"))


def add_option(vllm_config: VllmConfig, key: str, value: object) -> None:
    """Set a key beside our configuration in a copy of ``additional_config``: all processes of vLLM get it."""
    vllm_config.additional_config = {**vllm_config.additional_config, key: value}


def attached_config(vllm_config: VllmConfig) -> HybridConfig:
    """Return the configuration that `attach_config` stored."""
    stored = vllm_config.additional_config
    mapping = stored.get(ADDITIONAL_CONFIG_KEY) if isinstance(stored, dict) else None
    if not isinstance(mapping, dict):
        return attach_config(vllm_config)
    return config_from_mapping(mapping, "additional_config")
