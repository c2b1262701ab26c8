"""The engine on the simulated GPU with workers that are late (tests/support/held_up.py); cases of `gpu_probe`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from tests.support.far_device import busy, late
from tests.support.gpu import ON_GPU

SHORT, LONG = 4, 6  # tokens that the first request and the others ask for
BLOCKS = 40  # nobody is preempted for room
DEADLINE = 2  # of steps, in seconds


@contextmanager
def held_up() -> Iterator[set[int]]:
    """Whoever makes an engine within gets workers that never hear of the steps of these `StepInputs.number`s."""
    from hybrid_backend.step.cpu_attention import MailboxCpuAttention
    from tests.support.held_up import HeldUp

    make, numbers, slow = MailboxCpuAttention.__init__, set[int](), list[HeldUp]()

    def made(self: MailboxCpuAttention, *args: Any) -> None:
        make(self, *args)
        slow.append(HeldUp(self, numbers.__contains__))

    MailboxCpuAttention.__init__ = made  # type: ignore[method-assign]
    try:
        yield numbers
    finally:
        MailboxCpuAttention.__init__ = make  # type: ignore[method-assign]
        for each in slow:
            each.close()


def serve(llm: Any, prompts: list[list[int]], numbers: set[int], always: bool) -> dict[str, Any]:
    """Two requests decode while the third is a prompt still; one step is held up, in which the first ends (``always``:
    all steps are)."""
    from vllm import SamplingParams

    engine, held = llm.llm_engine, llm.llm_engine.model_executor.driver_worker.worker
    runtime, preempted = held.session.runtime, list[list[str]]()
    execute, begin = held.execute_model, runtime.begin_step
    late_steps: list[list[str]] = []  # whose rows

    def watched(scheduled: Any) -> Any:
        if scheduled.preempted_req_ids:
            preempted.append(sorted(_names(scheduled.preempted_req_ids)))
        return execute(scheduled)

    def opened(batch: Any) -> Any:
        step = begin(batch)
        rows = [] if step.decode is None else sorted(_names(step.decode.request_ids))
        if rows and (always or (not late_steps and rows == ["0", "1"] and step.prefill)):
            numbers.add(step.number + 1)
            late_steps.append(rows)
        return step

    held.execute_model, runtime.begin_step = watched, opened
    for name, prompt in enumerate(prompts):
        sampling = SamplingParams(temperature=0, max_tokens=LONG if name else SHORT, ignore_eos=True, detokenize=False)
        engine.add_request(str(name), {"prompt_token_ids": prompt}, sampling)
    tokens: dict[str, list[int]] = {}
    reasons: dict[str, str] = {}
    with late(), nullcontext() if ON_GPU else busy():  # vLLM itself may wait
        while engine.has_unfinished_requests():
            for output in engine.step():
                tokens[output.request_id] = list(output.outputs[0].token_ids)
                reasons[output.request_id] = output.outputs[0].finish_reason
        engine.step()  # the worker hears of the last ones
    return {
        "tokens": tokens,
        "reasons": reasons,
        "late": late_steps,
        "preempted": preempted,
        "running": runtime.tiers.frames.running,
        "runner": type(held.model_runner).__module__,
        "scheduler": type(engine.engine_core.engine_core.scheduler).__name__,
    }


def _names(request_ids: Any) -> list[str]:
    return [name.partition("-")[0] for name in request_ids]


def expected(answers: list[list[int]]) -> dict[str, list[int]]:
    """As much of the model's ``answers`` as is asked for."""
    return {str(name): answer[: LONG if name else SHORT] for name, answer in enumerate(answers)}
