"""The demo model with K and V in the model's type and in 8 bits, in one process: ``int8_probe.py FOLDER MODEL``.

Writes FOLDER/CASE.json: greedy answers with the log-probabilities of their tokens, to prompts below and beyond the
budget; the same again from the prefix cache; and with so few blocks that requests are preempted.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1")

from tests.engines.probes import write

POOL = 2**28  # bytes
PROMPTS, ANSWER = (200, 900, 2400), 12  # tokens; chunks of 512
BLOCKS = 222  # of 16 tokens: all prompts fit and, beside the null block, one more; their answers do not
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "auto": ({}, {}),
    "int8": ({"kv_dtype": "int8"}, {}),
    "flag": ({}, {"kv_cache_dtype": "int8_per_token_head"}),
    "dense": ({"kv_dtype": "int8", "method": "dense"}, {}),
    # Everything is attended, by the device tier what its frames hold and by the workers the rest.
    "scout": (
        {
            "kv_dtype": "int8",
            "method": "scout",
            "sparse": "never",
            "frames_per_request": 40,
            "exact_layers": [0, 1],
            "recall": {"intervals": 4},
        },
        {},
    ),
    # Sinks and a window on the device tier; the workers attend every older token, in context caches.
    "hgca": (
        {"kv_dtype": "int8", "method": "hgca", "hgca": {"window_tokens": 64, "beta": 1e-9}, "exact_layers": [0, 1]},
        {},
    ),
    "preempted": ({"kv_dtype": "int8", "method": "dense"}, {"num_gpu_blocks_override": BLOCKS}),
}


def logprobs(answer: Any) -> list[float]:
    """Of the answer's own tokens."""
    found = answer.outputs[0]
    return [of[token].logprob for of, token in zip(found.logprobs, found.token_ids, strict=True)]


def serve(model: str, hybrid: dict[str, Any], flags: dict[str, Any]) -> dict[str, Any]:
    from prometheus_client import CollectorRegistry
    from vllm import LLM, SamplingParams
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    from hybrid_backend.engines.vllm import worker

    vars(worker)["REGISTRY"] = CollectorRegistry()  # an engine per process is the rule; here there are several
    llm = LLM(
        model, attention_backend="CUSTOM", additional_config={"hybrid": {"page_size": 16, **hybrid}}, seed=0,
        dtype="float32", enforce_eager=True, max_model_len=2560, max_num_batched_tokens=512, max_num_seqs=4,
        kv_cache_memory_bytes=POOL, **flags,
    )  # fmt: skip
    try:
        text = (Path(__file__).parents[2] / "support" / "kjv.txt").read_text()
        ids = llm.get_tokenizer().encode(text)
        prompts = [{"prompt_token_ids": ids[n : 2 * n]} for n in PROMPTS]
        sampling = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True, logprobs=1)
        held: Any = llm.llm_engine.model_executor.driver_worker.worker  # type: ignore[attr-defined]
        preempted: list[str] = []
        execute = held.execute_model

        def watched(scheduled: Any) -> Any:
            preempted.extend(scheduled.preempted_req_ids or ())
            return execute(scheduled)

        held.execute_model = watched
        first, again = llm.generate(prompts, sampling), llm.generate(prompts, sampling)
        llm.llm_engine.step()  # the worker hears of the last ones
        runtime, cache = held.session.runtime, llm.llm_engine.vllm_config.cache_config
        gauges = runtime.gauges()
        return {
            "tokens": [list(one.outputs[0].token_ids) for one in first],
            "logprobs": [logprobs(one) for one in first],
            "again": {
                "tokens": [list(one.outputs[0].token_ids) for one in again],
                "logprobs": list(map(logprobs, again)),
            },
            "cached": [one.num_cached_tokens for one in again],
            "blocks": cache.num_gpu_blocks,
            "bytes": sum(layer.nbytes for layer in runtime.tiers.host.layers),
            "page_bytes": runtime.model.page_bytes(runtime.config.page_size),
            "layers": runtime.model.num_layers,
            "preempted": len(preempted),
            "requests_left": len(getattr(runtime.executor, "_sequences", ())) + gauges["hybrid_resident_requests"],
        }
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()


def main() -> None:
    folder, model = Path(sys.argv[1]), sys.argv[2]
    for name, (hybrid, flags) in CASES.items():
        write(folder, name, lambda hybrid=hybrid, flags=flags: serve(model, hybrid, flags))  # type: ignore[misc]


if __name__ == "__main__":
    main()
