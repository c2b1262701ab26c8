"""Decision whether rows may wait from one step to the next (`execution.parking`) in an engine's configuration."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from hybrid_backend.config import HybridConfig
from hybrid_backend.engines.refusal import Refusal
from hybrid_backend.engines.vllm.settings import add_option
from hybrid_backend.errors import EngineError
from hybrid_backend.methods import resolve_method
from hybrid_backend.step.method import may_park, needs_parking

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_KEY = "hybrid_parks"
"""Key beside our configuration, and so among the options that vLLM's compile-cache key is made of: the compiled graphs
differ by their hooks."""
_FIX = "choose another model"

_RUNNER_VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"
_V2_RUNNER: Refusal[VllmConfig] = Refusal(
    "vLLM's V2 model runner, which keeps the lengths of sequences on the GPU",
    lambda config: config.use_v2_model_runner,
    f"set {_RUNNER_VARIABLE}=0",
)
OBSTACLES: tuple[Refusal[VllmConfig], ...] = (
    _V2_RUNNER,
    Refusal(
        "tensor parallelism",
        lambda config: config.parallel_config.tensor_parallel_size > 1,
        "use --tensor-parallel-size 1",
    ),
    Refusal("LoRA", lambda config: config.lora_config is not None, "leave out --enable-lora"),
    Refusal("KV connectors", lambda config: config.kv_transfer_config is not None, "leave out --kv-transfer-config"),
    Refusal(
        "quantised weights, whose scales may be shared by rows",
        lambda config: config.model_config.quantization is not None,
        _FIX,
    ),
    Refusal("sliding-window layers", lambda config: config.model_config.get_sliding_window() is not None, _FIX),
    Refusal("chunked local attention", lambda config: config.model_config.attention_chunk_size, _FIX),
    Refusal(
        "layers of other kinds than attention, whose state takes every token once",
        lambda config: config.model_config.is_hybrid,
        _FIX,
    ),
    Refusal(
        "models that run as Transformers code", lambda config: config.model_config.using_transformers_backend(), _FIX
    ),
)


def parks_rows(vllm_config: VllmConfig) -> bool:
    """Tell whether rows may wait, in a configuration that our platform has prepared."""
    return bool(vllm_config.additional_config.get(_KEY))


def choose_parking(vllm_config: VllmConfig, config: HybridConfig) -> bool:
    """Decide whether rows may wait, and turn asynchronous scheduling off if they may.

    The scheduler must know which rows yielded a token before it gives them the next one.

    Raises:
        EngineError: the configuration asks for rows that wait, and this engine cannot have them.
    """
    can_wait = may_park(resolve_method(config.method), config)
    if can_wait:
        _choose_v1(vllm_config, config)
    obstacle = next((entry for entry in OBSTACLES if can_wait and entry.is_set(vllm_config)), None)
    parks = can_wait and obstacle is None
    add_option(vllm_config, _KEY, parks)
    if parks and vllm_config.scheduler_config.async_scheduling:
        vllm_config.scheduler_config.async_scheduling = False
        init_logger("vllm.hybrid_backend").info_once(
            f"{config.method}.strategy: asynchronous scheduling is off, so that rows may wait from one step to the next"
        )
    if obstacle is not None:
        forgo_parking(vllm_config, config, obstacle.what, obstacle.fix)
    return parks


def _choose_v1(vllm_config: VllmConfig, config: HybridConfig) -> None:
    """Have vLLM take its V1 model runner, where V2 is all that keeps rows from waiting and the user did not choose it.

    The choice is an environment variable (config/vllm.py, ``use_v2_model_runner``), which the engine's processes
    inherit.
    """
    others = [entry for entry in OBSTACLES if entry is not _V2_RUNNER]
    is_chosen = os.environ.get(_RUNNER_VARIABLE) is not None
    if is_chosen or not _V2_RUNNER.is_set(vllm_config) or any(entry.is_set(vllm_config) for entry in others):
        return
    os.environ[_RUNNER_VARIABLE] = "0"
    if _V2_RUNNER.is_set(vllm_config):  # Another setting of vLLM asks for V2.
        del os.environ[_RUNNER_VARIABLE]
        return
    init_logger("vllm.hybrid_backend").info_once(
        f"{config.method}.strategy: vLLM's V1 model runner is taken ({_RUNNER_VARIABLE}=0), so that rows may wait from "
        f"one step to the next; {_RUNNER_VARIABLE}=1 keeps V2, where requests on the CPU are waited for in every layer"
    )


def forgo_parking(vllm_config: VllmConfig, config: HybridConfig, what: str, fix: str = _FIX) -> None:
    """Have every layer wait for the CPU, because of ``what``.

    Raises:
        EngineError: the configuration does not leave this open.
    """
    key = f"{config.method}.strategy"
    if needs_parking(resolve_method(config.method), config):
        raise EngineError(f"{key}: overlap does not work with {what}; {fix}, or write auto or lockstep")
    add_option(vllm_config, _KEY, False)
    init_logger("vllm.hybrid_backend").info_once(
        f"{key}: auto: requests on the CPU are waited for in every layer (lockstep), as overlap does not "
        f"work with {what}; {fix} for it"
    )
