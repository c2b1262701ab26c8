"""Methods by name."""

from __future__ import annotations

import torch

from hybrid_backend.config import HybridConfig
from hybrid_backend.errors import ConfigError
from hybrid_backend.in_place.step import why_not_in_place
from hybrid_backend.methods.apex import Apex
from hybrid_backend.methods.clo import Clo
from hybrid_backend.methods.dense import Dense
from hybrid_backend.methods.headinfer import HeadInfer
from hybrid_backend.methods.hgca import Hgca
from hybrid_backend.methods.infinigen import InfiniGen
from hybrid_backend.methods.quest import Quest
from hybrid_backend.methods.scout import Scout
from hybrid_backend.step.method import Method

AUTO = "auto"

_METHODS: dict[str, type[Method]] = {
    method.name: method for method in (Apex, Clo, Dense, HeadInfer, Hgca, InfiniGen, Quest, Scout)
}


def register(method: type[Method]) -> None:
    """Make a method of another package known by its ``name`` in this process.

    Raises:
        ConfigError: another method has the name.
    """
    if method.name == AUTO or _METHODS.get(method.name, method) is not method:
        raise ConfigError(f"method: the name {method.name!r} is taken; give {method.__name__} another name")
    _METHODS[method.name] = method


def unregister(method: type[Method]) -> None:
    """Forget a method that `register` made known."""
    _METHODS.pop(method.name, None)


def method_names() -> list[str]:
    """Return the names of all methods, sorted."""
    return sorted(_METHODS)


def resolve_method(name: str) -> type[Method]:
    """Return the method called ``name``, which is not ``auto``.

    Raises:
        ConfigError: there is no such method.
    """
    check_method_name(name)
    return _METHODS[name]


def check_method_name(name: str) -> None:
    """Raise ConfigError unless ``name`` is ``auto`` or that of a method."""
    if name != AUTO and name not in _METHODS:
        raise ConfigError(f"method: unknown method {name!r}; known are {AUTO}, {', '.join(method_names())}")


def with_method(config: HybridConfig, heads: int, kv_heads: int, head_dim: int, device: torch.device) -> HybridConfig:
    """Return ``config`` with a method's name in place of ``auto``: `quest` where it can serve, else `scout`.

    Args:
        config: a configuration; returned as it is if it names a method.
        heads: query heads of the attention layers on one rank.
        kv_heads: KV heads of the same layers.
        head_dim: size of a head.
        device: device tier.
    """
    if config.method != AUTO:
        return config
    can_quest = not why_not_in_place(config, heads, kv_heads, head_dim, device)
    return config.model_copy(update={"method": "quest" if can_quest else "scout"})
