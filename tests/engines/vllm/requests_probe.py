"""Run requests with all that they may bring, and workers that refuse, with a tiny model in this process.

``requests_probe.py FOLDER`` writes FOLDER/NAME.json for each of `CASES`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ["VLLM_DISABLE_REQUEST_ID_RANDOMIZATION"] = "1"  # a session's pieces share an id

from tests.engines.probes import write
from tests.engines.vllm.families import build
from tests.engines.vllm.family_probe import PAGE, engine, prompts_of

# isort: split
from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.worker.cpu_worker import CPUWorker

from hybrid_backend.engines.vllm import BACKEND
from hybrid_backend.engines.vllm import worker as worker_module
from hybrid_backend.engines.vllm.cpu_worker import HybridCPUWorker
from hybrid_backend.errors import EngineError

EXACT = {"model": {"match": "*"}, "page_size": PAGE}
SPARSE = EXACT | {"budget_tokens": 4 * PAGE, "sparse": "always", "lookahead": {"enabled": False}}
LENGTHS = [20, 300, 500, 90]


def chunks(model: Path) -> dict[str, Any]:
    """Seeded requests, whose prompts come whole to the stock backend and in chunks to ours."""
    sampling = [
        SamplingParams(temperature=1, seed=n, max_tokens=24, ignore_eos=True, detokenize=False) for n in range(4)
    ]
    asked = [{"prompt_token_ids": prompt} for prompt in prompts_of(LENGTHS)]

    def answers(llm: Any) -> list[list[int]]:
        return [list(output.outputs[0].token_ids) for output in llm.generate(asked, sampling, use_tqdm=False)]

    with engine(model, max_num_batched_tokens=2048) as llm:
        tokens = {"whole": answers(llm)}
    with engine(model, EXACT, max_num_batched_tokens=96) as llm:
        tokens["in chunks"] = answers(llm)
    return tokens


def sessions(model: Path) -> dict[str, Any]:
    """Run a streaming session whose first piece names a budget and whose second names none.

    vLLM's in-process engine computes the prompt of the second piece and answers nothing, with the stock backend too.
    """
    budgets = []
    with engine(model, SPARSE) as llm:
        core, session = llm.llm_engine, llm.llm_engine.model_executor.driver_worker.worker.session
        tasks = core.get_supported_tasks()
        for tokens, extra in ((400, {"budget_tokens": 8 * PAGE}), (20, None)):
            params = SamplingParams(
                temperature=0, max_tokens=3, ignore_eos=True, detokenize=False, extra_args=extra,
                output_kind=RequestOutputKind.DELTA,
            )  # fmt: skip
            prompt = {"type": "token", "prompt_token_ids": prompts_of([tokens])[0]}
            piece = core.input_processor.process_inputs(
                "session", prompt, params, supported_tasks=tasks, resumable=True
            )
            core.add_request("session", piece, params)
            for _ in range(8):
                core.step()
            budgets.append(session._budgets.get("session", 0))
    return {"budgets": budgets}


def derived(model: Path) -> dict[str, Any]:
    """A connector that came into the configuration after the platform had checked it."""
    flags = AsyncEngineArgs(
        str(model), attention_backend=BACKEND, skip_tokenizer_init=True, kv_cache_memory_bytes=2**25
    )
    config = flags.create_engine_config()
    config.kv_transfer_config = KVTransferConfig(kv_connector="OffloadingConnector", kv_role="kv_both")
    worker = HybridCPUWorker.__new__(HybridCPUWorker)
    worker.vllm_config = config
    try:
        worker.init_device()
    except EngineError as error:
        return {"refused": str(error), "has_device": hasattr(worker, "device")}
    return {"refused": "", "has_device": True}


def warm_up(model: Path) -> dict[str, Any]:
    """Requests that vLLM's CPU worker serves while it warms up, as it does since 0.33 with the V2 runner."""
    asked = [{"prompt_token_ids": prompt} for prompt in prompts_of(LENGTHS)]
    sampling = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False)
    stock, counted, published = CPUWorker.compile_or_warm_up_model, [], []
    with engine(model, SPARSE) as llm:
        worker = llm.llm_engine.model_executor.driver_worker.worker

        def serve() -> None:
            llm.generate(asked, sampling, use_tqdm=False)
            counted.append(sum(layer.context_tokens for layer in worker.session.runtime.stats.layers))

        def warm_up_with_requests(self: CPUWorker) -> Any:
            serve()
            return stock(self)

        def publish() -> None:
            worker.publisher.publish(force=True)
            labels = {"rank": "0", "layer": "1"}
            registry = vars(worker_module)["REGISTRY"]  # the engine's own, as `engine` makes one for each engine
            published.append(registry.get_sample_value("hybrid_context_tokens_total", labels) or 0)

        with patch.object(CPUWorker, "compile_or_warm_up_model", warm_up_with_requests):
            worker.compile_or_warm_up_model()
        publish()
        serve()
        publish()
    return {"counted": counted, "published": published}


CASES: dict[str, Callable[[Path], dict[str, Any]]] = {
    "chunks": chunks,
    "sessions": sessions,
    "derived": derived,
    "warm_up": warm_up,
}


def main(folder: Path) -> None:
    model = build("llama", folder / "llama")
    for name, case in CASES.items():
        write(folder, name, partial(case, model))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
