"""Method ``clo`` (CLO, arXiv 2511.14510): its policy, and the choice of heads that keep their pages."""

from hybrid_backend.methods.clo.heads import persistent_heads, threshold
from hybrid_backend.methods.clo.method import Clo

__all__ = ["Clo", "persistent_heads", "threshold"]
