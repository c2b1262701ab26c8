"""What the backend does not support is refused at start, in one line, before any process is started."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hybrid_backend.config import HybridConfig
from hybrid_backend.engines.sglang import BACKEND
from hybrid_backend.engines.sglang.compat import check_engine
from hybrid_backend.engines.sglang.settings import host_pool_bytes
from hybrid_backend.errors import ConfigError, EngineError
from hybrid_backend.methods import resolve_method
from hybrid_backend.model import weights_to_load
from hybrid_backend.workers import resolve_kernel

_STOCK = f"leave out --attention-backend {BACKEND} for this model"


def check_arguments(arguments: Any, config: HybridConfig) -> None:
    """Raise EngineError or ConfigError for the first thing that cannot work. ``arguments``: SGLang's, as resolved."""
    from sglang.srt.arg_groups.overrides import model_config_of

    check_engine(warns=True)
    method = resolve_method(config.method)
    resolve_kernel(config.workers.kernel)
    _refuse(_unsupported_arguments(arguments))
    if config.page_size != arguments.page_size:
        raise ConfigError(
            f"page_size: {config.page_size} is unlike the engine's page size {arguments.page_size}; "
            f"start the engine with --page-size {config.page_size} or set page_size: {arguments.page_size}"
        )
    # A platform gets a recorder around the arguments; the model's configuration is kept with those inside it.
    model = model_config_of(getattr(arguments, "_cfg", arguments))
    device = torch.device(arguments.device)
    looks_ahead = method.looks_ahead(config, device)
    _refuse(_unsupported_models(model))
    if looks_ahead and (arguments.enable_lora or arguments.lora_paths):
        raise EngineError(
            "the hybrid backend does not support LoRA together with the lookahead; "
            "set lookahead: {enabled: false} or leave out --enable-lora"
        )
    if method.needs_parking(config):
        raise EngineError(
            f"{config.method}.strategy: overlap does not work with SGLang, which takes a token of every row in every "
            "step; write auto or lockstep"
        )
    layers = model.num_hidden_layers
    config.validate_for(layers)
    method.check(config, device, layers, model.get_num_kv_heads(1))
    dtype = str(model.dtype).removeprefix("torch.")
    weights, _ = weights_to_load(str(model.model_path), model.hf_config.to_dict(), dtype, model.revision)
    host_pool_bytes(config, weights)


def _refuse(found: list[tuple[Any, str, str]]) -> None:
    for is_asked, what, fix in found:
        if is_asked:
            raise EngineError(f"the hybrid backend does not support {what}; {fix}")


def _unsupported_arguments(a: Any) -> list[tuple[Any, str, str]]:
    """Whether it was asked for, what it is, the way out."""
    dtype = a.kv_cache_dtype
    return [
        (a.device != "cpu", f"the device {a.device!r} in this version", "use --device cpu"),
        (a.disaggregation_mode != "null", "PD disaggregation", "leave out --disaggregation-mode"),
        (a.enable_hierarchical_cache, "HiCache", "leave out --enable-hierarchical-cache"),
        (a.enable_lmcache, "LMCache", "leave out --enable-lmcache"),
        (a.enable_hisparse, "HiSparse", "leave out --enable-hisparse"),
        (a.speculative_algorithm is not None, "speculative decoding", "leave out --speculative-algorithm"),
        (dtype not in ("auto", "bf16", "bfloat16"), f"a KV cache of type {dtype}", "use --kv-cache-dtype auto"),
        (a.tp_size > 1, "tensor parallelism on SGLang in this version", "use --tp-size 1"),
        (a.pp_size > 1, "pipeline parallelism", "use --pp-size 1"),
        (a.dp_size > 1 or a.attn_dp_size > 1, "data parallelism on SGLang in this version", "use --dp-size 1"),
        (a.attn_cp_size > 1 or a.dcp_size > 1, "context parallelism", "use --attn-cp-size 1 and --dcp-size 1"),
        (a.enable_two_batch_overlap, "two-batch overlap", "leave out --enable-two-batch-overlap"),
        (a.enable_pdmux, "PD multiplexing", "leave out --enable-pdmux"),
        (a.enable_unified_memory, "SGLang's unified memory pool", "leave out --enable-unified-memory"),
        (a.enable_page_major_kv_layout, "another KV layout", "leave out --enable-page-major-kv-layout"),
        (a.enable_memory_saver, "the memory saver", "leave out --enable-memory-saver"),
        (a.dllm_algorithm is not None, "diffusion language models", "leave out --dllm-algorithm"),
        (a.prefill_only_disable_kv_cache, "serving without a KV cache", "leave out --prefill-only-disable-kv-cache"),
    ]


def _unsupported_models(model: Any) -> list[tuple[Any, str, str]]:
    text = model.hf_text_config
    kinds = set(getattr(text, "layer_types", None) or ())
    return [
        (
            model.attention_arch.name != "MHA" or model.head_dim != model.v_head_dim,
            "MLA and state-space models",
            _STOCK,
        ),
        (not model.is_generation or model.is_encoder_decoder, "models that do not generate text", _STOCK),
        (
            model.is_hybrid_swa or model.sliding_window_size or "sliding_attention" in kinds,
            "sliding-window attention on SGLang in this version",
            _STOCK,
        ),
        (kinds - {"full_attention", "sliding_attention"}, "models with layers of other kinds than attention", _STOCK),
        (getattr(text, "attn_logit_softcapping", None), "attention with logit soft-capping", _STOCK),
    ]


def check_layer(layer: nn.Module) -> None:
    """Raise EngineError for an attention layer (SGLang's RadixAttention) that does more than plain causal attention."""
    found: Any = layer
    refused = {
        "sliding windows": found.sliding_window_size > 0,
        "attention with logit soft-capping": bool(found.logit_cap),
        "cross-attention": found.is_cross_attention,
        f"attention of type {found.attn_type.value}": found.attn_type.value != "decoder",
        "chunked local attention": found.use_irope,
        "length-dependent attention temperature": found.xai_temperature_len > 0,
        "quantised KV": found.k_scale is not None or found.quant_method is not None,
    }
    for what, is_asked in refused.items():
        if is_asked:
            raise EngineError(f"the hybrid backend does not support {what} in layer {found.layer_id}; {_STOCK}")
