"""CPU workers: the kernels that compute attention partials on the CPU, and the pools of threads that run them."""

from hybrid_backend.workers.base import Owners, Ticket, WorkerPool
from hybrid_backend.workers.cpus import ALONE, Rank
from hybrid_backend.workers.judging import Judging
from hybrid_backend.workers.pool import NativePool, make_pool
from hybrid_backend.workers.registry import IPEX, kernel_name, kernel_names, resolve_kernel

__all__ = [
    "ALONE",
    "IPEX",
    "Judging",
    "NativePool",
    "Owners",
    "Rank",
    "Ticket",
    "WorkerPool",
    "kernel_name",
    "kernel_names",
    "make_pool",
    "resolve_kernel",
]
