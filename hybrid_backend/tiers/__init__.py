"""Memory that holds KV on host and device: host pool, frames, digests, staging buffers, and their sizes."""

from hybrid_backend.tiers.base import Tiers
from hybrid_backend.tiers.sizes import TierLayout

__all__ = ["TierLayout", "Tiers"]
