"""Workers that are slow on purpose: between a step's mailboxes and the native thread that serves them stands a thread
which hands every question on, but for those of steps that it holds up (`HeldUp`), or of requests (`HeldQuestions`)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from hybrid_backend.methods.apex.questions import BoxQuestions
from hybrid_backend.step.cpu_attention import MailboxCpuAttention


class _Between:
    """``ways``: where each box's number is written, and where the workers read it."""

    def __init__(self, ways: list[tuple[Tensor, Tensor]]) -> None:
        self._ways, self._stop = ways, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def passes(self, box: int, number: int) -> bool:
        """Whether this question is handed on."""
        raise NotImplementedError

    def _run(self) -> None:
        known = [0] * len(self._ways)
        while not self._stop.is_set():
            for box, (asked, real) in enumerate(self._ways):
                number = int(asked[0])
                if number != known[box]:
                    known[box] = number
                    if self.passes(box, number):
                        real[0] = number
            time.sleep(1e-4)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()


class HeldUp(_Between):
    """Of ``partials``, before anything of them is captured. ``holds``: whether the questions of the step of this
    `StepInputs.number` never reach the workers."""

    def __init__(self, partials: MailboxCpuAttention, holds: Callable[[int], bool]) -> None:
        self._holds = holds
        served = partials.boxes.layers
        pinned = torch.cuda.is_available()
        mine = {
            layer: replace(box, asked_flag=torch.zeros_like(box.asked_flag, pin_memory=pinned))
            for layer, box in served.items()
        }
        partials.boxes.layers = mine
        super().__init__([(mine[layer].asked_flag, box.asked_flag) for layer, box in served.items()])

    def passes(self, box: int, number: int) -> bool:
        return not self._holds(number)


class HeldQuestions(_Between):
    """Of ``questions``, before anything of them is captured. ``holds``: requests whose questions never reach the
    workers; ``spoils``: those whose questions cannot be computed."""

    def __init__(self, questions: BoxQuestions) -> None:
        self.holds: set[int] = set()
        self.spoils: set[int] = set()
        self._boxes, real = questions.boxes, questions.boxes.asked_flag
        self._boxes.asked_flag = torch.zeros_like(real, pin_memory=torch.cuda.is_available())
        super().__init__(list(zip(self._boxes.asked_flag, real, strict=True)))

    def passes(self, box: int, number: int) -> bool:
        if box in self.spoils:
            self._boxes.ids[box, 0] = -1
        return box not in self.holds
