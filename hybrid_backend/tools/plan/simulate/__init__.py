"""Time of a decode step, from a hardware profile, a model's shape and a configuration."""

from hybrid_backend.tools.plan.simulate.step import PARTS, StepTime, decode_step, simulated_methods

__all__ = ["PARTS", "StepTime", "decode_step", "simulated_methods"]
