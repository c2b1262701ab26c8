"""Shapes of published models, so that `hybrid plan` knows them without a network.

Source: config.json of each model on the Hugging Face hub, reduced to the keys that decide the shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from hybrid_backend.config import ModelMatch

_QWEN3: dict[str, Any] = {
    "model_type": "qwen3", "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    "max_position_embeddings": 40960, "use_sliding_window": False, "sliding_window": None,
}  # fmt: skip
_GLM4: dict[str, Any] = {
    "hidden_size": 4096, "intermediate_size": 13696, "num_hidden_layers": 40, "num_attention_heads": 32,
    "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 151552, "max_position_embeddings": 131072,
}  # fmt: skip
_GATED_DELTA: dict[str, Any] = {
    "model_type": "qwen3_5_text", "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 248320,
    "linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 262144,
}  # fmt: skip


class Published(NamedTuple):
    """A published model.

    Attributes:
        hub_id: its id on the hub.
        config: the keys of its config.json that decide its shape.
        match: name patterns of models that have its shape, such as quantised copies; empty: its short name anywhere.
    """

    hub_id: str
    config: Mapping[str, Any]
    match: tuple[str, ...] = ()


PUBLISHED: Mapping[str, Published] = {
    "smollm2-135m": Published("HuggingFaceTB/SmolLM2-135M-Instruct", {
        "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True,
        "max_position_embeddings": 8192,
    }),
    "qwen2.5-coder-0.5b": Published("Qwen/Qwen2.5-Coder-0.5B-Instruct", {
        "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
        "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True,
        "max_position_embeddings": 32768, "use_sliding_window": False,
    }),
    "llama-3.1-8b": Published("meta-llama/Llama-3.1-8B-Instruct", {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
    }, ("*llama-3.1-8b*", "*llama3.1-8b*")),
    "llama-3.2-3b": Published("meta-llama/Llama-3.2-3B-Instruct", {
        "model_type": "llama", "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28,
        "num_attention_heads": 24, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256,
        "tie_word_embeddings": True, "max_position_embeddings": 131072,
    }, ("*llama-3.2-3b*", "*llama3.2-3b*")),
    "llama-3.3-70b": Published("meta-llama/Llama-3.3-70B-Instruct", {
        "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
        "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
    }, ("*llama-3.3-70b*", "*llama-3.1-70b*")),
    "mistral-7b": Published("mistralai/Mistral-7B-Instruct-v0.3", {
        "model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32768, "sliding_window": None,
        "max_position_embeddings": 32768,
    }, ("*mistral-7b-v0.[23]*", "*mistral-7b-instruct-v0.[23]*")),
    "mistral-small-24b": Published("mistralai/Mistral-Small-24B-Instruct-2501", {
        "model_type": "mistral", "hidden_size": 5120, "intermediate_size": 32768, "num_hidden_layers": 40,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 131072,
        "sliding_window": None, "max_position_embeddings": 32768,
    }, ("*mistral-small-3*", "*mistral-small-24b*")),
    "gemma-3-12b": Published("google/gemma-3-12b-it", {
        "model_type": "gemma3", "text_config": {
            "model_type": "gemma3_text", "hidden_size": 3840, "intermediate_size": 15360, "num_hidden_layers": 48,
            "num_attention_heads": 16, "num_key_value_heads": 8, "sliding_window": 1024,
        },
    }),
    "glm-4-9b-hf": Published("zai-org/glm-4-9b-chat-hf", {
        **_GLM4, "model_type": "glm",
    }, ("*glm-4-9b-hf*", "*glm-4-9b-chat-hf*", "*glm-4-9b-chat-1m-hf*")),
    "glm-4-9b": Published("zai-org/GLM-4-9B-0414", {
        **_GLM4, "model_type": "glm4", "max_position_embeddings": 32768,
    }, ("*glm-4-9b-0414*",)),
    "glm-4.5-air": Published("zai-org/GLM-4.5-Air", {
        "model_type": "glm4_moe", "hidden_size": 4096, "intermediate_size": 10944, "num_hidden_layers": 46,
        "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151552,
        "n_routed_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1408, "n_shared_experts": 1,
        "first_k_dense_replace": 1, "max_position_embeddings": 131072,
    }),
    "qwen3-8b": Published("Qwen/Qwen3-8B", {
        **_QWEN3, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
    }),
    "qwen3-14b": Published("Qwen/Qwen3-14B", {
        **_QWEN3, "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 40, "num_attention_heads": 40,
    }),
    "qwen3-32b": Published("Qwen/Qwen3-32B", {
        **_QWEN3, "hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64,
    }),
    "qwen3-30b-a3b": Published("Qwen/Qwen3-30B-A3B", {
        **_QWEN3, "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768, "decoder_sparse_step": 1, "mlp_only_layers": [],
    }, ("*qwen3-30b-a3b*", "*qwen3-coder-30b-a3b*")),
    "qwen3-vl-8b": Published("Qwen/Qwen3-VL-8B-Instruct", {
        "model_type": "qwen3_vl", "text_config": {
            "model_type": "qwen3_vl_text", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
            "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
            "max_position_embeddings": 262144,
        },
    }),
    "qwen3-next-80b-a3b": Published("Qwen/Qwen3-Next-80B-A3B-Instruct", {
        "model_type": "qwen3_next", "hidden_size": 2048, "intermediate_size": 5120, "num_hidden_layers": 48,
        "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "vocab_size": 151936,
        "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "full_attention_interval": 4, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
        "max_position_embeddings": 262144,
    }),
    "gpt-oss-20b": Published("openai/gpt-oss-20b", {
        "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088,
        "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 12, "max_position_embeddings": 131072,
        "quantization_config": {"quant_method": "mxfp4"},
    }),
    "gpt-oss-120b": Published("openai/gpt-oss-120b", {
        "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 36,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088,
        "num_local_experts": 128, "num_experts_per_tok": 4, "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 18, "max_position_embeddings": 131072,
        "quantization_config": {"quant_method": "mxfp4"},
    }),
    "minimax-m2": Published("MiniMaxAI/MiniMax-M2", {
        "model_type": "minimax_m2", "hidden_size": 3072, "intermediate_size": 1536, "num_hidden_layers": 62,
        "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 200064,
        "num_local_experts": 256, "num_experts_per_tok": 8, "max_position_embeddings": 196608,
        "quantization_config": {"quant_method": "fp8"},
    }),
    "nemotron-nano-9b-v2": Published("nvidia/NVIDIA-Nemotron-Nano-9B-v2", {
        "model_type": "nemotron_h", "hidden_size": 4480, "intermediate_size": 15680, "num_hidden_layers": 56,
        "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 131072,
        "hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
        "mamba_num_heads": 128, "mamba_head_dim": 80, "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4,
        "mlp_hidden_act": "relu2", "max_position_embeddings": 131072,
    }),
    "qwen3.5-9b": Published("Qwen/Qwen3.5-9B", {
        "model_type": "qwen3_5", "text_config": {
            **_GATED_DELTA, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32,
            "num_attention_heads": 16, "linear_num_value_heads": 32,
            "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 8,
        },
    }, ("*qwen3.5-9b*", "*qwen3.6-9b*")),
    "qwen3.5-27b": Published("Qwen/Qwen3.5-27B", {
        "model_type": "qwen3_5", "text_config": {
            **_GATED_DELTA, "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 64,
            "num_attention_heads": 24, "linear_num_value_heads": 48,
            "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 16,
        },
    }, ("*qwen3.5-27b*", "*qwen3.6-27b*")),
    "lfm2-1.2b": Published("LiquidAI/LFM2-1.2B", {
        "model_type": "lfm2", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 65536, "tie_word_embeddings": True,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14], "conv_L_cache": 3, "max_position_embeddings": 128000,
    }),
}  # fmt: skip
"""Published models by the short names that `hybrid plan` takes."""


def published(model: str) -> Published | None:
    """Return the published model that ``model`` names by hub id, with or without the owner, or by its short name."""
    named = model.lower()
    for name, entry in PUBLISHED.items():
        hub_id = entry.hub_id.lower()
        if named in (name, hub_id, hub_id.partition("/")[2]):
            return entry
    return None


def relative(model: str) -> Published | None:
    """Return the published model whose shape ``model`` shares by its name, for example of a quantised copy."""
    scores = {
        name: ModelMatch(match=entry.match or f"*{name}*").specificity(model) or 0 for name, entry in PUBLISHED.items()
    }
    best = max(scores, key=lambda name: scores[name])
    return PUBLISHED[best] if scores[best] else None
