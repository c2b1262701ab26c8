"""Hooks before decoder layers: layer l tells the attention of layer l+1 its input (lookahead), or has rows of its own
input changed (rows that go on from an earlier step).

A pre-hook calls an opaque custom op, which survives torch.compile because it says what it mutates: its inputs, or a
token tensor; what it does with them is invisible to the compiler. In piecewise graphs the lookahead is part of a piece,
which was captured without a step, and does nothing; rows that go on must do so there too, so pieces end before
`LAYER_INPUT`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.forward_context import get_forward_context
from vllm.utils.torch_utils import direct_register_custom_op

from hybrid_backend.attention.lookahead import call_names, named

LAYER_INPUT = "hybrid_backend::layer_input"
_LIBRARY = torch.library.Library("hybrid_backend", "FRAGMENT")


def _found(layer_name: str) -> tuple[Any, Any]:
    """The attention layer and the step's metadata for it; None: profiling, no step."""
    context = get_forward_context()
    metadata = context.attn_metadata.get(layer_name) if isinstance(context.attn_metadata, dict) else None
    return context.no_compile_layers[layer_name].impl, metadata


def _lookahead(
    positions: Tensor | None, hidden_states: Tensor, residual: Tensor | None, token: Tensor, layer_name: str
) -> None:
    impl, metadata = _found(layer_name)
    if metadata is not None:
        impl.lookahead(metadata, positions, hidden_states, residual)


def _lookahead_fake(
    positions: Tensor | None, hidden_states: Tensor, residual: Tensor | None, token: Tensor, layer_name: str
) -> None:
    return None


# vLLM's wrapper, which reads these annotations, knows torch.Tensor by this name.
def _layer_input(hidden_states: torch.Tensor, residual: torch.Tensor | None, layer_name: str) -> None:
    impl, metadata = _found(layer_name)
    if metadata is not None:
        impl.layer_input(metadata, hidden_states, residual)


def _layer_input_fake(hidden_states: Tensor, residual: Tensor | None, layer_name: str) -> None:
    return None


direct_register_custom_op(
    "lookahead",
    _lookahead,
    mutates_args=["token"],
    fake_impl=_lookahead_fake,
    target_lib=_LIBRARY,
    dispatch_key="CompositeExplicitAutograd",
)


direct_register_custom_op(
    "layer_input",
    eager_break_during_capture(_layer_input),
    mutates_args=["hidden_states", "residual"],
    fake_impl=_layer_input_fake,
    target_lib=_LIBRARY,
    dispatch_key="CompositeExplicitAutograd",
)

Hook = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]


def lookahead_hook(decoder: nn.Module, layer_name: str, device: torch.device) -> Hook:
    """A pre-hook for ``decoder``, which announces its input to the attention layer ``layer_name``."""
    token, names = torch.zeros(1, device=device), tuple(call_names(decoder))

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        positions, hidden_states, residual = _inputs(names, args, kwargs)
        torch.ops.hybrid_backend.lookahead(positions, hidden_states, residual, token, layer_name)

    return hook


def input_hook(decoder: nn.Module, layer_name: str) -> Hook:
    """A pre-hook for ``decoder``, the layer of ``layer_name``, which may change rows of its input."""
    names = tuple(call_names(decoder))

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        _, hidden_states, residual = _inputs(names, args, kwargs)
        torch.ops.hybrid_backend.layer_input(hidden_states, residual, layer_name)

    return hook


def _inputs(names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Positions, hidden states and residual of a decoder layer's call."""
    given = named(names, args, kwargs)
    return [given.get(name) for name in ("positions", "hidden_states", "residual")]
