"""vLLM's CUDA platform, which honours ``--attention-backend CUSTOM`` already. NOT YET RUN ON A GPU (docs/cuda.md).

A module of its own, because importing vLLM's CUDA platform loads its CUDA extensions.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from vllm.logger import init_logger
from vllm.platforms.cuda import CudaPlatform
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from hybrid_backend.config import HybridConfig
from hybrid_backend.engines.vllm import GPU_WORKER
from hybrid_backend.engines.vllm.blocks import Blocks
from hybrid_backend.engines.vllm.footprint import MethodMemory, Room, engine_items, largest
from hybrid_backend.engines.vllm.platform import prepare
from hybrid_backend.engines.vllm.settings import chosen, replace_config
from hybrid_backend.errors import ConfigError, ModelError
from hybrid_backend.host_memory import size_text
from hybrid_backend.methods import resolve_method
from hybrid_backend.model import ModelShape, shape_from_config, spec_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.selector import AttentionSelectorConfig


_FILLED = 0.9
"""Of the room that is left: what the engine takes is estimated."""


class HybridCudaPlatform(CudaPlatform):
    """Differs from the stock platform only for those who ask for our backend."""

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        if chosen(vllm_config):
            _forgo_cached_state(vllm_config)
        config = prepare(vllm_config, super().check_and_update_config, GPU_WORKER)
        if config is not None:
            changed = bound_requests(vllm_config, config, cls.get_device_total_memory())
            if changed:
                init_logger("vllm.hybrid_backend").warning_once(changed)

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


def bound_requests(vllm_config: VllmConfig, config: HybridConfig, device_bytes: int) -> str | None:
    """Lower ``max_num_seqs`` to what a GPU of ``device_bytes`` holds; vLLM's default (256, or 1,024 on large GPUs) is
    for engines that reserve nothing for a request.

    Returns:
        what was changed and why, for the log; None: nothing was.

    Raises:
        ConfigError: not even one request fits.
    """
    scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
    if vllm_config.model_config.quantization is not None:
        return None  # what the weights take is not known before they are loaded
    try:
        shape = _share(vllm_config)
    except ModelError as error:
        return f"how many requests fit the GPU is not known ({error}); if it runs out of memory, set --max-num-seqs"
    room = Room(device_bytes, 0, scheduler.max_num_batched_tokens, utilization=cache.gpu_memory_utilization)
    memory = MethodMemory(shape, Blocks.of(shape, config.page_size), room, config)
    pages = memory.blocks.in_bytes(cache.kv_cache_memory_bytes)

    def needed(batch: int) -> int:
        engine = sum(item.bytes for item in engine_items(shape, room, batch) if item.place == "device")
        longest = vllm_config.model_config.max_model_len
        return engine + memory.windows(batch) + memory.gauges(pages, batch, longest)["hybrid_device_bytes"]

    limit, asked = room.limit("device"), scheduler.max_num_seqs
    fits = largest(lambda batch: needed(batch) <= limit, asked)
    if fits:
        _fill(vllm_config, config, shape, fits, pages, int(_FILLED * (limit - needed(fits))))
    if fits == asked:
        return None
    each = needed(2) - needed(1)
    if not fits:
        raise ConfigError(
            f"frames_per_request: {config.frames_per_request}: one request needs {size_text(needed(1))} of the GPU's "
            f"{size_text(limit)} (its memory times --gpu-memory-utilization): {size_text(each)} for its frames, the "
            "remainder for weights, digests of the host pool and the engine; choose fewer frames or a smaller "
            "host_pool.size"
        )
    scheduler.max_num_seqs = fits
    return (
        f"--max-num-seqs: {fits} requests run at once instead of {asked}: each takes {size_text(each)} of the GPU; "
        "with a smaller frames_per_request there can be more"
    )


def _fill(
    vllm_config: VllmConfig, config: HybridConfig, shape: ModelShape, requests: int, pages: int, room: int
) -> None:
    """Where requests share frames, those that fit ``room`` bytes beside the ones that so many requests bring along; not
    more than there are ``pages`` in the host pool."""
    method = resolve_method(config.method)
    model = spec_of(shape, vllm_config.model_config.max_model_len)
    layout = method.layout(config, model, torch.device("cuda"))
    if layout.shares_frames:
        more = room // (len(layout.full_layers(model)) * model.page_bytes(config.page_size))
        replace_config(vllm_config, method.filled(config, min(layout.frames(requests) + more, pages)))


def _share(vllm_config: VllmConfig) -> ModelShape:
    """What one rank holds of the model."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    dtype = str(model.dtype).removeprefix("torch.")
    shape = shape_from_config({**model.hf_text_config.to_dict(), "dtype": dtype}, str(model.model))
    ranks = parallel.tensor_parallel_size
    return replace(
        shape,
        heads=model.get_num_attention_heads(parallel),
        kv_heads=model.get_num_kv_heads(parallel),
        intermediate=shape.intermediate // ranks,
        vocab=shape.vocab // ranks,
        weight_bytes=shape.weight_bytes // ranks,
    )
