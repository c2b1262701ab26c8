"""Where KV lives: the host pool, frames and residency, digests, staging, and their sizes."""

from hybrid_backend.tiers.base import Tiers
from hybrid_backend.tiers.sizes import TierLayout

__all__ = ["TierLayout", "Tiers"]
