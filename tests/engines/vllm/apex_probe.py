# ruff: noqa: E402 (Triton must be told to interpret before vLLM imports it)
"""Method apex in vLLM, in this process: the demo model, stock and then with rows that wait from one iteration to the
next. ``apex_probe.py FOLDER NAME...`` writes FOLDER/NAME.json for "stock" and each of these `CASES`."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",  # scheduler and worker live here, so that they can be watched
    OMP_NUM_THREADS="1",  # on busy cores threads that wait for each other take five times as long
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_NO_USAGE_STATS="1",
    VLLM_LOGGING_LEVEL="WARNING",
    HF_HUB_OFFLINE="1",
)

from tests.support.interpreter import interpret_triton

interpret_triton()  # before vLLM imports Triton

import torch
from vllm import LLM, SamplingParams
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
from vllm.sampling_params import StructuredOutputsParams

from hybrid_backend.engines.vllm import BACKEND
from hybrid_backend.tools.hub import fetch
from tests.engines.probes import write
from tests.engines.texts import tokens_of_prose
from tests.support.garbage import leave_out_what_was_imported
from tests.support.held_answers import Held, settled

leave_out_what_was_imported()

LAYERS, PAGE = 30, 16
DEVICE_TOKENS = 6 * PAGE  # prompts of more are on the CPU
MANY = 24  # tokens of requests on the device, which are not delayed
Answer = dict[str, Any]


class Ask(NamedTuple):
    prompt: list[int]
    sampling: dict[str, Any]


def ask(length: int, tokens: int, **sampling: Any) -> Ask:
    """Another prompt for every length."""
    return Ask(tokens_of_prose(length, 331 * length), {"max_tokens": tokens, "ignore_eos": True, **sampling})


SEEDED = {"temperature": 0.9}
MIXED = {
    "here": ask(17, MANY),
    "here, seeded": ask(20, MANY, seed=5, **SEEDED),
    "greedy": ask(100, 4),
    "seeded": ask(103, 4, seed=7, **SEEDED),
    "two": ask(106, 4, seed=11, n=2, **SEEDED),
    "long": ask(170, 4, logprobs=3),  # in two chunks, which vLLM cannot do with a seed on a CPU
    "penalties": ask(109, 4, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.5, logprobs=1),
    "stops": ask(112, 4, stop=["a", "e", "o"], ignore_eos=False),
    "regex": ask(115, 4, structured_outputs=StructuredOutputsParams(regex=r"[A-Z][a-z]{2} [0-9]{3}[a-z ]+")),
    "choice": ask(118, 4, structured_outputs=StructuredOutputsParams(choice=["Jerusalem", "Egypt"]), ignore_eos=False),
}
FITS = {"5": ask(5, 6), "9": ask(9, 6), "12": ask(12, 6, seed=3, **SEEDED), "20": ask(20, 6, logprobs=2)}
FILLS = ask(8 * PAGE - 2, 4)  # its second token is the last of a page
LATE = {"here": ask(20, MANY), "late": ask(97, 2), "in time": ask(98, 3)}
# Of the second all whole pages are in the prefix cache when it is computed again, so that it asks the CPU once more.
OVERDUE = {"once": ask(100, 2), "twice": ask(7 * PAGE, 2), "in time": ask(121, 2)}
PHASES = (0, LAYERS // 2, LAYERS - 1)  # layers at which rows are parked
ENDED = {f"{what} {phase}": ask(98 + phase + (what == "aborted"), 3)
         for phase in PHASES for what in ("aborted", "preempted")}  # fmt: skip
STAYS = {"here": ask(20, MANY), "stays": ask(131, 3)}
SERVED = {"here": ask(40, MANY), "a": ask(180, 3), "b": ask(120, 3), "c": ask(200, 3)}  # over HTTP


class Serving:
    """An engine, one iteration at a time."""

    def __init__(self, llm: LLM) -> None:
        self.engine = llm.llm_engine
        self.scheduler: Any = self.engine.engine_core.engine_core.scheduler
        self.worker: Any = self.engine.model_executor.driver_worker.worker
        self.begin()

    def begin(self) -> None:
        """A case begins: nothing is known of the ones before."""
        self.scheduler.reset_prefix_cache()
        self.iterations = 0
        self.answers: dict[str, list[Answer]] = {}
        self.at: dict[str, list[int]] = {}  # iterations in which tokens came
        self.cached: dict[str, int] = {}  # tokens of the prompt that came from the prefix cache
        self._before = self._steps() if hasattr(self.worker, "session") else Counter()

    # --- requests ---

    def add(self, name: str, ask: Ask) -> None:
        sampling = SamplingParams(**{"temperature": 0, **ask.sampling})
        self.engine.add_request(name, {"prompt_token_ids": ask.prompt}, sampling)
        self.at[name], self.answers[name] = [], [{"tokens": []} for _ in range(sampling.n)]

    def add_all(self, asks: dict[str, Ask]) -> None:
        for name, each in asks.items():
            self.add(name, each)

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            for output in self.engine.step():
                name = output.request_id
                for each in output.outputs:
                    self.answers[name][each.index] = _answer(each)
                self.at[name] += [self.iterations] * (len(self.answers[name][0]["tokens"]) - len(self.at[name]))
                self.cached[name] = output.num_cached_tokens or 0
            self.iterations += 1

    def run(self, asks: dict[str, Ask] | None = None) -> None:
        """Until nobody is left; ``asks`` come first."""
        self.add_all(asks or {})
        while self.engine.has_unfinished_requests():
            self.step()

    def found(self, **more: Any) -> dict[str, Any]:
        """What a case tells."""
        return {"answers": self.answers, "at": self.at, "cached": self.cached, **more}

    def request(self, name: str) -> Any:
        """The scheduler's."""
        return next(each for each in self.scheduler.requests.values() if each.request_id.partition("-")[0] == name)

    def preempt(self, name: str) -> None:
        request = self.request(name)
        self.scheduler.running.remove(request)
        self.scheduler._preempt_request(request, time.monotonic())
        self.scheduler.prev_step_scheduled_req_ids.discard(request.request_id)

    # --- of ours ---

    @property
    def runtime(self) -> Any:
        return self.worker.session.runtime

    @property
    def parking(self) -> Any:
        return self.runtime.executor.waiting

    @property
    def questions(self) -> Any:
        return self.parking.questions

    def index(self, name: str) -> int | None:
        """In the frames; None: it has none."""
        indices = self.runtime.tiers.frames._index_of.items()
        return next((index for request, index in indices if request.partition("-")[0] == name), None)

    def parked_at(self, name: str) -> int | None:
        index = self.index(name)
        return None if index is None else self.parking._layer_of.get(index)

    def follow(self, strategy: str) -> None:
        method = self.runtime.method
        method.config = method.config.model_copy(
            update={"apex": method.config.apex.model_copy(update={"strategy": strategy})}
        )

    def strategies(self) -> dict[str, int]:
        """Steps of this case."""
        return dict(self._steps() - self._before)

    def _steps(self) -> Counter[str]:
        steps: Counter[str] = Counter()
        for (done, _), count in self.runtime.stats.steps.items():
            steps[done] += count
        return steps

    def left(self) -> dict[str, float]:
        """Of requests that are gone."""
        self.engine.step()  # the worker hears of the last ones
        gauges = self.runtime.gauges()
        names = ("hybrid_parked_rows", "hybrid_resident_requests", "hybrid_frames_in_use")
        return {
            **{name: gauges[name] for name in names},
            "indices": self.runtime.tiers.frames.running,
            "questions": len(self.questions._tickets),
            "pages on the device": self.runtime.method._residency.placement.used,
            "parked since": len(self.parking._since),
        }


