"""Predicted queries: a decoder layer's own code is run up to its attention, on the input of the previous decoder layer.

The prediction works for every model family, because a `QueryPredictor` runs a copy of the engine's layer. The copy
shares the weights, and its attention module stops the forward pass and returns the query. Norms, biases, rotary
embedding and scales therefore run as in the layer itself. Only the query rows of the QKV projection are computed.

`proven_predictor` verifies a predictor on random input before the predictor is used.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor, nn

from hybrid_backend.errors import EngineError

_PROOF_ROWS = 4
"""Rows of the random input that verifies a predictor."""
_MAX_ERROR_FP32 = 1e-3
"""Largest relative error of a predictor on the layer's own input in fp32."""
_MAX_ERROR_16_BIT = 0.05
"""Largest relative error in 16 bits, where the predictor rounds the sum of hidden states and residual once more."""
_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class _AttentionReachedError(Exception):
    """Raised by the attention of a copied layer to end the layer's forward pass, which is not a failure."""

    def __init__(self, query: Tensor) -> None:
        super().__init__("the query is there")
        self.query = query


class Predictor(Protocol):
    """Predicts the query of one layer from the inputs of an earlier decoder layer."""

    adds_residual: bool
    """The residual stream is the sum of hidden states and residual; otherwise the hidden states alone."""

    def __call__(self, inputs: Mapping[str, Any]) -> Tensor:
        """Return the predicted query ``[rows, heads, head_dim]``, given the arguments of the decoder layer by name."""


