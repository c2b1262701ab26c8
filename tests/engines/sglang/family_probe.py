"""Serves one tiny random-weight model per family, stock and hybrid, by SGLang's own scheduler; writes JSON.

``python -P family_probe.py FOLDER FAMILY...`` writes FOLDER/FAMILY.json (`tests.engines.vllm.families.MODELS`). A
failure is an ``{"error": ...}`` there, so that one family never hides another.

SGLang is imported once. Each engine is a fork of this process, where the scheduler runs without the processes of
tokenizer and detokenizer: it is given tokens, and what the runtime did can be looked at.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.update(
    OMP_NUM_THREADS="1",  # the models are tiny; and a process with threads must not fork
    HF_HUB_OFFLINE="1",
    HF_HUB_DISABLE_PROGRESS_BARS="1",
)
sys.path.append(str(Path(__file__).parents[3]))  # last, as our `kernels` must not hide the package of that name

import torch
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput, UpdateWeightFromDiskReqInput
from sglang.srt.managers.scheduler import Scheduler, SpawnRanks, configure_scheduler_process, spawn_world_rank
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import publish
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import PortArgs, ServerArgs
from sglang.srt.utils import DynamicGradMode

from hybrid_backend.engines.sglang import BACKEND
from hybrid_backend.engines.sglang.settings import ENV_RESOLVED
from tests.engines.vllm.families import VOCABULARY, build
from tests.support.models import move_weights

PAGE = 32
TOKENS = 24
PROMPTS = [20, 200, 500, 90]
ALONE = PROMPTS[1:2]
_EXACT = {
    "model": {"match": "*"},
    "method": "scout",
    "method": "scout",
    "page_size": PAGE,
    "metrics": {"sample_interval": 1},  # every step: the lookahead runs although everything is resident
    "host_pool": {"size": "64MiB"},
}
# What the frames cannot hold is the CPU's, by the real query, and the budget is everything: nothing is approximate.
_ON_CPU = _EXACT | {
    "frames_per_request": 4,
    "budget_tokens": 20 * PAGE,
    "lookahead": {"enabled": True, "partial_query": "real"},
}
_SPARSE = _EXACT | {
    "frames_per_request": 4,
    "budget_tokens": 4 * PAGE,
    "lookahead": {"enabled": True},
    "recall": {"intervals": 2},
}


def forked(work: Callable[[], dict[str, Any]], file: Path) -> dict[str, Any]:
    """Return the result of ``work`` in a fork of this process, which ends then."""
    child = os.fork()
    if not child:
        try:
            result = work()
        except BaseException:
            result = {"error": traceback.format_exc()}
        file.write_text(json.dumps(result))
        sys.stderr.flush()
        os._exit(0)
    os.waitpid(child, 0)
    result = json.loads(file.read_text()) if file.exists() else {"error": "the engine's process died"}
    file.unlink(missing_ok=True)
    return result


class Engine:
    """SGLang's scheduler in this process: the stock backend, or ours with this configuration."""

    def __init__(self, model: Path, hybrid: dict[str, Any] | None) -> None:
        if hybrid is not None:
            os.environ[ENV_RESOLVED] = json.dumps(hybrid)
        arguments = ServerArgs(
            model_path=str(model),
            skip_tokenizer_init=True,
            device="cpu",
            dtype="float32",
            attention_backend="torch_native" if hybrid is None else BACKEND,
            page_size=PAGE,
            context_length=640,
            max_total_tokens=4096 if hybrid is None else None,
            max_running_requests=4,
            chunked_prefill_size=128,
            disable_radix_cache=True,
            disable_overlap_schedule=True,
            random_seed=0,
        )
        load_plugins()
        arguments.resolve_once()
        ports = PortArgs.init_new(arguments)
        ranks = SpawnRanks(world_rank=spawn_world_rank(arguments, tp_rank=0, pp_rank=0), dp_rank=None, gpu_id=0)
        publish(arguments, role="scheduler", ranks=ranks)
        configure_scheduler_process(arguments, 0)
        self.scheduler = Scheduler(arguments, ports)

    @property
    def runtime(self) -> Any:
        return self.scheduler.tp_worker.model_runner.attn_backend.session.runtime

    @DynamicGradMode()  # as Scheduler.event_loop_normal
    def generate(self, lengths: list[int] = PROMPTS, tokens: int = TOKENS) -> dict[str, Any]:
        """Greedy tokens and their log-probabilities, all prompts at once."""
        scheduler = self.scheduler
        for number, length in enumerate(lengths):
            prompt = torch.randint(1, VOCABULARY, (length,), generator=torch.Generator().manual_seed(length))
            sampling = SamplingParams(max_new_tokens=tokens, temperature=0, ignore_eos=True)
            sampling.normalize(None)
            request = TokenizedGenerateReqInput(
                rid=str(number),
                input_text=None,
                input_ids=array("q", prompt.tolist()),
                input_embeds=None,
                mm_inputs=None,
                token_type_ids=None,
                sampling_params=sampling,
                return_logprob=True,
                logprob_start_len=-1,
                top_logprobs_num=0,
                token_ids_logprob=None,
                stream=False,
            )
            scheduler.process_input_requests([request])
        requests = list(scheduler.waiting_queue)
        assert len(requests) == len(lengths)
        while not scheduler.is_fully_idle():
            plan = scheduler.get_next_batch_to_run(
                running_batch=scheduler.running_batch, last_batch=scheduler.last_batch
            )
            scheduler.running_batch, batch = plan.running_batch, plan.batch_to_run
            if batch:
                scheduler.process_batch_result(batch, scheduler.run_batch(batch))
            scheduler.last_batch = batch
        assert all(request.finished() for request in requests)
        return {
            "tokens": [list(request.output_ids) for request in requests],
            "logprobs": [list(map(float, request.logprob.output_token_logprobs_val)) for request in requests],
        }

    def change_weights(self, checkpoint: Path) -> None:
        """Load another checkpoint into the running engine, and move all parameters."""
        update = UpdateWeightFromDiskReqInput(model_path=str(checkpoint), load_format="auto")
        done = self.scheduler.weight_updater.update_weights_from_disk(update)
        assert done.success, done.message
        move_weights(self.scheduler.tp_worker.model_runner.model)


