"""The predicted query in three launches, for a device on which each costs: norm of the residual stream, product with
the rows of queries, and what is done to each head (norm, rotary embedding).

Nothing is known of families here either. The layer's own code runs once and shows which of its modules it calls before
its attention; what these are is told by what they hold. The fused form is used where it gives what the layer's code
gives (`lookahead.proven_predictor`), at positions over the whole context; anything that it leaves out (a scale, a gate,
a norm of another kind) shows there, and the layer's code stays.
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
# Relative errors of the worst row. In 16 bits both round alike, but for products within norm and rotary embedding.
_SAME, _SAME_HALF = 1e-3, 0.02


class _Norm(NamedTuple):
    """An engine's RMS norm. Its weight is read at each use, since the weights of a running engine change."""

    module: Any
    epsilon: float
    adds_one: bool

    def current(self) -> RmsNorm:
        """Return the norm as the kernels know it."""
        from hybrid_backend.kernels.triton.predict import RmsNorm  # late: Triton is not everywhere

        return RmsNorm(self.module.weight, self.epsilon, self.adds_one)


class FusedPredictor:
    """A `Predictor`."""

    def __init__(
        self,
        itself: Predictor,
        norm: _Norm,
        projection: nn.Module,
        head_dim: int,
        query_norm: _Norm | None,
        rotary: Any,
    ) -> None:
        """
        Args:
            itself: predicts by the layer's own code: where positions have several axes (rotary embedding of images).
            projection: the engine's module that projects to queries, keys and values (`lookahead.query_rows`).
            rotary: the engine's module, with ``cos_sin_cache``, which engines may convert later; None: no rotation.
        """
        self.adds_residual = itself.adds_residual
        self._itself, self._norm, self._query_norm, self._rotary = itself, norm, query_norm, rotary
        self._projection, self._head_dim = projection, head_dim

    def __call__(self, inputs: Mapping[str, Any]) -> Tensor:
        from hybrid_backend.kernels.triton import predict  # late: Triton is not everywhere

        positions, rotation = inputs["positions"], None
        if self._rotary is not None:
            if positions is None or positions.dim() != 1:
                return self._itself(inputs)
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
    """The fused form of a predictor that was proven, or the predictor itself where there is none that gives the same.

    Args:
        stream, projections, inputs: as of `lookahead.proven_predictor`.
        max_tokens: of a sequence: a position may be any below.
    """
    try:
        with torch.inference_mode():
            found = _fused(predictor, decoder, stream, projections, inputs, max_tokens)
    except Exception:  # whatever engines' modules have to say to a call that is not theirs
        return predictor
    return predictor if found is None else found


def _fused(
    predictor: Predictor,
    decoder: nn.Module,
    stream: Tensor,
    projections: tuple[type[nn.Module], ...],
    inputs: Inputs,
    max_tokens: int,
) -> FusedPredictor | None:
    """Ranks of a tensor-parallel model decide alike as far as the layer's code talks to other ranks: what it computes
    for all heads together is not fused there."""
    projection: Any = only_projection(decoder, projections)
    if projection is None or not has_query_rows(projection, stream.dtype):
        return None
    chance = torch.Generator().manual_seed(1)
    hidden, residual = torch.randn(2, _ROWS, stream.shape[1], generator=chance).to(stream)
    apart = residual if predictor.adds_residual else None

    def given(positions: Tensor) -> Mapping[str, Any]:
        # Clones, as layers change what they are given.
        return inputs(positions.to(stream.device), hidden.clone(), None if apart is None else apart.clone())

    called = _called(decoder, predictor, given(torch.arange(_ROWS)))
    rotary = next((each for each in called if _turns(each)), None)
    last = max_tokens if rotary is None else min(max_tokens, len(rotary.cos_sin_cache))
    far = given(torch.linspace(0, last - 1, _ROWS).long())
    real = predictor(far)
    rows, heads, head_dim = real.shape
    sizes = {head_dim}
    if projection.num_heads == getattr(projection, "total_num_heads", projection.num_heads):
        sizes.add(heads * head_dim)
    first = next((each for each in called if _size(each) == stream.shape[1]), None)
    second = next((each for each in called if _size(each) in sizes and each is not first), None)
    if first is None or len(query_rows(projection)[0]) != heads * head_dim:
        return None
    query_norm = None if second is None else _rms_norm(second, real.reshape(rows, -1, _size(second)))
    found = FusedPredictor(predictor, _rms_norm(first, hidden), projection, head_dim, query_norm, rotary)
    errors = (found(far) - real).float().flatten(1).norm(dim=1) / real.float().flatten(1).norm(dim=1)
    return found if float(errors.max()) <= (_SAME if stream.dtype == torch.float32 else _SAME_HALF) else None


def _called(decoder: nn.Module, predictor: Predictor, inputs: Mapping[str, Any]) -> Sequence[Any]:
    """The layer's modules that its code calls before its attention, in order."""
    called: list[nn.Module] = []
    hooks = [each.register_forward_pre_hook(lambda module, _: called.append(module)) for each in decoder.modules()]
    try:
        predictor(inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return called


def _turns(module: Any) -> bool:
    return isinstance(getattr(module, "cos_sin_cache", None), Tensor) and hasattr(module, "is_neox_style")


def _size(module: Any) -> int:
    """Elements that a norm is over, which has a weight for each; 0: this is none."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 1 or _epsilon(module) is None:
        return 0
    return len(weight)


def _epsilon(module: Any) -> float | None:
    return getattr(module, "variance_epsilon", getattr(module, "eps", None))


def _rms_norm(module: Any, x: Tensor) -> _Norm:
    """``module`` as the kernels know it. Its weight, or 1 + weight: whichever comes closer to what it does."""
    from hybrid_backend.kernels.triton.predict import normed_stream  # late: Triton is not everywhere

    real = module(x.clone()).flatten(0, -2)
    norms = [_Norm(module, float(_epsilon(module) or 0), adds_one) for adds_one in (False, True)]
    flat = x.flatten(0, -2)
    errors = [float((normed_stream(flat, None, norm.current()) - real).float().norm()) for norm in norms]
    return norms[errors.index(min(errors))]
