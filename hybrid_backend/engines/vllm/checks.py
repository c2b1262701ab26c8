"""What the backend does not support is refused at start, in one line, before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hybrid_backend.config import HybridConfig
from hybrid_backend.engines.refusal import Refusal, refuse
from hybrid_backend.engines.vllm import (
    ASYNC_SCHEDULER,
    CONNECTOR_MODULE,
    CONNECTORS,
    OWN_BACKEND,
    PARKING_SCHEDULER,
    SCHEDULER,
)
from hybrid_backend.errors import ConfigError, EngineError
from hybrid_backend.methods import resolve_method
from hybrid_backend.step.method import looks_ahead
from hybrid_backend.step.operations import check_shape
from hybrid_backend.workers import resolve_kernel

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True)
class Start:
    """What is to be served, as vLLM and we have it."""

    vllm_config: VllmConfig
    config: HybridConfig

    @cached_property
    def model(self) -> Any:
        return self.vllm_config.model_config

    @cached_property
    def parallel(self) -> Any:
        return self.vllm_config.parallel_config

    @cached_property
    def scheduler(self) -> Any:
        return self.vllm_config.scheduler_config

    @cached_property
    def device(self) -> torch.device:
        return torch.device(self.vllm_config.device_config.device_type)

    @property
    def cache_dtype(self) -> str:
        return self.vllm_config.cache_config.cache_dtype

    @property
    def dtype(self) -> str:
        return str(self.model.dtype).removeprefix("torch.")

    @property
    def window(self) -> int | None:
        return getattr(self.model.hf_text_config, "sliding_window", None)

    @property
    def slides_only(self) -> bool:
        """Whether no layer has full attention."""
        if self.window is None:
            return False
        kinds = getattr(self.model.hf_text_config, "layer_types", None)
        if kinds:
            return all(kind == "sliding_attention" for kind in kinds)
        return self.model.get_sliding_window() is not None

    @property
    def asks_for_ray(self) -> bool:
        return "ray" in (self.parallel.distributed_executor_backend, self.parallel.data_parallel_backend)

    @property
    def transfer(self) -> Any:
        return self.vllm_config.kv_transfer_config

    @property
    def takes_stock_pages(self) -> bool:
        """From a prefill server with vLLM's own backend, through one of vLLM's own connectors."""
        asked = self.transfer
        return (
            asked is not None
            and asked.kv_connector in CONNECTORS
            and (asked.kv_connector_module_path or CONNECTOR_MODULE) == CONNECTOR_MODULE
        )

    @property
    def reads_files(self) -> bool:
        return self.takes_stock_pages and self.transfer.kv_connector == "ExampleConnector"

    @cached_property
    def has_silent_connector(self) -> bool:
        """A connector may say that it tells the runtime which pages it wrote (`HybridRuntime.imported`)."""
        if self.transfer is None or self.takes_stock_pages:
            return False
        # Not at the top: it asks for the platform, which is being made when this module is imported.
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        try:
            kind = KVConnectorFactory.get_connector_class(self.transfer)
        except (ValueError, ImportError, AttributeError):
            return True  # the engine says what is wrong with it
        return not getattr(kind, "updates_digests", False)

    @property
    def looks_ahead(self) -> bool:
        return looks_ahead(resolve_method(self.config.method), self.config)


STOCK_BLOCK = 32
"""Blocks of vLLM's own CPU backend are a multiple of it (v1/attention/backends/cpu_attn.py)."""

