"""Predicted queries in three kernel launches: norm of the residual stream, query projection, then norm and rotation.

The fused predictor works for every model family. Hooks record which modules a `lookahead.QueryPredictor` calls, and the
attributes of a module tell norms and rotary embeddings. The fused predictor is used only if its queries equal those of
the layer's own code on random input at positions over the whole context. A layer with another operation before its
attention, such as a scale or a gate, fails that comparison and keeps its `QueryPredictor`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from hybrid_backend.attention.lookahead import Inputs, Predictor, has_query_rows, only_projection, query_rows

if TYPE_CHECKING:
    from hybrid_backend.kernels.triton.predict import RmsNorm

_ROWS = 8
"""Rows of the random input that compares the fused predictor with the layer's own code."""
_MAX_ERROR_FP32 = 1e-3
"""Largest relative error of a row in fp32."""
_MAX_ERROR_16_BIT = 0.02
"""Largest relative error of a row in 16 bits, where norm and rotary embedding may round products differently."""


class _Norm(NamedTuple):
    """An engine's RMS norm module."""

    module: Any
    """The engine's module with the norm's ``weight``."""
    epsilon: float
    """Number that is added to the mean square."""
    adds_one: bool
    """The factor is ``1 + weight`` instead of ``weight``."""

    def current(self) -> RmsNorm:
        """Return the norm with its current weight, because the weights of a running engine may change."""
        # A CPU server does not need Triton, so Triton is imported only when a fused predictor runs.
        from hybrid_backend.kernels.triton.predict import RmsNorm

        return RmsNorm(self.module.weight, self.epsilon, self.adds_one)


class FusedPredictor:
    """A `Predictor` that takes three kernel launches."""

    def __init__(
        self,
        unfused: Predictor,
        norm: _Norm,
        projection: nn.Module,
        head_dim: int,
        query_norm: _Norm | None,
        rotary: Any,
    ) -> None:
        """Keep the engine's modules.

        Args:
            unfused: predictor that runs the layer's own code; used if positions have several axes, as with images.
            norm: norm of the residual stream.
            projection: QKV projection (`lookahead.query_rows`).
            head_dim: channels of a head.
            query_norm: norm of the queries after the projection; None: no norm.
            rotary: the engine's rotary embedding with ``cos_sin_cache``; None: no rotation.
        """
        self.adds_residual = unfused.adds_residual
        self._unfused, self._norm, self._query_norm, self._rotary = unfused, norm, query_norm, rotary
        self._projection, self._head_dim = projection, head_dim

    def __call__(self, inputs: Mapping[str, Any]) -> Tensor:
        """Return the predicted query ``[rows, heads, head_dim]``."""
        from hybrid_backend.kernels.triton import predict

        positions, rotation = inputs["positions"], None
        if self._rotary is not None:
            if positions is None or positions.dim() != 1:
                return self._unfused(inputs)
            rotation = predict.Rotation(positions, self._rotary.cos_sin_cache, self._rotary.is_neox_style)
        residual = inputs["residual"] if self.adds_residual else None
        x = predict.normed_stream(inputs["hidden_states"], residual, self._norm.current())
        q = nn.functional.linear(x, *query_rows(self._projection)).view(len(x), -1, self._head_dim)
        query_norm = None if self._query_norm is None else self._query_norm.current()
        return predict.finished_queries(q, query_norm, rotation)


def fused(
    predictor: Predictor,
    decoder: nn.Module,
    stream: Tensor,
    projections: tuple[type[nn.Module], ...],
    inputs: Inputs,
    max_tokens: int,
) -> Predictor:
    """Return a fused predictor with the same queries as ``predictor``; ``predictor`` itself if no fused one has them.

    Args:
        predictor: verified predictor of the layer (`lookahead.proven_predictor`).
        decoder: decoder layer whose query is predicted.
        stream: empty tensor ``[0, hidden]`` with the dtype and device of the residual stream.
        projections: the engine's classes of QKV projections.
        inputs: function that makes the arguments of the decoder layer.
        max_tokens: largest sequence length in tokens.
    """
    try:
        with torch.inference_mode():
            fused_predictor = _fused(predictor, decoder, stream, projections, inputs, max_tokens)
    # The engine's modules may raise any exception, because the engine itself never calls them in this way.
    except Exception:
        return predictor
    return predictor if fused_predictor is None else fused_predictor


