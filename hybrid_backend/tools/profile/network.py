"""A Hugging Face model, layer by layer: what goes into each decoder layer, and the queries and keys that follow.

As in `attention.lookahead`, a layer's own code is run as far as its attention, which here is a function that
transformers looks up by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from hybrid_backend.errors import ModelError

Rope = tuple[Tensor, Tensor]  # cosines and sines
Attention = Callable[..., tuple[Tensor, None]]  # as transformers calls it
Seen = Callable[[int, Tensor, Rope], None]  # layer, its input [tokens, hidden], its rotary embedding


@dataclass(frozen=True)
class Layer:
    """A decoder layer. ``window``: tokens of its sliding window, None for full attention."""

    index: int
    module: nn.Module
    window: int | None

    @property
    def attention(self) -> Any:
        return self.module.self_attn

    @property
    def scale(self) -> float:
        return float(self.attention.scaling)

    def queries_and_keys(self, x: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """Return the queries and keys that this layer's attention gets if ``x`` is the layer's input.

        Args:
            x: ``[tokens, hidden]``; the input of an earlier layer gives the predicted query.
            rope: cosines and sines, ``[1, tokens, rotary]``.

        Returns:
            ``[tokens, heads, head_dim]`` and ``[tokens, kv_heads, head_dim]``, both after the rotary embedding.
        """
        config = self.attention.config
        usual, config._attn_implementation = config._attn_implementation, _STOP
        try:
            self.module.forward(x[None], position_embeddings=rope, attention_mask=None)
        except _Reached as reached:
            return reached.query[0].transpose(0, 1), reached.key[0].transpose(0, 1)
        finally:
            config._attn_implementation = usual
        raise ModelError(f"{type(self.module).__name__} does not look its attention up, so it cannot be profiled")


_STOP = "hybrid_backend_stop"


class _Reached(Exception):
    """Not an error: how a layer's forward is left."""

    def __init__(self, query: Tensor, key: Tensor) -> None:
        super().__init__("attention is reached")
        self.query, self.key = query, key


def _stop(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *others: Any, **more: Any) -> NoReturn:
    raise _Reached(query, key)


AttentionInterface.register(_STOP, _stop)


@dataclass(frozen=True)
class Network:
    """A model that can be profiled: ``model`` maps token ids to logits, its ``decoder`` to the last hidden states."""

    model: Any
    decoder: Any
    layers: tuple[Layer, ...]
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

    @contextmanager
    def attending(self, attention: Attention, mark: str) -> Iterator[None]:
        """All layers attend by ``attention``. What it is told of a layer with full attention is kept in its attention
        module as ``mark``, and is gone afterwards."""
        AttentionInterface.register(mark, attention)
        config = self.decoder.config
        usual, config._attn_implementation = config._attn_implementation, mark
        try:
            yield
        finally:
            config._attn_implementation = usual
            for layer in self.full_layers:
                vars(layer.attention).pop(mark, None)

    @contextmanager
    def recorded(self) -> Iterator[list[Any]]:
        """Yield a list that receives what every decoder layer returns, in order."""
        outputs: list[Any] = []
        handles = [
            layer.module.register_forward_hook(lambda _module, _inputs, output: outputs.append(output))
            for layer in self.layers
        ]
        try:
            yield outputs
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def replaying(self, outputs: Sequence[Any]) -> Iterator[None]:
        """The first decoder layers return ``outputs``, one each, and compute nothing; their cache stays as it is."""
        replayed = [layer.module for layer in self.layers[: len(outputs)]]
        for module, output in zip(replayed, outputs, strict=True):
            module.forward = partial(_replay, output)
        try:
            yield
        finally:
            for module in replayed:
                del module.forward  # the class's own forward is back


def _replay(output: Any, *_arguments: Any, **_more: Any) -> Any:
    return output


def wrap(model: Any) -> Network:
    """A loaded causal language model as a `Network`.

    Raises:
        ModelError: a model with other layers than attention, or without full attention.
    """
    config = model.config.get_text_config()
    decoder = model.get_decoder()
    modules = list(decoder.layers)
    window = getattr(config, "sliding_window", None)
    everywhere = "full_attention" if window is None else "sliding_attention"  # as Mistral's first models
    kinds = getattr(config, "layer_types", None) or [everywhere] * len(modules)
    layers = []
    for index, (module, kind) in enumerate(zip(modules, kinds, strict=True)):
        attention = getattr(module, "self_attn", None)
        if not hasattr(attention, "scaling") or not hasattr(attention, "head_dim"):
            raise ModelError(
                f"model type {config.model_type!r} cannot be profiled: layer {index}, {type(module).__name__}, "
                "is not one of attention alone"
            )
        layers.append(Layer(index, module, window if kind == "sliding_attention" else None))
    if all(layer.window is not None for layer in layers):
        raise ModelError("all layers of this model attend a sliding window: there is nothing to offload")
    return Network(
        model=model,
        decoder=decoder,
        layers=tuple(layers),
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=int(layers[0].attention.head_dim),
        max_context=int(config.max_position_embeddings),
    )


def load(directory: str | Path, device: str = "cpu") -> Network:
    """The model in ``directory`` (or a hub id) in fp32, frozen."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()  # It warns of sampling defaults, which a profile does not use.
    try:
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="sdpa")
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{directory}: cannot be loaded ({error}); give a causal model in Hugging Face format"
        ) from None
    return wrap(model.to(device).eval().requires_grad_(False))
