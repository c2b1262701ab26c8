"""Models with quantised weights, as llm-compressor writes them (compressed-tensors), which vLLM serves on a CPU.

Rounded to the nearest value, without calibration: what a format costs in time and whether it is served right does not
depend on how its values were chosen. Answers of a model that was calibrated are better.
"""

from __future__ import annotations

from pathlib import Path

import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme, apply_quantization_config
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams
from torch import nn
from transformers import PreTrainedModel


def save_quantised(
    model: PreTrainedModel, folder: Path, scheme: str, group: int | None = None, symmetric: bool = True
) -> Path:
    """Writes ``model``, quantised, to ``folder``; the output layer stays as it is. ``model`` is not to be used after.

    Args:
        scheme: one of compressed-tensors' presets: ``W8A8`` (a scale per output channel, inputs quantised token by
            token), ``W4A16`` (a scale per ``group`` inputs, inputs as they are).
        group: inputs that share a scale; None: the preset's.
        symmetric: quantised inputs have no zero point.
    """
    found = preset_name_to_scheme(scheme, ["Linear"])
    assert found.weights is not None
    if found.input_activations is not None:
        found.input_activations.symmetric = symmetric
    if group is not None:
        found.weights.group_size = group
    config = QuantizationConfig(config_groups={"weights": found}, ignore=["lm_head"])
    apply_quantization_config(model, config)
    for module in model.modules():
        if isinstance(module, nn.Linear) and hasattr(module, "weight_scale"):
            _choose_scales(module, found)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(str(folder))
    return folder


def _choose_scales(layer: nn.Linear, scheme: QuantizationScheme) -> None:
    assert scheme.weights is not None
    rows = layer.weight.detach().unflatten(1, (-1, scheme.weights.group_size or layer.in_features))
    scale, zero = calculate_qparams(rows.amin(-1), rows.amax(-1), scheme.weights)
    with torch.no_grad():
        layer.weight_scale.copy_(scale)
        if hasattr(layer, "weight_zero_point"):
            layer.weight_zero_point.copy_(zero)
