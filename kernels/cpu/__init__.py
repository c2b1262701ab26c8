"""Native CPU kernels: partial attention over pages, digests, a worker pool, and whole decode layers.

The kernels are C++17 behind a plain C ABI (``src/``). ``build.py`` builds them when the package is installed.
`available` tells if that succeeded on this machine. If not, all other functions raise `WorkerError` with the package to
install.
"""

from __future__ import annotations

from hybrid_backend.errors import WorkerError
from hybrid_backend.kernels.cpu.decode import Decoder, decodes, openmp_entry
from hybrid_backend.kernels.cpu.judging import NativeJudging
from hybrid_backend.kernels.cpu.library import isas, native
from hybrid_backend.kernels.cpu.mailbox import STEPS, HostLists, Mailboxes, QueryShape, QuestionBoxes, RequestBoxes
from hybrid_backend.kernels.cpu.operations import attend_prompt
from hybrid_backend.kernels.cpu.partial import NativeTicket, Pool, partial

__all__ = [
    "STEPS",
    "Decoder",
    "HostLists",
    "Mailboxes",
    "NativeJudging",
    "NativeTicket",
    "Pool",
    "QueryShape",
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
    """Return the reason why the kernels do not run on this machine, with what to install; None if they run."""
    try:
        native()
    except WorkerError as error:
        return str(error)
    return None


def available() -> bool:
    """Tell if the kernels were built and load on this machine."""
    return why_unavailable() is None
