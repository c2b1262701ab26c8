"""Attention sinks as the kernels read them: copies of vLLM's parameters, refreshed before each step."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from hybrid_backend.engines.vllm.layer import HybridImpl


class Sinks:
    """fp32 copies of the attention sinks of all layers, at addresses that do not change.

    The parameters of a running engine may change: by a reload, by a trainer that sends weights, by ``apply_model``.
    Nothing announces a change. vLLM's loaders write through ``Parameter.data``, which counts no versions, and trainers
    give ``Parameter.data`` another tensor. Therefore each step copies all sinks again: a few hundred bytes per layer.

    Attributes:
        layers: ``[num_heads]`` fp32 per layer; None for a layer without sinks, or with another implementation.
    """

    def __init__(self, impls: Iterable[object]) -> None:
        """Copy the sinks of ``impls``, the implementation of each attention layer in order."""
        self._impls: list[HybridImpl] = []
        self._copies: list[Tensor] = []
        layers: list[Tensor | None] = []
        for impl in impls:
            copy = None
            if isinstance(impl, HybridImpl) and impl.sinks is not None:
                copy = torch.empty_like(impl.sinks, dtype=torch.float32)
                self._impls.append(impl)
                self._copies.append(copy)
            layers.append(copy)
        self.layers = tuple(layers)
        self.refresh()

    def refresh(self) -> None:
        """Copy the current values of the parameters, before a step whose layers read them."""
        if self._copies:
            torch._foreach_copy_(self._copies, [impl.sinks for impl in self._impls if impl.sinks is not None])
