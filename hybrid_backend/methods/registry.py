"""Methods by name."""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points

import torch

from hybrid_backend.batch import ModelSpec
from hybrid_backend.config import HybridConfig
from hybrid_backend.errors import ConfigError
from hybrid_backend.methods.apex import Apex
from hybrid_backend.methods.clo import Clo
from hybrid_backend.methods.dense import Dense
from hybrid_backend.methods.headinfer import HeadInfer
from hybrid_backend.methods.hgca import Hgca
from hybrid_backend.methods.infinigen import InfiniGen
from hybrid_backend.methods.quest import Quest, why_not_quest
from hybrid_backend.methods.scout import Scout
from hybrid_backend.step.method import Method

AUTO = "auto"
ENTRY_POINTS = "hybrid_backend.methods"
"""Group of the entry points by which another installed package names its methods."""

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


@cache
def register_installed() -> None:
    """Register the methods that other installed packages name as entry points, once in a process.

    Raises:
        ConfigError: a method cannot be imported, or its name is taken.
    """
    for entry_point in entry_points(group=ENTRY_POINTS):
        try:
            method = entry_point.load()
        except Exception as error:
            raise ConfigError(f"method: {entry_point.value}, which a package names, fails to load: {error}") from error
        register(method)


def method_names() -> list[str]:
    """Return the names of all methods, sorted."""
    register_installed()
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
    register_installed()
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
    can_quest = not why_not_quest(config, heads, kv_heads, head_dim, device)
    return config.model_copy(update={"method": "quest" if can_quest else "scout"})


def why_scout(config: HybridConfig, model: ModelSpec, device: torch.device) -> str:
    """Return the reason why ``method: auto`` is `scout` on a CPU; an empty string on a GPU and for other methods."""
    if config.method != "scout" or device.type != "cpu":
        return ""
    return why_not_quest(config, model.num_heads, model.num_kv_heads, model.head_dim, device)
