"""Refusal, at start and in one line, of settings that the backend does not support, before anything is allocated."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hybrid_backend.config import HybridConfig
from hybrid_backend.engines.refusal import Refusal, check_model, refuse
from hybrid_backend.engines.vllm import (
    ASYNC_SCHEDULER,
    CONNECTOR_MODULE,
    CONNECTORS,
    OWN_BACKEND,
    PARKING_SCHEDULER,
    SCHEDULER,
)
from hybrid_backend.engines.vllm.kv_dtype import INT8
from hybrid_backend.engines.vllm.layer_kinds import AttentionShape, attention_shapes, full_shape, has_local_layers
from hybrid_backend.errors import ConfigError, EngineError
from hybrid_backend.in_place.step import why_not_in_place
from hybrid_backend.methods import resolve_method
from hybrid_backend.step.method import looks_ahead
from hybrid_backend.workers import resolve_kernel

if TYPE_CHECKING:
    from vllm.config import VllmConfig


STOCK_BLOCK = 32
"""Divisor of the block sizes of vLLM's own CPU backend (v1/attention/backends/cpu_attn.py)."""


class Start:
    """A start of the engine: vLLM's configuration with its parts, and ours.

    Attributes:
        text: the language model's own configuration, from its ``config.json``.
        transfer: vLLM's configuration of KV connectors; None without one.
        device: kind of the device tier.
    """

    def __init__(self, vllm_config: VllmConfig, config: HybridConfig) -> None:
        self.vllm_config, self.config = vllm_config, config
        self.model: Any = vllm_config.model_config
        self.text: Any = self.model.hf_text_config
        self.parallel: Any = vllm_config.parallel_config
        self.scheduler: Any = vllm_config.scheduler_config
        self.cache: Any = vllm_config.cache_config
        self.transfer: Any = vllm_config.kv_transfer_config
        self.device = torch.device(vllm_config.device_config.device_type)

    @property
    def dtype(self) -> str:
        """The model's dtype without ``torch.``."""
        return str(self.model.dtype).removeprefix("torch.")

    @property
    def window(self) -> int | None:
        """The sliding window in tokens that the model's files name."""
        return getattr(self.text, "sliding_window", None)

    @property
    def slides_only(self) -> bool:
        """Tell whether no layer has full attention."""
        if self.window is None:
            return False
        kinds = getattr(self.text, "layer_types", None)
        if kinds:
            return all(kind == "sliding_attention" for kind in kinds)
        return self.model.get_sliding_window() is not None

    @property
    def full_shapes(self) -> list[AttentionShape]:
        """The different shapes of the layers with full attention."""
        return attention_shapes(self.vllm_config, local=False)

    @property
    def local_shapes(self) -> list[AttentionShape]:
        """The different shapes of the layers with a sliding window or chunks."""
        return attention_shapes(self.vllm_config, local=True)

    @property
    def takes_stock_pages(self) -> bool:
        """Tell whether KV comes from a server with vLLM's own backend, through one of vLLM's own connectors."""
        transfer = self.transfer
        return (
            transfer is not None
            and transfer.kv_connector in CONNECTORS
            and (transfer.kv_connector_module_path or CONNECTOR_MODULE) == CONNECTOR_MODULE
        )

    @property
    def reads_files(self) -> bool:
        """Tell whether KV comes through files."""
        return self.takes_stock_pages and self.transfer.kv_connector == "ExampleConnector"

    @cached_property
    def has_silent_connector(self) -> bool:
        """Tell whether a connector writes pages without telling the runtime (`HybridRuntime.imported`)."""
        if self.transfer is None or self.takes_stock_pages:
            return False
        # The import is late, because the factory needs vLLM's platform, which imports this module when it is created.
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        try:
            kind = KVConnectorFactory.get_connector_class(self.transfer)
        except (ValueError, ImportError, AttributeError):
            return True  # vLLM reports the error in the connector's settings.
        return not getattr(kind, "updates_digests", False)

    @property
    def speculative(self) -> Any:
        """The engine's speculative decoding; None: one token is decoded at a time."""
        return self.vllm_config.speculative_config

    @cached_property
    def attends_in_place(self) -> bool:
        """Tell whether the native decoder attends pages where they lie."""
        shape = self.full_shapes[0]
        is_possible = not why_not_in_place(self.config, shape.heads, shape.kv_heads, shape.head_dim, self.device)
        return resolve_method(self.config.method).suits_cpu and is_possible

    @property
    def looks_ahead(self) -> bool:
        """Tell whether the method predicts queries."""
        return looks_ahead(resolve_method(self.config.method), self.config)


