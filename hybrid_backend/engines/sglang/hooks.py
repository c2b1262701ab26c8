"""Lookahead hooks: decoder layer l tells the runtime its input, from which the query of layer l+1 is predicted."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from sglang.srt.layers.layer_boundary.residual.batch import stream_of
from torch import nn

from hybrid_backend.attention.lookahead import QueryPredictor, family_of
from hybrid_backend.config import HybridConfig
from hybrid_backend.engines.sglang.checks import LOOKAHEAD_FAMILIES
from hybrid_backend.engines.sglang.session import Session
from hybrid_backend.errors import EngineError
from hybrid_backend.methods import resolve_method


def attach_lookahead(
    session: Session, layers: list[tuple[Any, nn.Module]], config: HybridConfig, model_type: str
) -> None:
    """Predict every layer's query at the input of the layer before it. ``layers`` as of `attention_layers`."""
    if not resolve_method(config.method).looks_ahead(config, torch.device("cpu")):
        return
    family = family_of(model_type, config.model.family)
    if family not in LOOKAHEAD_FAMILIES:
        raise EngineError(f"no lookahead on SGLang for model type {model_type!r}")
    for layer, ((_, earlier), (_, decoder)) in enumerate(pairwise(layers), start=1):
        if layer not in config.exact_layers:
            hook = _hook(session, layer, QueryPredictor(decoder, family))
            earlier.register_forward_pre_hook(hook, with_kwargs=True)


def _hook(
    session: Session, layer: int, predictor: QueryPredictor
) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
    """A pre-hook for the decoder layer before ``layer``: it is called with positions, hidden states and the batch,
    which carries the residual stream; their sum is the layer's input."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        runtime, step = session.runtime, session.step
        if step is None or not runtime.wants_lookahead(layer, step):
            return
        names = ("positions", "hidden_states", "forward_batch")
        positions, hidden, batch = list(args[:3]) + [kwargs[name] for name in names[len(args) :]]
        rows = step.decode
        assert rows is not None
        x = stream_of(batch).snapshot(hidden)
        runtime.lookahead(layer, step, predictor(rows.gather(positions), rows.gather(x)))

    return hook
