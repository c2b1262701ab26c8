"""A predicted query in three launches: used where it is the layer's own, else the layer's code runs.

The modules here hold what vLLM's hold; `tests/engines/vllm/test_simulated_gpu.py` runs vLLM's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from hybrid_backend.attention.fused_lookahead import FusedPredictor, fused
from hybrid_backend.attention.lookahead import Predictor, QueryPredictor, proven_predictor
from tests.support.models import change_weights

pytest.importorskip("triton", reason="Triton has no wheel for this platform")

from hybrid_backend.kernels.triton import predict

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADS, KV_HEADS, DIM, HIDDEN, POSITIONS = 4, 2, 24, 96, 40
ERROR = {torch.float32: 1e-4, torch.bfloat16: 0.02}


class Norm(nn.Module):
    offset = 0

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.randn(width)), 1e-5

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        x = x if residual is None else x + residual
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        out = (wide * (self.weight.float() + self.offset)).to(x.dtype)
        return out if residual is None else (out, x)


class GemmaNorm(Norm):
    offset = 1


class Centered(Norm):
    """A layer norm, which has an epsilon and a weight of the same size."""

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        x = x if residual is None else x + residual
        return super().forward(x - x.mean(-1, keepdim=True) + 0.5), x


class Projection(nn.Module):
    num_heads, head_size = HEADS, DIM

    def __init__(self, has_bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn((HEADS + 2 * KV_HEADS) * DIM, HIDDEN) / HIDDEN**0.5)
        self.bias = nn.Parameter(torch.randn(len(self.weight))) if has_bias else None

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return nn.functional.linear(x, self.weight, self.bias), None


class Rotary(nn.Module):
    def __init__(self, rotary_dim: int, is_neox_style: bool) -> None:
        super().__init__()
        self.head_size, self.rotary_dim, self.is_neox_style = DIM, rotary_dim, is_neox_style
        angles = torch.arange(POSITIONS)[:, None] / 10 ** (torch.arange(rotary_dim // 2) / 3)
        self.register_buffer("cos_sin_cache", torch.cat([angles.cos(), angles.sin()], 1))

    def forward(self, positions: Tensor, q: Tensor) -> Tensor:
        cos, sin = self.cos_sin_cache[positions][:, None].chunk(2, -1)  # type: ignore[index]
        turned, kept = q.view(len(q), -1, DIM).split([self.rotary_dim, DIM - self.rotary_dim], -1)
        pairs = turned.chunk(2, -1) if self.is_neox_style else (turned[..., ::2], turned[..., 1::2])
        both = pairs[0] * cos - pairs[1] * sin, pairs[1] * cos + pairs[0] * sin
        turned = torch.cat(both, -1) if self.is_neox_style else torch.stack(both, -1).flatten(-2)
        return torch.cat([turned, kept], -1).view_as(q)


class Attention(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return q


class Layer(nn.Module):
    """As vLLM's: what is left out of it is None."""

    def __init__(
        self, norm: type[Norm] = Norm, bias: bool = False, query_norm: Norm | None = None, rotary: Rotary | None = None
    ) -> None:
        super().__init__()
        self.post_attention_layernorm, self.input_layernorm = norm(HIDDEN), norm(HIDDEN)
        self.qkv_proj, self.attn = Projection(bias), Attention()
        self.k_norm, self.q_norm, self.rotary_emb = Norm(DIM), query_norm, rotary

    def forward(self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None) -> Tensor:
        x = self.normed(hidden_states, residual)
        q, k, v = self.qkv_proj(x)[0].split([HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM], -1)
        if self.q_norm is not None:
            q = self.q_norm(q.reshape(len(q), -1, len(self.q_norm.weight))).view(len(q), -1)
            k = self.k_norm(k.reshape(len(k), -1, DIM)).view(len(k), -1)
        if self.rotary_emb is not None:
            q, k = self.rotary_emb(positions, q), self.rotary_emb(positions, k)
        attended: Tensor = self.attn(self.scaled(q, positions), k, v)
        return attended

    def normed(self, hidden_states: Tensor, residual: Tensor | None) -> Any:
        if residual is None:
            return self.input_layernorm(hidden_states)
        return self.input_layernorm(hidden_states, residual)[0]

    def scaled(self, q: Tensor, positions: Tensor) -> Tensor:
        return q


