"""Resources that serve tasks in the order in which they are given: the core of the simulation.

A GPU stream (the step's, or the one in which pages are selected), a pool of workers that takes jobs in turn and a copy
engine are such queues. A task starts when its resource is free and everything that it waits for is done; so virtual
time needs no event heap, and a resource that becomes faster can never make anything end later.
"""

from __future__ import annotations

from typing import Literal, get_args

Resource = Literal["device", "selection", "workers", "link"]


class Timeline:
    """Virtual time in seconds."""

    def __init__(self) -> None:
        self._free: dict[Resource, float] = dict.fromkeys(get_args(Resource), 0.0)
        self._busy: dict[Resource, float] = dict.fromkeys(get_args(Resource), 0.0)

    def run(self, resource: Resource, seconds: float, *after: float) -> float:
        """Queue a task that may not start before the times ``after``; returns when it ends."""
        end = max(self._free[resource], *after, 0.0) + seconds
        self._free[resource] = end
        self._busy[resource] += seconds
        return end

    def pass_idle(self, resource: Resource, seconds: float) -> None:
        """Let time pass in which the resource does nothing."""
        self._free[resource] += seconds

    def free(self, resource: Resource) -> float:
        """When the resource has done all that it was given."""
        return self._free[resource]

    def busy(self, resource: Resource) -> float:
        """Seconds of work so far."""
        return self._busy[resource]
