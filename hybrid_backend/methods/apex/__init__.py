"""Method ``apex`` (APEX, arXiv 2506.03296): the policy, and the rule that chooses between lockstep and overlap."""

from hybrid_backend.methods.apex.method import Apex

__all__ = ["Apex"]
