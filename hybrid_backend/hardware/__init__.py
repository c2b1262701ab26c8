"""What a machine can do, and the shapes of models: the numbers that planning and simulation rest on."""

from hybrid_backend.hardware.machines import find_hardware, machine_names
from hybrid_backend.hardware.shape import ModelShape, read_shape
from hybrid_backend.hardware.spec import Curve, Hardware, Number

__all__ = ["Curve", "Hardware", "ModelShape", "Number", "find_hardware", "machine_names", "read_shape"]