def _answer(output: Any) -> Answer:
    logprobs = [{token: each.logprob for token, each in place.items()} for place in output.logprobs or ()]
    return {
        "tokens": list(output.token_ids),
        "text": output.text,
        "reason": output.finish_reason,
        "logprobs": logprobs,
    }


@contextmanager
def serving(hybrid: dict[str, Any] | None = None) -> Iterator[Serving]:
    ours: dict[str, Any] = {}
    if hybrid is not None:
        ours = {"attention_backend": BACKEND, "additional_config": {"hybrid": hybrid}}
    llm = LLM(
        str(fetch("smollm2-135m-instruct")), dtype="float32", max_model_len=512, max_num_seqs=16,
        max_num_batched_tokens=4096 if hybrid is None else 512, block_size=32 if hybrid is None else PAGE,
        enforce_eager=True, kv_cache_memory_bytes=256 * 2**20, disable_log_stats=True, **ours,
    )  # fmt: skip
    try:
        yield Serving(llm)
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()


# --- cases ---


def stock(engine: Serving) -> dict[str, Any]:
    """Answers to everything that the cases ask for, and to what they ask in the middle of somebody's answer."""
    sets = {"mixed": MIXED, "fits": FITS, "late": LATE, "overdue": OVERDUE, "ended": ENDED, "stays": STAYS,
            "served": SERVED, "prefix": {"fills": FILLS}}  # fmt: skip
    engine.run({f"{name}/{each}": ask for name, asks in sets.items() for each, ask in asks.items()})
    engine.run({f"prefix/{name}": ask for name, ask in after(engine.answers["prefix/fills"]).items()})
    return engine.answers


