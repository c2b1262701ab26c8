"""What a worker tells the scheduler of a step beside its tokens: whose may not be used, whose are yet to come."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NoReturn

from vllm.logger import init_logger
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from hybrid_backend.batch import StepFailure

_logger = init_logger("vllm.hybrid_backend")


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

    def __init__(self, output: AsyncModelRunnerOutput, failure: Callable[[], StepFailure | None]) -> None:
        """``failure``: of the step, asked when the output is there."""
        self._output, self._failure = output, failure

    def get_output(self) -> ModelRunnerOutput:
        output = self._output.get_output()
        return checked(output, self._failure())

    def get_kv_connector_output(self) -> Any:
        """Asked by vLLM 0.33 and later."""
        return self._output.get_kv_connector_output()


class UnheardRank:
    """A rank whose output vLLM does not ask for, nor its errors (v1/executor/multiproc_executor.py,
    ``WorkerProc._execute_worker_rpc``), while the others go on with what it gave them."""

    def __init__(self) -> None:
        self._on_its_way: AsyncModelRunnerOutput | None = None

    def check(self, output: ModelRunnerOutput | AsyncModelRunnerOutput | None) -> None:
        """``output``: of the last step, `checked` or a `CheckedOutput`. The latter is looked at when the next comes,
        so that the device has its work meanwhile. None: there is no step.

        Raises:
            SystemExit: it may not be used.
        """
        before, self._on_its_way = self._on_its_way, None
        there = [] if before is None else [before.get_output()]
        if isinstance(output, AsyncModelRunnerOutput):
            self._on_its_way = output
        elif output is not None:
            there.append(output)
        for each in there:
            if isinstance(each, HybridOutput) and each.failed:
                self.end(each.why)

    @staticmethod
    def end(why: str) -> NoReturn:
        """vLLM ends the engine when one of its workers has ended."""
        _logger.error("%s; vLLM does not ask this rank, so it ends, and the engine with it", why)
        raise SystemExit(1)


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
