"""Native CPU kernels: partial attention over pages, digests, a worker pool, and fused decode layers.

C++17 behind a plain C ABI (``src/``), built by ``build.py`` when the package is installed. `available` tells whether
that worked here; where it did not, everything else raises `WorkerError` with what to install.
"""

from __future__ import annotations

from hybrid_backend.errors import WorkerError
from hybrid_backend.kernels.cpu.decode import Decoder, decodes, openmp_entry
from hybrid_backend.kernels.cpu.library import isas, native
from hybrid_backend.kernels.cpu.mailbox import STEPS, Mailboxes, QuestionBoxes, RequestBoxes
from hybrid_backend.kernels.cpu.operations import attend_prompt
from hybrid_backend.kernels.cpu.partial import NativeTicket, Pool, partial

__all__ = [
    "STEPS",
    "Decoder",
    "Mailboxes",
    "NativeTicket",
    "Pool",
    "QuestionBoxes",
    "RequestBoxes",
    "attend_prompt",
    "available",
    "decodes",
    "isas",
    "openmp_entry",
    "partial",
    "why_unavailable",
]


def why_unavailable() -> str | None:
    """What to install so that the kernels run here; None if they do."""
    try:
        native()
    except WorkerError as error:
        return str(error)
    return None


def available() -> bool:
    """Whether the kernels were built and load on this machine."""
    return why_unavailable() is None
