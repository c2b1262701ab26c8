"""Carries decode steps out: opens a step, runs the operations that the method asks for, and counts."""

from hybrid_backend.step.driver import DecodeStep
from hybrid_backend.step.executor import Executor

__all__ = ["DecodeStep", "Executor"]
