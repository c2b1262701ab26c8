"""Workers that are slow on purpose: between a step's mailboxes and the native thread that serves them stands a thread
which hands every question on, but for those of steps that it holds up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from hybrid_backend.execution.partials import MailboxPartials


class HeldUp:
    """Of ``partials``, before anything of them is captured. ``holds``: whether the questions of the step of this
    `StepInputs.number` never reach the workers."""

    def __init__(self, partials: MailboxPartials, holds: Callable[[int], bool]) -> None:
        self._holds, self._stop = holds, threading.Event()
        served = partials.boxes.layers
        pinned = torch.cuda.is_available()
        mine = {
            layer: replace(box, asked=torch.zeros_like(box.asked, pin_memory=pinned)) for layer, box in served.items()
        }
        partials.boxes.layers = mine
        self._ways = [(mine[layer].asked, box.asked) for layer, box in served.items()]
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        known = [0] * len(self._ways)
        while not self._stop.is_set():
            for layer, (asked, real) in enumerate(self._ways):
                number = int(asked[0])
                if number != known[layer]:
                    known[layer] = number
                    if not self._holds(number):
                        real[0] = number
            time.sleep(1e-4)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
