"""Old place of `memory_plan.footprint`, until tools/plan and bench import it from there."""

from hybrid_backend.memory_plan.footprint import (
    UTILIZATION,
    Candidate,
    Item,
    Memory,
    MemoryRoom,
    MethodMemory,
    Place,
    StockMemory,
    default_chunk,
    largest,
)

Room = MemoryRoom
__all__ = [
    "UTILIZATION",
    "Candidate",
    "Item",
    "Memory",
    "MethodMemory",
    "Place",
    "Room",
    "StockMemory",
    "default_chunk",
    "largest",
]