REFUSALS: tuple[Refusal[Start], ...] = (
    Refusal("MLA models", lambda s: s.model.use_mla, OWN_BACKEND),
    Refusal("diffusion language models", lambda s: getattr(s.model, "is_diffusion", False), OWN_BACKEND),
    Refusal("models without attention layers", lambda s: s.model.is_attention_free, OWN_BACKEND),
    Refusal(
        "models that do not generate text",
        lambda s: s.model.is_encoder_decoder or s.model.runner_type != "generate",
        OWN_BACKEND,
    ),
    Refusal(
        "one KV group for all layers of a model with sliding windows on a GPU",
        lambda s: (
            s.device.type == "cuda"
            and s.scheduler.disable_hybrid_kv_cache_manager
            and s.model.get_sliding_window() is not None
        ),
        "leave out --disable-hybrid-kv-cache-manager",
    ),
    Refusal(
        "chunked local attention on a GPU",
        lambda s: s.device.type == "cuda" and s.model.attention_chunk_size,
        OWN_BACKEND,
        lambda s: f"attention_chunk_size: {s.model.attention_chunk_size}",
    ),
    Refusal(
        "sliding-window layers of another shape than the layers with full attention on a GPU",
        lambda s: s.device.type == "cuda" and s.local_shapes and s.local_shapes != s.full_shapes,
        OWN_BACKEND,
        lambda s: f"{s.local_shapes[0]} and {s.full_shapes[0]}",
    ),
    Refusal(
        "layers with full attention of different shapes",
        lambda s: len(s.full_shapes) > 1,
        OWN_BACKEND,
        lambda s: " and ".join(map(str, s.full_shapes)),
    ),
    Refusal(
        "layers that share another layer's KV cache",
        lambda s: getattr(s.text, "num_kv_shared_layers", None),
        OWN_BACKEND,
        lambda s: f"num_kv_shared_layers: {s.text.num_kv_shared_layers}",
    ),
    Refusal("models whose layers all slide", lambda s: s.slides_only, OWN_BACKEND, lambda s: f"over {s.window} tokens"),
    Refusal(
        "attention with logit soft-capping",
        lambda s: getattr(s.text, "attn_logit_softcapping", None),
        OWN_BACKEND,
    ),
    Refusal(
        "a KV cache of another type than the model's",
        lambda s: s.cache.cache_dtype not in ("auto", s.dtype, INT8),
        f"use --kv-cache-dtype auto or {INT8}, or the model's type where its own files ask for another",
        lambda s: f"{s.cache.cache_dtype} instead of {s.dtype}",
    ),
    Refusal(
        "a KV cache in 8 bits of a model with sliding windows on a GPU",
        lambda s: s.device.type == "cuda" and s.cache.cache_dtype == INT8 and s.model.get_sliding_window() is not None,
        "use --kv-cache-dtype auto and kv_dtype: auto",
    ),
    Refusal(
        "KV connectors with a KV cache in 8 bits",
        lambda s: s.cache.cache_dtype == INT8 and s.vllm_config.kv_transfer_config is not None,
        "leave out --kv-transfer-config, or use --kv-cache-dtype auto",
    ),
    Refusal(
        "prefixes that end within a block, of models with layers of other kinds than attention",
        lambda s: s.model.is_hybrid and s.cache.prefix_match_unit is not None,
        "leave out --prefix-match-unit",
    ),
    Refusal(
        "speculative decoding with a method that does not attend in place",
        lambda s: s.speculative is not None and not s.attends_in_place,
        "leave out --speculative-config, or serve method quest or dense on a CPU",
        lambda s: f"method: {s.config.method}",
    ),
    Refusal(
        "speculative decoding by another proposer than n-grams of the prompt",
        lambda s: s.speculative is not None and s.speculative.method != "ngram",
        'write "method": "ngram" in --speculative-config, or leave it out; serve the target model where MODEL is one '
        "that speculates for it",
        lambda s: f"method: {s.speculative.method}",
    ),
    Refusal(
        "speculative decoding of models with layers of other kinds than attention",
        lambda s: s.speculative is not None and s.model.is_hybrid,
        "leave out --speculative-config",
    ),
    Refusal(
        "another scheduler, which would use tokens that were computed without the CPU's partials",
        lambda s: s.scheduler.scheduler_cls not in (None, SCHEDULER, ASYNC_SCHEDULER, PARKING_SCHEDULER),
        "leave out --scheduler-cls",
    ),
    Refusal("pipeline parallelism", lambda s: s.parallel.pipeline_parallel_size > 1, "use --pipeline-parallel-size 1"),
    Refusal("micro-batching", lambda s: s.parallel.use_ubatching, "leave out --enable-dbo and --ubatch-size"),
    Refusal(
        "decode context parallelism",
        lambda s: s.parallel.decode_context_parallel_size > 1,
        "use --decode-context-parallel-size 1",
    ),
    Refusal(
        "Ray on a CPU, where vLLM's own platform is none that Ray's executors know",
        lambda s: (
            s.device.type == "cpu"
            and "ray" in (s.parallel.distributed_executor_backend, s.parallel.data_parallel_backend)
        ),
        "use --distributed-executor-backend mp and --data-parallel-backend mp",
    ),
    Refusal(
        # vLLM makes a connector of this setting after its platform has checked the configuration.
        "KV offloading by vLLM, as its own host pool already holds all of the KV",
        lambda s: getattr(s.cache, "kv_offloading_size", None) is not None,
        "leave out --kv-offloading-size",
    ),
    Refusal(
        "KV connectors that write pages behind its back",
        lambda s: s.has_silent_connector,
        f"choose {' or '.join(CONNECTORS[:2])} in --kv-transfer-config, or serve without a connector",
        lambda s: f"kv_connector: {s.transfer.kv_connector}",
    ),
    Refusal(
        "KV connectors on a GPU in this version",
        lambda s: s.takes_stock_pages and s.device.type != "cpu",
        "leave out --kv-transfer-config",
        lambda s: f"kv_connector: {s.transfer.kv_connector}",
    ),
    Refusal(
        "handing its KV over, which others would take for the layout of vLLM's own backend",
        lambda s: s.takes_stock_pages and s.transfer.kv_role != "kv_consumer",
        "serve prompts with vLLM's own backend, and write kv_role: kv_consumer here",
        lambda s: f"kv_role: {s.transfer.kv_role}",
    ),
    Refusal(
        "handing its KV back to the prefill server",
        lambda s: s.takes_stock_pages and s.transfer.kv_connector_extra_config.get("bidirectional_kv_xfer"),
        "leave out bidirectional_kv_xfer of kv_connector_extra_config",
    ),
    Refusal(
        "KV connectors with models that have other layers beside full attention",
        lambda s: s.takes_stock_pages and (has_local_layers(s.model) or s.model.is_hybrid),
        "leave out --kv-transfer-config for this model",
    ),
    Refusal(
        "the ExampleConnector with tensor parallelism, whose ranks would all write the same file",
        lambda s: s.reads_files and s.parallel.tensor_parallel_size > 1,
        "use --tensor-parallel-size 1",
        lambda s: f"--tensor-parallel-size {s.parallel.tensor_parallel_size}",
    ),
    Refusal(
        "LoRA together with the lookahead",
        lambda s: s.vllm_config.lora_config is not None and s.looks_ahead,
        "set lookahead: {enabled: false} or leave out --enable-lora",
    ),
)


