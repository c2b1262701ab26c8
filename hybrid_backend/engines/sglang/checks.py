"""Refusal, at start and in one line, of settings that the backend does not support, before any process is started."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from hybrid_backend.config import HybridConfig
from hybrid_backend.engines.refusal import Refusal, check_model, refuse
from hybrid_backend.engines.sglang import OWN_BACKEND
from hybrid_backend.engines.sglang.compat import check_engine
from hybrid_backend.engines.sglang.settings import host_pool_bytes
from hybrid_backend.errors import EngineError
from hybrid_backend.methods import resolve_method
from hybrid_backend.model import weights_to_load
from hybrid_backend.step.method import looks_ahead, needs_parking
from hybrid_backend.workers import resolve_kernel


@dataclass(frozen=True)
class Start:
    """A start of the engine.

    Attributes:
        arguments: SGLang's server arguments, as resolved.
        config: our configuration.
    """

    arguments: Any
    config: HybridConfig

    @cached_property
    def model(self) -> Any:
        """SGLang's configuration of the model."""
        from sglang.srt.arg_groups.overrides import model_config_of

        # A platform gets a recorder around the arguments; the model's configuration is stored in those inside it.
        return model_config_of(getattr(self.arguments, "_cfg", self.arguments))

    @property
    def layer_kinds(self) -> set[str]:
        """Kinds of layers that the model's files name."""
        return set(getattr(self.model.hf_text_config, "layer_types", None) or ())

    @property
    def looks_ahead(self) -> bool:
        """Tell whether the method predicts queries."""
        return looks_ahead(resolve_method(self.config.method), self.config)


def _switch(what: str, argument: str) -> Refusal[Start]:
    """Return the refusal of a flag without a value."""
    return Refusal(what, lambda s: getattr(s.arguments, argument), f"leave out --{argument.replace('_', '-')}")


ARGUMENT_REFUSALS: tuple[Refusal[Start], ...] = (
    Refusal(
        "other devices than the CPU in this version",
        lambda s: s.arguments.device != "cpu",
        "use --device cpu",
        lambda s: repr(s.arguments.device),
    ),
    Refusal(
        "PD disaggregation", lambda s: s.arguments.disaggregation_mode != "null", "leave out --disaggregation-mode"
    ),
    _switch("HiCache", "enable_hierarchical_cache"),
    _switch("LMCache", "enable_lmcache"),
    _switch("FlexKV", "enable_flexkv"),
    _switch("an external KV cache behind the radix cache", "enable_unified_cache_external_linker"),
    _switch("HiSparse", "enable_hisparse"),
    _switch("speculative decoding", "speculative_algorithm"),
    Refusal("tensor parallelism on SGLang in this version", lambda s: s.arguments.tp_size > 1, "use --tp-size 1"),
    Refusal("pipeline parallelism", lambda s: s.arguments.pp_size > 1, "use --pp-size 1"),
    Refusal(
        "data parallelism on SGLang in this version",
        lambda s: s.arguments.dp_size > 1 or s.arguments.attn_dp_size > 1,
        "use --dp-size 1",
    ),
    Refusal(
        "context parallelism",
        lambda s: s.arguments.attn_cp_size > 1 or s.arguments.dcp_size > 1,
        "use --attn-cp-size 1 and --dcp-size 1",
    ),
    _switch("two-batch overlap", "enable_two_batch_overlap"),
    _switch("PD multiplexing", "enable_pdmux"),
    _switch("SGLang's unified memory pool", "enable_unified_memory"),
    _switch("another KV layout", "enable_page_major_kv_layout"),
    _switch("the memory saver", "enable_memory_saver"),
    Refusal("the KV cache's canary", lambda s: s.arguments.kv_canary != "none", "leave out --kv-canary"),
    Refusal(
        "models in Transformers' implementation",
        lambda s: s.arguments.model_impl == "transformers",
        "leave out --model-impl",
    ),
    _switch("diffusion language models", "dllm_algorithm"),
    _switch("serving without a KV cache", "prefill_only_disable_kv_cache"),
)

