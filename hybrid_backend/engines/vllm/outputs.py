"""What a worker tells the scheduler of a step beside its tokens: whose may not be used, whose are yet to come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from hybrid_backend.runtime import HybridRuntime
from hybrid_backend.step import Step, StepFailure


@dataclass
class HybridOutput(ModelRunnerOutput):
    """The step's output, in which the tokens of ``failed`` requests are wrong, and ``blocks`` hold wrong KV, since CPU
    partials missed the deadline or could not be computed (``why``); the rows of ``unfinished`` ones wait for a later
    step (`HybridRuntime.unfinished`). Read by our schedulers; fields, since the engine's core may be another process.
    """

    why: str = ""
    failed: list[str] = field(default_factory=list)  # request ids
    blocks: list[int] = field(default_factory=list)
    unfinished: list[str] = field(default_factory=list)  # request ids


class CheckedOutput(AsyncModelRunnerOutput):
    """An output that is on its way from the device: whether it may be used is known when it is there."""

    def __init__(self, output: AsyncModelRunnerOutput, runtime: HybridRuntime, step: Step) -> None:
        self._output, self._runtime, self._step = output, runtime, step

    def get_output(self) -> ModelRunnerOutput:
        output = self._output.get_output()
        return checked(output, self._runtime.failure(self._step))


def checked(
    output: ModelRunnerOutput, failure: StepFailure | None, unfinished: Sequence[str] = ()
) -> ModelRunnerOutput:
    if failure is None and not unfinished:
        return output
    same = {each.name: getattr(output, each.name) for each in fields(ModelRunnerOutput)}
    told = HybridOutput(**same, unfinished=list(unfinished))
    if failure is not None:
        told.why, told.failed, told.blocks = str(failure.error), failure.request_ids, failure.pages
    return told
