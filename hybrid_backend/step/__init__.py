"""Runs decode steps: what a method may call, the driver that calls the method, and what is counted."""

from hybrid_backend.step.driver import StepDriver
from hybrid_backend.step.executor import Executor
from hybrid_backend.step.method import Method
from hybrid_backend.step.toolbox import Toolbox

__all__ = ["Executor", "Method", "StepDriver", "Toolbox"]
