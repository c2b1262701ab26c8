"""Sizes that the card of each published model states, beside the shape that `hybrid plan` ships of it.

Source: the model's page on the Hugging Face hub; parameters are those that the hub counts in the safetensors files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from hybrid_backend.tools.plan.published import PUBLISHED


class Card(NamedTuple):
    """``billions``: of all parameters; ``kv_kib``: K and V of one token in bf16, in all layers with full attention."""

    billions: float
    full_layers: int
    kv_kib: float
    config: Mapping[str, Any]


_SIZES: dict[str, tuple[float, int, float]] = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": (0.135, 30, 22.5),
    "Qwen/Qwen2.5-Coder-0.5B-Instruct": (0.494, 24, 12),
    "meta-llama/Llama-3.1-8B-Instruct": (8.03, 32, 128),
    "meta-llama/Llama-3.2-3B-Instruct": (3.21, 28, 112),
    "meta-llama/Llama-3.3-70B-Instruct": (70.55, 80, 320),
    "mistralai/Mistral-7B-Instruct-v0.3": (7.25, 32, 128),
    "mistralai/Mistral-Small-24B-Instruct-2501": (23.57, 40, 160),
    "google/gemma-3-12b-it": (11.77, 8, 64),  # its decoder; 12.19 with the vision tower
    "zai-org/glm-4-9b-chat-hf": (9.40, 40, 40),
    "zai-org/GLM-4-9B-0414": (9.40, 40, 40),
    "zai-org/GLM-4.5-Air": (106.0, 46, 184),
    "Qwen/Qwen3-8B": (8.2, 36, 144),
    "Qwen/Qwen3-14B": (14.8, 40, 160),
    "Qwen/Qwen3-32B": (32.76, 64, 256),
    "Qwen/Qwen3-30B-A3B": (30.5, 48, 96),
    "Qwen/Qwen3-VL-8B-Instruct": (8.2, 36, 144),  # its decoder, that of Qwen3-8B; 8.77 with the vision tower
    "Qwen/Qwen3-Next-80B-A3B-Instruct": (80.0, 12, 24),
    "openai/gpt-oss-20b": (20.9, 12, 24),
    "openai/gpt-oss-120b": (116.8, 18, 36),
    "MiniMaxAI/MiniMax-M2": (230.0, 62, 248),
    "nvidia/NVIDIA-Nemotron-Nano-9B-v2": (8.9, 4, 16),
    "Qwen/Qwen3.5-9B": (9.0, 8, 32),
    "Qwen/Qwen3.5-27B": (27.0, 16, 64),
    "LiquidAI/LFM2-1.2B": (1.17, 6, 12),
}

CARDS: dict[str, Card] = {entry.hub_id: Card(*_SIZES[entry.hub_id], entry.config) for entry in PUBLISHED.values()}
