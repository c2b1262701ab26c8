"""Old place of `memory_plan.blocks`, until tools/plan and bench import it from there."""

from hybrid_backend.memory_plan.blocks import Blocks as Blocks
