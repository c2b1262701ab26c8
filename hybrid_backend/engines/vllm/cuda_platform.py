"""vLLM's CUDA platform, which honours ``--attention-backend CUSTOM`` already.

A module of its own, because importing vLLM's CUDA platform loads its CUDA extensions.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.platforms.cuda import CudaPlatform
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from hybrid_backend.config import HybridConfig
from hybrid_backend.engines.vllm import GPU_WORKER
from hybrid_backend.engines.vllm.asked import add_middleware, check_asked
from hybrid_backend.engines.vllm.blocks import Blocks
from hybrid_backend.engines.vllm.card import Card
from hybrid_backend.engines.vllm.footprint import Room
from hybrid_backend.engines.vllm.platform import prepare
from hybrid_backend.engines.vllm.settings import chosen, replace_config
from hybrid_backend.errors import ConfigError, ModelError
from hybrid_backend.host_memory import size_text
from hybrid_backend.model import ModelShape, shape_from_config, stored_bytes

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.attention.selector import AttentionSelectorConfig


class HybridCudaPlatform(CudaPlatform):
    """Differs from the stock platform only for those who ask for our backend."""

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        if chosen(vllm_config):
            _forgo_cached_state(vllm_config)
        config = prepare(vllm_config, super().check_and_update_config, GPU_WORKER)
        if config is not None:
            for told in bound_requests(vllm_config, config, cls.get_device_total_memory()):
                init_logger("vllm.hybrid_backend").warning_once(told)

    @classmethod
    def pre_register_and_update(cls, parser: FlexibleArgumentParser | None = None) -> None:
        super().pre_register_and_update(parser)
        add_middleware(parser)

    @classmethod
    def validate_request(cls, *request: Any, **named: Any) -> None:
        super().validate_request(*request, **named)
        check_asked(*request, **named)

    @classmethod
    def register_custom_kv_cache_specs(cls, vllm_config: VllmConfig) -> None:
        # Not at the top: it asks for the platform, which is being made when this module is imported.
        from hybrid_backend.engines.vllm.device_groups import register_specs

        super().register_custom_kv_cache_specs(vllm_config)
        register_specs()

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: Any, attn_selector_config: AttentionSelectorConfig, num_heads: int | None = None
    ) -> str:
        """Layers with a sliding window stay on the device (`device_groups`): vLLM chooses their backend."""
        if selected_backend == AttentionBackendEnum.CUSTOM and attn_selector_config.has_sliding_window:
            selected_backend = None
        return str(super().get_attn_backend_cls(selected_backend, attn_selector_config, num_heads))


def _forgo_cached_state(vllm_config: VllmConfig) -> None:
    """Models with state beside attention have no prefix cache on a GPU: vLLM copies a cached state to another block
    before it goes on from there, and names the blocks without their group (v1/worker/utils.py,
    ``copy_kv_cache_blocks_inplace``), which is not enough where groups have pools of their own."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    if model is None or not (model.is_hybrid and cache.enable_prefix_caching):
        return
    cache.enable_prefix_caching = False
    # As vLLM sets them where prefix caching is off (model_executor/models/config.py, ``MambaModelConfig``).
    cache.mamba_cache_mode, cache.mamba_block_size = "none", model.max_model_len
    init_logger("vllm.hybrid_backend").warning_once(
        "prefix caching is off: on a GPU the hybrid backend does not support it for models with state-space or "
        "linear-attention layers"
    )


def bound_requests(vllm_config: VllmConfig, config: HybridConfig, device_bytes: int) -> list[str]:
    """What a GPU of ``device_bytes`` holds: which exact layers stay on it whole, how many requests run at once, how
    many frames each has. ``max_num_seqs`` is lowered to that; vLLM's default (256, or 1,024 on large GPUs) is for
    engines that reserve nothing for a request.

    Returns:
        what was changed and why, for the log.

    Raises:
        ConfigError: not even one request fits.
    """
    scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
    try:
        shape = _share(vllm_config)
    except ModelError as error:
        return [f"how many requests fit the GPU is not known ({error}); if it runs out of memory, set --max-num-seqs"]
    room = Room(device_bytes, 0, scheduler.max_num_batched_tokens, utilization=cache.gpu_memory_utilization)
    longest, asked = vllm_config.model_config.max_model_len, scheduler.max_num_seqs
    card = Card(shape, Blocks.of(shape, config.page_size), room, cache.kv_cache_memory_bytes, longest)
    told: list[str] = []

    config, kept = card.with_whole_layers(config, asked)
    if kept is not None:
        told.append(kept)
    fits = card.requests(config, asked)
    needed, limit = card.needed(config, 1), room.limit("device")
    each = card.needed(config, 2) - needed
    if not fits:
        raise ConfigError(
            f"frames_per_request: {config.frames_per_request}: one request needs {size_text(needed)} of the GPU's "
            f"{size_text(limit)} (its memory times --gpu-memory-utilization): {size_text(each)} for its frames, the "
            "remainder for weights, digests of the host pool and the engine; choose fewer frames or a smaller "
            "host_pool.size"
        )
    replace_config(vllm_config, card.filled(config, fits))
    if fits < asked:
        scheduler.max_num_seqs = fits
        _capture_full_batch(vllm_config)
        told.append(
            f"--max-num-seqs: {fits} requests run at once instead of {asked}: each takes {size_text(each)} of the GPU; "
            "with a smaller frames_per_request there can be more"
        )
    return told


def _capture_full_batch(vllm_config: VllmConfig) -> None:
    """vLLM has chosen the sizes of graphs before it asks the platform (config/vllm.py, ``_set_cudagraph_sizes``): a
    batch of as many requests as there can be has its graph too."""
    compilation, most = vllm_config.compilation_config, vllm_config.scheduler_config.max_num_seqs
    sizes = compilation.cudagraph_capture_sizes
    if sizes and most < sizes[-1] and most not in sizes:
        compilation.cudagraph_capture_sizes = sorted([*sizes, most])
        compilation.post_init_cudagraph_sizes()


def _share(vllm_config: VllmConfig) -> ModelShape:
    """What one rank holds of the model."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    dtype = str(model.dtype).removeprefix("torch.")
    shape = shape_from_config({**model.hf_text_config.to_dict(), "dtype": dtype}, str(model.model))
    ranks = parallel.tensor_parallel_size
    if model.quantization is not None:
        stored = stored_bytes(str(model.model), model.revision)
        if not stored:
            raise ModelError("its quantised weights are not here yet")
        shape = replace(shape, weight_bytes=stored)
    return replace(
        shape,
        heads=model.get_num_attention_heads(parallel),
        kv_heads=model.get_num_kv_heads(parallel),
        intermediate=shape.intermediate // ranks,
        vocab=shape.vocab // ranks,
        weight_bytes=shape.weight_bytes // ranks,
    )
