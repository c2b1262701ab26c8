"""What a machine can do: the numbers that planning and simulation rest on."""

from hybrid_backend.tools.plan.hardware.machines import find_hardware, machine_names
from hybrid_backend.tools.plan.hardware.spec import Curve, Hardware, Number

__all__ = ["Curve", "Hardware", "Number", "find_hardware", "machine_names"]
