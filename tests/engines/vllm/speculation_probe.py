"""Run requests with and without speculative decoding, stock and hybrid, in this process.

``speculation_probe.py FOLDER DEMO`` writes FOLDER/NAME.json for each of `CASES`; DEMO is the folder of the demo model.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",  # the worker lives here, so that its runtime can be asked
    OMP_NUM_THREADS="1",  # the models are tiny: a second thread only waits for the first
    VLLM_NO_USAGE_STATS="1",
    VLLM_LOGGING_LEVEL="WARNING",
    HF_HUB_OFFLINE="1",
)

import torch
from prometheus_client import CollectorRegistry
from vllm import LLM, SamplingParams
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
from vllm.platforms.cpu import CpuPlatform
from vllm.sampling_params import StructuredOutputsParams

from hybrid_backend.engines.vllm import BACKEND, worker
from tests.engines.probes import write
from tests.engines.vllm.families import VOCABULARY, build

# vLLM looks through all modules for kernels to replace, and stumbles over an object of llvmlite once numba has searched
# n-grams. One replacement holds for all engines of a process.
_replace_once = cache(CpuPlatform.register_triton_kernel_overrides)
CpuPlatform.register_triton_kernel_overrides = staticmethod(_replace_once)  # type: ignore[method-assign, assignment]

PAGE = 32
QUEST = {"model": {"match": "*"}, "page_size": PAGE, "method": "quest"}
SPARSE = QUEST | {"sparse": "always", "budget_tokens": 4 * PAGE, "selection": {"interval": 1}}
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
LENGTHS = [20, 300, 420, 90, 61, 33, 128, 64]


@contextmanager
def engine(model: Path, hybrid: dict[str, Any] | None, **changes: Any) -> Iterator[LLM]:
    """Start an engine with our backend and its configuration ``hybrid``; None: stock's."""
    vars(worker)["REGISTRY"] = CollectorRegistry()  # an engine per process is the rule; here there are several
    options: dict[str, Any] = {
        "skip_tokenizer_init": True, "dtype": "float32", "block_size": PAGE, "max_model_len": 640, "max_num_seqs": 8,
        "max_num_batched_tokens": 128, "enable_prefix_caching": False, "kv_cache_memory_bytes": 32 << 20,
        "enforce_eager": True, "disable_log_stats": False,
    }  # fmt: skip
    if hybrid is not None:
        options |= {"attention_backend": BACKEND, "additional_config": {"hybrid": hybrid}}
    llm = LLM(str(model), **options | changes)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()


def kept_bytes(llm: LLM) -> int:
    """Return what the decoder keeps of sequences."""
    kept: list[int] = llm.collective_rpc(lambda worker: worker.session.runtime.executor.host_bytes)
    return kept[0]


def greedy(tokens: int = 24, **keys: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=1, **keys)


def repeating(lengths: list[int]) -> list[dict[str, Any]]:
    """Prompts that repeat a few tokens, so that n-grams are found in them."""
    prompts = (torch.randint(1, VOCABULARY, (17,), generator=torch.Generator().manual_seed(n)) for n in lengths)
    return [{"prompt_token_ids": (prompt.tolist() * n)[:n]} for n, prompt in zip(lengths, prompts, strict=True)]


def answers(llm: LLM, prompts: list[dict[str, Any]], sampling: Any) -> dict[str, Any]:
    outputs = [request.outputs[0] for request in llm.generate(prompts, sampling, use_tqdm=False)]
    return {
        "tokens": [list(output.token_ids) for output in outputs],
        "logprobs": [
            [step[token].logprob for step, token in zip(output.logprobs or [], output.token_ids, strict=False)]
            for output in outputs
        ],
    }


def drafted(llm: LLM) -> dict[str, int]:
    """Return the numbers of drafts that the engine has proposed and accepted."""
    values = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    return {name: int(values.get(f"vllm:spec_decode_num_{name}_tokens", 0)) for name in ("draft", "accepted")}


