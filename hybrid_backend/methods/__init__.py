"""Methods: published ways to place, select and compute, one file each."""

from hybrid_backend.methods.registry import (
    check_method_name,
    method_names,
    register,
    resolve_method,
    unregister,
    with_method,
)
from hybrid_backend.step.method import Method

__all__ = ["Method", "check_method_name", "method_names", "register", "resolve_method", "unregister", "with_method"]
