"""Features in docs/reference/support.md, each as settings of the engines (`bench.support_page`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace
from typing import Any

_SGLANG_FLAGS = (
    "enable_hierarchical_cache", "enable_lmcache", "enable_flexkv", "enable_unified_cache_external_linker",
    "enable_hisparse", "enable_two_batch_overlap", "enable_pdmux", "enable_unified_memory",
    "enable_page_major_kv_layout", "enable_memory_saver", "prefill_only_disable_kv_cache", "enable_lora", "lora_paths",
)  # fmt: skip
_SGLANG_SIZES = ("tp_size", "pp_size", "dp_size", "attn_dp_size", "attn_cp_size", "dcp_size")
# Settings of a start with the engines' defaults, by the engines' names.
PLAIN: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "vllm": {
            "device_config.device_type": "cpu",
            "model_config.use_mla": False,
            "model_config.is_attention_free": False,
            "model_config.is_encoder_decoder": False,
            "model_config.runner_type": "generate",
            "model_config.hf_text_config.layer_types": None,
            "model_config.get_sliding_window": lambda: None,
            "model_config.attention_chunk_size": None,
            "model_config.model_arch_config.per_layer_overrides": None,
            "model_config.get_num_attention_heads": lambda _, layer=None: 32,
            "model_config.get_num_kv_heads": lambda _, layer=None: 8 if layer is None else layer.kv_heads,
            "model_config.get_head_size": lambda: 128,
            "model_config.is_hybrid": False,
            "model_config.dtype": "bfloat16",
            "parallel_config.tensor_parallel_size": 1,
            "parallel_config.distributed_executor_backend": "mp",
            "parallel_config.data_parallel_backend": "mp",
            "parallel_config.pipeline_parallel_size": 1,
            "parallel_config.decode_context_parallel_size": 1,
            "parallel_config.use_ubatching": False,
            "scheduler_config.scheduler_cls": None,
            "scheduler_config.disable_hybrid_kv_cache_manager": False,
            "cache_config.cache_dtype": "auto",
            "cache_config.prefix_match_unit": None,
            "speculative_config": None,
            "kv_transfer_config": None,
            "lora_config": None,
        },
        "sglang": {
            "arguments.device": "cpu",
            "arguments.disaggregation_mode": "null",
            "arguments.speculative_algorithm": None,
            "arguments.kv_cache_dtype": "auto",
            "arguments.dllm_algorithm": None,
            "arguments.kv_canary": "none",
            "arguments.model_impl": "auto",
            **{f"arguments.{flag}": False for flag in _SGLANG_FLAGS},
            **{f"arguments.{size}": 1 for size in _SGLANG_SIZES},
            "model.attention_arch.name": "MHA",
            "model.head_dim": 64,
            "model.v_head_dim": 64,
            "model.is_generation": True,
            "model.is_encoder_decoder": False,
            "model.is_hybrid_swa": False,
            "model.sliding_window_size": None,
            "model.hf_text_config.layer_types": None,
        },
    }
)


@dataclass(frozen=True)
class Feature:
    """A feature as settings of each engine (None if the engine has no such feature), with the tests that show it."""

    name: str
    vllm: Mapping[str, Any] | None
    sglang: Mapping[str, Any] | None
    vllm_test: str | None = None
    sglang_test: str | None = None


_TEXT = "model_config.hf_text_config"
_SGLANG_TEXT = "model.hf_text_config"
_EXACT, _FAMILIES = "tests/engines/test_exact.py", "tests/engines/vllm/test_families.py"
_BEYOND_ONE, _RANKS = "tests/engines/vllm/test_disaggregated.py", "tests/engines/vllm/test_ranks.py"
_SOME_SLIDE = ["sliding_attention", "full_attention"]
_WINDOWS = {
    f"{_TEXT}.sliding_window": 128,
    f"{_TEXT}.layer_types": _SOME_SLIDE,
    "model_config.get_sliding_window": lambda: 128,
}
_SGLANG_WINDOWS = {f"{_SGLANG_TEXT}.layer_types": _SOME_SLIDE, "model.is_hybrid_swa": True}


class Layers(list[SimpleNamespace]):
    """Stand-in for vLLM's ``ModelArchitectureConfig`` of a model whose layers have different shapes."""

    per_layer_overrides = ()


def _layer(kv_heads: int, head_dim: int) -> SimpleNamespace:
    return SimpleNamespace(kv_heads=kv_heads, head_size=head_dim)


def _layers(kind: str) -> tuple[dict[str, Any], dict[str, Any]]:
    kinds = [kind, "full_attention"]
    return {f"{_TEXT}.layer_types": kinds}, {f"{_SGLANG_TEXT}.layer_types": kinds}


def _transfer(connector: str) -> dict[str, Any]:
    asked = {"kv_connector": connector, "kv_role": "kv_consumer", "kv_connector_extra_config": {}}
    return {"kv_transfer_config": SimpleNamespace(**asked, kv_connector_module_path=None)}