class WithoutResidual(Layer):
    def normed(self, hidden_states: Tensor, residual: Tensor | None) -> Any:
        return self.input_layernorm(hidden_states)


class PostNorm(Layer):
    """The attention sees the stream as it is."""

    def normed(self, hidden_states: Tensor, residual: Tensor | None) -> Any:
        return hidden_states if residual is None else hidden_states + residual


class Scaled(Layer):
    def scaled(self, q: Tensor, positions: Tensor) -> Tensor:
        return q * 1.1


class HotterWhenLong(Layer):
    """A temperature that grows with the position, as in Llama 4: at the first positions there is none."""

    def scaled(self, q: Tensor, positions: Tensor) -> Tensor:
        return q * (1 + 0.1 * (positions >= POSITIONS - 2))[:, None]


class LayerNormed(Layer):
    def __init__(self) -> None:
        super().__init__(Centered)

    def normed(self, hidden_states: Tensor, residual: Tensor | None) -> Any:
        return self.input_layernorm(hidden_states, residual)[0]


def half(is_neox: bool) -> Rotary:
    return Rotary(DIM // 2, is_neox)


FUSED = {
    "llama": lambda: Layer(rotary=Rotary(DIM, True)),
    "qwen2": lambda: Layer(bias=True, rotary=Rotary(DIM, True)),
    "qwen3": lambda: Layer(query_norm=Norm(DIM), rotary=Rotary(DIM, True)),
    "gemma3": lambda: Layer(GemmaNorm, query_norm=GemmaNorm(DIM), rotary=Rotary(DIM, True)),
    "glm4": lambda: Layer(bias=True, rotary=half(False)),
    "olmoe": lambda: Layer(query_norm=Norm(HEADS * DIM), rotary=half(True)),
    "without rotary embedding": Layer,
    "without residual": lambda: WithoutResidual(rotary=half(True)),
}


def inputs(positions: Tensor, hidden: Tensor, residual: Tensor | None) -> Mapping[str, Any]:
    return {"positions": positions, "hidden_states": hidden, "residual": residual}


def own(layer: Layer, kind: torch.dtype) -> QueryPredictor:
    stream = torch.empty(0, HIDDEN, dtype=kind, device=DEVICE)
    found = proven_predictor(layer, layer.attn, DIM, stream, (Projection,), inputs)
    assert isinstance(found, QueryPredictor), found
    return found


def made(layer: Layer, kind: torch.dtype = torch.float32) -> Predictor:
    layer.to(DEVICE, kind)
    stream = torch.empty(0, HIDDEN, dtype=kind, device=DEVICE)
    return fused(own(layer, kind), layer, stream, (Projection,), inputs, POSITIONS)


def example(kind: torch.dtype, rows: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    hidden, residual = torch.randn(2, rows, HIDDEN).to(DEVICE, kind)
    return torch.randint(POSITIONS, (rows,)).to(DEVICE), hidden, residual


@pytest.mark.parametrize("kind", list(ERROR))
@pytest.mark.parametrize("name", FUSED)
def test_a_layer_of_known_parts_is_predicted_by_kernels_and_gets_its_own_query(name: str, kind: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = FUSED[name]()
    predictor = made(layer, kind)
    assert isinstance(predictor, FusedPredictor)
    positions, hidden, residual = example(kind)
    with torch.inference_mode():
        real = layer(positions, hidden.clone(), residual.clone())
        found = predictor(inputs(positions, hidden, residual if predictor.adds_residual else None))
    assert found.shape == (5, HEADS, DIM) and found.is_contiguous() and found.dtype == kind
    for a, b in zip(found.flatten(1).double(), real.double(), strict=True):
        assert float((a - b).norm()) <= ERROR[kind] * float(b.norm())


@pytest.mark.parametrize("kind", [PostNorm, Scaled, HotterWhenLong, LayerNormed])
def test_a_layer_that_does_anything_else_keeps_its_own_code(kind: type[Layer]) -> None:
    torch.manual_seed(0)
    for dtype in ERROR:
        assert isinstance(made(kind(), dtype), QueryPredictor)


def test_a_norm_over_the_heads_of_all_ranks_is_not_this_rank_s() -> None:
    torch.manual_seed(0)
    layer = FUSED["olmoe"]()
    layer.qkv_proj.total_num_heads = 2 * HEADS
    assert isinstance(made(layer), QueryPredictor)


def test_which_norm_adds_one_is_told_though_a_norm_of_queries_hides_scales() -> None:
    """With weights that are all alike, the query is the same either way. Weights may be loaded later."""
    torch.manual_seed(0)
    for norm in (Norm, GemmaNorm):
        layer = Layer(norm, query_norm=Norm(DIM))
        nn.init.constant_(layer.input_layernorm.weight, 3.0)
        predictor = made(layer)
        assert isinstance(predictor, FusedPredictor)
        nn.init.normal_(layer.input_layernorm.weight)
        positions, hidden, residual = example(torch.float32)
        with torch.inference_mode():
            found = predictor(inputs(positions, hidden, residual))
        torch.testing.assert_close(found.flatten(1), layer(positions, hidden, residual), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("way", ["in place", "other memory", "other parameters"])
@pytest.mark.parametrize("name", ["qwen2", "qwen3"])  # with biases, with norms of queries
def test_a_fused_prediction_follows_the_layer_s_weights_whichever_way_they_change(name: str, way: str) -> None:
    torch.manual_seed(0)
    layer = FUSED[name]()
    predictor = made(layer)
    assert isinstance(predictor, FusedPredictor)
    change_weights(layer, way)
    positions, hidden, residual = example(torch.float32)
    with torch.inference_mode():
        real = layer(positions, hidden.clone(), residual.clone())
        predicted = predictor(inputs(positions, hidden, residual if predictor.adds_residual else None))
    torch.testing.assert_close(predicted.flatten(1), real, rtol=1e-3, atol=1e-3)


def test_positions_of_several_axes_are_for_the_layer_s_own_code() -> None:
    torch.manual_seed(0)
    layer = FUSED["llama"]()
    predictor = made(layer)
    positions, hidden, residual = example(torch.float32)
    expected = predictor(inputs(positions, hidden, residual))
    layer.rotary_emb.forward = lambda axes, q: Rotary.forward(layer.rotary_emb, axes[0], q)
    found = predictor(inputs(positions.expand(3, -1), hidden, residual))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("name", "launches"),
    [
        ("qwen3", ["_stream_kernel", "mm", "_queries_kernel"]),
        ("qwen2", ["_stream_kernel", "addmm", "_queries_kernel"]),
        ("without rotary embedding", ["_stream_kernel", "mm"]),
    ],
)
def test_a_prediction_is_three_launches_at_most(name: str, launches: list[str]) -> None:
    torch.manual_seed(0)
    layer = FUSED[name]()
    predictor, given = made(layer), inputs(*example(torch.float32))
    with torch.no_grad(), launched() as found:
        predictor(given)
    assert found == launches


@contextmanager
def launched() -> Iterator[list[str]]:
    """What would be launched on a GPU, in order: operators that compute or copy, and Triton's kernels."""
    found: list[str] = []
    kernels = type(predict._stream_kernel)
    run = kernels.run

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        found.append(self.fn.__name__)
        with _disable_current_modes():
            return run(self, *args, **kwargs)

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = func._schema.name.removeprefix("aten::")
            if not func.is_view and not name.startswith(("empty", "new_empty", "_unsafe_view")):
                found.append(name)
            return func(*args, **(kwargs or {}))

    kernels.run = noted
    try:
        with Operators():
            yield found
    finally:
        kernels.run = run
