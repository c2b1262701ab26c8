"""Hooks before decoder layers, for the lookahead and for rows that continue from an earlier step.

A pre-hook calls an opaque custom op. torch.compile keeps the op, because it declares what it mutates: a token tensor
(lookahead), or the layer's input (rows that continue). What the op does with its inputs is invisible to the compiler.
A piece of a piecewise graph is captured without a step, so an op inside a piece would do nothing. Pieces therefore end
before both ops, which run in every step; a step with prompts and decode rows has its lookahead like any other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.forward_context import get_forward_context
from vllm.utils.torch_utils import direct_register_custom_op

from hybrid_backend.attention.lookahead import call_names, named

LOOKAHEAD = "hybrid_backend::lookahead"
LAYER_INPUT = "hybrid_backend::layer_input"
_LIBRARY = torch.library.Library("hybrid_backend", "FRAGMENT")


def _impl_and_metadata(layer_name: str) -> tuple[Any, Any]:
    """Return an attention layer and the step's metadata for it; the latter is None while vLLM profiles."""
    context = get_forward_context()
    metadata = context.attn_metadata.get(layer_name) if isinstance(context.attn_metadata, dict) else None
    return context.no_compile_layers[layer_name].impl, metadata


# vLLM's `eager_break_during_capture` reads these annotations, and knows torch.Tensor by this name only.
def _lookahead(
    positions: torch.Tensor | None,
    hidden_states: torch.Tensor,
    residual: torch.Tensor | None,
    token: torch.Tensor,
    layer_name: str,
) -> None:
    impl, metadata = _impl_and_metadata(layer_name)
    if metadata is not None:
        impl.lookahead(metadata, positions, hidden_states, residual)


def _layer_input(hidden_states: torch.Tensor, residual: torch.Tensor | None, layer_name: str) -> None:
    impl, metadata = _impl_and_metadata(layer_name)
    if metadata is not None:
        impl.layer_input(metadata, hidden_states, residual)


def _nothing(*args: object, **kwargs: object) -> None:
    """Stand in for both operations while torch.compile traces: they return nothing."""


direct_register_custom_op(
    "lookahead",
    eager_break_during_capture(_lookahead),
    mutates_args=["token"],
    fake_impl=_nothing,
    target_lib=_LIBRARY,
    dispatch_key="CompositeExplicitAutograd",
)
direct_register_custom_op(
    "layer_input",
    eager_break_during_capture(_layer_input),
    mutates_args=["hidden_states", "residual"],
    fake_impl=_nothing,
    target_lib=_LIBRARY,
    dispatch_key="CompositeExplicitAutograd",
)

Hook = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]


def lookahead_hook(decoder: nn.Module, layer_name: str, device: torch.device) -> Hook:
    """Return a pre-hook for ``decoder``, which announces its input to the attention layer ``layer_name``."""
    token, names = torch.zeros(1, device=device), tuple(call_names(decoder))

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        positions, hidden_states, residual = _inputs(names, args, kwargs)
        torch.ops.hybrid_backend.lookahead(positions, hidden_states, residual, token, layer_name)

    return hook


def input_hook(decoder: nn.Module, layer_name: str) -> Hook:
    """Return a pre-hook for ``decoder``, the layer of ``layer_name``, which may change rows of its input."""
    names = tuple(call_names(decoder))

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        _, hidden_states, residual = _inputs(names, args, kwargs)
        torch.ops.hybrid_backend.layer_input(hidden_states, residual, layer_name)

    return hook


def _inputs(names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return positions, hidden states and residual of a decoder layer's call."""
    arguments = named(names, args, kwargs)
    return [arguments.get(name) for name in ("positions", "hidden_states", "residual")]
