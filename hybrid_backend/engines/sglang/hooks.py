"""Lookahead hooks: decoder layer l tells the runtime its input, from which the query of layer l+1 is predicted."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.layer_boundary.residual.batch import start, stream_of
from sglang.srt.layers.linear import QKVParallelLinear
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from torch import Tensor, nn

from hybrid_backend.attention.lookahead import Layer, QueryPredictor, call_names, named, predictors
from hybrid_backend.config import HybridConfig
from hybrid_backend.engines.sglang.session import Session
from hybrid_backend.methods import resolve_method

_logger = logging.getLogger(__name__)


def attach_lookahead(session: Session, layers: list[Layer], config: HybridConfig, stream: Tensor) -> None:
    """Predict every layer's query at the input of the layer before it. Layers for which that is impossible look at
    their true queries. ``stream``: ``[0, hidden]``, of the residual stream's dtype and device."""
    if not resolve_method(config.method).looks_ahead(config, torch.device("cpu")):
        return
    ahead = {
        index: layer
        for index, layer in enumerate(layers)
        if layer.before is not None and index not in config.exact_layers
    }
    head_dim = session.runtime.model.head_dim
    found, warning = predictors(ahead, head_dim, stream, (QKVParallelLinear,), _proof_inputs)
    for index, predictor in found.items():
        before = ahead[index].before
        assert before is not None
        before.register_forward_pre_hook(_hook(session, index, before, predictor), with_kwargs=True)
    if warning:
        _logger.warning(warning)


def _proof_inputs(positions: Tensor, hidden: Tensor, residual: Tensor | None) -> dict[str, Any]:
    """The residual stream is the batch's; here there is no batch yet."""
    return _inputs(positions, hidden, SimpleNamespace(forward_mode=ForwardMode.DECODE, batch_size=len(hidden)))


def _inputs(positions: Tensor, hidden: Tensor, batch: Any) -> dict[str, Any]:
    """For a layer that is given the whole residual stream at once. ``batch`` is changed."""
    start(batch)
    return {"positions": positions, "hidden_states": hidden, "forward_batch": batch}


def _hook(
    session: Session, layer: int, before: nn.Module, predictor: QueryPredictor
) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
    """A pre-hook for the decoder layer ``before``: it is called with positions, hidden states and the batch, which
    carries the residual stream; their sum is the layer's input."""
    names = tuple(call_names(before))

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        runtime, step = session.runtime, session.step
        if step is None or not runtime.wants_lookahead(layer, step):
            return
        given = named(names, args, kwargs)
        batch, rows = given["forward_batch"], step.decode
        assert rows is not None
        x = rows.gather(stream_of(batch).snapshot(given["hidden_states"]))
        positions = rows.gather(given["positions"].movedim(-1, 0)).movedim(0, -1)
        runtime.lookahead(layer, step, predictor(_inputs(positions, x, copy.copy(batch))))

    return hook
