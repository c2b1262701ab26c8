"""Lookahead hooks: decoder layer l tells the runtime its input, from which the query of layer l+1 is predicted."""

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
    """Predict every layer's query at the input of the layer before it. Layers for which that is impossible look at
    their true queries. ``stream``: ``[0, hidden]``, of the residual stream's dtype and device."""
    if not looks_ahead(resolve_method(config.method), config):
        return
    ahead = {
        index: layer for index, layer in enumerate(layers) if layer.before is not None and config.is_predicted(index)
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
    """For a layer that takes a residual. The others' is the batch's, and here there is no batch yet."""
    batch = SimpleNamespace(forward_mode=ForwardMode.DECODE, batch_size=len(hidden))
    return _inputs(positions, hidden, batch) | {"residual": residual}


def _inputs(positions: Tensor | None, hidden: Tensor, batch: Any) -> dict[str, Any]:
    """For a layer that is given the whole residual stream at once. ``batch`` is changed."""
    start(batch)
    return {"positions": positions, "hidden_states": hidden, "forward_batch": batch, "residual": None}


def _hook(
    session: Session, layer: int, before: nn.Module, predictor: QueryPredictor
) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
    """A pre-hook for the decoder layer ``before``: it is called with hidden states and the batch. The residual is the
    batch's, or an argument, or is in the hidden states already, as the model has it; the sum is the layer's input."""
    names = tuple(call_names(before))

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        runtime, step = session.runtime, session.step
        if step is None or not runtime.wants_lookahead(layer, step):
            return
        given = named(names, args, kwargs)
        hidden, batch, rows = given["hidden_states"], given["forward_batch"], step.decode
        assert rows is not None
        stream, residual, positions = batch.residual_stream, given.get("residual"), given.get("positions")
        x = rows.gather(hidden if stream is None else stream.snapshot(hidden))
        if residual is not None and predictor.adds_residual:
            x = x + rows.gather(residual)
        if positions is not None:
            positions = rows.gather(positions.movedim(-1, 0)).movedim(0, -1)
        runtime.lookahead(layer, step, predictor(_inputs(positions, x, copy.copy(batch))))

    return hook
