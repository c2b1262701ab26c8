"""Where KV lives: host pool, digests, slots, residency, transfers."""

from hybrid_backend.tiers.base import TierLayout, Tiers

__all__ = ["TierLayout", "Tiers"]
