"""What the backend does not support is refused at start, in one line, before anything is allocated."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hybrid_backend.config import HybridConfig
from hybrid_backend.engines.vllm import ASYNC_SCHEDULER, PARKING_SCHEDULER, SCHEDULER
from hybrid_backend.errors import ConfigError, EngineError
from hybrid_backend.methods import resolve_method
from hybrid_backend.workers import resolve_kernel

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig


def check_engine_config(vllm_config: VllmConfig, config: HybridConfig, worker_cls: str) -> None:
    """Raise EngineError or ConfigError for the first thing that cannot work."""
    method = resolve_method(config.method)
    resolve_kernel(config.workers.kernel)
    parallel = vllm_config.parallel_config
    if parallel.worker_cls != worker_cls:
        raise EngineError(
            f"the hybrid backend needs its own worker: add --worker-cls {worker_cls} (or use `hybrid serve MODEL`)"
        )
    for unsupported, fix in _unsupported(vllm_config, config):
        raise EngineError(f"the hybrid backend does not support {unsupported}; {fix}")
    page, block = config.page_size, vllm_config.cache_config.block_size
    if page != block:
        raise ConfigError(
            f"page_size: {page} is unlike the engine's block size {block}; "
            f"start the engine with --block-size {page} or set page_size: {block}"
        )
    layers = vllm_config.model_config.get_num_layers_by_block_type(parallel)
    config.validate_for(layers)
    device = torch.device(vllm_config.device_config.device_type)
    method.check(config, device, layers, vllm_config.model_config.get_num_kv_heads(parallel))


def _unsupported(vllm_config: VllmConfig, config: HybridConfig) -> list[tuple[str, str]]:
    """Pairs of what was asked for and the way out."""
    model, parallel, cache = vllm_config.model_config, vllm_config.parallel_config, vllm_config.cache_config
    text = model.hf_text_config
    layer_types = getattr(text, "layer_types", None)
    window = getattr(text, "sliding_window", None)
    local_only = window is not None and (
        all(kind == "sliding_attention" for kind in layer_types)
        if layer_types
        else model.get_sliding_window() is not None
    )
    device = torch.device(vllm_config.device_config.device_type)
    looks_ahead = resolve_method(config.method).looks_ahead(config, device)
    stock = "leave out --attention-backend CUSTOM for this model"
    found = [
        (model.use_mla, "MLA models", stock),
        (model.is_attention_free, "models without attention layers", stock),
        (
            model.is_encoder_decoder or model.runner_type != "generate",
            "models that do not generate text",
            stock,
        ),
        (
            device.type == "cuda"
            and vllm_config.scheduler_config.disable_hybrid_kv_cache_manager
            and model.get_sliding_window() is not None,
            "one KV group for all layers of a model with sliding windows on a GPU",
            "leave out --disable-hybrid-kv-cache-manager",
        ),
        (bool(getattr(text, "attention_chunk_size", None)), "chunked local attention", stock),
        (local_only, f"models whose layers all slide over {window} tokens", stock),
        (bool(getattr(text, "attn_logit_softcapping", None)), "attention with logit soft-capping", stock),
        (
            cache.cache_dtype not in ("auto", "bfloat16", "float16", "float32"),
            f"a quantised KV cache (--kv-cache-dtype {cache.cache_dtype})",
            "use --kv-cache-dtype auto",
        ),
        (
            vllm_config.speculative_config is not None,
            "speculative decoding",
            "leave out --speculative-config",
        ),
        (
            vllm_config.scheduler_config.scheduler_cls not in (None, SCHEDULER, ASYNC_SCHEDULER, PARKING_SCHEDULER),
            "another scheduler, which would use tokens that were computed without the CPU's partials",
            "leave out --scheduler-cls",
        ),
        (parallel.pipeline_parallel_size > 1, "pipeline parallelism", "use --pipeline-parallel-size 1"),
        (parallel.use_ubatching, "micro-batching", "leave out --enable-dbo and --ubatch-size"),
        (
            parallel.decode_context_parallel_size > 1,
            "decode context parallelism",
            "use --decode-context-parallel-size 1",
        ),
        (
            vllm_config.kv_transfer_config is not None and not _updates_digests(vllm_config.kv_transfer_config),
            "KV connectors, which write pages behind its back",
            "leave out --kv-transfer-config",
        ),
        (
            vllm_config.lora_config is not None and looks_ahead,
            "LoRA together with the lookahead",
            "set lookahead: {enabled: false} or leave out --enable-lora",
        ),
    ]
    return [(what, fix) for unsupported, what, fix in found if unsupported]


def _updates_digests(connector: KVTransferConfig) -> bool:
    """A connector may say that it tells the runtime which pages it wrote (`HybridRuntime.imported`)."""
    # Not at the top: it asks for the platform, which is being made when this module is imported.
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    try:
        kind = KVConnectorFactory.get_connector_class(connector)
    except (ValueError, ImportError, AttributeError):
        return False  # the engine says what is wrong with it
    return bool(getattr(kind, "updates_digests", False))
