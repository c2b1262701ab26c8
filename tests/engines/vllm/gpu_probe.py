"""Engines on the simulated GPU, or on one that is there, in a process of their own:
``gpu_probe.py FOLDER RUNNER CASE...``

Writes FOLDER/CASE.json: the greedy tokens of all prompts; for ``at_once`` how many requests GPUs of some sizes admit.
RUNNER: v1 or v2, vLLM's model runners. On a GPU, cases that end in ``.eager`` have no graphs, and those that end in
``.compiled`` are as vLLM would compile them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_USE_V2_MODEL_RUNNER="1" if sys.argv[2] == "v2" else "0",
    # Piecewise graphs without torch.compile.
    VLLM_USE_BREAKABLE_CUDAGRAPH="0" if sys.argv[-1].endswith(".compiled") else "1",
    VLLM_USE_FLASHINFER_SAMPLER="0",
    VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1",
)

from tests.engines.probes import write
from tests.engines.vllm import late_probe, simulated_gpu
from tests.engines.vllm.counted_launches import count_launches, count_mixed
from tests.engines.vllm.watched_attention import Watch, watch_attention
from tests.support.garbage import leave_out_what_was_imported
from tests.support.gpu import ON_GPU

PROMPTS, TOKENS, CHUNK, LONGEST = (46, 94, 142), 4, 64, 192
BLOCK, BLOCKS = 16, 17  # the prompts take 17, three of which two of them share; they grow to 20: one is preempted
FAMILY_BLOCKS = 19
ABORTED_AT = 5  # of the steps, when all prompts have been computed
ROWS = 4
VOCABULARY, LAYERS, KV_HEADS, DIM = 256, 3, 2, 32
FULL = {"mode": 0, "custom_ops": ["none"], "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [4]}
MIXED = {**FULL, "cudagraph_mode": "FULL_AND_PIECEWISE", "cudagraph_capture_sizes": [4, CHUNK]}
# Everything is attended: by the device what its frames hold, by the CPU the rest. So answers are exact.
EXACT = {
    "budget_tokens": LONGEST,
    "exact_layers": [0],
    "lookahead": {"partial_query": "real"},
    "recall": {"intervals": 2},
}
LATE = {**EXACT, "frames_per_request": 4, "workers": {"deadline_seconds": late_probe.DEADLINE}}
FAMILY = {**EXACT, "exact_layers": [], "frames_per_request": 4}
# Contexts of up to ten pages attend four, two of which their digests choose.
SPARSE = {
    "budget_tokens": 4 * BLOCK,
    "exact_layers": [0],
    "sinks": 1,
    "recent": 1,
    "lookahead": {"partial_query": "real"},
    "recall": {"intervals": 2},
    "frames_per_request": 4,
    "metrics": {"sample_interval": 1},
}
# Room for the short requests, until they grow. The workers attend all others in no time, so that none has to wait.
FAST_CPU = Path(sys.argv[1]) / "fast-cpu.json"
APEX: dict[str, Any] = {"method": "apex", "apex": {"device_tokens": 5 * BLOCK, "hardware": str(FAST_CPU)}}
CACHES: dict[str, Any] = {"method": "hgca", "exact_layers": [0], "hgca": {"window_tokens": 32, "beta": 1e-9}}
FEWER = {"apex.overlap": 13}  # blocks: requests that park grow later, when the first is done
LONGER = 8  # tokens of sparse answers, and of those of requests that park
WAITING = ("hgca.caches", "hgca.int8")  # for the device, before a step in which a page leaves a ring
# Tiny models of tests/engines/vllm/families.py, and how many of their layers have full attention.
FULL_LAYERS = {"gemma3": 2, "gpt_oss": 2, "lfm2": 3}
FAMILIES = {name + graphs: full for name, full in FULL_LAYERS.items() for graphs in ("", ".full")}
CARDS = (1600, 1900, 8000)  # MiB
CASES: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "scout": ({**EXACT, "frames_per_request": 4}, MIXED),
    "scout.full": ({**EXACT, "frames_per_request": 4}, FULL),
    "scout.sparse": (SPARSE, MIXED),
    "scout.per_head": ({**SPARSE, "selection": {"granularity": "kv_head"}}, FULL),
    "scout.codes": ({**SPARSE, "selection": {"digest": "codes"}}, MIXED),
    "scout.promise": ({**SPARSE, "frames_per_request": 6, "quality": {"min_mass": 0.99}}, MIXED),
    "scout.int8": ({**EXACT, "frames_per_request": 4, "kv_dtype": "int8"}, MIXED),
    "dense.int8": ({"method": "dense", "kv_dtype": "int8"}, MIXED),
    "hgca.int8": ({**CACHES, "kv_dtype": "int8"}, FULL),
    "infinigen.sparse": ({**SPARSE, "method": "infinigen", "frames_per_request": 5}, FULL),
    "hgca": ({"method": "hgca", "sparse": "never", "hgca": {"window_tokens": 64}}, MIXED),
    "hgca.caches": (CACHES, FULL),
    "clo": ({"method": "clo", "budget_tokens": LONGEST, "clo": {"persistent": ["1:0"]}}, MIXED),
    "clo.sparse": ({**SPARSE, "method": "clo", "clo": {"eta": 0.001, "persistent": ["1:0"]}}, FULL),
    "headinfer": ({"method": "headinfer"}, MIXED),
    # Every head of a layer has a window, one of two, or none.
    "headinfer.windows": (
        {"method": "headinfer", "headinfer": {"window_heads": ["0:0", "0:1", "1:1"], "window_tokens": 2 * BLOCK}},
        MIXED,
    ),
    "dense": ({"method": "dense"}, MIXED),
    "apex": (APEX, MIXED),
    "apex.overlap": ({**APEX, "apex": {**APEX["apex"], "strategy": "overlap"}}, MIXED),
    "again": ({**EXACT, "frames_per_request": 4}, MIXED),
    **{name: (FAMILY, FULL if name.endswith(".full") else MIXED) for name in FAMILIES},
    "late": (LATE, MIXED),
    "late.always": ({**LATE, "workers": {"deadline_seconds": 0.5}}, MIXED),  # which every step waits for
    "late.full": (LATE, FULL),
}
if ON_GPU:
    CASES |= {f"{name}.eager": (keys, None) for name, (keys, _) in CASES.items()}
    CASES |= {f"{name}.compiled": (keys, {}) for name, (keys, graphs) in CASES.items() if graphs is MIXED}


def build(folder: Path) -> Any:
    """A random Llama whose attention is peaked."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=4 * DIM, intermediate_size=160, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=KV_HEADS, max_position_embeddings=512, initializer_range=0.2,
    )  # fmt: skip
    model = LlamaForCausalLM(config).float()
    model.save_pretrained(folder)
    return model