def stock(model: Path, changed: Path) -> dict[str, Any]:
    """Four at once, one alone, and the four again with the weights of ``changed``."""
    engine = Engine(model, None)
    results = {"at_once": engine.generate(), "alone": engine.generate(ALONE)}
    engine.change_weights(changed)
    return results | {"changed": engine.generate()}


def hybrid(model: Path, changed: Path, config: dict[str, Any]) -> dict[str, Any]:
    """The same, and what the runtime kept and did for the four at once, per layer."""
    engine = Engine(model, config)
    results: dict[str, Any] = {"at_once": engine.generate()}
    layers = engine.runtime.stats.layers
    results |= {
        "predicted": [i for i, layer in enumerate(layers) if layer.cosine_samples],
        "cosine": [layer.cosine_sum / max(1, layer.cosine_samples) for layer in layers],
        "selected": [layer.selected_tokens for layer in layers],
        "on_cpu": [layer.cpu_tokens for layer in layers],
        "frames": sorted(engine.runtime.tiers.frames.layers),
    }
    results["alone"] = engine.generate(ALONE)
    engine.change_weights(changed)
    return results | {"changed": engine.generate()}


def main(folder: Path, names: list[str]) -> None:
    for name in names:
        model, changed, file = folder / name, folder / "other" / name, folder / f"{name}.part"
        runs: dict[str, Callable[[], dict[str, Any]]] = {
            "built": lambda model=model, name=name: {"folder": str(build(name, model))},
            "other_built": lambda changed=changed, name=name: {"folder": str(build(name, changed, seed=1))},
            "stock": lambda model=model, changed=changed: stock(model, changed),
            "hybrid": lambda model=model, changed=changed: hybrid(model, changed, _ON_CPU),
            "sparse": lambda model=model, changed=changed: hybrid(model, changed, _SPARSE),
            "started": lambda changed=changed: {"sparse": Engine(changed, _SPARSE).generate()},
        }
        results: dict[str, Any] = {}
        for run, work in runs.items():
            results[run] = forked(work, file)
            if "error" in results[run]:
                results = {"error": f"{run}: {results[run]['error']}"}
                break
        (folder / f"{name}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
