"""How vLLM's processes wait for one another where every core computes.

The engine core looks for its worker's answer in a loop that yields and looks again, for a second after every message
(vllm/distributed/device_communicators/shm_broadcast.py, SpinCondition). vLLM keeps a core free for that. Where none is
free, the loop takes turns with a thread that computes, and the others wait for that thread at their next barrier: so
there a reader sleeps until it is told of a message. docs/peers.md has the measurement.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping, MutableMapping
from typing import Any

from hybrid_backend.engines.cpu_defaults import BIND, RESERVED
from hybrid_backend.host_memory import numbers

SLEEP = "HYBRID_READERS_SLEEP"
"""Set for the processes that the engine starts, which load plugins before they open a queue."""
_LOST = 20
"""Milliseconds after which a reader looks by itself: what tells it of the first messages may come before it listens."""
_BUSY = 1.0  # seconds after a message, as in vLLM; then it sleeps as long as vLLM lets it


def keeps_a_core(cores: Collection[int], environment: Mapping[str, str] = os.environ) -> bool:
    """Whether vLLM 0.32 leaves one of ``cores`` to processes that do not compute (vllm/utils/ompmultiprocessing.py)."""
    bound = environment.get(BIND, "auto")
    if bound == "auto":
        return int(environment.get(RESERVED) or 1) > 0
    return bound != "nobind" and not set(cores) <= {cpu for part in bound.split("|") for cpu in numbers(part)}


def choose(cores: Collection[int], environment: MutableMapping[str, str] = os.environ) -> None:
    """Say to the processes that will be started whether their readers sleep; what the user set stays."""
    if not keeps_a_core(cores, environment):
        environment.setdefault(SLEEP, "1")


def apply(environment: Mapping[str, str] = os.environ) -> None:
    """Make it so in this process."""
    if environment.get(SLEEP) != "1":
        return
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    stock = SpinCondition.wait
    if getattr(stock, "sleeps", False):  # vLLM loads plugins more than once
        return

    def wait(self: Any, timeout_ms: int | None = None) -> None:
        busy = time.monotonic() <= self.last_read + _BUSY
        self.busy_loop_s = 0
        stock(self, min(_LOST, timeout_ms or _LOST) if busy else timeout_ms)

    wait.sleeps = True  # type: ignore[attr-defined]
    SpinCondition.wait = wait
