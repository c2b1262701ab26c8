"""What the backend does not support is refused at start, in one line, before any process is started."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from hybrid_backend.config import HybridConfig
from hybrid_backend.engines.refusal import Refusal, refuse
from hybrid_backend.engines.sglang import OWN_BACKEND
from hybrid_backend.engines.sglang.compat import check_engine
from hybrid_backend.engines.sglang.settings import host_pool_bytes
from hybrid_backend.errors import EngineError
from hybrid_backend.methods import resolve_method
from hybrid_backend.model import weights_to_load
from hybrid_backend.step.method import looks_ahead, needs_parking
from hybrid_backend.step.operations import check_shape
from hybrid_backend.workers import resolve_kernel


@dataclass(frozen=True)
class Start:
    """What is to be served: SGLang's arguments, as resolved, and our configuration."""

    arguments: Any
    config: HybridConfig

    @cached_property
    def model(self) -> Any:
        from sglang.srt.arg_groups.overrides import model_config_of

        # A platform gets a recorder around the arguments; the model's configuration is kept with those inside it.
        return model_config_of(getattr(self.arguments, "_cfg", self.arguments))

    @property
    def layer_kinds(self) -> set[str]:
        return set(getattr(self.model.hf_text_config, "layer_types", None) or ())

    @property
    def looks_ahead(self) -> bool:
        return looks_ahead(resolve_method(self.config.method), self.config)


ARGUMENT_REFUSALS: tuple[Refusal[Start], ...] = (
    Refusal(
        "other devices than the CPU in this version",
        lambda a: a.arguments.device != "cpu",
        "use --device cpu",
        lambda a: repr(a.arguments.device),
    ),
    Refusal(
        "PD disaggregation", lambda a: a.arguments.disaggregation_mode != "null", "leave out --disaggregation-mode"
    ),
    Refusal("HiCache", lambda a: a.arguments.enable_hierarchical_cache, "leave out --enable-hierarchical-cache"),
    Refusal("LMCache", lambda a: a.arguments.enable_lmcache, "leave out --enable-lmcache"),
    Refusal("FlexKV", lambda a: a.arguments.enable_flexkv, "leave out --enable-flexkv"),
    Refusal(
        "an external KV cache behind the radix cache",
        lambda a: a.arguments.enable_unified_cache_external_linker,
        "leave out --enable-unified-cache-external-linker",
    ),
    Refusal("HiSparse", lambda a: a.arguments.enable_hisparse, "leave out --enable-hisparse"),
    Refusal(
        "speculative decoding",
        lambda a: a.arguments.speculative_algorithm is not None,
        "leave out --speculative-algorithm",
    ),
    Refusal("tensor parallelism on SGLang in this version", lambda a: a.arguments.tp_size > 1, "use --tp-size 1"),
    Refusal("pipeline parallelism", lambda a: a.arguments.pp_size > 1, "use --pp-size 1"),
    Refusal(
        "data parallelism on SGLang in this version",
        lambda a: a.arguments.dp_size > 1 or a.arguments.attn_dp_size > 1,
        "use --dp-size 1",
    ),
    Refusal(
        "context parallelism",
        lambda a: a.arguments.attn_cp_size > 1 or a.arguments.dcp_size > 1,
        "use --attn-cp-size 1 and --dcp-size 1",
    ),
    Refusal(
        "two-batch overlap", lambda a: a.arguments.enable_two_batch_overlap, "leave out --enable-two-batch-overlap"
    ),
    Refusal("PD multiplexing", lambda a: a.arguments.enable_pdmux, "leave out --enable-pdmux"),
    Refusal(
        "SGLang's unified memory pool",
        lambda a: a.arguments.enable_unified_memory,
        "leave out --enable-unified-memory",
    ),
    Refusal(
        "another KV layout",
        lambda a: a.arguments.enable_page_major_kv_layout,
        "leave out --enable-page-major-kv-layout",
    ),
    Refusal("the memory saver", lambda a: a.arguments.enable_memory_saver, "leave out --enable-memory-saver"),
    Refusal("the KV cache's canary", lambda a: a.arguments.kv_canary != "none", "leave out --kv-canary"),
    Refusal(
        "models in Transformers' implementation",
        lambda a: a.arguments.model_impl == "transformers",
        "leave out --model-impl",
    ),
    Refusal(
        "diffusion language models", lambda a: a.arguments.dllm_algorithm is not None, "leave out --dllm-algorithm"
    ),
    Refusal(
        "serving without a KV cache",
        lambda a: a.arguments.prefill_only_disable_kv_cache,
        "leave out --prefill-only-disable-kv-cache",
    ),
)

