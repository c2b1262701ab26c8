"""Decode steps: the `Method` interface, the driver that calls a method, its toolbox, counters and samples."""

from hybrid_backend.step.driver import StepDriver
from hybrid_backend.step.executor import Executor
from hybrid_backend.step.method import Method
from hybrid_backend.step.toolbox import Toolbox

__all__ = ["Executor", "Method", "StepDriver", "Toolbox"]
