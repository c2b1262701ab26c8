"""Output of a worker's step besides its tokens: whose may not be used, whose are yet to come, who else may start."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NoReturn

from vllm.logger import init_logger
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from hybrid_backend.batch import StepFailure
from hybrid_backend.step.request_room import RequestRoom

_logger = init_logger("vllm.hybrid_backend")


@dataclass
class HybridOutput(ModelRunnerOutput):
    """Output of a step that failed in part, whose rows wait in part, or that limits requests. Our schedulers read it.

    The additions are fields, because the engine's core may be another process.

    CPU partials missed the deadline or could not be computed (``why``). So the tokens of the requests ``failed`` and
    the KV of ``blocks`` are wrong. The rows of the requests ``unfinished`` wait (`HybridRuntime.unfinished`). ``room``
    limits the requests that may start (`step.method.request_room`).
    """

    why: str = ""
    failed: list[str] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    unfinished: list[str] = field(default_factory=list)
    room: RequestRoom | None = None


class CheckedOutput(AsyncModelRunnerOutput):
    """An output on its way from the device, which is checked when it has arrived."""

    def __init__(
        self,
        output: AsyncModelRunnerOutput,
        failure: Callable[[], StepFailure | None],
        room: RequestRoom | None = None,
    ) -> None:
        self._output, self._failure, self._room = output, failure, room

    def get_output(self) -> ModelRunnerOutput:
        output = self._output.get_output()
        return checked(output, self._failure(), room=self._room)

    def get_kv_connector_output(self) -> Any:
        """Return the connector's output, which vLLM 0.33 and later fetch separately."""
        return self._output.get_kv_connector_output()


class UnreadRank:
    """A rank whose outputs and errors vLLM does not read, while other ranks go on with what it computed.

    The source is v1/executor/multiproc_executor.py, ``WorkerProc._execute_worker_rpc``.
    """

    def __init__(self) -> None:
        self._pending: AsyncModelRunnerOutput | None = None

    def check(self, output: ModelRunnerOutput | AsyncModelRunnerOutput | None) -> None:
        """Raise SystemExit if the output of the last step, None if there was none, may not be used.

        A `CheckedOutput` is read when the next output comes, so that the device has its work meanwhile.
        """
        before, self._pending = self._pending, None
        arrived = [] if before is None else [before.get_output()]
        if isinstance(output, AsyncModelRunnerOutput):
            self._pending = output
        elif output is not None:
            arrived.append(output)
        for result in arrived:
            if isinstance(result, HybridOutput) and result.failed:
                self.end(result.why)

    @staticmethod
    def end(why: str) -> NoReturn:
        """End this worker. vLLM ends the engine when one of its workers has ended."""
        _logger.error("%s; vLLM does not ask this rank, so it ends, and the engine with it", why)
        raise SystemExit(1)


def checked(
    output: ModelRunnerOutput,
    failure: StepFailure | None,
    unfinished: Sequence[str] = (),
    room: RequestRoom | None = None,
) -> ModelRunnerOutput:
    """Return ``output``, as a `HybridOutput` if its step failed, rows wait, or requests are limited."""
    if failure is None and not unfinished and room is None:
        return output
    stock = {entry.name: getattr(output, entry.name) for entry in fields(ModelRunnerOutput)}
    result = HybridOutput(**stock, unfinished=list(unfinished), room=room)
    if failure is not None:
        result.why, result.failed, result.blocks = str(failure.error), failure.request_ids, failure.pages
    return result
