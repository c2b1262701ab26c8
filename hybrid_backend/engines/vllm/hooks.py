"""Lookahead hooks: decoder layer l tells the attention of layer l+1 its input.

The pre-hook calls an opaque custom op, which survives torch.compile because it claims to mutate a token tensor; what
it does with the input is invisible to the compiler.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from vllm.forward_context import get_forward_context
from vllm.utils.torch_utils import direct_register_custom_op

_LIBRARY = torch.library.Library("hybrid_backend", "FRAGMENT")


def _lookahead(
    positions: Tensor, hidden_states: Tensor, residual: Tensor | None, token: Tensor, layer_name: str
) -> None:
    context = get_forward_context()
    if not isinstance(context.attn_metadata, dict):
        return  # profiling: no step
    metadata = context.attn_metadata.get(layer_name)
    if metadata is not None:
        context.no_compile_layers[layer_name].impl.lookahead(metadata, positions, hidden_states, residual)


def _lookahead_fake(
    positions: Tensor, hidden_states: Tensor, residual: Tensor | None, token: Tensor, layer_name: str
) -> None:
    return None


direct_register_custom_op(
    "lookahead",
    _lookahead,
    mutates_args=["token"],
    fake_impl=_lookahead_fake,
    target_lib=_LIBRARY,
    dispatch_key="CompositeExplicitAutograd",
)


def hook_for(layer_name: str, device: torch.device) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
    """A pre-hook for a decoder layer, which announces its input to the attention layer ``layer_name``."""
    token = torch.zeros(1, device=device)

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        names = ("positions", "hidden_states", "residual")
        values = list(args[:3]) + [kwargs.get(name) for name in names[len(args) :]]
        positions, hidden_states, residual = values
        torch.ops.hybrid_backend.lookahead(positions, hidden_states, residual, token, layer_name)

    return hook
