"""Whether rows may wait from one step to the next (`methods.apex.parking`) in an engine of this configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.logger import init_logger

from hybrid_backend.config import HybridConfig
from hybrid_backend.errors import EngineError
from hybrid_backend.methods import resolve_method
from hybrid_backend.step.method import may_park, needs_parking

if TYPE_CHECKING:
    from vllm.config import VllmConfig


_PARKS = "hybrid_parks"  # beside our configuration


def parks_rows(vllm_config: VllmConfig) -> bool:
    """Whether they do, in a configuration that our platform has prepared."""
    return bool(vllm_config.additional_config.get(_PARKS))


def choose_parking(vllm_config: VllmConfig, config: HybridConfig) -> bool:
    """Whether the method may have rows wait. Asynchronous scheduling is turned off then: the scheduler must know which
    rows yielded a token before it gives them the next one.

    Raises:
        EngineError: the configuration asks for it, and this engine cannot.
    """
    can_wait = may_park(resolve_method(config.method), config)
    obstacle = _obstacle(vllm_config) if can_wait else None
    parks = can_wait and obstacle is None
    # Among the options that vLLM's compile-cache key is made of: the graphs differ by their hooks.
    vllm_config.additional_config = {**vllm_config.additional_config, _PARKS: parks}
    if parks and vllm_config.scheduler_config.async_scheduling:
        vllm_config.scheduler_config.async_scheduling = False
        init_logger("vllm.hybrid_backend").info_once(
            f"{config.method}.strategy: asynchronous scheduling is off, so that rows may wait from one step to the next"
        )
    if obstacle is not None:
        forgo_parking(vllm_config, config, *obstacle)
    return parks


def forgo_parking(vllm_config: VllmConfig, config: HybridConfig, what: str, fix: str = "choose another model") -> None:
    """Rows are waited for in every layer, because of ``what``.

    Raises:
        EngineError: the configuration does not leave it open.
    """
    asked = f"{config.method}.strategy"
    if needs_parking(resolve_method(config.method), config):
        raise EngineError(f"{asked}: overlap does not work with {what}; {fix}, or write auto or lockstep")
    vllm_config.additional_config = {**vllm_config.additional_config, _PARKS: False}
    init_logger("vllm.hybrid_backend").info_once(
        f"{asked}: auto: requests on the CPU are waited for in every layer (lockstep), as overlap does not "
        f"work with {what}; {fix} for it"
    )


def _obstacle(vllm_config: VllmConfig) -> tuple[str, str] | None:
    """What was asked for, and the way out."""
    model, stock = vllm_config.model_config, "choose another model"
    found = [
        (
            vllm_config.use_v2_model_runner,
            "vLLM's V2 model runner, which keeps the lengths of sequences on the GPU",
            "set VLLM_USE_V2_MODEL_RUNNER=0",
        ),
        (vllm_config.parallel_config.tensor_parallel_size > 1, "tensor parallelism", "use --tensor-parallel-size 1"),
        (vllm_config.lora_config is not None, "LoRA", "leave out --enable-lora"),
        (vllm_config.kv_transfer_config is not None, "KV connectors", "leave out --kv-transfer-config"),
        (model.quantization is not None, "quantised weights, whose scales may be shared by rows", stock),
        (model.get_sliding_window() is not None, "sliding-window layers", stock),
        (model.is_hybrid, "layers of other kinds than attention, whose state takes every token once", stock),
        (model.using_transformers_backend(), "models that run as Transformers code", stock),
    ]
    return next(((what, fix) for is_there, what, fix in found if is_there), None)