def after(answer: list[Answer]) -> dict[str, Ask]:
    """Two prompts that begin with a page which ``FILLS`` fills by its answer, and go on in their own way."""
    page = FILLS.prompt + answer[0]["tokens"][:2]
    return {name: Ask(page + tokens_of_prose(4, start), {"max_tokens": 2, "ignore_eos": True})
            for name, start in (("meanwhile", 0), ("afterwards", 100))}  # fmt: skip


def strategy(name: str) -> Callable[[Serving], dict[str, Any]]:
    def case(engine: Serving) -> dict[str, Any]:
        engine.follow(name)
        engine.run(MIXED)
        return engine.found(strategies=engine.strategies(), left=engine.left())

    return case


def switching(engine: Serving) -> dict[str, Any]:
    """Rows that are parked are waited for in a later step, and the other way round."""
    method, turn = engine.runtime.method, 0

    def next_one(rows: Any, on_cpu: torch.Tensor) -> str:
        nonlocal turn
        turn += 1
        return ("lockstep" if turn % 10 == 0 else "overlap") if bool(on_cpu.any()) else "gpu"

    method._strategy = next_one
    try:
        engine.run(MIXED)
    finally:
        del method._strategy
    return engine.found(strategies=engine.strategies(), left=engine.left())


def fits(engine: Serving) -> dict[str, Any]:
    """One after the other, then all at once."""
    engine.follow("auto")
    alone = {}
    for name, each in FITS.items():
        engine.run({name: each})
        alone[name] = engine.answers[name]
    engine.run(FITS)
    return engine.found(alone=alone, strategies=engine.strategies(), left=engine.left())


