"""A Hugging Face model, layer by layer: what goes into each decoder layer, and the queries and keys that follow.

`attention.lookahead.QueryPredictor` does the same on vLLM's layers. It cannot be shared: vLLM fuses the projections and
its rotary embedding takes positions, where Hugging Face's takes their sines and cosines. The formula and the table of
families are the same, and the tests compare what both call the true query with the model's own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hybrid_backend.attention.lookahead import family_of
from hybrid_backend.errors import ModelError

Rope = tuple[Tensor, Tensor]  # cosines and sines
Seen = Callable[[int, Tensor, Rope], None]  # layer, its input [tokens, hidden], its rotary embedding


@dataclass(frozen=True)
class Layer:
    """One decoder layer. ``window``: tokens of its sliding window, None for full attention."""

    index: int
    module: nn.Module
    window: int | None

    @property
    def attention(self) -> Any:
        return self.module.self_attn

    @property
    def scale(self) -> float:
        return float(self.attention.scaling)

    def queries_and_keys(self, x: Tensor, rope: Rope, with_keys: bool = True) -> tuple[Tensor, Tensor]:
        """What this layer's attention sees if ``x`` is its input.

        Args:
            x: ``[tokens, hidden]``; the input of an earlier layer gives the predicted query.
            rope: cosines and sines, ``[1, tokens, rotary]``.
            with_keys: else the keys are empty.

        Returns:
            ``[tokens, heads, head_dim]`` and ``[tokens, kv_heads, head_dim]``, both after the rotary embedding.
        """
        attention = self.attention
        normed = self.module.input_layernorm(x[None])  # type: ignore[operator]
        q = attention.q_proj(normed).unflatten(-1, (-1, attention.head_dim))
        k = attention.k_proj(normed).unflatten(-1, (-1, attention.head_dim)) if with_keys else q[:, :, :0]
        if hasattr(attention, "q_norm"):
            q, k = attention.q_norm(q), attention.k_norm(k)
        rotate = vars(sys.modules[type(attention).__module__])["apply_rotary_pos_emb"]
        q, k = rotate(q, k, *rope, unsqueeze_dim=2)
        return q[0], k[0]


@dataclass(frozen=True)
class Network:
    """A model that can be profiled: ``decoder`` maps token ids to the last hidden states."""

    decoder: Any
    layers: tuple[Layer, ...]
    family: str
    heads: int
    kv_heads: int
    head_dim: int
    max_context: int

    @property
    def device(self) -> torch.device:
        return next(self.decoder.parameters()).device  # type: ignore[no-any-return]

    @property
    def full_layers(self) -> tuple[Layer, ...]:
        return tuple(layer for layer in self.layers if layer.window is None)

    @contextmanager
    def watched(self, seen: Seen) -> Iterator[None]:
        """``seen`` is called at the input of every decoder layer, in order."""

        def hook_of(index: int) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
            def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                x = args[0] if args else kwargs["hidden_states"]
                seen(index, x[0], kwargs["position_embeddings"])

            return hook

        handles = [
            layer.module.register_forward_pre_hook(hook_of(layer.index), with_kwargs=True) for layer in self.layers
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def wrap(model: Any, family: str = "auto") -> Network:
    """A loaded causal language model as a `Network`.

    Raises:
        ModelError: a family whose query cannot be predicted, or a model without full attention.
    """
    config = model.config.get_text_config()
    known = family_of(config.model_type, family)
    if known is None:
        raise ModelError(
            f"model type {config.model_type!r} cannot be profiled: its next query cannot be predicted; "
            "known are llama, mistral, qwen2, qwen3, gemma3 and glm4 (model.family names one of them)"
        )
    decoder = model.get_decoder()
    modules = list(decoder.layers)
    window = getattr(config, "sliding_window", None)
    everywhere = "full_attention" if window is None else "sliding_attention"  # as Mistral's first models
    kinds = getattr(config, "layer_types", None) or [everywhere] * len(modules)
    layers = []
    for index, (module, kind) in enumerate(zip(modules, kinds, strict=True)):
        attention = getattr(module, "self_attn", None)
        lacking = [name for name in ("q_proj", "k_proj", "head_dim", "scaling") if not hasattr(attention, name)]
        if lacking or not hasattr(module, "input_layernorm"):
            raise ModelError(
                f"{type(module).__name__} does not look like family {known!r} (its attention lacks "
                f"{', '.join(lacking) or 'input_layernorm'}); model.family must name the right one"
            )
        layers.append(Layer(index, module, window if kind == "sliding_attention" else None))
    if all(layer.window is not None for layer in layers):
        raise ModelError(f"all layers of this {known} model attend a sliding window: there is nothing to offload")
    return Network(
        decoder=decoder,
        layers=tuple(layers),
        family=known,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=int(layers[0].attention.head_dim),
        max_context=int(config.max_position_embeddings),
    )


def load(directory: str | Path, family: str = "auto", device: str = "cpu") -> Network:
    """The model in ``directory`` (or a hub id) in fp32, frozen."""
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="sdpa")
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{directory}: cannot be loaded ({error}); give a causal model in Hugging Face format"
        ) from None
    return wrap(model.to(device).eval().requires_grad_(False), family)