@dataclass(frozen=True)
class Layer:
    """Arguments of an attention layer that the backend may not support."""

    alibi_slopes: list[float] | None
    logits_soft_cap: float | None
    attn_type: str
    kv_sharing_target_layer_name: str | None


LAYER_REFUSALS: tuple[Refusal[Layer], ...] = (
    Refusal("ALiBi", lambda s: s.alibi_slopes is not None, OWN_BACKEND),
    Refusal("attention with logit soft-capping", lambda s: s.logits_soft_cap, OWN_BACKEND),
    Refusal(
        "attention of other types than a decoder's",
        lambda s: s.attn_type != "decoder",
        OWN_BACKEND,
        lambda s: s.attn_type,
    ),
    Refusal(
        "layers that share another layer's KV cache", lambda s: s.kv_sharing_target_layer_name is not None, OWN_BACKEND
    ),
)


def check_engine_config(vllm_config: VllmConfig, config: HybridConfig, worker_cls: str) -> None:
    """Refuse settings that cannot work.

    vLLM derives more settings after its platform has called this function. So `hybrid serve` and every worker call it
    again, on the final configuration.

    Args:
        vllm_config: vLLM's configuration.
        config: our configuration.
        worker_cls: class path of our worker for this device.

    Raises:
        EngineError: a setting of vLLM or the model is not supported.
        ConfigError: a setting of ours is not supported.
    """
    resolve_method(config.method)
    resolve_kernel(config.workers.kernel)
    start = Start(vllm_config, config)
    model, parallel = start.model, start.parallel
    if parallel.worker_cls != worker_cls:
        raise EngineError(
            f"--worker-cls: the hybrid backend needs its own worker, {worker_cls}, instead of {parallel.worker_cls}; "
            "leave it out"
        )
    refuse(REFUSALS, start)
    config.check_page_size(start.cache.block_size, "block size", "--block-size")
    _check_transfer(start, config.page_size)
    chunk = model.attention_chunk_size
    if chunk and chunk % config.page_size:
        raise ConfigError(
            f"page_size: {config.page_size} does not divide the model's attention_chunk_size, {chunk}; set page_size: "
            f"{math.gcd(chunk, 32)}"
        )
    check_model(config, start.device, model.get_num_layers_by_block_type(parallel), *full_shape(vllm_config))


