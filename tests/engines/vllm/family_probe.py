# ruff: noqa: E402 (Triton must be told to interpret before vLLM imports it)
"""Serves one tiny random-weight model per family, stock and hybrid, in this process; writes what it saw as JSON.

``family_probe.py FOLDER NAME...`` writes FOLDER/NAME.json; a NAME is ``MODEL`` or ``MODEL.PROBE``
(`families.MODELS`, `_PROBES`). A failure is an ``{"error": ...}`` there, so that one family never hides another.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",  # the worker lives here, so that its modules can be watched
    VLLM_CPU_INT4_W4A8="0",  # with AMX: inputs of 4-bit weights are not quantised
    VLLM_USE_LAYERNAME="0",  # as `hybrid serve` sets it
    OMP_NUM_THREADS="1",  # the models are tiny: a second thread only waits for the first
    VLLM_NO_USAGE_STATS="1",
    VLLM_LOGGING_LEVEL="WARNING",
    HF_HUB_OFFLINE="1",
)

from tests.support.interpreter import interpret_triton

interpret_triton()  # before vLLM imports Triton

import torch
from PIL import Image
from prometheus_client import CollectorRegistry
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from vllm import LLM, SamplingParams
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.model_executor.models import ModelRegistry

from hybrid_backend.engines.vllm import BACKEND, worker
from hybrid_backend.errors import EngineError
from tests.engines.probes import write
from tests.engines.vllm import gated_delta
from tests.engines.vllm.families import (
    DTYPES,
    FINDS_PREFIXES,
    IMAGE,
    IMAGE_BEGINS,
    IMAGE_ENDS,
    LOCAL,
    PARKED,
    VISION,
    VOCABULARY,
    build,
)
from tests.engines.vllm.family_watch import never_in_time_on_second, tiers, watch_order, watch_own_input
from tests.support.garbage import leave_out_what_was_imported
from tests.support.models import move_weights

leave_out_what_was_imported()

PAGE, NEW_SINK = 32, 2.0
rotate = RotaryEmbedding.forward_cpu


def rotate_flat(self: Any, positions: Tensor, q: Tensor, k: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """vLLM 0.32's kernel takes queries ``[tokens, heads, head_dim]``, as LFM2's, for ``[batch, tokens, width]`` and
    reads positions that are not there. Mended for the stock backend and ours alike."""
    flat_q, flat_k = rotate(self, positions, q.flatten(1), None if k is None else k.flatten(1))
    return flat_q.view_as(q), None if k is None else flat_k.view_as(k)


RotaryEmbedding.forward_cpu = rotate_flat  # type: ignore[method-assign]
gated_delta.install()

TOKENS, FEW = 24, 5
PROMPTS = [20, 200, 500, 90]
ALONE = PROMPTS[1:2]
LONG = 120  # tokens, over which sequences grow by some blocks
BLOCKS = {"lfm2": 40, "nemotron_h": 40, "granite4": 24, "qwen3_next": 40, "gemma4_wide": 40, "llama4": 48}
_SERVED = {"model": {"match": "*"}, "page_size": PAGE}  # all else as on a CPU by default: in place
_EXACT = {
    **_SERVED,
    "method": "scout",
    "budget_tokens": 4 * PAGE,
    "frames_per_request": 24,
    "lookahead": {"enabled": True},
    "metrics": {"sample_interval": 1},  # every step: the lookahead runs although everything is resident
}
# What the frames cannot hold is the CPU's, by the real query, and the budget is everything: nothing is approximate.
_ON_CPU = _EXACT | {
    "frames_per_request": 4,
    "budget_tokens": 20 * PAGE,
    "lookahead": {"enabled": True, "partial_query": "real"},
}
# The shortest prompt is on the device, the others are the CPU's; rows wait from one step to the next if they can.
_PARKED = {**_SERVED, "method": "apex", "apex": {"device_tokens": 5 * PAGE}}
_OVERLAP = _PARKED | {"apex": {"device_tokens": 5 * PAGE, "strategy": "overlap"}}
_SPARSE = _EXACT | {"frames_per_request": 4, "recall": {"intervals": 2}}


@contextmanager
def engine(model: Path, hybrid: dict[str, Any] | None = None, **changes: Any) -> Iterator[LLM]:
    """vLLM in this process: the stock backend, or ours with this configuration. ``changes``: engine arguments."""
    vars(worker)["REGISTRY"] = CollectorRegistry()  # an engine per process is the rule; here there are several
    options: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "dtype": DTYPES.get(model.name, "float32"),
        "block_size": PAGE,
        "max_model_len": 640,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 128,
        "enable_prefix_caching": False,
        "kv_cache_memory_bytes": 32 * 2**20,
        "enforce_eager": True,
        "disable_log_stats": True,
    }
    if model.name in VISION:
        options |= {"skip_tokenizer_init": False, "limit_mm_per_prompt": {"image": 1, "video": 0}}
    if hybrid is not None:
        options |= {
            "attention_backend": BACKEND,
            "additional_config": {"hybrid": hybrid},
        }
    llm = None
    try:
        llm = LLM(str(model), **options | changes)
        yield llm
    finally:
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()


def prompts_of(lengths: list[int]) -> list[list[int]]:
    return [torch.randint(1, VOCABULARY, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in lengths]


def with_image(prompt: list[int]) -> dict[str, Any]:
    """Ten tokens, an image and the rest. The image's 12 tokens take 4 positions, so the rest's are not its numbers."""
    pixels = torch.randint(0, 256, (48, 64, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    return {
        "prompt_token_ids": [*prompt[:10], IMAGE_BEGINS, IMAGE, IMAGE_ENDS, *prompt[10:]],
        "multi_modal_data": {"image": Image.fromarray(pixels.numpy())},
    }


def asked(llm: LLM, lengths: list[int]) -> list[dict[str, Any]]:
    """Of those that see, the longer prompts have an image."""
    sees = llm.model_config.is_multimodal_model
    return [with_image(p) if sees and len(p) > 100 else {"prompt_token_ids": p} for p in prompts_of(lengths)]


def generate(llm: LLM, tokens: int = TOKENS, lengths: list[int] = PROMPTS) -> dict[str, Any]:
    """Greedy tokens and their log-probabilities, all prompts at once."""
    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=1)
    requests = llm.generate(asked(llm, lengths), sampling, use_tqdm=False)
    outputs = [request.outputs[0] for request in requests]
    return {
        "asked": [len(request.prompt_token_ids) for request in requests],
        "cached": [request.num_cached_tokens for request in requests],
        "tokens": [list(o.token_ids) for o in outputs],
        "logprobs": [
            [step[token].logprob for step, token in zip(o.logprobs or [], o.token_ids, strict=True)] for o in outputs
        ],
    }


def in_worker(llm: LLM, look: Callable[[Any], Any]) -> Any:
    return llm.collective_rpc(look)[0]


def served(llm: LLM, tokens: int = TOKENS) -> dict[str, Any]:
    """`generate`, and what the runtime did."""
    answers = generate(llm, tokens)
    seen: dict[str, Any] = in_worker(llm, tiers)
    return answers | seen


def parked(llm: LLM) -> dict[str, Any]:
    """`generate`, and how rows on the CPU were attended."""
    answers = generate(llm)
    strategies = in_worker(llm, lambda w: sorted({done for done, _ in w.session.runtime.stats.steps}))
    return answers | {
        "strategies": strategies,
        "cpu_ratio": in_worker(llm, lambda w: w.session.runtime.stats.cpu_ratio()),
    }


def other_checkpoint(model: Path) -> Path:
    """Return a checkpoint of the same family with other random weights; it is written at the first call."""
    folder = model.parent / "other" / model.name
    return folder if folder.exists() else build(model.name, folder, seed=1)


def changed(llm: LLM, checkpoint: Path) -> dict[str, Any]:
    """`generate` after another checkpoint is loaded into the running engine and all parameters are moved; else the
    error, which hides nothing that was seen before."""
    try:
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(checkpoint)})
        llm.apply_model(move_weights)
        return generate(llm)
    except Exception:
        return {"error": traceback.format_exc()}


def family(model: Path) -> dict[str, Any]:
    """Stock; in place; exact, most of it on the CPU workers; the prediction from a layer's own input; sparse; rows that
    wait. Three of these engines get other weights, with which a last one starts."""
    found: dict[str, Any] = {}
    other = other_checkpoint(model)
    with engine(model) as llm:
        found["stock"], found["stock_alone"] = generate(llm), generate(llm, lengths=ALONE)
        found["changed_stock"] = changed(llm, other)
    with engine(model, _SERVED) as llm:
        found["in_place"] = served(llm)
        found["changed_in_place"] = changed(llm, other)
    with engine(model, _ON_CPU) as llm:
        found["mine"], found["mine_alone"] = served(llm), generate(llm, lengths=ALONE)
        if found["mine"]["predicted"]:
            errors = in_worker(llm, watch_own_input)
            generate(llm, FEW)
            found["errors"] = {layer: max(values) for layer, values in errors.items()}
            found["compared"] = {layer: len(values) for layer, values in errors.items()}
    with engine(model, _SPARSE) as llm:
        found["sparse"] = served(llm)
        found["changed_sparse"] = changed(llm, other)
    with engine(other, _SPARSE) as llm:
        found["started_sparse"] = generate(llm)
    if model.name in PARKED:
        with engine(model, _PARKED if "gemma3" in model.name else _OVERLAP) as llm:
            found["parked"] = parked(llm)
    return found


def half(model: Path) -> dict[str, Any]:
    """In bf16, in place: before attention sinks change, after that, and of an engine that starts with the new ones."""
    results: dict[str, Any] = {}
    other = model.parent / "sinks" / model.name
    shutil.copytree(model, other)
    weights = load_file(other / "model.safetensors")
    sinks = {name: torch.full_like(weight, NEW_SINK) for name, weight in weights.items() if name.endswith("sinks")}
    save_file(weights | sinks, other / "model.safetensors", metadata={"format": "pt"})
    with engine(model, _SERVED, dtype="bfloat16") as llm:
        results["before"] = generate(llm)
        llm.apply_model(set_sinks)
        llm.reset_prefix_cache()  # keys and values follow from the sinks of the layers before
        results["changed"] = generate(llm)
    with engine(other, _SERVED, dtype="bfloat16") as llm:
        results["started"] = generate(llm)
    return results


def set_sinks(model: nn.Module) -> None:
    """Give every layer new attention sinks in other memory, as a trainer does."""
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            parameter.data = torch.full_like(parameter, NEW_SINK)


def kept_state(model: Path) -> dict[str, Any]:
    """Prefixes that are found again, requests that are preempted or aborted; there is little memory."""
    found: dict[str, Any] = {}
    # So many blocks that the four prompts begin, and cannot all end.
    little: dict[str, Any] = {"num_gpu_blocks_override": BLOCKS[model.name]}
    # vLLM 0.32 fails on a CPU where a Mamba 2 layer keeps the states of prefixes (mamba_mixer2.py, has_checkpoints).
    little["enable_prefix_caching"] = model.name in FINDS_PREFIXES
    with engine(model, **little) as llm:
        found["stock"] = generate(llm, LONG)
        found["again_stock"] = [generate(llm, LONG, [500]) for _ in range(2)]
    with engine(model, _SERVED if model.name in LOCAL else _ON_CPU, **little) as llm:
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler  # type: ignore[attr-defined]
        preempt, preempted = scheduler._preempt_request, []

        def noted(request: Any, *others: Any, **more: Any) -> None:
            preempted.append(request.request_id)
            preempt(request, *others, **more)

        scheduler._preempt_request = noted
        found["mine"] = generate(llm, LONG)
        found["preempted"] = len(preempted)
        engine_ = llm.llm_engine
        for n, prompt in enumerate(prompts_of([210, 220])):
            sampling = SamplingParams(temperature=0, max_tokens=LONG, ignore_eos=True, detokenize=False)
            engine_.add_request(f"aborted-{n}", {"prompt_token_ids": prompt}, sampling)
        for _ in range(8):
            engine_.step()
        engine_.abort_request(["aborted-0", "aborted-1"])
        found["again_mine"] = [generate(llm, LONG, [500]) for _ in range(2)]
        found["gauges"] = in_worker(llm, lambda w: w.session.runtime.gauges())
        found["pages_per_block"] = in_worker(llm, lambda w: w.session.pages_per_block)
    return found


def by_method(model: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for method in ("scout", "quest"):
        with engine(model, _EXACT | {"method": method, "budget_tokens": 24 * PAGE}) as llm:
            found[method] = served(llm)
    return found


def parallel(model: Path) -> dict[str, Any]:
    """Two ranks, each with half of the heads and a process of its own."""
    cores = sorted(os.sched_getaffinity(0))
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"{cores[0]}|{cores[-1]}"
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # the worker is asked by a function
    try:
        with engine(model, _ON_CPU, tensor_parallel_size=2) as llm:
            found = generate(llm, FEW) | {"ranks": llm.collective_rpc(tiers)}
            llm.collective_rpc(never_in_time_on_second)
            try:
                generate(llm, LONG)
            except RuntimeError as error:
                found["ended"] = str(error)
    finally:
        del os.environ["VLLM_CPU_OMP_THREADS_BIND"], os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"]
    return found


def mostly_full(model: Path) -> dict[str, Any]:
    """More layers with full attention than with sliding windows: vLLM gives each of the former a page table."""
    kinds = ["full_attention"] * 5 + ["sliding_attention"]
    shape: dict[str, Any] = {"hf_overrides": {"layer_types": kinds}}
    found: dict[str, Any] = {}
    with engine(model, **shape) as llm:
        found["stock"] = generate(llm, FEW)
    try:
        with engine(model, _SERVED, **shape):
            pass
    except EngineError as error:
        found["refused"] = str(error)
    with engine(model, _SERVED, disable_hybrid_kv_cache_manager=True, **shape) as llm:
        found["one group"] = generate(llm, FEW)
    return found


def compiled(model: Path) -> dict[str, Any]:
    """As `hybrid serve` compiles."""
    how = {"enforce_eager": False, "compilation_config": {"inductor_compile_config": {"cpp_wrapper": True}}}
    with engine(model, _EXACT, **how) as llm:
        order = in_worker(llm, watch_order)
        found = served(llm)
        mode = in_worker(llm, lambda w: w.vllm_config.compilation_config.mode.name)
    with engine(model, _OVERLAP, **how) as llm:
        found["parked"] = parked(llm)
    return found | {"mode": mode, "orders": [list(x) for x in {tuple(events) for events in order.values()}]}


# "MODEL" or "MODEL.PROBE" -> what to do with the model
_PROBES: dict[str, Callable[[Path], dict[str, Any]]] = {
    "": family,
    "methods": by_method,
    "state": kept_state,
    "parallel": parallel,
    "mostly_full": mostly_full,
    "compiled": compiled,
    "half": half,
}


def register_loaded(model: Path) -> None:
    """Register a model's class itself, which vLLM otherwise imports in a process of its own to look at it (10 s)."""
    for architecture in json.loads((model / "config.json").read_text())["architectures"]:
        ModelRegistry.register_model(architecture, ModelRegistry.models[architecture].load_model_cls())


def main(folder: Path, names: list[str]) -> None:
    def case(model: Path, probe: str) -> dict[str, Any]:
        if not model.exists():
            build(model.name, model)
        register_loaded(model)
        return _PROBES[probe](model)

    for name in names:
        which, _, probe = name.partition(".")
        write(folder, name, partial(case, folder / which, probe))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
