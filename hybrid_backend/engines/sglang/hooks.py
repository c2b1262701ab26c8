"""Lookahead hooks: decoder layer l gives the runtime its input, from which the query of layer l+1 is predicted."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from sglang.srt.layers.layer_boundary.residual.batch import start
from sglang.srt.layers.linear import QKVParallelLinear
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from torch import Tensor, nn

from hybrid_backend.attention.lookahead import Layer, QueryPredictor, call_names, named, predictors
from hybrid_backend.config import HybridConfig
from hybrid_backend.engines.sglang.session import Session
from hybrid_backend.methods import resolve_method
from hybrid_backend.step.method import looks_ahead

_logger = logging.getLogger(__name__)


def attach_lookahead(session: Session, layers: list[Layer], config: HybridConfig, stream: Tensor) -> None:
    """Predict every layer's query at the input of the layer before it.

    Layers for which that is impossible select with their true queries. ``stream`` is ``[0, hidden]`` of the residual
    stream's dtype and device.
    """
    if not looks_ahead(resolve_method(config.method), config):
        return
    config = session.runtime.config
    predicted = {
        index: layer for index, layer in enumerate(layers) if layer.before is not None and config.is_predicted(index)
    }
    head_dim = session.runtime.model.head_dim
    predictor_of_layer, warning = predictors(predicted, head_dim, stream, (QKVParallelLinear,), _proof_inputs)
    for index, predictor in predictor_of_layer.items():
        before = predicted[index].before
        assert before is not None
        before.register_forward_pre_hook(_hook(session, index, before, predictor), with_kwargs=True)
    if warning:
        _logger.warning(warning)


def _proof_inputs(positions: Tensor, hidden: Tensor, residual: Tensor | None) -> dict[str, Any]:
    """Return a layer's arguments before the first batch, for a layer that takes a residual as an argument."""
    batch = SimpleNamespace(forward_mode=ForwardMode.DECODE, batch_size=len(hidden))
    return _inputs(positions, hidden, batch) | {"residual": residual}


def _inputs(positions: Tensor | None, hidden: Tensor, batch: Any) -> dict[str, Any]:
    """Return the arguments of a layer that gets the whole residual stream at once. ``batch`` is changed."""
    start(batch)
    return {"positions": positions, "hidden_states": hidden, "forward_batch": batch, "residual": None}


def _hook(
    session: Session, layer: int, before: nn.Module, predictor: QueryPredictor
) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
    """Return a pre-hook for the decoder layer ``before``, which is called with hidden states and the batch.

    The residual is in the batch, or an argument, or in the hidden states already, depending on the model. The sum is
    the layer's input.
    """
    names = tuple(call_names(before))

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        runtime, step = session.runtime, session.step
        if step is None or not runtime.wants_lookahead(layer, step):
            return
        arguments = named(names, args, kwargs)
        hidden, batch, rows = arguments["hidden_states"], arguments["forward_batch"], step.decode
        assert rows is not None
        stream, residual, positions = batch.residual_stream, arguments.get("residual"), arguments.get("positions")
        x = rows.gather(hidden if stream is None else stream.snapshot(hidden))
        if residual is not None and predictor.adds_residual:
            x = x + rows.gather(residual)
        if positions is not None:
            positions = rows.gather(positions.movedim(-1, 0)).movedim(0, -1)
        runtime.lookahead(layer, step, predictor(_inputs(positions, x, copy.copy(batch))))

    return hook
