"""A Hugging Face model that can be profiled: inputs, queries and keys of its decoder layers, and attention of our own.

As in `attention.lookahead`, a layer's own code runs up to its attention, which is a function that transformers looks up
by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from hybrid_backend.errors import ModelError

Rope = tuple[Tensor, Tensor]
"""Cosines and sines of the rotary embedding, ``[1, tokens, rotary]``."""
Watch = Callable[[int, Tensor, Rope], None]
"""Function of a layer's index, its input ``[tokens, hidden]`` and its rotary embedding."""
Attend = Callable[[int, Tensor, Tensor, Tensor, float, int | None], Tensor]
"""Function of a layer's index, q ``[1, heads, queries, dim]``, k and v ``[1, kv_heads, tokens, dim]``, the scale and
the sliding window in tokens; it returns ``[1, heads, queries, dim]``."""

_STOP, _OURS = "hybrid_backend_stop", "hybrid_backend_profile"


class _AttentionReachedError(Exception):
    """Signal that leaves a layer's forward at its attention; the arguments are the queries and keys."""


def _stop(module: nn.Module, query: Tensor, key: Tensor, *_: Any, **__: Any) -> NoReturn:
    raise _AttentionReachedError(query, key)


AttentionInterface.register(_STOP, _stop)


@contextmanager
def _implementation(config: Any, name: str) -> Iterator[None]:
    """Let the model of ``config`` use the attention function that is registered under ``name``."""
    usual, config._attn_implementation = config._attn_implementation, name
    try:
        yield
    finally:
        config._attn_implementation = usual


@dataclass(frozen=True)
class Layer:
    """A decoder layer. ``window``: tokens of its sliding window, None for full attention."""

    index: int
    module: nn.Module
    window: int | None

    @property
    def scale(self) -> float:
        return float(self.attention.scaling)

    @property
    def attention(self) -> Any:
        return self.module.self_attn

    def queries_and_keys(self, x: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """Return the queries and keys that this layer's attention gets if ``x`` ``[tokens, hidden]`` is its input.

        The input of an earlier layer gives the predicted query.

        Returns:
            ``[tokens, heads, head_dim]`` and ``[tokens, kv_heads, head_dim]``, both after the rotary embedding.
        """
        with _implementation(self.attention.config, _STOP):
            try:
                self.module.forward(x[None], position_embeddings=rope, attention_mask=None)
            except _AttentionReachedError as reached:
                query, key = reached.args
                return query[0].transpose(0, 1), key[0].transpose(0, 1)
        raise ModelError(f"{type(self.module).__name__} does not look its attention up, so it cannot be profiled")


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

    def hidden(self, ids: Sequence[int], **arguments: Any) -> Tensor:
        """Return the last hidden states ``[tokens, hidden]`` of one sequence; ``arguments`` go to the decoder."""
        states = self.decoder(torch.tensor([ids], device=self.device), **{"use_cache": False, **arguments})
        hidden: Tensor = states.last_hidden_state[0]
        return hidden

    @contextmanager
    def watched(self, watch: Watch) -> Iterator[None]:
        """Call ``watch`` at the input of every decoder layer, in order."""

        def hook(index: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = args[0] if args else kwargs["hidden_states"]
            watch(index, x[0], kwargs["position_embeddings"])

        with ExitStack() as hooks:
            for layer in self.layers:
                handle = layer.module.register_forward_pre_hook(partial(hook, layer.index), with_kwargs=True)
                hooks.callback(handle.remove)
            yield

    @contextmanager
    def attending(self, attend: Attend) -> Iterator[None]:
        """Replace the attention of all layers by ``attend`` for the time of the block."""

        def attention(
            module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **arguments: Any
        ) -> tuple[Tensor, None]:
            out = attend(module.layer_idx, q, k, v, scaling, arguments.get("sliding_window"))
            return out.transpose(1, 2), None

        AttentionInterface.register(_OURS, attention)
        with _implementation(self.decoder.config, _OURS):
            yield

    @contextmanager
    def replaying(self, outputs: list[Any], first: int) -> Iterator[None]:
        """Let the layers before ``first`` return their ``outputs`` without computing; their cache stays as it is.

        The other layers compute, and append their output if ``outputs`` does not have it yet.
        """

        def forward(index: int, usual: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            output = outputs[index] if index < first else usual(*args, **kwargs)
            if index == len(outputs):
                outputs.append(output)
            return output

        with ExitStack() as patches:
            for layer in self.layers:
                wrapped = partial(forward, layer.index, layer.module.forward)
                patches.enter_context(patch.object(layer.module, "forward", wrapped))
            yield


def visible(queries: int, tokens: int, window: int | None, device: torch.device) -> Tensor:
    """Return which tokens the last ``queries`` see, causally and in a sliding window: ``[queries, tokens]`` bool."""
    key = torch.arange(tokens, device=device)
    distance = key[tokens - queries :, None] - key
    return (distance >= 0) & (distance < (tokens if window is None else window))


def wrap(model: Any) -> Network:
    """Return a loaded causal language model as a `Network`.

    Raises:
        ModelError: layers are of another kind than full and sliding-window attention, or differ in shape, or none is
            full.
    """
    config = model.config.get_text_config()
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        raise ModelError(
            f"model type {config.model_type!r} cannot be profiled: it has layers that attend chunks of the sequence "
            "(attention_chunk_size); serve it with the default configuration"
        )
    decoder = model.get_decoder()
    modules = list(decoder.layers)
    window = getattr(config, "sliding_window", None)
    # Configurations without layer types, as those of the first Mistral models, have one kind of layer.
    default = "full_attention" if window is None else "sliding_attention"
    kinds = getattr(config, "layer_types", None) or [default] * len(modules)
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
    sizes = sorted({int(layer.attention.head_dim) for layer in layers})
    if len(sizes) > 1:
        raise ModelError(
            f"model type {config.model_type!r} cannot be profiled: its layers have heads of {sizes[0]} and {sizes[1]} "
            "channels; serve it with the default configuration"
        )
    return Network(
        model=model,
        decoder=decoder,
        layers=tuple(layers),
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=sizes[0],
        max_context=int(config.max_position_embeddings),
    )


def load(directory: str | Path, device: str = "cpu") -> Network:
    """Load the model in ``directory`` (or of a hub id) in fp32, frozen.

    Raises:
        ModelError: the model cannot be loaded.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()  # Transformers warns of sampling defaults, which a profile does not use.
    try:
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="sdpa")
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{directory}: cannot be loaded ({error}); give a causal model in Hugging Face format"
        ) from None
    return wrap(model.to(device).eval().requires_grad_(False))
