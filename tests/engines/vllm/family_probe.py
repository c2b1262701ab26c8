# ruff: noqa: E402 (Triton must be told to interpret before vLLM imports it)
"""Serves one tiny random-weight model per family, stock and hybrid, in this process; writes what it saw as JSON.

``python family_probe.py FOLDER NAME...`` writes FOLDER/NAME.json; a NAME is ``MODEL`` or ``MODEL.PROBE`` (`MODELS`,
`_PROBES`). A failure is an ``{"error": ...}`` there, so that one family never hides another.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",  # the worker lives here, so that its modules can be watched
    OMP_NUM_THREADS="1",  # the models are tiny: a second thread only waits for the first
    VLLM_NO_USAGE_STATS="1",
    VLLM_LOGGING_LEVEL="WARNING",
    HF_HUB_OFFLINE="1",
)

from tests.support.interpreter import interpret_triton

interpret_triton()  # before vLLM imports Triton

import torch
from prometheus_client import CollectorRegistry
from torch import Tensor
from vllm import LLM, SamplingParams
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

from hybrid_backend.attention.lookahead import QueryPredictor, family_of
from hybrid_backend.engines.vllm import BACKEND, CPU_WORKER, worker
from hybrid_backend.engines.vllm.hooks import lookahead_hook
from hybrid_backend.engines.vllm.session import attention_layers
from tests.support.models import peaked

PAGE = 32
WINDOW = 64
TOKENS, FEW = 24, 5
PROMPTS = [20, 200, 500]
VOCABULARY = 512
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}
_HEADS_UNLIKE_HIDDEN = {"head_dim": 32}  # heads * head_dim is not the hidden size
_SLIDING = "sliding_attention"

# name -> (Hugging Face configuration class, its arguments)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _SHAPE | _HEADS_UNLIKE_HIDDEN | {"attention_bias": True}),
    "mistral": ("MistralConfig", _SHAPE | _HEADS_UNLIKE_HIDDEN | {"sliding_window": None}),
    "qwen2": ("Qwen2Config", _SHAPE | {"hidden_size": 128}),
    "qwen3": ("Qwen3Config", _SHAPE | _HEADS_UNLIKE_HIDDEN),
    "glm4": ("Glm4Config", _SHAPE | _HEADS_UNLIKE_HIDDEN | {"attention_bias": True, "pad_token_id": 0}),
    "gemma3": (
        "Gemma3TextConfig",
        _SHAPE
        | _HEADS_UNLIKE_HIDDEN
        | {
            "num_hidden_layers": 6,
            "query_pre_attn_scalar": 24,  # a scale unlike head_dim ** -0.5
            "sliding_window": WINDOW,
            "layer_types": [_SLIDING, _SLIDING, "full_attention"] * 2,
        },
    ),
    # Families without a lookahead: one with vLLM's own model code, one that vLLM serves with Transformers' code.
    "stablelm": ("StableLmConfig", _SHAPE | {"hidden_size": 128}),
    "glm": ("GlmConfig", _SHAPE | _HEADS_UNLIKE_HIDDEN | {"pad_token_id": 0}),
}
NO_LOOKAHEAD = {"lookahead": {"enabled": False}}
_EXACT = {
    "model": {"match": "*"},
    "page_size": PAGE,
    "budget_tokens": 4 * PAGE,
    "frames_per_request": 24,
    "lookahead": {"enabled": True},
    "metrics": {"sample_interval": 1},  # every step: the lookahead runs although everything is resident
}
# What the frames cannot hold is the CPU's, by the real query, and the budget is everything: nothing is approximate.
_ON_CPU = _EXACT | {
    "tiers": "separate",
    "frames_per_request": 4,
    "budget_tokens": 20 * PAGE,
    "lookahead": {"enabled": True, "partial_query": "real"},
}
# The shortest prompt is on the device, the others are the CPU's; rows wait from one step to the next if they can.
_PARKED = {"model": {"match": "*"}, "page_size": PAGE, "method": "apex", "apex": {"device_tokens": 5 * PAGE}}
_OVERLAP = _PARKED | {"apex": {"device_tokens": 5 * PAGE, "strategy": "overlap"}}
_SPARSE = _EXACT | {"tiers": "separate", "frames_per_request": 4, "recall": {"intervals": 2}}


def build(name: str, folder: Path) -> Path:
    class_name, arguments = MODELS[name]
    peaked(class_name, **arguments).save_pretrained(folder)
    return folder


@contextmanager
def engine(model: Path, hybrid: dict[str, Any] | None = None, eager: bool = True, ranks: int = 1) -> Iterator[LLM]:
    """vLLM in this process: the stock backend, or ours with this configuration."""
    vars(worker)["REGISTRY"] = CollectorRegistry()  # an engine per process is the rule; here there are several
    options: dict[str, Any] = {}
    if hybrid is not None:
        options = {
            "attention_backend": BACKEND,
            "worker_cls": CPU_WORKER,
            "additional_config": {"hybrid": hybrid},
        }
    llm = None
    try:
        llm = LLM(
            str(model),
            skip_tokenizer_init=True,
            dtype="float32",
            block_size=PAGE,
            max_model_len=640,
            max_num_seqs=4,
            max_num_batched_tokens=128,
            enable_prefix_caching=False,
            kv_cache_memory_bytes=32 * 2**20,
            enforce_eager=eager,
            disable_log_stats=True,
            tensor_parallel_size=ranks,
            **options,
        )
        yield llm
    finally:
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()


def generate(llm: LLM, tokens: int = TOKENS) -> dict[str, Any]:
    """Greedy tokens and their log-probabilities, all prompts at once."""
    random = torch.Generator().manual_seed(1)
    prompts = [torch.randint(1, VOCABULARY, (n,), generator=random).tolist() for n in PROMPTS]
    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=1)
    outputs = [o.outputs[0] for o in llm.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False)]
    return {
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


def tiers(w: Any) -> dict[str, Any]:
    """What the runtime keeps and did, per layer."""
    runtime = w.session.runtime
    layers = runtime.stats.layers
    return {
        "windows": list(runtime.model.windows),
        "frames": sorted(runtime.tiers.frames.layers),
        "digests": sorted(runtime.tiers.digests.layers),
        "predicted": [i for i, layer in enumerate(layers) if layer.cosine_samples],
        "cosine": [layer.cosine_sum / max(1, layer.cosine_samples) for layer in layers],
        "selected": [layer.selected_tokens for layer in layers],
        "on_cpu": [layer.cpu_tokens for layer in layers],
        "lead_seconds": [layer.lead_seconds for layer in layers],
        "kv_heads": runtime.model.num_kv_heads,
        "frame_bytes": runtime.tiers.frames.nbytes,
    }


def watch_own_input(w: Any) -> dict[int, list[float]]:
    """From now on every layer predicts from its OWN input. Returns a log: the largest error of each decode step."""
    runtime = w.session.runtime
    family = family_of(w.model_config.hf_config.model_type, "auto") or "unknown"
    errors: dict[int, list[float]] = {}
    predicted: dict[int, Tensor] = {}
    forward = runtime.forward

    def note(layer: int, step: Any, query: Tensor) -> None:
        predicted[layer] = query.clone()

    def compare(layer: int, step: Any, query: Tensor, *others: Tensor) -> None:
        if step.decode is not None:
            real = step.decode.gather(query)
            errors.setdefault(layer, []).append(float((predicted.pop(layer) - real).abs().max()))
        forward(layer, step, query, *others)

    for name, attention, decoder in attention_layers(w.model_runner.get_model()):
        decoder._forward_pre_hooks.clear()
        decoder._forward_pre_hooks_with_kwargs.clear()
        attention.impl.predictor = QueryPredictor(decoder, family)
        decoder.register_forward_pre_hook(lookahead_hook(name, w.device), with_kwargs=True)
    runtime.wants_lookahead = lambda layer, step: step.decode is not None
    runtime.executor.lookahead = lambda *_: None
    runtime.lookahead = note
    runtime.forward = compare
    return errors


def watch_order(w: Any) -> dict[int, list[str]]:
    """From now on, a log of what every decode step did, in order."""
    runtime = w.session.runtime
    events: dict[int, list[str]] = {}

    def watched(name: str, call: Callable[..., None]) -> Callable[..., None]:
        def wrapper(layer: int, step: Any, *tensors: Tensor) -> None:
            if step.decode is not None:
                events.setdefault(step.number, []).append(f"{name} {layer}")
            call(layer, step, *tensors)

        return wrapper

    for name, method in (("lookahead", "lookahead"), ("attend", "forward")):
        setattr(runtime, method, watched(name, getattr(runtime, method)))
    return events


def parked(llm: LLM) -> dict[str, Any]:
    """`generate`, and how rows on the CPU were attended."""
    answers = generate(llm)
    strategies = in_worker(llm, lambda w: sorted({done for done, _ in w.session.runtime.stats.steps}))
    return answers | {
        "strategies": strategies,
        "cpu_ratio": in_worker(llm, lambda w: w.session.runtime.stats.cpu_ratio()),
    }


def with_lookahead(model: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with engine(model) as llm:
        found["stock"] = generate(llm)
    with engine(model, _EXACT | {"tiers": "unified"}) as llm:
        found["unified"] = served(llm)
        errors = in_worker(llm, watch_own_input)
        generate(llm)
        found["errors"] = {layer: max(values) for layer, values in errors.items()}
        found["compared"] = {layer: len(values) for layer, values in errors.items()}
    with engine(model, _PARKED if "gemma3" in model.name else _OVERLAP) as llm:
        found["parked"] = parked(llm)
    return found


def other_tiers(model: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with engine(model, _EXACT | {"tiers": "separate"}) as llm:
        found["separate"] = served(llm)
    with engine(model, _EXACT | NO_LOOKAHEAD | {"tiers": "unified"}) as llm:
        found["in_place"] = served(llm)
    return found


def sparse(model: Path) -> dict[str, Any]:
    with engine(model, _SPARSE) as llm:
        return served(llm)


def parallel(model: Path) -> dict[str, Any]:
    """Two ranks, each with half of the heads and a process of its own."""
    cores = sorted(os.sched_getaffinity(0))
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"{cores[0]}|{cores[-1]}"
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # the worker is asked by a function
    try:
        with engine(model, _ON_CPU, ranks=2) as llm:
            found = generate(llm, FEW) | {"ranks": llm.collective_rpc(tiers)}
    finally:
        del os.environ["VLLM_CPU_OMP_THREADS_BIND"], os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"]
    return found


def without_lookahead(model: Path) -> dict[str, Any]:
    found: dict[str, Any] = {"refusal": None}
    try:
        with engine(model, _EXACT):
            pass
    except Exception as error:
        found["refusal"] = str(error)
    with engine(model) as llm:
        found["stock"] = generate(llm)
    for kind in ("separate", "unified"):
        with engine(model, _EXACT | NO_LOOKAHEAD | {"tiers": kind}) as llm:
            found[kind] = served(llm)
    return found


def compiled(model: Path) -> dict[str, Any]:
    with engine(model, _EXACT, eager=False) as llm:
        order = in_worker(llm, watch_order)
        found = served(llm)
        mode = in_worker(llm, lambda w: w.vllm_config.compilation_config.mode.name)
    with engine(model, _OVERLAP, eager=False) as llm:
        found["parked"] = parked(llm)
    return found | {"mode": mode, "orders": [list(x) for x in {tuple(events) for events in order.values()}]}


# "MODEL" or "MODEL.PROBE" -> what to do with the model
_PROBES: dict[str, Callable[[Path], dict[str, Any]]] = {
    "": with_lookahead,
    "tiers": other_tiers,
    "sparse": sparse,
    "parallel": parallel,
    "refused": without_lookahead,
    "compiled": compiled,
}


def main(folder: Path, names: list[str]) -> None:
    for name in names:
        family, _, probe = name.partition(".")
        try:
            model = folder / family
            found = _PROBES[probe](model if model.exists() else build(family, model))
        except Exception:
            found = {"error": traceback.format_exc()}
        (folder / f"{name}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