MODEL_REFUSALS: tuple[Refusal[Start], ...] = (
    Refusal(
        "MLA and state-space models",
        lambda a: a.model.attention_arch.name != "MHA" or a.model.head_dim != a.model.v_head_dim,
        OWN_BACKEND,
    ),
    Refusal(
        "a KV cache of another type than the model's",
        lambda a: (
            a.arguments.kv_cache_dtype != "auto"
            and not (a.arguments.kv_cache_dtype in ("bf16", "bfloat16") and a.model.dtype == torch.bfloat16)
        ),
        "use --kv-cache-dtype auto",
        lambda a: f"--kv-cache-dtype {a.arguments.kv_cache_dtype}",
    ),
    Refusal(
        "models that do not generate text",
        lambda a: not a.model.is_generation or a.model.is_encoder_decoder,
        OWN_BACKEND,
    ),
    Refusal(
        "sliding-window attention on SGLang in this version",
        lambda a: a.model.is_hybrid_swa or a.model.sliding_window_size or "sliding_attention" in a.layer_kinds,
        OWN_BACKEND,
    ),
    Refusal(
        "models with layers of other kinds than attention",
        lambda a: a.layer_kinds - {"full_attention", "sliding_attention"},
        OWN_BACKEND,
    ),
    Refusal(
        "attention with logit soft-capping",
        lambda a: getattr(a.model.hf_text_config, "attn_logit_softcapping", None),
        OWN_BACKEND,
    ),
    Refusal(
        "dual chunk attention",
        lambda a: getattr(a.model.hf_text_config, "dual_chunk_attention_config", None),
        OWN_BACKEND,
    ),
    Refusal(
        "LoRA together with the lookahead",
        lambda a: a.looks_ahead and (a.arguments.enable_lora or a.arguments.lora_paths),
        "set lookahead: {enabled: false} or leave out --enable-lora",
    ),
)

# Of a layer, SGLang's RadixAttention, that does more than plain causal attention.
LAYER_REFUSALS: tuple[Refusal[Any], ...] = (
    Refusal("sliding windows", lambda a: a.sliding_window_size > 0, OWN_BACKEND),
    Refusal("attention with logit soft-capping", lambda a: a.logit_cap, OWN_BACKEND),
    Refusal("cross-attention", lambda a: a.is_cross_attention, OWN_BACKEND),
    Refusal(
        "attention of other types than a decoder's",
        lambda a: a.attn_type.value != "decoder",
        OWN_BACKEND,
        lambda a: a.attn_type.value,
    ),
    Refusal("chunked local attention", lambda a: a.use_irope, OWN_BACKEND),
    Refusal("length-dependent attention temperature", lambda a: a.xai_temperature_len > 0, OWN_BACKEND),
    Refusal("quantised KV", lambda a: a.k_scale is not None or a.quant_method is not None, OWN_BACKEND),
)


def check_arguments(arguments: Any, config: HybridConfig) -> None:
    """Raise EngineError or ConfigError for the first thing that cannot work. ``arguments``: SGLang's, as resolved."""
    check_engine(warns=True)
    method = resolve_method(config.method)
    resolve_kernel(config.workers.kernel)
    start = Start(arguments, config)
    refuse(ARGUMENT_REFUSALS, start)
    config.check_page_size(arguments.page_size, "page size", "--page-size")
    chunk = arguments.chunked_prefill_size
    if chunk is not None and chunk > 0 and chunk % arguments.page_size:
        raise EngineError(
            f"--chunked-prefill-size: got {chunk}, expected a multiple of page_size {arguments.page_size}; "
            f"write {-(-chunk // arguments.page_size) * arguments.page_size}"
        )
    refuse(MODEL_REFUSALS, start)
    if needs_parking(method, config):
        raise EngineError(
            f"{config.method}.strategy: overlap does not work with SGLang, which takes a token of every row in every "
            "step; write auto or lockstep"
        )
    model = start.model
    layers = model.num_hidden_layers
    config.validate_for(layers)
    device, kv_heads = torch.device(arguments.device), model.get_num_kv_heads(1)
    method.check(config, device, layers, kv_heads)
    check_shape(config, model.num_attention_heads, kv_heads, model.head_dim, device)
    dtype = str(model.dtype).removeprefix("torch.")
    weights, _ = weights_to_load(str(model.model_path), model.hf_config.to_dict(), dtype, model.revision)
    host_pool_bytes(config, weights)


def check_layer(layer: nn.Module) -> None:
    """Raise EngineError for an attention layer (SGLang's RadixAttention) that does more than plain causal attention."""
    found: Any = layer
    refuse(LAYER_REFUSALS, found, f" in layer {found.layer_id}")
