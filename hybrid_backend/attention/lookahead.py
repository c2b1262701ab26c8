"""The predicted query (DESIGN.md section 4): what a decoder layer's own code makes of an earlier layer's input, as far
as its attention.

Nothing is known here of families of models. A layer is copied without its weights, which the copy shares; in the copy
the attention keeps the query that it is called with, and nothing after it runs. Norms, projections, biases, norms of
queries, rotary embedding, gates, scales: whatever the layer does before its attention is done, in its own order. Only
the projection to queries, keys and values is told apart, so that the rows of keys and values are left out.

What such a copy gets right is proven before it is used (`proven_predictor`).
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
# Relative errors. In 16 bits the sum of hidden states and residual is rounded once more, and so is what follows.
_PROVEN, _PROVEN_HALF = 1e-3, 0.05
_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class _Reached(Exception):
    """Not an error: how a layer's forward is left."""

    def __init__(self, query: Tensor) -> None:
        super().__init__("the query is there")
        self.query = query


class Predictor(Protocol):
    """Predicts one layer's query from what an earlier decoder layer is called with.

    ``adds_residual``: the residual stream is the sum of hidden states and residual, else the hidden states alone, and
    no residual is given.
    """

    adds_residual: bool

    def __call__(self, inputs: Mapping[str, Any]) -> Tensor:
        """``inputs``: what the layer is called with, by name, for any rows. ``[rows, heads, head_dim]``."""