REFUSALS: tuple[Refusal[Start], ...] = (
    Refusal("MLA models", lambda a: a.model.use_mla, OWN_BACKEND),
    Refusal("diffusion language models", lambda a: getattr(a.model, "is_diffusion", False), OWN_BACKEND),
    Refusal("models without attention layers", lambda a: a.model.is_attention_free, OWN_BACKEND),
    Refusal(
        "models that do not generate text",
        lambda a: a.model.is_encoder_decoder or a.model.runner_type != "generate",
        OWN_BACKEND,
    ),
    Refusal(
        "one KV group for all layers of a model with sliding windows on a GPU",
        lambda a: (
            a.device.type == "cuda"
            and a.scheduler.disable_hybrid_kv_cache_manager
            and a.model.get_sliding_window() is not None
        ),
        "leave out --disable-hybrid-kv-cache-manager",
    ),
    Refusal(
        "chunked local attention", lambda a: getattr(a.model.hf_text_config, "attention_chunk_size", None), OWN_BACKEND
    ),
    Refusal("models whose layers all slide", lambda a: a.slides_only, OWN_BACKEND, lambda a: f"over {a.window} tokens"),
    Refusal(
        "attention with logit soft-capping",
        lambda a: getattr(a.model.hf_text_config, "attn_logit_softcapping", None),
        OWN_BACKEND,
    ),
    Refusal(
        "a KV cache of another type than the model's",
        lambda a: a.cache_dtype != "auto" and a.cache_dtype != a.dtype,
        "use --kv-cache-dtype auto, or the model's type where its own files ask for another",
        lambda a: f"{a.cache_dtype} instead of {a.dtype}",
    ),
    Refusal(
        "prefixes that end within a block, of models with layers of other kinds than attention",
        lambda a: a.model.is_hybrid and a.vllm_config.cache_config.prefix_match_unit is not None,
        "leave out --prefix-match-unit",
    ),
    Refusal(
        "speculative decoding",
        lambda a: a.vllm_config.speculative_config is not None,
        "leave out --speculative-config, or serve the target model where MODEL is one that speculates for it",
    ),
    Refusal(
        "another scheduler, which would use tokens that were computed without the CPU's partials",
        lambda a: a.scheduler.scheduler_cls not in (None, SCHEDULER, ASYNC_SCHEDULER, PARKING_SCHEDULER),
        "leave out --scheduler-cls",
    ),
    Refusal("pipeline parallelism", lambda a: a.parallel.pipeline_parallel_size > 1, "use --pipeline-parallel-size 1"),
    Refusal("micro-batching", lambda a: a.parallel.use_ubatching, "leave out --enable-dbo and --ubatch-size"),
    Refusal(
        "decode context parallelism",
        lambda a: a.parallel.decode_context_parallel_size > 1,
        "use --decode-context-parallel-size 1",
    ),
    Refusal(
        "Ray on a CPU, where vLLM's own platform is none that Ray's executors know",
        lambda a: a.asks_for_ray and a.device.type == "cpu",
        "use --distributed-executor-backend mp and --data-parallel-backend mp",
    ),
    Refusal(
        # vLLM makes a connector of this setting after its platform has checked the configuration.
        "KV offloading by vLLM, as its own host pool already holds all of the KV",
        lambda a: getattr(a.vllm_config.cache_config, "kv_offloading_size", None) is not None,
        "leave out --kv-offloading-size",
    ),
    Refusal(
        "KV connectors that write pages behind its back",
        lambda a: a.has_silent_connector,
        f"choose {' or '.join(CONNECTORS[:2])} in --kv-transfer-config, or serve without a connector",
        lambda a: f"kv_connector: {a.transfer.kv_connector}",
    ),
    Refusal(
        "KV connectors on a GPU in this version",
        lambda a: a.takes_stock_pages and a.device.type != "cpu",
        "leave out --kv-transfer-config",
        lambda a: f"kv_connector: {a.transfer.kv_connector}",
    ),
    Refusal(
        "handing its KV over, which others would take for the layout of vLLM's own backend",
        lambda a: a.takes_stock_pages and a.transfer.kv_role != "kv_consumer",
        "serve prompts with vLLM's own backend, and write kv_role: kv_consumer here",
        lambda a: f"kv_role: {a.transfer.kv_role}",
    ),
    Refusal(
        "handing its KV back to the prefill server",
        lambda a: a.takes_stock_pages and a.transfer.kv_connector_extra_config.get("bidirectional_kv_xfer"),
        "leave out bidirectional_kv_xfer of kv_connector_extra_config",
    ),
    Refusal(
        "KV connectors with models that have other layers beside full attention",
        lambda a: a.takes_stock_pages and (a.model.get_sliding_window() is not None or a.model.is_hybrid),
        "leave out --kv-transfer-config for this model",
    ),
    Refusal(
        "the ExampleConnector with tensor parallelism, whose ranks would all write the same file",
        lambda a: a.reads_files and a.parallel.tensor_parallel_size > 1,
        "use --tensor-parallel-size 1",
        lambda a: f"--tensor-parallel-size {a.parallel.tensor_parallel_size}",
    ),
    Refusal(
        "LoRA together with the lookahead",
        lambda a: a.vllm_config.lora_config is not None and a.looks_ahead,
        "set lookahead: {enabled: false} or leave out --enable-lora",
    ),
)