FEATURES: tuple[Feature, ...] = (
    Feature("prefix cache, radix cache", {}, {}, _EXACT, _EXACT),
    Feature("chunked prefill", {}, {}, _EXACT, _EXACT),
    Feature("preemption, retraction", {}, {}, _EXACT, "tests/engines/sglang/test_serving.py"),
    Feature(
        "prompt chunks and decoding rows in one batch", {}, {}, _EXACT, "tests/engines/sglang/test_mixed_chunks.py"
    ),
    Feature("streaming", {}, {}, "tests/engines/vllm/test_serving.py", "tests/engines/sglang/test_serving.py"),
    Feature("torch.compile", {}, {}, "tests/engines/vllm/test_compiled.py"),
    Feature("asynchronous scheduling, overlap scheduling", {}, {}, "tests/engines/vllm/test_scheduler.py", _EXACT),
    Feature("tensor parallelism", {"parallel_config.tensor_parallel_size": 2}, {"arguments.tp_size": 2}, _RANKS),
    Feature("pipeline parallelism", {"parallel_config.pipeline_parallel_size": 2}, {"arguments.pp_size": 2}),
    Feature("data parallelism", {"parallel_config.data_parallel_size": 2}, {"arguments.dp_size": 2}, _BEYOND_ONE),
    Feature("ranks and replicas over Ray", {"parallel_config.distributed_executor_backend": "ray"}, None),
    Feature("context parallelism", {"parallel_config.decode_context_parallel_size": 2}, {"arguments.dcp_size": 2}),
    Feature("micro-batching", {"parallel_config.use_ubatching": True}, {"arguments.enable_two_batch_overlap": True}),
    Feature(
        "speculative decoding",
        {"speculative_config": SimpleNamespace(method="ngram")},
        {"arguments.speculative_algorithm": "NGRAM"},
        "tests/engines/vllm/test_speculation.py",
    ),
    Feature(
        "prefill and decode on different servers",
        _transfer("NixlConnector"),
        {"arguments.disaggregation_mode": "decode"},
        _BEYOND_ONE,
    ),
    Feature(
        "LMCache and other KV connectors than ExampleConnector and NixlConnector",
        _transfer("LMCacheConnectorV1"),
        {"arguments.enable_lmcache": True},
    ),
    Feature("HiCache", None, {"arguments.enable_hierarchical_cache": True}),
    Feature("LoRA", {"lora_config": SimpleNamespace()}, {"arguments.enable_lora": True}),
    Feature(
        "quantised weights (W8A8, W4A16)",
        {"model_config.quantization": "compressed-tensors"},
        {"arguments.quantization": "compressed-tensors"},
        _FAMILIES,
    ),
    Feature("fp8 KV cache", {"cache_config.cache_dtype": "fp8"}, {"arguments.kv_cache_dtype": "fp8_e5m2"}),
    Feature("mixture of experts", {}, {}, _FAMILIES, "tests/engines/sglang/test_families.py"),
    Feature("prompts with images", {}, {}, _FAMILIES),
    Feature("sliding windows beside full attention (Gemma 3)", _WINDOWS, _SGLANG_WINDOWS, _FAMILIES),
    Feature("windows and attention sinks (gpt-oss)", _WINDOWS, _SGLANG_WINDOWS, _FAMILIES),
    Feature(
        "sliding windows of another shape than full attention (Gemma 4)",
        {**_WINDOWS, "model_config.model_arch_config": Layers([_layer(16, 256), _layer(4, 512)])},
        _SGLANG_WINDOWS,
        _FAMILIES,
    ),
    Feature(
        "layers that share another layer's KV cache (Gemma 4 E, Gemma 3n)",
        {**_WINDOWS, f"{_TEXT}.num_kv_shared_layers": 20},
        _SGLANG_WINDOWS,
    ),
    Feature(
        "only sliding windows",
        {f"{_TEXT}.sliding_window": 4096, "model_config.get_sliding_window": lambda: 4096},
        {"model.sliding_window_size": 4096},
    ),
    Feature("short convolutions (LFM2)", *_layers("conv"), _FAMILIES),
    Feature("gated delta nets (Qwen3-Next)", *_layers("linear_attention"), _FAMILIES),
    Feature(
        "chunked local attention (Llama 4)",
        {"model_config.attention_chunk_size": 8192, f"{_TEXT}.layer_types": ["chunked_attention", "full_attention"]},
        {f"{_SGLANG_TEXT}.layer_types": ["chunked_attention", "full_attention"]},
        _FAMILIES,
    ),
    Feature("MLA (DeepSeek)", {"model_config.use_mla": True}, {"model.attention_arch.name": "MLA"}),
    Feature(
        "soft-capped logits (Gemma 2)",
        {f"{_TEXT}.attn_logit_softcapping": 50.0},
        {f"{_SGLANG_TEXT}.attn_logit_softcapping": 50.0},
    ),
    Feature("embedding and encoder models", {"model_config.runner_type": "pooling"}, {"model.is_generation": False}),
)