class QueryPredictor:
    """A `Predictor` that runs the layer's own code."""

    adds_residual = False

    def __init__(self, decoder: nn.Module, attention: nn.Module, head_dim: int, projection: nn.Module | None) -> None:
        """
        Args:
            decoder: the layer whose query is predicted.
            attention: the module in it that is called with query, key, value.
            projection: the module in it that projects to all three, of which only the rows of queries are computed;
                None: the layer runs as it is.
        """

        def keep(query: Tensor, *others: Any, **more: Any) -> NoReturn:
            raise _Reached(query)

        replaced: dict[nn.Module, Callable[..., Any]] = {attention: keep}
        if projection is not None:
            replaced[projection] = _query_rows(projection)
        self._layer, self._head_dim = _copied(decoder, replaced), head_dim
        arguments = call_names(decoder)
        self._takes = frozenset(arguments)
        self._unknown = {name: None for name, is_required in arguments.items() if is_required}

    def takes(self, name: str) -> bool:
        """Whether the layer is called with it."""
        return name in self._takes

    def __call__(self, inputs: Mapping[str, Any]) -> Tensor:
        """
        Raises:
            EngineError: the layer's forward ends without attention.
        """
        given = {name: value for name, value in inputs.items() if name in self._takes}
        if self.adds_residual and given.get("residual") is not None:
            given |= {"hidden_states": given["hidden_states"] + given["residual"], "residual": None}
        try:
            self._layer.forward(**(self._unknown | given))
        except _Reached as reached:
            query = reached.query
            return query.reshape(-1, query.shape[-1] // self._head_dim, self._head_dim) if query.dim() == 2 else query
        raise EngineError(f"{type(self._layer).__name__} does not call its attention")


def call_names(decoder: nn.Module) -> dict[str, bool]:
    """Names of what a layer is called with, in order, and whether it must be given."""
    arguments = list(inspect.signature(type(decoder).forward).parameters.values())[1:]
    return {each.name: each.default is each.empty for each in arguments if each.kind not in _VARIABLE}


def named(names: Iterable[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """A call's arguments by name. ``names``: `call_names`."""
    return dict(zip(names, args, strict=False)) | dict(kwargs)


class Layer(NamedTuple):
    """An attention layer that is ours. Layers of other kinds (state-space, linear attention) are the engine's."""

    attention: Any  # the engine's module
    decoder: nn.Module  # the decoder layer that it is in
    before: nn.Module | None  # the decoder layer before that one


def layer_at(modules: Mapping[str, nn.Module], path: str) -> Layer:
    """The attention at ``path``. Its decoder layer is an item of a list of modules.

    Args:
        modules: all of the model, by path (``nn.Module.named_modules``).

    Raises:
        EngineError: there is no list of layers.
    """
    parts = path.split(".")
    for end in range(len(parts) - 1, 0, -1):
        listing = modules[".".join(parts[: end - 1])]
        if isinstance(listing, nn.ModuleList):
            index = int(parts[end - 1])
            return Layer(modules[path], listing[index], listing[index - 1] if index else None)
    raise EngineError(f"{path} is in no list of decoder layers")


Inputs = Callable[[Tensor, Tensor, Tensor | None], Mapping[str, Any]]
"""What an engine calls a decoder layer with: positions ``[rows]``, hidden states and residual ``[rows, hidden]``."""


def predictors(
    layers: Mapping[int, Layer], head_dim: int, stream: Tensor, projections: tuple[type[nn.Module], ...], inputs: Inputs
) -> tuple[dict[int, QueryPredictor], str | None]:
    """What is proven of each layer (`proven_predictor`), and what to log of those that must do without."""
    found: dict[int, QueryPredictor] = {}
    whys: dict[str, list[str]] = {}
    for index, (attention, decoder, _) in layers.items():
        predictor = proven_predictor(decoder, attention, head_dim, stream, projections, inputs)
        if isinstance(predictor, str):
            whys.setdefault(predictor, []).append(str(index))
        else:
            found[index] = predictor
    if not whys:
        return found, None
    told = "; ".join(f"{why} (layers {', '.join(those)})" for why, those in whys.items())
    return found, f"lookahead: {told}: CPU workers start there with the true query, so less of their time is hidden"


def proven_predictor(
    decoder: nn.Module,
    attention: nn.Module,
    head_dim: int,
    stream: Tensor,
    projections: tuple[type[nn.Module], ...],
    inputs: Inputs,
) -> QueryPredictor | str:
    """A predictor that gives the layer's real query where it is given the layer's own input, or why there is none.

    Proven on random input: the layer itself is given hidden states and residual apart, the predictor the stream.

    Args:
        stream: ``[0, hidden]``, of the residual stream's dtype and device.
        projections: the engine's kinds of modules that project to queries, keys and values at once.
    """
    only = only_projection(decoder, projections)
    narrowed = [only] if only is not None and has_query_rows(only, stream.dtype) else []
    kind, error = type(decoder).__name__, float("inf")
    try:
        itself = QueryPredictor(decoder, attention, head_dim, None)
        if not itself.takes("hidden_states"):
            return f"{kind} is not called with hidden_states"
        chance = torch.Generator().manual_seed(0)
        hidden, residual = torch.randn(2, _PROOF_ROWS, stream.shape[1], generator=chance).to(stream)
        positions = torch.arange(_PROOF_ROWS, device=stream.device)
        with torch.inference_mode():
            # Clones, as layers change what they are given.
            real = itself(inputs(positions, hidden.clone(), residual.clone())).float()
            for projection in [*narrowed, None]:
                predictor = QueryPredictor(decoder, attention, head_dim, projection)
                # Some layers are given a residual and pass it by.
                for predictor.adds_residual in (True, False) if itself.takes("residual") else (False,):
                    stream = hidden + residual if predictor.adds_residual else hidden.clone()
                    predicted = predictor(inputs(positions, stream, None)).float()
                    error = float((predicted - real).norm() / real.norm())
                    if error <= (_PROVEN if stream.dtype == torch.float32 else _PROVEN_HALF):
                        return predictor
    except Exception as why:  # whatever the engine's code has to say to a call that is not its own
        return f"{kind} does not run as far as its attention ({type(why).__name__}: {why})"
    return f"{kind} gives a query that is {error:.0%} off where it is given its own input"


def only_projection(decoder: nn.Module, projections: tuple[type[nn.Module], ...]) -> nn.Module | None:
    """The layer's module that projects to queries, keys and values at once; None: there is none, or several."""
    found = [module for module in decoder.modules() if isinstance(module, projections)]
    return found[0] if len(found) == 1 else None


def has_query_rows(projection: Any, dtype: torch.dtype) -> bool:
    """Return whether `query_rows` can tell the weights of queries apart.

    Some engines pack the weights of a projection on a CPU, and may drop the original.
    """
    weight = getattr(projection, "weight", None)
    rows = int(getattr(projection, "num_heads", 0)) * int(getattr(projection, "head_size", 0))
    return isinstance(weight, Tensor) and weight.dim() == 2 and weight.dtype == dtype and len(weight) > rows > 0


def query_rows(projection: Any) -> tuple[Tensor, Tensor | None]:
    """Return weight ``[rows, hidden]`` and bias of a projection's queries, which come first; gates count as heads.

    Both are views for one call: the weights of a running engine change, and its parameters may get other memory.
    """
    rows, bias = projection.num_heads * projection.head_size, getattr(projection, "bias", None)
    return projection.weight[:rows], None if bias is None else bias[:rows]


def _query_rows(projection: Any) -> Callable[[Tensor], tuple[Tensor, None]]:
    """The projection's forward with zeros for keys and values. Both engines return a bias apart, if asked to."""
    key_value_rows = len(projection.weight) - len(query_rows(projection)[0])

    def forward(x: Tensor) -> tuple[Tensor, None]:
        return nn.functional.pad(nn.functional.linear(x, *query_rows(projection)), (0, key_value_rows)), None

    return forward


def _copied(module: nn.Module, forwards: Mapping[nn.Module, Callable[..., Any]]) -> nn.Module:
    """A copy that shares all weights, in which some submodules have another forward; what holds none of those is
    shared. Hooks of the original are not called."""
    own = copy.copy(module)
    own._forward_hooks, own._forward_pre_hooks = type(own._forward_hooks)(), type(own._forward_pre_hooks)()
    own._modules = {
        name: child if child is None or forwards.keys().isdisjoint(child.modules()) else _copied(child, forwards)
        for name, child in module._modules.items()
    }
    if module in forwards:
        own.__dict__["forward"] = forwards[module]
    return own
