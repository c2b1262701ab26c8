"""What decides a model's shape in its published ``config.json``, and what its card says of its size.

Source: the model's page on the Hugging Face hub, file config.json.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Card(NamedTuple):
    """``billions``: of all parameters; ``kv_kib``: K and V of one token in bf16, in all layers with full attention."""

    billions: float
    full_layers: int
    kv_kib: float
    config: dict[str, Any]


# What the sizes of Qwen3.5 have in common.
_GATED_DELTA: dict[str, Any] = {
    "model_type": "qwen3_5_text", "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 248320,
    "linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 262144,
}  # fmt: skip

CARDS: dict[str, Card] = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": Card(0.135, 30, 22.5, {
        "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True,
        "max_position_embeddings": 8192,
    }),
    "meta-llama/Llama-3.1-8B-Instruct": Card(8.03, 32, 128, {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
    }),
    "Qwen/Qwen3-8B": Card(8.2, 36, 144, {
        "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
        "max_position_embeddings": 40960, "use_sliding_window": False, "sliding_window": None,
    }),
    "Qwen/Qwen3-14B": Card(14.8, 40, 160, {
        "model_type": "qwen3", "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 40,
        "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
        "max_position_embeddings": 40960, "use_sliding_window": False, "sliding_window": None,
    }),
    "Qwen/Qwen3-30B-A3B": Card(30.5, 48, 96, {
        "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936,
        "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "max_position_embeddings": 40960, "use_sliding_window": False, "sliding_window": None,
    }),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": Card(80.0, 12, 24, {
        "model_type": "qwen3_next", "hidden_size": 2048, "intermediate_size": 5120, "num_hidden_layers": 48,
        "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "vocab_size": 151936,
        "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "full_attention_interval": 4, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
        "max_position_embeddings": 262144,
    }),
    "openai/gpt-oss-20b": Card(20.9, 12, 24, {
        "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088,
        "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 12, "max_position_embeddings": 131072,
    }),
    "openai/gpt-oss-120b": Card(116.8, 18, 36, {
        "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 36,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088,
        "num_local_experts": 128, "num_experts_per_tok": 4, "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 18, "max_position_embeddings": 131072,
    }),
    "zai-org/GLM-4.5-Air": Card(106.0, 46, 184, {
        "model_type": "glm4_moe", "hidden_size": 4096, "intermediate_size": 10944, "num_hidden_layers": 46,
        "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151552,
        "n_routed_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1408, "n_shared_experts": 1,
        "first_k_dense_replace": 1, "max_position_embeddings": 131072,
    }),
    "MiniMaxAI/MiniMax-M2": Card(230.0, 62, 248, {
        "model_type": "minimax_m2", "hidden_size": 3072, "intermediate_size": 1536, "num_hidden_layers": 62,
        "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 200064,
        "num_local_experts": 256, "num_experts_per_tok": 8, "max_position_embeddings": 196608,
    }),
    "nvidia/NVIDIA-Nemotron-Nano-9B-v2": Card(8.9, 4, 16, {
        "model_type": "nemotron_h", "hidden_size": 4480, "intermediate_size": 15680, "num_hidden_layers": 56,
        "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 131072,
        "hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
        "mamba_num_heads": 128, "mamba_head_dim": 80, "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4,
        "mlp_hidden_act": "relu2", "max_position_embeddings": 131072,
    }),
    "Qwen/Qwen3.5-9B": Card(9.0, 8, 32, {
        "model_type": "qwen3_5", "text_config": _GATED_DELTA | {
            "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32, "num_attention_heads": 16,
            "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 8,
            "linear_num_value_heads": 32,
        },
    }),
    "Qwen/Qwen3.5-27B": Card(27.0, 16, 64, {
        "model_type": "qwen3_5", "text_config": _GATED_DELTA | {
            "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 64, "num_attention_heads": 24,
            "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 16,
            "linear_num_value_heads": 48,
        },
    }),
    "LiquidAI/LFM2-1.2B": Card(1.17, 6, 12, {
        "model_type": "lfm2", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 65536, "tie_word_embeddings": True,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14], "conv_L_cache": 3, "max_position_embeddings": 128000,
    }),
}  # fmt: skip
