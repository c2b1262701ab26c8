"""Small random models."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from hybrid_backend.model import ModelShape, shape_from_config


def peaked(config_class: str, **arguments: Any) -> PreTrainedModel:
    """In fp32. Attention is peaked, and norms and biases are not neutral, so that errors show."""
    config = getattr(transformers, config_class)(**arguments)
    torch.manual_seed(0)
    sees = hasattr(config, "vision_config")
    auto = transformers.AutoModelForImageTextToText if sees else transformers.AutoModelForCausalLM
    model: PreTrainedModel = auto.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for path, weight in model.named_parameters():
            if weight.dim() == 1:
                weight.add_(torch.randn_like(weight) * 0.3)
            else:
                peak = 2.0 if "q_proj" in path or "k_proj" in path else 1.0
                weight.copy_(torch.randn_like(weight) * peak * weight.shape[1] ** -0.5)
    return model


def llama_8b() -> ModelShape:
    """Llama 3.1 8B's."""
    config = {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "torch_dtype": "bfloat16",
    }
    return shape_from_config(config, "llama-3.1-8b")
