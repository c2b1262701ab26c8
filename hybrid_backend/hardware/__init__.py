"""Hardware profiles: rates and sizes of machines, for planning, simulation and schedules."""

from hybrid_backend.hardware.machines import find_hardware, hardware_of_gpu, machine_choices, machine_names
from hybrid_backend.hardware.spec import Curve, Hardware, Number

__all__ = ["Curve", "Hardware", "Number", "find_hardware", "hardware_of_gpu", "machine_choices", "machine_names"]
