"""Carries decode steps out: opens a step, runs the operations that the method asks for, and counts."""

from hybrid_backend.execution.base import Executor
from hybrid_backend.execution.step import DecodeStep

__all__ = ["DecodeStep", "Executor"]
