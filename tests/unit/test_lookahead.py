"""A query is predicted by the layer's own code, and only where that is proven."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hybrid_backend.attention.lookahead import QueryPredictor, layer_at, proven_predictor
from hybrid_backend.errors import EngineError
from tests.support.models import change_weights

HEADS, KV_HEADS, DIM, HIDDEN = 4, 2, 8, 24
STREAM = torch.empty(0, HIDDEN)


class Projection(nn.Module):
    """As the engines': queries, keys and values in one matrix; returns a bias apart."""

    num_heads, head_size = HEADS, DIM

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn((HEADS + 2 * KV_HEADS) * DIM, HIDDEN))
        self.bias = nn.Parameter(torch.randn(len(self.weight)))
        self.calls = 0

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        self.calls += 1
        return nn.functional.linear(x, self.weight, self.bias), None


class Attention(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise AssertionError("the real attention must not be called")


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.attn = Projection(), Attention()
        self.q_norm = nn.RMSNorm(DIM)

    def forward(self, positions: Tensor, x: Tensor) -> Tensor:
        qkv, _ = self.qkv(x)
        q, k, v = qkv.split([HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM], -1)
        q = self.q_norm(q.view(len(x), HEADS, DIM)).view(len(x), -1) * (1 + positions[:, None])
        attended: Tensor = self.attn(q, k, v)
        return attended


class Layer(nn.Module):
    """Normalises the sum of hidden states and residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mixer = nn.RMSNorm(HIDDEN), Mixer()

    def forward(self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None) -> Tensor:
        x = hidden_states if residual is None else hidden_states.add_(residual)  # in place, as engines' kernels do
        return self.mixer(positions, self.norm(x))  # type: ignore[no-any-return]


class PassesBy(Layer):
    """Is given a residual that is nothing to it, as Granite 4's layers."""

    def forward(self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None) -> Tensor:
        return super().forward(positions, hidden_states, None)


class Scales(Layer):
    """What it is given is not a stream that could be added up."""

    def forward(self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None) -> Tensor:
        return super().forward(positions, hidden_states if residual is None else 2 * hidden_states, residual)


class WithoutAttention(Layer):
    def forward(self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None) -> Tensor:
        return hidden_states


class AsksForMore(Layer):
    def forward(self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None, rope: Any) -> Tensor:  # type: ignore[override]
        return super().forward(positions, hidden_states * rope[0], residual)


def inputs(positions: Tensor, hidden: Tensor, residual: Tensor | None) -> Mapping[str, Any]:
    return {"positions": positions, "hidden_states": hidden, "residual": residual, "unknown": 1}


def proven(layer: Layer) -> QueryPredictor | str:
    return proven_predictor(layer, layer.mixer.attn, DIM, STREAM, (Projection,), inputs)


@pytest.mark.parametrize(("kind", "adds"), [(Layer, True), (PassesBy, False)])
def test_predicted_query_is_what_the_layer_calls_its_attention_with(kind: type[Layer], adds: bool) -> None:
    torch.manual_seed(0)
    layer = kind()
    predictor = proven(layer)
    assert isinstance(predictor, QueryPredictor) and predictor.adds_residual == adds
    x, positions = torch.randn(3, HIDDEN), torch.arange(3)
    real: list[Tensor] = []
    layer.mixer.attn.forward = lambda q, k, v: real.append(q) or q  # type: ignore[method-assign, func-returns-value]
    layer(positions, x.clone(), None)
    found = predictor(inputs(positions, x, None))
    assert found.shape == (3, HEADS, DIM)
    torch.testing.assert_close(found.flatten(1), real[0])


def test_keys_and_values_are_not_computed() -> None:
    layer = Layer()
    predictor = proven(layer)
    assert isinstance(predictor, QueryPredictor)
    before = layer.mixer.qkv.calls
    layer.mixer.qkv.weight.data[HEADS * DIM :] = float("nan")  # keys and values
    assert predictor(inputs(torch.arange(2), torch.randn(2, HIDDEN), None)).isfinite().all()
    assert layer.mixer.qkv.calls == before


@pytest.mark.parametrize("left", [(0,), ((HEADS + 2 * KV_HEADS) * DIM, HIDDEN)])
def test_a_packed_projection_is_called_as_it_is(left: tuple[int, ...]) -> None:
    """Nothing is left of its weight, or it is quantised."""
    layer = Layer()
    projection = layer.mixer.qkv
    packed = projection.weight
    projection.weight = nn.Parameter(torch.zeros(left).to(torch.float8_e4m3fn), requires_grad=False)
    projection.forward = lambda x: (x @ packed.mT, None)  # type: ignore[method-assign]
    assert isinstance(proven(layer), QueryPredictor)


def test_weights_that_change_later_are_the_predictors_too() -> None:
    layer = Layer()
    predictor = proven(layer)
    assert isinstance(predictor, QueryPredictor)
    given = inputs(torch.arange(2), torch.randn(2, HIDDEN), None)
    before = predictor(given)
    layer.mixer.q_norm.weight.data.mul_(2)
    torch.testing.assert_close(predictor(given), 2 * before)


@pytest.mark.parametrize("way", ["in place", "other memory", "other parameters"])
def test_a_predictor_follows_the_layers_weights_whichever_way_they_change(way: str) -> None:
    torch.manual_seed(0)
    layer = Layer()
    predictor = proven(layer)
    assert isinstance(predictor, QueryPredictor)
    change_weights(layer, way)
    own = proven(layer)
    assert isinstance(own, QueryPredictor)
    example = inputs(torch.arange(2), torch.randn(2, HIDDEN), None)
    torch.testing.assert_close(predictor(example), own(example))


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Scales, "Scales gives a query that is .*% off where it is given its own input"),
        (WithoutAttention, "WithoutAttention does not call its attention"),
        (AsksForMore, r"AsksForMore does not run as far as its attention \(TypeError"),
    ],
)
def test_a_layer_whose_query_cannot_be_proven_says_why(kind: type[Layer], why: str) -> None:
    torch.manual_seed(0)
    found = proven(kind())
    assert isinstance(found, str)
    assert re.search(why, found), found


def test_the_layer_before_is_the_one_before_it_in_the_models_list() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Linear(1, 1), Layer(), Layer()])
    modules = dict(model.named_modules())
    assert layer_at(modules, "layers.2.mixer.attn")[1:] == (model.layers[2], model.layers[1])
    assert layer_at(modules, "layers.1.mixer.attn")[1:] == (model.layers[1], model.layers[0])
    with pytest.raises(EngineError, match="in no list of decoder layers"):
        layer_at({"": model, "mixer": model.layers[1].mixer}, "mixer.attn")
