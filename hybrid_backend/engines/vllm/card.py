"""Old place of `memory_plan.device`, until tools/plan and bench import it from there."""

from hybrid_backend.memory_plan.device import DevicePlan as Card

__all__ = ["Card"]