def _fused(
    predictor: Predictor,
    decoder: nn.Module,
    stream: Tensor,
    projections: tuple[type[nn.Module], ...],
    inputs: Inputs,
    max_tokens: int,
) -> FusedPredictor | None:
    """Return a fused predictor; None if the layer's modules do not fit or the queries differ.

    All tensor-parallel ranks must decide alike if the layer communicates before its attention. A norm over all query
    heads communicates, so a rank that has only some of the heads does not fuse such a norm.
    """
    projection: Any = only_projection(decoder, projections)
    if projection is None or not has_query_rows(projection, stream.dtype):
        return None
    generator = torch.Generator().manual_seed(1)
    hidden, residual = torch.randn(2, _ROWS, stream.shape[1], generator=generator).to(stream)
    input_residual = residual if predictor.adds_residual else None

    def make_inputs(positions: Tensor) -> Mapping[str, Any]:
        # Some layers modify their inputs in place, so each call gets a copy.
        residual_copy = None if input_residual is None else input_residual.clone()
        return inputs(positions.to(stream.device), hidden.clone(), residual_copy)

    called = _called_modules(decoder, predictor, make_inputs(torch.arange(_ROWS)))
    rotary = next((module for module in called if _is_rotary(module)), None)
    num_positions = max_tokens if rotary is None else min(max_tokens, len(rotary.cos_sin_cache))
    spread_inputs = make_inputs(torch.linspace(0, num_positions - 1, _ROWS).long())
    true_query = predictor(spread_inputs)
    rows, heads, head_dim = true_query.shape
    query_sizes = {head_dim}
    if projection.num_heads == getattr(projection, "total_num_heads", projection.num_heads):
        query_sizes.add(heads * head_dim)
    first = next((module for module in called if _norm_size(module) == stream.shape[1]), None)
    second = next((module for module in called if _norm_size(module) in query_sizes and module is not first), None)
    if first is None or len(query_rows(projection)[0]) != heads * head_dim:
        return None
    query_norm = None if second is None else _rms_norm(second, true_query.reshape(rows, -1, _norm_size(second)))
    result = FusedPredictor(predictor, _rms_norm(first, hidden), projection, head_dim, query_norm, rotary)
    differences = (result(spread_inputs) - true_query).float().flatten(1).norm(dim=1)
    error = float((differences / true_query.float().flatten(1).norm(dim=1)).max())
    return result if error <= (_MAX_ERROR_FP32 if stream.dtype == torch.float32 else _MAX_ERROR_16_BIT) else None


def _called_modules(decoder: nn.Module, predictor: Predictor, inputs: Mapping[str, Any]) -> Sequence[Any]:
    """Return the modules of a decoder layer that run before its attention, in call order."""
    called: list[nn.Module] = []
    hooks = [module.register_forward_pre_hook(lambda module, _: called.append(module)) for module in decoder.modules()]
    try:
        predictor(inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return called


def _is_rotary(module: Any) -> bool:
    """Tell whether a module is a rotary embedding of the engine."""
    return isinstance(getattr(module, "cos_sin_cache", None), Tensor) and hasattr(module, "is_neox_style")


def _norm_size(module: Any) -> int:
    """Return the number of elements that a norm normalizes together; 0 if the module is not a norm."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 1 or _epsilon(module) is None:
        return 0
    return len(weight)


def _epsilon(module: Any) -> float | None:
    """Return the epsilon of a norm; None if the module has none."""
    return getattr(module, "variance_epsilon", getattr(module, "eps", None))


def _rms_norm(module: Any, x: Tensor) -> _Norm:
    """Describe a norm module. Its output for ``x`` decides whether the factor is ``weight`` or ``1 + weight``."""
    from hybrid_backend.kernels.triton.predict import normed_stream

    expected = module(x.clone()).flatten(0, -2)
    norms = [_Norm(module, float(_epsilon(module) or 0), adds_one) for adds_one in (False, True)]
    flat = x.flatten(0, -2)
    errors = [float((normed_stream(flat, None, norm.current()) - expected).float().norm()) for norm in norms]
    return norms[errors.index(min(errors))]