class QueryPredictor:
    """A `Predictor` that runs a copy of the decoder layer up to its attention."""

    adds_residual = False
    """`proven_predictor` sets this to True for a layer that adds its residual."""

    def __init__(self, decoder: nn.Module, attention: nn.Module, head_dim: int, projection: nn.Module | None) -> None:
        """Copy the decoder layer.

        Args:
            decoder: decoder layer whose query is predicted.
            attention: attention module of the layer, which is called with query, key and value.
            head_dim: channels of a head.
            projection: QKV projection of the layer, of which only the rows of queries are computed; None: the whole
                layer up to its attention is computed.
        """

        def stop(query: Tensor, *args: Any, **kwargs: Any) -> NoReturn:
            raise _AttentionReachedError(query)

        forwards: dict[nn.Module, Callable[..., Any]] = {attention: stop}
        if projection is not None:
            forwards[projection] = _query_forward(projection)
        self._layer, self._head_dim = _copy_layer(decoder, forwards), head_dim
        arguments = call_names(decoder)
        self._takes = frozenset(arguments)
        self._defaults = {name: None for name, is_required in arguments.items() if is_required}

    def takes(self, name: str) -> bool:
        """Tell whether the decoder layer has an argument ``name``."""
        return name in self._takes

    def __call__(self, inputs: Mapping[str, Any]) -> Tensor:
        """Return the predicted query ``[rows, heads, head_dim]``.

        Raises:
            EngineError: the forward pass of the layer ends without a call of its attention.
        """
        arguments = {name: value for name, value in inputs.items() if name in self._takes}
        if self.adds_residual and arguments.get("residual") is not None:
            arguments |= {"hidden_states": arguments["hidden_states"] + arguments["residual"], "residual": None}
        try:
            self._layer.forward(**(self._defaults | arguments))
        except _AttentionReachedError as reached:
            query = reached.query
            return query.reshape(-1, query.shape[-1] // self._head_dim, self._head_dim) if query.dim() == 2 else query
        raise EngineError(f"{type(self._layer).__name__} does not call its attention")


def call_names(decoder: nn.Module) -> dict[str, bool]:
    """Return the argument names of a decoder layer's ``forward``, in order; True: the argument has no default."""
    parameters = list(inspect.signature(type(decoder).forward).parameters.values())[1:]
    return {
        parameter.name: parameter.default is parameter.empty
        for parameter in parameters
        if parameter.kind not in _VARIABLE
    }


def named(names: Iterable[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name, where ``names`` are the names of the positional ones (`call_names`)."""
    return dict(zip(names, args, strict=False)) | dict(kwargs)


class Layer(NamedTuple):
    """An attention layer that this backend computes. The engine computes state-space and linear-attention layers."""

    attention: Any
    """The engine's attention module."""
    decoder: nn.Module
    """Decoder layer that contains the attention module."""
    before: nn.Module | None
    """Previous decoder layer; None for the first one."""


def layer_at(modules: Mapping[str, nn.Module], path: str) -> Layer:
    """Return the attention layer at a module path, with its decoder layer and the previous decoder layer.

    Args:
        modules: all modules of the model by path (``nn.Module.named_modules``).
        path: path of the attention module.

    Raises:
        EngineError: no ``nn.ModuleList`` of decoder layers is on the path.
    """
    names = path.split(".")
    for end in range(len(names) - 1, 0, -1):
        decoders = modules[".".join(names[: end - 1])]
        if isinstance(decoders, nn.ModuleList):
            index = int(names[end - 1])
            return Layer(modules[path], decoders[index], decoders[index - 1] if index else None)
    raise EngineError(f"{path} is in no list of decoder layers")


Inputs = Callable[[Tensor, Tensor, Tensor | None], Mapping[str, Any]]
"""Function that makes an engine's arguments of a decoder layer, by name.

Its parameters are positions ``[rows]``, hidden states ``[rows, hidden]`` and the residual ``[rows, hidden]`` or None.
"""


def predictors(
    layers: Mapping[int, Layer], head_dim: int, stream: Tensor, projections: tuple[type[nn.Module], ...], inputs: Inputs
) -> tuple[dict[int, QueryPredictor], str | None]:
    """Return the verified predictors by layer (`proven_predictor`), and a log line about layers without a predictor."""
    predictor_of: dict[int, QueryPredictor] = {}
    layers_of_reason: dict[str, list[str]] = {}
    for index, (attention, decoder, _) in layers.items():
        predictor = proven_predictor(decoder, attention, head_dim, stream, projections, inputs)
        if isinstance(predictor, str):
            layers_of_reason.setdefault(predictor, []).append(str(index))
        else:
            predictor_of[index] = predictor
    if not layers_of_reason:
        return predictor_of, None
    reasons = "; ".join(f"{reason} (layers {', '.join(names)})" for reason, names in layers_of_reason.items())
    log = f"lookahead: {reasons}: CPU workers start there with the true query, so less of their time is hidden"
    return predictor_of, log


def proven_predictor(
    decoder: nn.Module,
    attention: nn.Module,
    head_dim: int,
    stream: Tensor,
    projections: tuple[type[nn.Module], ...],
    inputs: Inputs,
) -> QueryPredictor | str:
    """Return a predictor that yields a layer's true query from the layer's own input, or the reason why none does.

    The predictor is verified on random input. The layer itself gets hidden states and residual as two tensors; the
    predictor gets only the residual stream.

    Args:
        decoder: decoder layer whose query is predicted.
        attention: attention module of the layer.
        head_dim: channels of a head.
        stream: empty tensor ``[0, hidden]`` with the dtype and device of the residual stream.
        projections: the engine's classes of QKV projections.
        inputs: function that makes the arguments of the decoder layer.
    """
    qkv_projection = only_projection(decoder, projections)
    has_rows = qkv_projection is not None and has_query_rows(qkv_projection, stream.dtype)
    kind, error = type(decoder).__name__, float("inf")
    try:
        true_layer = QueryPredictor(decoder, attention, head_dim, None)
        if not true_layer.takes("hidden_states"):
            return f"{kind} is not called with hidden_states"
        generator = torch.Generator().manual_seed(0)
        hidden, residual = torch.randn(2, _PROOF_ROWS, stream.shape[1], generator=generator).to(stream)
        positions = torch.arange(_PROOF_ROWS, device=stream.device)
        with torch.inference_mode():
            # Some layers modify their inputs in place, so each call gets a copy.
            true_query = true_layer(inputs(positions, hidden.clone(), residual.clone())).float()
            for projection in [qkv_projection, None] if has_rows else [None]:
                predictor = QueryPredictor(decoder, attention, head_dim, projection)
                # Some decoder layers accept a residual but do not add it.
                for predictor.adds_residual in (True, False) if true_layer.takes("residual") else (False,):
                    stream = hidden + residual if predictor.adds_residual else hidden.clone()
                    predicted = predictor(inputs(positions, stream, None)).float()
                    error = float((predicted - true_query).norm() / true_query.norm())
                    if error <= (_MAX_ERROR_FP32 if stream.dtype == torch.float32 else _MAX_ERROR_16_BIT):
                        return predictor
    # The engine's code may raise any exception, because the engine itself never calls a layer in this way.
    except Exception as reason:
        return f"{kind} does not run as far as its attention ({type(reason).__name__}: {reason})"
    return f"{kind} gives a query that is {error:.0%} off where it is given its own input"


def only_projection(decoder: nn.Module, projections: tuple[type[nn.Module], ...]) -> nn.Module | None:
    """Return the QKV projection of a decoder layer; None if the layer has none or several."""
    modules = [module for module in decoder.modules() if isinstance(module, projections)]
    return modules[0] if len(modules) == 1 else None


def has_query_rows(projection: Any, dtype: torch.dtype) -> bool:
    """Tell whether `query_rows` can slice the weight of a QKV projection.

    On a CPU some engines pack the weight into another layout and drop the original.
    """
    weight = getattr(projection, "weight", None)
    rows = int(getattr(projection, "num_heads", 0)) * int(getattr(projection, "head_size", 0))
    return isinstance(weight, Tensor) and weight.dim() == 2 and weight.dtype == dtype and len(weight) > rows > 0


def query_rows(projection: Any) -> tuple[Tensor, Tensor | None]:
    """Return views of the weight ``[rows, hidden]`` and the bias ``[rows]`` of the queries in a QKV projection.

    Queries come first, and output gates count as query heads. The views are valid for one call, because an engine may
    replace its parameters while it runs.
    """
    rows, bias = projection.num_heads * projection.head_size, getattr(projection, "bias", None)
    return projection.weight[:rows], None if bias is None else bias[:rows]


def _query_forward(projection: Any) -> Callable[[Tensor], tuple[Tensor, None]]:
    """Return a forward of a QKV projection that yields ``(output, None)``, with zeros for keys and values."""
    key_value_rows = len(projection.weight) - len(query_rows(projection)[0])

    def forward(x: Tensor) -> tuple[Tensor, None]:
        return nn.functional.pad(nn.functional.linear(x, *query_rows(projection)), (0, key_value_rows)), None

    return forward


def _copy_layer(module: nn.Module, forwards: Mapping[nn.Module, Callable[..., Any]]) -> nn.Module:
    """Copy a module without its hooks, sharing all weights, and replace the ``forward`` of the modules in ``forwards``.

    Submodules that contain no module of ``forwards`` are shared instead of copied.
    """
    clone = copy.copy(module)
    clone._forward_hooks, clone._forward_pre_hooks = type(clone._forward_hooks)(), type(clone._forward_pre_hooks)()
    clone._modules = {
        name: child if child is None or forwards.keys().isdisjoint(child.modules()) else _copy_layer(child, forwards)
        for name, child in module._modules.items()
    }
    if module in forwards:
        clone.__dict__["forward"] = forwards[module]
    return clone
