"""Who computes on the CPU: a registry of partial-attention kernels and the pool that runs them."""

from hybrid_backend.workers.pool import Ticket, WorkerPool
from hybrid_backend.workers.registry import kernel_names, resolve_kernel

__all__ = ["Ticket", "WorkerPool", "kernel_names", "resolve_kernel"]