def _check_transfer(start: Start, page_size: int) -> None:
    """Raise ConfigError or EngineError if the pages of a prefill server could not be read here."""
    if not start.takes_stock_pages:
        return
    if page_size % STOCK_BLOCK:
        raise ConfigError(
            f"page_size: {page_size} does not go with --kv-transfer-config: the prefill server's blocks must be equal, "
            f"and are multiples of {STOCK_BLOCK}; set page_size: {STOCK_BLOCK} here, --block-size {STOCK_BLOCK} there"
        )
    # The import is late, because vLLM's platform imports this module when it is created.
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    if start.model.get_head_size() not in CPUAttentionBackend.get_supported_head_sizes():
        raise EngineError(
            f"--kv-transfer-config: the prefill server, vLLM's own CPU backend, has no head size of "
            f"{start.model.get_head_size()}; leave it out for this model"
        )
    if start.reads_files:
        key, extra = "shared_storage_path", start.transfer.kv_connector_extra_config
        folder = extra.get(key)
        if not isinstance(folder, str) or not Path(folder).is_dir():
            raise EngineError(
                f"--kv-transfer-config: kv_connector_extra_config: {key}: {folder!r} is no folder; "
                "name the one that the prefill server writes to"
            )
    if not start.reads_files and find_spec("nixl") is None:
        raise EngineError(
            f"--kv-transfer-config: kv_connector: {start.transfer.kv_connector} needs NIXL, which is not installed; "
            "pip install nixl, or choose ExampleConnector"
        )
