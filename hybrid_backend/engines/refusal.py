"""Refusals at start: tables of settings, which write docs/reference/support.md, and the checks that engines share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from hybrid_backend.config import HybridConfig
from hybrid_backend.errors import EngineError
from hybrid_backend.methods import resolve_method
from hybrid_backend.step.operations import check_shape, check_this_machine

Start = TypeVar("Start")


@dataclass(frozen=True)
class Refusal(Generic[Start]):
    """A setting that is refused.

    Attributes:
        what: the setting in words of the error.
        is_set: tells whether a start uses the setting.
        fix: the way out.
        value: returns the exact setting, if ``what`` leaves it open.
    """

    what: str
    is_set: Callable[[Start], object]
    fix: str
    value: Callable[[Start], object] | None = None


def refuse(table: Iterable[Refusal[Start]], start: Start, where: str = "") -> None:
    """Raise EngineError for the first entry of a table whose setting a start uses."""
    for refusal in table:
        if refusal.is_set(start):
            value = f" ({refusal.value(start)})" if refusal.value else ""
            raise EngineError(f"the hybrid backend does not support {refusal.what}{value}{where}; {refusal.fix}")


def check_model(
    config: HybridConfig, device: torch.device, layers: int, heads: int, kv_heads: int, head_dim: int
) -> None:
    """Check that the method and the kernels can serve a model.

    Args:
        config: our configuration.
        device: the device tier.
        layers: decoder layers that keep keys and values.
        heads: query heads of one rank.
        kv_heads: KV heads of one rank.
        head_dim: size of a head.

    Raises:
        ConfigError: a key of the configuration does not fit the model.
    """
    config.validate_for(layers)
    check_this_machine(config, device)
    resolve_method(config.method).check(config, device, layers, kv_heads)
    check_shape(config, heads, kv_heads, head_dim, device)
