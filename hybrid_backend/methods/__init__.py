"""Methods: published ways to place, select and compute, one file each."""

from hybrid_backend.methods.base import Method
from hybrid_backend.methods.registry import method_names, resolve_method

__all__ = ["Method", "method_names", "resolve_method"]
