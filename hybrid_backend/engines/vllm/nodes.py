"""Old place of `memory_plan.numa`, until tools/plan and tools/doctor import it from there."""

from hybrid_backend.memory_plan.numa import KVCACHE_SPACE, rank_nodes

__all__ = ["KVCACHE_SPACE", "rank_nodes"]
