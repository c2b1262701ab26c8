"""Functions that a probe of a family runs in a worker of vLLM: they read its counters and log what its steps do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.linear import QKVParallelLinear

from hybrid_backend.attention.lookahead import proven_predictor
from hybrid_backend.engines.vllm.hooks import lookahead_hook
from hybrid_backend.engines.vllm.model_hooks import attention_layers, layer_inputs
from hybrid_backend.step.patience import Patience


def tiers(w: Any) -> dict[str, Any]:
    """What the runtime keeps and did, per layer."""
    runtime = w.session.runtime
    layers = runtime.stats.layers
    return {
        "windows": list(runtime.model.windows),
        "frames": sorted(runtime.tiers.frames.layers),
        "digests": sorted(runtime.tiers.digests.layers),
        "predicted": [i for i, layer in enumerate(layers) if layer.cosine_samples],
        "cosine": [layer.cosine_sum / max(1, layer.cosine_samples) for layer in layers],
        "selected": [layer.selected_tokens for layer in layers],
        "on_cpu": [layer.cpu_tokens for layer in layers],
        "lead_seconds": [layer.lead_seconds for layer in layers],
        "kv_heads": runtime.model.num_kv_heads,
        "frame_bytes": runtime.tiers.frames.nbytes,
    }


def never_in_time_on_second(w: Any) -> None:
    """From now on the CPU workers of the second rank are late in every step."""
    if w.rank == 1:
        w.session.runtime.executor.cpu_attention._patience = Patience(0.0)


def watch_own_input(w: Any) -> dict[int, list[float]]:
    """From now on every layer predicts from its OWN input. Returns a log: the largest error of each decode step."""
    runtime = w.session.runtime
    stream = torch.empty(0, w.model_config.get_hidden_size(), dtype=w.model_config.dtype)
    errors: dict[int, list[float]] = {}
    predicted: dict[int, Tensor] = {}
    forward = runtime.forward

    def note(layer: int, step: Any, query: Tensor) -> None:
        predicted[layer] = query.clone()

    def compare(layer: int, step: Any, query: Tensor, *others: Tensor) -> None:
        if step.decode is not None:
            real = step.decode.gather(query)
            errors.setdefault(layer, []).append(float((predicted.pop(layer) - real).abs().max()))
        forward(layer, step, query, *others)

    layers = attention_layers(w.model_runner.get_model())
    for layer in layers:
        for decoder in (layer.before, layer.decoder):
            if decoder is not None:
                decoder._forward_pre_hooks.clear()
                decoder._forward_pre_hooks_with_kwargs.clear()
    for attention, decoder, _ in layers:
        predictor = proven_predictor(
            decoder, attention, attention.head_size, stream, (QKVParallelLinear,), layer_inputs
        )
        assert not isinstance(predictor, str), predictor
        attention.impl.predictor = predictor
        decoder.register_forward_pre_hook(lookahead_hook(decoder, attention.layer_name, w.device), with_kwargs=True)
    runtime.wants_lookahead = lambda layer, step: step.decode is not None
    runtime.executor.lookahead = lambda *_: None
    runtime.lookahead = note
    runtime.forward = compare
    return errors


def watch_order(w: Any) -> dict[int, list[str]]:
    """From now on, a log of what every decode step did, in order."""
    runtime = w.session.runtime
    events: dict[int, list[str]] = {}

    def watched(name: str, call: Callable[..., None]) -> Callable[..., None]:
        def wrapper(layer: int, step: Any, *tensors: Tensor) -> None:
            if step.decode is not None:
                events.setdefault(step.number, []).append(f"{name} {layer}")
            call(layer, step, *tensors)

        return wrapper

    for name, method in (("lookahead", "lookahead"), ("attend", "forward")):
        setattr(runtime, method, watched(name, getattr(runtime, method)))
    return events