@dataclass(frozen=True)
class Layer:
    """What vLLM asks of an attention layer."""

    alibi_slopes: list[float] | None
    logits_soft_cap: float | None
    attn_type: str
    kv_sharing_target_layer_name: str | None


LAYER_REFUSALS: tuple[Refusal[Layer], ...] = (
    Refusal("ALiBi", lambda a: a.alibi_slopes is not None, OWN_BACKEND),
    Refusal("attention with logit soft-capping", lambda a: a.logits_soft_cap, OWN_BACKEND),
    Refusal(
        "attention of other types than a decoder's",
        lambda a: a.attn_type != "decoder",
        OWN_BACKEND,
        lambda a: a.attn_type,
    ),
    Refusal(
        "layers that share another layer's KV cache", lambda a: a.kv_sharing_target_layer_name is not None, OWN_BACKEND
    ),
)


def check_engine_config(vllm_config: VllmConfig, config: HybridConfig, worker_cls: str) -> None:
    """Refuse what cannot work.

    vLLM derives more settings after its platform has had this called: `hybrid serve` and every worker call it again, on
    the final configuration.

    Args:
        vllm_config: vLLM's configuration.
        config: ours.
        worker_cls: class path of our worker for this device.

    Raises:
        EngineError: vLLM's settings or the model; the first that is not supported.
        ConfigError: our settings.
    """
    method = resolve_method(config.method)
    resolve_kernel(config.workers.kernel)
    start = Start(vllm_config, config)
    parallel = vllm_config.parallel_config
    if parallel.worker_cls != worker_cls:
        raise EngineError(
            f"--worker-cls: the hybrid backend needs its own worker, {worker_cls}, instead of {parallel.worker_cls}; "
            "leave it out"
        )
    refuse(REFUSALS, start)
    config.check_page_size(vllm_config.cache_config.block_size, "block size", "--block-size")
    _check_transfer(start, config.page_size)
    layers = vllm_config.model_config.get_num_layers_by_block_type(parallel)
    config.validate_for(layers)
    kv_heads = start.model.get_num_kv_heads(parallel)
    method.check(config, start.device, layers, kv_heads)
    heads = start.model.get_num_attention_heads(parallel)
    check_shape(config, heads, kv_heads, start.model.get_head_size(), start.device)


def _check_transfer(start: Start, page_size: int) -> None:
    """Raise ConfigError or EngineError if what a prefill server writes could not be read here."""
    if not start.takes_stock_pages:
        return
    if page_size % STOCK_BLOCK:
        raise ConfigError(
            f"page_size: {page_size} does not go with --kv-transfer-config: the prefill server's blocks must be equal, "
            f"and are multiples of {STOCK_BLOCK}; set page_size: {STOCK_BLOCK} here, --block-size {STOCK_BLOCK} there"
        )
    # Not at the top, as above.
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