MODEL_REFUSALS: tuple[Refusal[Start], ...] = (
    Refusal(
        "MLA and state-space models",
        lambda s: s.model.attention_arch.name != "MHA" or s.model.head_dim != s.model.v_head_dim,
        OWN_BACKEND,
    ),
    Refusal(
        "a KV cache of another type than the model's",
        lambda s: (
            s.arguments.kv_cache_dtype != "auto"
            and not (s.arguments.kv_cache_dtype in ("bf16", "bfloat16") and s.model.dtype == torch.bfloat16)
        ),
        "use --kv-cache-dtype auto; kv_dtype: int8 in our configuration is 8 bits",
        lambda s: f"--kv-cache-dtype {s.arguments.kv_cache_dtype}",
    ),
    Refusal(
        "models that do not generate text",
        lambda s: not s.model.is_generation or s.model.is_encoder_decoder,
        OWN_BACKEND,
    ),
    Refusal(
        "sliding-window attention on SGLang in this version",
        lambda s: s.model.is_hybrid_swa or s.model.sliding_window_size or "sliding_attention" in s.layer_kinds,
        OWN_BACKEND,
    ),
    Refusal(
        "models with layers of other kinds than attention",
        lambda s: s.layer_kinds - {"full_attention", "sliding_attention"},
        OWN_BACKEND,
    ),
    Refusal(
        "attention with logit soft-capping",
        lambda s: getattr(s.model.hf_text_config, "attn_logit_softcapping", None),
        OWN_BACKEND,
    ),
    Refusal(
        "dual chunk attention",
        lambda s: getattr(s.model.hf_text_config, "dual_chunk_attention_config", None),
        OWN_BACKEND,
    ),
    Refusal(
        "LoRA together with the lookahead",
        lambda s: s.looks_ahead and (s.arguments.enable_lora or s.arguments.lora_paths),
        "set lookahead: {enabled: false} or leave out --enable-lora",
    ),
)

LAYER_REFUSALS: tuple[Refusal[Any], ...] = (
    Refusal("sliding windows", lambda layer: layer.sliding_window_size > 0, OWN_BACKEND),
    Refusal("attention with logit soft-capping", lambda layer: layer.logit_cap, OWN_BACKEND),
    Refusal("cross-attention", lambda layer: layer.is_cross_attention, OWN_BACKEND),
    Refusal(
        "attention of other types than a decoder's",
        lambda layer: layer.attn_type.value != "decoder",
        OWN_BACKEND,
        lambda layer: layer.attn_type.value,
    ),
    Refusal("chunked local attention", lambda layer: layer.use_irope, OWN_BACKEND),
    Refusal("length-dependent attention temperature", lambda layer: layer.xai_temperature_len > 0, OWN_BACKEND),
    Refusal("quantised KV", lambda layer: layer.k_scale is not None or layer.quant_method is not None, OWN_BACKEND),
)
"""Refusals of a layer, SGLang's RadixAttention, that does more than plain causal attention."""


def check_arguments(arguments: Any, config: HybridConfig) -> None:
    """Raise EngineError or ConfigError for the first setting of SGLang's resolved arguments that cannot work."""
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
    check_model(
        config,
        torch.device(arguments.device),
        layers=model.num_hidden_layers,
        heads=model.num_attention_heads,
        kv_heads=model.get_num_kv_heads(1),
        head_dim=model.head_dim,
    )
    dtype = str(model.dtype).removeprefix("torch.")
    weights, _ = weights_to_load(str(model.model_path), model.hf_config.to_dict(), dtype, model.revision)
    host_pool_bytes(config, weights)


def check_layer(layer: nn.Module) -> None:
    """Raise EngineError for an attention layer (SGLang's RadixAttention) that does more than plain causal attention."""
    attention: Any = layer
    refuse(LAYER_REFUSALS, attention, f" in layer {attention.layer_id}")
