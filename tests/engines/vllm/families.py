"""Tiny random-weight models of the families that people run, by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.models import peaked

WINDOW = 64
VOCABULARY = 512
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,  # some classes' own is beyond this vocabulary
}
_HEADS_UNLIKE_HIDDEN = {"head_dim": 32}  # heads * head_dim is not the hidden size
_SLIDING, _CHUNKED, _FULL = "sliding_attention", "chunked_attention", "full_attention"
_GEMMA4 = {
    "num_hidden_layers": 6,
    "sliding_window": WINDOW,
    "layer_types": [_SLIDING, _SLIDING, _FULL] * 2,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": VOCABULARY,
}
_DELTA_NET = {
    "layer_types": ["linear_attention", "linear_attention", _FULL, "linear_attention", _FULL, _FULL],
    "num_hidden_layers": 6,
    "head_dim": 256,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}  # gated queries, a rotary embedding of a quarter of them
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
# Images: beyond the vocabulary of the prompts.
IMAGE, _VIDEO, IMAGE_BEGINS, IMAGE_ENDS = range(VOCABULARY, VOCABULARY + 4)
_SPECIAL = {
    IMAGE: "<|image_pad|>",
    _VIDEO: "<|video_pad|>",
    IMAGE_BEGINS: "<|vision_start|>",
    IMAGE_ENDS: "<|vision_end|>",
}
_PATCH, _MERGED, _FRAMES = 8, 2, 2
_VISION = {
    "text_config": SHAPE
    | _HEADS_UNLIKE_HIDDEN
    | {
        "vocab_size": VOCABULARY + len(_SPECIAL),
        "rope_parameters": {"rope_type": "default", "mrope_section": [6, 5, 5], "mrope_interleaved": True},
    },
    "vision_config": {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_heads": 2,
        "out_hidden_size": SHAPE["hidden_size"],
        "num_position_embeddings": 64,
        "patch_size": _PATCH,
        "spatial_merge_size": _MERGED,
        "temporal_patch_size": _FRAMES,
        "deepstack_visual_indexes": [0, 1],  # what the tower's layers see is added after layers of the decoder
    },
    "image_token_id": IMAGE,
    "video_token_id": _VIDEO,
    "vision_start_token_id": IMAGE_BEGINS,
    "vision_end_token_id": IMAGE_ENDS,
}

# name -> (Hugging Face configuration class, its arguments)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _HEADS_UNLIKE_HIDDEN | {"attention_bias": True}),
    "mistral": ("MistralConfig", _HEADS_UNLIKE_HIDDEN | {"sliding_window": None}),
    "qwen2": ("Qwen2Config", {"hidden_size": 128}),
    "qwen3": ("Qwen3Config", _HEADS_UNLIKE_HIDDEN),
    "glm4": ("Glm4Config", _HEADS_UNLIKE_HIDDEN | {"attention_bias": True}),
    "gemma3": (
        "Gemma3TextConfig",
        _HEADS_UNLIKE_HIDDEN
        | {
            "num_hidden_layers": 6,
            "query_pre_attn_scalar": 24,  # a scale unlike head_dim ** -0.5
            "sliding_window": WINDOW,
            "layer_types": [_SLIDING, _SLIDING, _FULL] * 2,
        },
    ),
    "stablelm": ("StableLmConfig", {"hidden_size": 128}),  # layers without a residual beside the hidden states
    "granite": ("GraniteConfig", {"hidden_size": 128, "residual_multiplier": 0.5, "attention_multiplier": 0.2}),
    "qwen3_moe": ("Qwen3MoeConfig", _HEADS_UNLIKE_HIDDEN | _EXPERTS),
    "olmoe": (
        "OlmoeConfig",
        {"hidden_size": 128, "num_key_value_heads": 4, "num_experts": 4, "num_experts_per_tok": 2},
    ),
    "glm4_moe": (
        "Glm4MoeConfig",
        _HEADS_UNLIKE_HIDDEN
        | {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "first_k_dense_replace": 1,
            "use_qk_norm": True,
            "partial_rotary_factor": 0.5,
            "n_shared_experts": 1,
        },
    ),
    "minimax_m2": (
        "MiniMaxM2Config",
        _HEADS_UNLIKE_HIDDEN
        | {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rotary_dim": 16,
            "scoring_func": "softmax",  # the only one that vLLM routes by on a CPU
            "use_routing_bias": True,
        },
    ),
    "gpt_oss": (
        "GptOssConfig",
        _HEADS_UNLIKE_HIDDEN
        | {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": WINDOW,
            "layer_types": [_SLIDING, _FULL] * 2,
        },
    ),
    "gemma4": ("Gemma4TextConfig", _HEADS_UNLIKE_HIDDEN | _GEMMA4 | {"global_head_dim": 32}),
    # As the published ones: layers of unlike shape, values that are keys, a dense MLP beside the experts.
    "gemma4_wide": (
        "Gemma4TextConfig",
        _GEMMA4
        | {
            "head_dim": 256,
            "num_key_value_heads": 4,
            "global_head_dim": 512,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 64,
        },
    ),
    "llama4": (
        "Llama4TextConfig",
        _HEADS_UNLIKE_HIDDEN
        | {
            "num_hidden_layers": 6,
            "attention_chunk_size": WINDOW,
            "no_rope_layers": [1, 1, 0] * 2,
            "layer_types": [_CHUNKED, _CHUNKED, _FULL] * 2,
            "attn_temperature_tuning": True,
            "floor_scale": 64,  # queries grow every 64 tokens
            "attn_scale": 0.5,
            "intermediate_size_mlp": 160,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
            "moe_layers": [1, 3, 5],
        },
    ),
    "lfm2": (
        "Lfm2Config",
        {
            "hidden_size": 128,
            "conv_dim": 128,
            "conv_dim_out": 128,
            "block_dim": 128,
            "block_auto_adjust_ff_dim": False,
            "layer_types": ["conv", "conv", _FULL, "conv", _FULL, _FULL],
            "num_hidden_layers": 6,
        },
    ),
    "nemotron_h": (
        "NemotronHConfig",
        _HEADS_UNLIKE_HIDDEN
        | {
            "num_hidden_layers": 6,
            "hybrid_override_pattern": "M*-M*-",
            "mamba_num_heads": 4,
            "mamba_head_dim": 32,
            "ssm_state_size": 16,
            "n_groups": 2,
            "attention_head_dim": 32,
            "expand": 1,
            "chunk_size": 32,
        },
    ),
    "granite4": (
        "GraniteMoeHybridConfig",
        {
            "hidden_size": 128,
            "layer_types": ["mamba", "mamba", "attention", "mamba", "attention", "attention"],
            "num_hidden_layers": 6,
            "mamba_n_heads": 8,
            "mamba_d_head": 32,
            "mamba_d_state": 16,
            "mamba_n_groups": 2,
            "mamba_expand": 2,
            "mamba_chunk_size": 32,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 64,
            "position_embedding_type": "rope",
            "attention_multiplier": 0.2,
        },
    ),
    "qwen3_next": ("Qwen3NextConfig", _DELTA_NET | _EXPERTS | {"shared_expert_intermediate_size": 64}),
    "qwen3_5": ("Qwen3_5TextConfig", _DELTA_NET),
    "qwen3_vl": ("Qwen3VLConfig", _VISION),  # positions of three rows
    "gpt2": ("GPT2Config", {"hidden_size": 128, "num_key_value_heads": 4}),
    "phi3": ("Phi3Config", {"hidden_size": 128}),
    # vLLM has no code of its own for it, and runs that of Transformers.
    "glm": ("GlmConfig", _HEADS_UNLIKE_HIDDEN),
    "llama_w8a8": ("LlamaConfig", _HEADS_UNLIKE_HIDDEN),
    "qwen3_w4a16": ("Qwen3Config", _HEADS_UNLIKE_HIDDEN),
}
# Of those, the ones with quantised weights, as `save_quantised` takes them. Inputs have zero points: those without are
# for vLLM's AMX kernel where there is one, which takes no fp32.
QUANTISED: dict[str, dict[str, Any]] = {
    "llama_w8a8": {"scheme": "W8A8", "symmetric": False},
    "qwen3_w4a16": {"scheme": "W4A16", "group": 32},
}
DTYPES = {"qwen3_w4a16": "bfloat16"}  # the others' is float32, which vLLM's kernel for 4-bit weights does not take
# Of those, the ones that are shown images.
VISION = ("qwen3_vl",)
# The ones with layers whose state is the engine's, and of these the ones of which a CPU keeps the state of prefixes.
WITH_STATE = ("lfm2", "nemotron_h", "granite4", "qwen3_next", "qwen3_5")
# The ones with layers whose blocks the engine frees while the request runs: of another shape, or in chunks.
LOCAL = ("gemma4_wide", "llama4")
FINDS_PREFIXES = ("lfm2", "qwen3_next", *LOCAL)
# The ones whose rows wait from one step to the next where they can.
PARKED = ("llama", "mistral", "qwen2", "qwen3", "glm4", "gemma3", "stablelm", "gpt2", "qwen3_vl")


def build(name: str, folder: Path, seed: int = 0) -> Path:
    class_name, arguments = MODELS[name]
    model = peaked(class_name, seed=seed, **(arguments if name in VISION else SHAPE | arguments))
    for path, weight in model.named_parameters():
        if path.endswith(".sinks"):  # as drawn, they have little part in the sums
            weight.data.add_(4.0)
        if name == "gemma4_wide" and path.endswith("q_norm.weight"):  # as drawn, logits reach 500: no weight but one
            weight.data.mul_(2 * len(weight) ** -0.5)
    if name in QUANTISED:
        from tests.support.quantised import save_quantised

        return save_quantised(model, folder, **QUANTISED[name])
    model.save_pretrained(folder)
    if name in VISION:
        _processor().save_pretrained(folder)
    return folder


def _processor() -> Any:
    """A word is a token; an image has 16 tokens at most. It needs torchvision."""
    import tokenizers
    from transformers import (
        PreTrainedTokenizerFast,
        Qwen2VLImageProcessor,
        Qwen3VLProcessor,
        Qwen3VLVideoProcessor,
    )

    words = {f"word{i}": i for i in range(VOCABULARY)} | {text: token for token, text in _SPECIAL.items()}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="word0"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=model, extra_special_tokens=list(_SPECIAL.values()), eos_token="word1", pad_token="word0"
    )
    edge = _PATCH * _MERGED
    patches = {
        "patch_size": _PATCH,
        "merge_size": _MERGED,
        "temporal_patch_size": _FRAMES,
        "size": {"shortest_edge": edge**2, "longest_edge": 16 * edge**2},  # pixels
    }
    return Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(**patches),
        tokenizer=tokenizer,
        video_processor=Qwen3VLVideoProcessor(**patches),
    )