def write_fast_cpu() -> None:
    from hybrid_backend.hardware import Curve, Number, find_hardware

    fast, none = Curve(points=((1, 1e18),), source="test"), Number(value=0, source="test")
    rates = {"cpu_attention_bytes_per_s": fast, "host_read_bytes_per_s": fast, "cpu_job_overhead_s": none}
    FAST_CPU.write_text(find_hardware("h200").replace(**rates).to_json())


def build_family(name: str, folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    from tests.engines.vllm import families

    return AutoModelForCausalLM.from_pretrained(families.build(name.partition(".")[0], folder), dtype="float32")


def prompts() -> list[list[int]]:
    import random

    chosen = random.Random(1)
    made = [[chosen.randrange(VOCABULARY) for _ in range(count)] for count in PROMPTS]
    made[2][: 3 * BLOCK] = made[1][: 3 * BLOCK]
    return made


def expected(model: Any) -> list[list[int]]:
    """What transformers answers."""
    import torch

    answers = []
    for prompt in prompts():
        ids, length = torch.tensor([prompt]), {"max_new_tokens": LONGER, "min_new_tokens": LONGER}
        # With a mask, as tokens of a prompt may be the padding's.
        out = model.generate(ids, attention_mask=torch.ones_like(ids), **length, do_sample=False)
        answers.append(out[0, len(prompt) :].tolist())
    return answers


def options(model: Path, hybrid: dict[str, Any], graphs: dict[str, Any] | None, blocks: int = BLOCKS) -> dict[str, Any]:
    layers = FAMILIES.get(model.name, LAYERS)
    from hybrid_backend.engines.vllm import BACKEND

    return dict(
        model=str(model), attention_backend=BACKEND, dtype="float32", skip_tokenizer_init=True,
        max_model_len=LONGEST, max_num_seqs=ROWS, max_num_batched_tokens=CHUNK, enforce_eager=graphs is None,
        compilation_config={"custom_ops": ["none"]} if graphs is None else graphs, block_size=BLOCK,
        kv_cache_memory_bytes=(blocks + 1) * layers * KV_HEADS * 2 * BLOCK * DIM * 4,  # vLLM keeps one for itself
        additional_config={"hybrid": {"page_size": BLOCK, "model": {"match": "*"}, **hybrid}},
        disable_log_stats=True, **({"gpu_memory_utilization": 0.15} if ON_GPU else {}),  # one of several processes
    )  # fmt: skip


def at_once(model: Path, card: int, **more: Any) -> dict[str, Any]:
    """How many of 1,024 requests a GPU of so many bytes admits at once."""
    from vllm.engine.arg_utils import EngineArgs

    simulated_gpu.card_of(card)
    asked = {**options(model, EXACT, None), "max_num_seqs": 1024, "max_num_batched_tokens": 2048, **more}
    try:
        return {"admitted": EngineArgs(**asked).create_engine_config().scheduler_config.max_num_seqs}
    except Exception as error:
        return {"refused": str(error)}
    finally:
        simulated_gpu.card_of(simulated_gpu.TOTAL)


def run(
    model: Path,
    hybrid: dict[str, Any],
    graphs: dict[str, Any] | None,
    serve: Callable[[Any], dict[str, Any]],
    blocks: int = BLOCKS,
    watch: Watch | None = None,
) -> dict[str, Any]:
    from prometheus_client import CollectorRegistry
    from vllm import LLM
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    from hybrid_backend.engines.vllm import worker

    vars(worker)["REGISTRY"] = CollectorRegistry()  # an engine per process is the rule; here there are several
    llm = LLM(**options(model, hybrid, graphs, blocks))
    try:
        if watch is not None:
            watch.take()  # of warm-up
        found = serve(llm)
        return found if watch is None else found | {"attention": watch.take()}
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()


def serve(llm: Any, count: int, waits: bool) -> dict[str, Any]:
    """All prompts at once, and one more, which is aborted. ``waits``: a step may wait for the
    device, as methods do that are planned on the host."""
    import torch
    from vllm import SamplingParams

    from tests.support.far_device import busy, calm, late
    from tests.support.streams import STREAMS, Graph

    waits = waits or ON_GPU  # vLLM itself does
    engine, held = llm.llm_engine, llm.llm_engine.model_executor.driver_worker.worker
    execute, preempted, ran = held.execute_model, [], set()

    def watched(scheduled: Any) -> Any:
        preempted.extend(scheduled.preempted_req_ids or ())
        ran.update(name.partition("-")[0] for name in scheduled.num_scheduled_tokens)
        # Only for a request that is preempted the device is waited for (`HybridRuntime.preempt`).
        with calm() if scheduled.preempted_req_ids else nullcontext():
            return execute(scheduled)

    held.execute_model = watched
    mixed = count_mixed(held.session.runtime)
    sampling = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
    for name, prompt in [("aborted", list(range(20))), *enumerate(prompts())]:
        engine.add_request(str(name), {"prompt_token_ids": prompt}, sampling)
    tokens: dict[str, list[int]] = {}
    graph = torch.cuda.CUDAGraph
    before = graph.replays
    STREAMS.bus.clear()
    STREAMS.programs.clear()
    compiled = set(STREAMS.variants)
    Graph.replayed.clear()
    runtime = held.session.runtime
    steps = parked = 0
    with late(), nullcontext() if waits else busy():
        while engine.has_unfinished_requests():
            for output in engine.step():
                tokens[output.request_id] = list(output.outputs[0].token_ids)
            steps += 1
            parked = max(parked, runtime.gauges().get("hybrid_parked_rows", 0))
            if steps == ABORTED_AT:
                engine.abort_request(["aborted"])
        engine.step()  # the worker hears of the last ones
    runtime.executor.samples.finish()
    return {
        "tokens": [tokens[str(i)] for i in range(len(PROMPTS))],
        "runner": type(held.model_runner).__module__,
        "cpu_tokens": sum(layer.cpu_tokens for layer in runtime.stats.layers),
        "layers": [vars(layer) for layer in runtime.stats.layers],
        "steps": [list(name) for name in runtime.stats.steps],
        "parked": parked,
        "scheduler": type(engine.engine_core.engine_core.scheduler).__name__,
        "gauges": runtime.gauges(),
        "planned": planned(llm),
        **groups(llm),
        "copied_bytes": runtime.gauges()["hybrid_copied_bytes"],
        "replays": graph.replays - before,
        "bus": {kind: counts for kind, counts in STREAMS.bus.items() if any(counts)},
        "replayed": dict(Graph.replayed),
        "compiled_late": sorted({str(each) for each in STREAMS.variants - compiled}),
        "programs": STREAMS.programs.get("_copy_kernel", 0),
        "page_bytes": next(view[0].nbytes for view in runtime.tiers.host.views if len(view)),
        "preempted": sorted(name.partition("-")[0] for name in preempted),
        "ran": sorted(ran),
        "made_harmless": "vllm.v1.worker.cpu.shm" in sys.modules,
        "left": runtime.tiers.frames.index("aborted"),
        "mixed": mixed,
    }


def groups(llm: Any) -> dict[str, Any]:
    """Who computes the layers of each kind, what those with a window or a state take, and what is left in the pools of
    blocks."""
    from vllm.model_executor.layers.mamba.abstract import MambaBase

    held = llm.llm_engine.model_executor.driver_worker.worker
    every = held.vllm_config.compilation_config.static_forward_context.values()
    layers = [layer for layer in every if hasattr(layer, "attn_backend")]
    states = [layer for layer in every if isinstance(layer, MambaBase)]
    kind = {True: "full_attention", False: "sliding_attention"}
    windows = {id(layer.kv_cache): layer.kv_cache for layer in layers if layer.sliding_window is not None}
    managers = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.coordinator.single_type_managers
    return {
        "backends": {
            **{kind[each.sliding_window is None]: each.attn_backend.__name__ for each in layers},
            **({"state": states[0].get_attn_backend().__name__} if states else {}),
        },
        "state_blocks": sorted({len(state) for each in states for state in each.kv_cache}),
        "predictors": [type(getattr(each.impl, "predictor", None)).__name__ for each in layers],
        "window_bytes": sum(each.nbytes for each in windows.values()),
        "planned_window_bytes": planner(llm).windows(ROWS),
        "blocks_left": sum(len(blocks) for each in managers for blocks in each.req_to_blocks.values()),
    }


def planned(llm: Any) -> dict[str, int]:
    """What the planner says that the runtime reports."""
    runtime = llm.llm_engine.model_executor.driver_worker.worker.session.runtime
    return planner(llm).gauges(runtime.tiers.host.pages, ROWS, LONGEST)


def planner(llm: Any) -> Any:
    from hybrid_backend.memory_plan.blocks import Blocks
    from hybrid_backend.memory_plan.footprint import MemoryRoom, MethodMemory
    from hybrid_backend.model import read_json, shape_from_config

    runtime = llm.llm_engine.model_executor.driver_worker.worker.session.runtime
    shape = shape_from_config(read_json(Path(llm.llm_engine.model_config.model, "config.json")), "")
    shape = replace(shape, kv_dtype=runtime.config.kv_dtype)
    return MethodMemory(shape, Blocks.of(shape, BLOCK), MemoryRoom(simulated_gpu.TOTAL, 0, CHUNK), runtime.config)


def ask_twice(llm: Any) -> dict[str, Any]:
    """The second time all but the last token of the prompt comes from the prefix cache: a batch of one token."""
    from vllm import SamplingParams

    prompt = {"prompt_token_ids": prompts()[1][: 2 * BLOCK + 1]}
    sampling = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    return {"tokens": [list(llm.generate(prompt, sampling)[0].outputs[0].token_ids) for _ in range(2)]}


def _count_replays() -> None:
    import torch

    replay = torch.cuda.CUDAGraph.replay

    def counted(self: Any) -> None:
        torch.cuda.CUDAGraph.replays += 1  # type: ignore[attr-defined]
        replay(self)

    torch.cuda.CUDAGraph.replays = 0  # type: ignore[attr-defined]
    torch.cuda.CUDAGraph.replay = counted  # type: ignore[method-assign]


def main() -> None:
    folder, names = Path(sys.argv[1]), sys.argv[3:]
    model = folder / "model"
    if ON_GPU:
        _count_replays()
    else:
        os.environ["VLLM_PLUGINS"] = ""
        simulated_gpu.prepare(folder)
    write_fast_cpu()
    answers = expected(build(model))
    families = {name: expected(build_family(name, folder / name)) for name in names if name in FAMILIES}
    watch, launches = watch_attention(), count_launches()
    watch.is_on = not ON_GPU

    def case(name: str) -> dict[str, Any]:
        if name == "at_once":
            admitted = {str(mib): at_once(model, mib << 20) for mib in CARDS}
            return admitted | {"in parts": at_once(model, 8 << 30, ubatch_size=2)}
        if name == "again":
            return run(model, *CASES[name], ask_twice)
        if name.startswith("late"):
            with late_probe.held_up() as numbers:
                always = name.startswith("late.always")
                serving = partial(late_probe.serve, prompts=prompts(), numbers=numbers, always=always)
                return run(model, *CASES[name], serving, late_probe.BLOCKS) | {"expected": late_probe.expected(answers)}
        if name in FAMILIES:
            found = run(folder / name, *CASES[name], partial(serve, count=LONGER, waits=False), FAMILY_BLOCKS)
            return found | {"expected": families[name]}
        if name == "apex.overlap":
            os.environ.pop("VLLM_USE_V2_MODEL_RUNNER")  # Without the user's choice the plugin takes V1 by itself.
        tokens = LONGER if CASES[name][0].get("sinks") or name in FEWER else TOKENS
        watched = watch if (not ON_GPU or name.endswith(".eager")) and not name.endswith(".int8") else None
        watch.is_on = watched is not None
        serving = partial(serve, count=tokens, waits=name in WAITING)
        found = run(model, *CASES[name], serving, FEWER.get(name, BLOCKS), watched)
        return found | {"expected": [answer[:tokens] for answer in answers], "launches": dict(launches)}

    with nullcontext() if ON_GPU else simulated_gpu.simulated_gpu():
        import vllm.entrypoints.llm  # noqa: F401

        leave_out_what_was_imported()
        for name in names:
            write(folder, name, partial(case, name))


if __name__ == "__main__":
    main()
