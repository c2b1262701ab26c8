"""What a worker hands back of a step whose CPU partials missed the deadline, or could not be computed."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from hybrid_backend.runtime import HybridRuntime
from hybrid_backend.step import Step, StepFailure


@dataclass
class FailedOutput(ModelRunnerOutput):
    """The step's output, in which these requests' tokens are wrong, and these blocks hold wrong KV. Read by our
    scheduler (`scheduler.Recomputing`); a field, since the engine's core may be another process."""

    why: str = ""
    failed: list[str] = field(default_factory=list)  # request ids
    blocks: list[int] = field(default_factory=list)


class CheckedOutput(AsyncModelRunnerOutput):
    """An output that is on its way from the device: whether it may be used is known when it is there."""

    def __init__(self, output: AsyncModelRunnerOutput, runtime: HybridRuntime, step: Step) -> None:
        self._output, self._runtime, self._step = output, runtime, step

    def get_output(self) -> ModelRunnerOutput:
        output = self._output.get_output()
        return checked(output, self._runtime.failure(self._step))


def checked(output: ModelRunnerOutput, failure: StepFailure | None) -> ModelRunnerOutput:
    if failure is None:
        return output
    same = {each.name: getattr(output, each.name) for each in fields(ModelRunnerOutput)}
    return FailedOutput(**same, why=str(failure.error), failed=failure.request_ids, blocks=failure.pages)