def prefix(engine: Serving) -> dict[str, Any]:
    expected = json.loads((Path(sys.argv[1]) / "stock.json").read_text())["prefix/fills"]
    asks, filled = after(expected), (len(FILLS.prompt) + 2) // PAGE - 1

    def is_cached() -> bool:
        manager = engine.scheduler.kv_cache_manager
        return manager.get_blocks(engine.request("fills").request_id).blocks[0][filled].block_hash is not None

    cached = {}
    with settled(engine.questions):
        engine.add("fills", FILLS)
        engine.step(1 + (LAYERS + 1) + LAYERS // 2 + 1)
        parked = engine.parked_at("fills")
        engine.add("meanwhile", asks["meanwhile"])
        engine.step()
        cached["meanwhile"] = is_cached()
        while len(engine.at["fills"]) < 3:
            cached["before"] = is_cached()
            engine.step()
        cached["afterwards"] = is_cached()
        engine.add("afterwards", asks["afterwards"])
        engine.run()
    return engine.found(parked=parked, is_cached=cached, left=engine.left())


def late(engine: Serving) -> dict[str, Any]:
    held = Held(engine.questions)
    engine.add_all(LATE)
    with settled(engine.questions, held):
        engine.step(2)
        held.holds = {engine.index("late")}  # type: ignore[arg-type]
        engine.step(2 * (LAYERS + 1))
        told = {name: len(at) for name, at in engine.at.items()}
        held.holds = set()
        engine.run()
    return engine.found(told=told, left=engine.left())


def overdue(engine: Serving) -> dict[str, Any]:
    """Two rows wait for longer than any may, one of them twice."""
    held, parking = Held(engine.questions), engine.parking
    allowed, parking._deadline = parking._deadline, 0.5
    engine.add_all(OVERDUE)
    recomputed: list[str] = []
    take_back = engine.scheduler._take_back

    def watched(output: Any) -> None:
        recomputed.extend(name.partition("-")[0] for name in output.failed)
        take_back(output)

    engine.scheduler._take_back = watched
    try:
        engine.step(3)
        while engine.engine.has_unfinished_requests():
            names = {"twice"} | ({"once"} - set(recomputed))
            held.holds = {index for index in map(engine.index, names) if index is not None}
            engine.step()
    finally:
        parking._deadline, engine.scheduler._take_back = allowed, take_back
    return engine.found(recomputed=recomputed, left=engine.left())


def ended(engine: Serving) -> dict[str, Any]:
    """Rows that are parked at the first layer, in the middle and at the last one go, all at once."""
    with settled(engine.questions):
        engine.add_all(STAYS)
        engine.step()
        for begins, phase in enumerate(reversed(PHASES)):
            if begins:
                engine.step(PHASES[-begins] - phase)
            engine.add_all({name: each for name, each in ENDED.items() if name.endswith(f" {phase}")})
        engine.step(2)
        parked = {name: engine.parked_at(name) for name in ENDED}
        gone = [name for name in ENDED if name.startswith("aborted")]
        engine.engine.abort_request(gone)
        for name in ENDED.keys() - set(gone):
            engine.preempt(name)
        engine.step()
        rows = engine.runtime.gauges()["hybrid_parked_rows"]
        engine.run()
    return engine.found(parked=parked, rows=rows, left=engine.left())


CASES: dict[str, Callable[[Serving], dict[str, Any]]] = {
    "overlap": strategy("overlap"),
    "lockstep": strategy("lockstep"),
    "auto": strategy("auto"),
    "gpu": strategy("gpu"),
    "switching": switching,
    "fits": fits,
    "prefix": prefix,
    "late": late,
    "overdue": overdue,
    "ended": ended,
}


def main(folder: Path, names: list[str]) -> None:
    def tell(name: str, engine: Serving, case: Callable[[Serving], dict[str, Any]]) -> None:
        began = time.monotonic()
        engine.begin()
        write(folder, name, lambda: case(engine))
        if engine.engine.has_unfinished_requests():  # the case failed
            engine.engine.abort_request(list(engine.at))
        print(f"{name}: {engine.iterations} iterations in {time.monotonic() - began:.0f} s", flush=True)

    with serving() as engine:
        tell("stock", engine, stock)
    apex = {"strategy": "overlap", "device_tokens": DEVICE_TOKENS}
    with serving({"method": "apex", "page_size": PAGE, "apex": apex}) as engine:
        for name in names:
            engine.follow("overlap")
            tell(name, engine, CASES[name])


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
