"""vLLM's CUDA platform, which honours ``--attention-backend CUSTOM`` already.

The class has a module of its own, because importing vLLM's CUDA platform loads its CUDA extensions.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.platforms.cuda import CudaPlatform
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from hybrid_backend.config import HybridConfig
from hybrid_backend.engines.vllm import GPU_WORKER
from hybrid_backend.engines.vllm.layer_kinds import full_shape
from hybrid_backend.engines.vllm.platform import RequestHooks, prepare
from hybrid_backend.engines.vllm.settings import chosen, replace_config
from hybrid_backend.errors import ModelError
from hybrid_backend.memory_plan.blocks import Blocks
from hybrid_backend.memory_plan.device import DevicePlan
from hybrid_backend.memory_plan.footprint import MemoryRoom
from hybrid_backend.model import ModelShape, shape_from_config, stored_bytes

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.selector import AttentionSelectorConfig


class HybridCudaPlatform(RequestHooks, CudaPlatform):
    """vLLM's CUDA platform. It differs from the stock one only for users who choose our backend."""

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        if chosen(vllm_config):
            _disable_cached_state(vllm_config)
        config = prepare(vllm_config, super().check_and_update_config, GPU_WORKER)
        if config is not None:
            for message in fit_device(vllm_config, config, cls.get_device_total_memory()):
                init_logger("vllm.hybrid_backend").warning_once(message)

    @classmethod
    def register_custom_kv_cache_specs(cls, vllm_config: VllmConfig) -> None:
        # A late import: the module asks for the platform, which is being made when this module is imported.
        from hybrid_backend.engines.vllm.device_groups import register_specs

        super().register_custom_kv_cache_specs(vllm_config)
        register_specs()

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: Any, attn_selector_config: AttentionSelectorConfig, num_heads: int | None = None
    ) -> str:
        """Leave the backend of sliding-window layers, which stay on the device (`device_groups`), to vLLM."""
        if selected_backend == AttentionBackendEnum.CUSTOM and attn_selector_config.has_sliding_window:
            selected_backend = None
        return str(super().get_attn_backend_cls(selected_backend, attn_selector_config, num_heads))


def _disable_cached_state(vllm_config: VllmConfig) -> None:
    """Turn prefix caching off for models with state beside attention.

    vLLM copies a cached state to another block before it continues from there, and names the blocks without their group
    (v1/worker/utils.py, ``copy_kv_cache_blocks_inplace``). On a GPU groups have pools of their own, where the number of
    a block is not enough.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    if model is None or not (model.is_hybrid and cache.enable_prefix_caching):
        return
    cache.enable_prefix_caching = False
    # vLLM sets these where prefix caching is off (model_executor/models/config.py, ``MambaModelConfig``).
    cache.mamba_cache_mode, cache.mamba_block_size = "none", model.max_model_len
    init_logger("vllm.hybrid_backend").warning_once(
        "prefix caching is off: on a GPU the hybrid backend does not support it for models with state-space or "
        "linear-attention layers"
    )


def fit_device(vllm_config: VllmConfig, config: HybridConfig, device_bytes: int) -> tuple[str, ...]:
    """Store the whole layers, the requests and the frames that a GPU of ``device_bytes`` holds (`DevicePlan.choose`).

    vLLM's default of ``max_num_seqs`` (256, or 1,024 on large GPUs) is for engines that reserve nothing for a request.

    Returns:
        lines for the log that say what was lowered, and why.

    Raises:
        ConfigError: not even one request fits.
    """
    scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
    try:
        shape = replace(_rank_shape(vllm_config), kv_dtype=config.kv_dtype)
    except ModelError as error:
        return (f"how many requests fit the GPU is not known ({error}); if it runs out of memory, set --max-num-seqs",)
    room = MemoryRoom(device_bytes, 0, scheduler.max_num_batched_tokens, utilization=cache.gpu_memory_utilization)
    blocks = Blocks.of(shape, config.page_size)
    plan = DevicePlan(shape, blocks, room, cache.kv_cache_memory_bytes, vllm_config.model_config.max_model_len)
    choice = plan.choose(config, scheduler.max_num_seqs)
    replace_config(vllm_config, choice.config)
    if choice.requests < scheduler.max_num_seqs:
        scheduler.max_num_seqs = choice.requests
        _capture_full_batch(vllm_config)
    return choice.messages


def _capture_full_batch(vllm_config: VllmConfig) -> None:
    """Have vLLM capture a graph for a batch of ``max_num_seqs`` rows.

    vLLM has chosen the sizes of graphs before it asks the platform (config/vllm.py, ``_set_cudagraph_sizes``).
    """
    compilation, most = vllm_config.compilation_config, vllm_config.scheduler_config.max_num_seqs
    sizes = compilation.cudagraph_capture_sizes
    if sizes and most < sizes[-1] and most not in sizes:
        compilation.cudagraph_capture_sizes = sorted([*sizes, most])
        compilation.post_init_cudagraph_sizes()


def _rank_shape(vllm_config: VllmConfig) -> ModelShape:
    """Return the shape of one rank's part of the model."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    dtype = str(model.dtype).removeprefix("torch.")
    shape = shape_from_config({**model.hf_text_config.to_dict(), "dtype": dtype}, str(model.model))
    ranks = parallel.tensor_parallel_size
    if model.quantization is not None:
        stored = stored_bytes(str(model.model), model.revision)
        if not stored:
            raise ModelError("its quantised weights are not here yet")
        shape = replace(shape, weight_bytes=stored)
    full = full_shape(vllm_config)
    return replace(
        shape,
        heads=full.heads,
        kv_heads=full.kv_heads,
        intermediate=shape.intermediate // ranks,
        vocab=shape.vocab // ranks,
        weight_bytes=shape.weight_bytes // ranks,
    )
