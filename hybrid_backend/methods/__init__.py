"""Methods: published ways to place, select and compute, one file each."""

from hybrid_backend.methods.base import Method
from hybrid_backend.methods.registry import check_method_name, method_names, resolve_method, with_method

__all__ = ["Method", "check_method_name", "method_names", "resolve_method", "with_method"]
