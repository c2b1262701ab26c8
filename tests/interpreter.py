"""Triton's interpreter, for machines without a GPU."""

from __future__ import annotations

import os


def interpret_triton() -> None:
    """Choose the interpreter where no GPU is. It must be chosen before Triton is first imported; the processes that
    this one starts are not to inherit it."""
    import torch  # late: whoever divides the cores does so before

    if torch.cuda.is_available():
        return
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        import triton
    except ImportError:
        pass  # no wheel for this platform
    else:
        triton.knobs.runtime.interpret = True
    finally:
        del os.environ["TRITON_INTERPRET"]
