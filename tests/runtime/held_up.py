"""Workers that are slow on purpose: between a step's mailboxes and the native thread that serves them stands a thread
which hands every question on, but for those of steps that it holds up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from hybrid_backend.methods.graph_scout import GraphScout


class HeldUp:
    """Of ``graph``, before anything of it is captured. ``holds``: whether the questions of the step of this
    `StepInputs.number` never reach the workers."""

    def __init__(self, graph: GraphScout, holds: Callable[[int], bool]) -> None:
        self._holds, self._stop = holds, threading.Event()
        served = graph.mail.layers
        pinned = torch.cuda.is_available()
        graph.mail.layers = [
            replace(letters, asked=torch.zeros_like(letters.asked, pin_memory=pinned)) for letters in served
        ]
        self._ways = [(mine.asked, real.asked) for mine, real in zip(graph.mail.layers, served, strict=True)]
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        seen = [0] * len(self._ways)
        while not self._stop.is_set():
            for layer, (asked, real) in enumerate(self._ways):
                number = int(asked[0])
                if number != seen[layer]:
                    seen[layer] = number
                    if not self._holds(number):
                        real[0] = number
            time.sleep(1e-4)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
