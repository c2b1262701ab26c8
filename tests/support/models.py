"""Small random models."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

from hybrid_backend.model import ModelShape, shape_from_config


def peaked(config_class: str, *, seed: int = 0, **arguments: Any) -> PreTrainedModel:
    """In fp32. Attention is peaked, and norms and biases are not neutral, so that errors show."""
    config = getattr(transformers, config_class)(**arguments)
    torch.manual_seed(seed)
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


def move_weights(model: nn.Module) -> None:
    """Give all parameters other memory with the same values, as trainers do, and ruin the memory that they leave."""
    for parameter in model.parameters():
        old = parameter.data
        if old.is_floating_point():
            parameter.data = old.clone()
            old.fill_(float("nan"))


def change_weights(model: nn.Module, way: str) -> None:
    """Give all parameters of ``model`` other values, and ruin the memory of the old values where that is left.

    Args:
        way: ``"in place"``; ``"other memory"``, through ``Parameter.data``; ``"other parameters"`` of the modules.
    """
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            old = parameter.data
            new = old * (0.5 + torch.rand_like(old))
            if way == "other memory":
                parameter.data = new
            elif way == "other parameters":
                setattr(module, name, nn.Parameter(new, requires_grad=False))
            old.copy_(new) if way == "in place" else old.fill_(float("nan"))


def write_llama(folder: Path, tokenizer: Path, **arguments: Any) -> Path:
    """A small random Llama with the tokenizer of the folder ``tokenizer``, for a server."""
    files = ("tokenizer.json", "tokenizer_config.json")
    vocabulary = len(json.loads((tokenizer / files[0]).read_text())["model"]["vocab"])
    shape = {
        "vocab_size": vocabulary,
        "hidden_size": 128,
        "intermediate_size": 160,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
    }
    peaked("LlamaConfig", **{**shape, **arguments}).save_pretrained(folder)
    for file in files:
        shutil.copy(tokenizer / file, folder / file)
    return folder


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