def served(model: Path, hybrid: dict[str, Any] | None, **changes: Any) -> dict[str, Any]:
    """All prompts at once in chunks, twice, then one alone with a minimum of tokens and a stop token."""
    with engine(model, hybrid, **changes) as llm:
        at_once = answers(llm, repeating(LENGTHS), greedy())
        stop = at_once["tokens"][0][5]
        found = {
            "at once": at_once,
            "again": answers(llm, repeating(LENGTHS), greedy()),
            "alone": answers(llm, repeating(LENGTHS[2:3]), greedy(40)),
            "stopped": answers(llm, repeating(LENGTHS[:1]), greedy(stop_token_ids=[stop])),
            "at least": answers(llm, repeating(LENGTHS[:1]), greedy(stop_token_ids=[stop], min_tokens=12)),
            **drafted(llm),
        }
        if hybrid is not None:
            found["kept"] = kept_bytes(llm)
        return found


def exact(model: Path) -> dict[str, Any]:
    """Stock without drafts; hybrid with drafts: `quest`, `dense`, with a prefix cache, and preempted."""
    few_pages = {"kv_cache_memory_bytes": 2 << 20, "enable_prefix_caching": True}
    return {
        "stock": served(model, None),
        "quest": served(model, QUEST, speculative_config=NGRAM),
        "dense": served(model, QUEST | {"method": "dense"}, speculative_config=NGRAM),
        "cached": served(model, QUEST, speculative_config=NGRAM, enable_prefix_caching=True),
        "preempted": preempted(model, speculative_config=NGRAM, **few_pages),
    }


def preempted(model: Path, **changes: Any) -> dict[str, Any]:
    """Requests that do not fit the pool together."""
    with engine(model, QUEST, **changes) as llm:
        found = answers(llm, repeating(LENGTHS), greedy())
        counts = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
        return found | {"preemptions": int(counts["vllm:num_preemptions"]), **drafted(llm)}


def sparse(model: Path) -> dict[str, Any]:
    """`quest` that leaves pages out, with and without drafts; then requests that are aborted among drafts."""
    with engine(model, SPARSE) as llm:
        found: dict[str, Any] = {"plain": answers(llm, repeating(LENGTHS), greedy())}
    with engine(model, SPARSE, speculative_config=NGRAM) as llm:
        found |= {"drafted": answers(llm, repeating(LENGTHS), greedy()), **drafted(llm)}
        core = llm.llm_engine
        for number, prompt in enumerate(repeating(LENGTHS)):
            core.add_request(str(number), prompt, greedy(150))
        for step in range(40):
            core.step()
            if step % 5 == 4:
                core.abort_request([str(step // 5)])
        while core.has_unfinished_requests():
            core.step()
        found["kept"] = kept_bytes(llm)
        found["after aborts"] = answers(llm, repeating(LENGTHS), greedy())
    return found


def text(model: Path) -> dict[str, Any]:
    """The demo model: stop strings and structured output; stock without drafts beside hybrid with drafts."""
    code = "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n\n" * 8 + "def add(a, b):\n"
    prompts = [code, "1 2 3 4 1 2 3 4 1 2 3 4 1 2", "Repeat: apple banana cherry apple banana cherry apple"]
    found = {}
    for name, changes in (
        ("stock", {}),
        ("drafted", {"speculative_config": NGRAM}),
    ):
        hybrid = QUEST | {"page_size": 16} if name == "drafted" else None
        more = {
            "skip_tokenizer_init": False,
            "block_size": 16 if hybrid else 32,
            "disable_log_stats": False,
            **changes,
        }
        with engine(model, hybrid, **more | changes) as llm:
            plain = SamplingParams(temperature=0, max_tokens=40)
            stopped = SamplingParams(temperature=0, max_tokens=40, stop=["a - b", "banana"])
            shape = StructuredOutputsParams(regex=r"(apple|banana|cherry)( (apple|banana|cherry)){5}")
            structured = SamplingParams(temperature=0, max_tokens=24, structured_outputs=shape)
            found[name] = {
                kind: [request.outputs[0].text for request in llm.generate(prompts, sampling, use_tqdm=False)]
                for kind, sampling in (("plain", plain), ("stopped", stopped), ("structured", structured))
            } | drafted(llm)
    return found


CASES: dict[str, Callable[[Path], dict[str, Any]]] = {"exact": exact, "sparse": sparse}


def main(folder: Path, demo: Path) -> None:
    model = build("llama", folder / "llama")
    for name, case in CASES.items():
        write(folder, name, partial(case, model))
    write(folder, "text", partial(text, demo))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
