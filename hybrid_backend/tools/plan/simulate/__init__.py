"""Time of a decode step, from a hardware profile, a model's shape and a configuration."""

from hybrid_backend.tools.plan.simulate.step import PARTS, StepTime, decode_step, simulated_methods
from hybrid_backend.tools.plan.simulate.what_if import WhatIf, parse_what_if

__all__ = ["PARTS", "StepTime", "WhatIf", "decode_step", "parse_what_if", "simulated_methods"]
