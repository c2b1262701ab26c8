"""When an engine hears that the workers have judged a prompt: at once, or when a test says so."""

from __future__ import annotations

import time
from typing import Any

from hybrid_backend.kernels.operations import Judgement, PromptToJudge
from hybrid_backend.workers import Judging, WorkerPool

SECONDS = 60.0


def judge_at_once(workers: WorkerPool) -> None:
    """Each prompt is judged when it is submitted, so that the step that submits it takes the judgement."""
    judge = workers.judge

    def judged(prompt: PromptToJudge, what: str) -> Judging:
        judging = judge(prompt, what)
        wait_for(judging)
        return judging

    replace_judge(workers, judged)


def wait_for(judging: Judging) -> Judgement:
    """Poll until the judgement is there."""
    while True:
        judgement = judging.poll(SECONDS)
        if judgement is not None:
            return judgement
        time.sleep(0.0005)


class Held:
    """A judging of which the engine hears nothing before `release`."""

    def __init__(self, judging: Judging) -> None:
        self.judging, self.is_released, self.is_abandoned = judging, False, False

    def poll(self, deadline: float) -> Judgement | None:
        return wait_for(self.judging) if self.is_released else None

    def abandon(self) -> None:
        self.is_abandoned = True
        self.judging.abandon()

    def release(self) -> None:
        """The next step takes the judgement."""
        self.is_released = True


def hold_judgements(workers: WorkerPool) -> list[Held]:
    """Return a list that takes each judging that is submitted later."""
    judge, held = workers.judge, list[Held]()

    def holding(prompt: PromptToJudge, what: str) -> Judging:
        held.append(Held(judge(prompt, what)))
        return held[-1]

    replace_judge(workers, holding)
    return held


def replace_judge(workers: Any, judge: Any) -> None:
    """Let a pool judge by another function."""
    workers.judge = judge
