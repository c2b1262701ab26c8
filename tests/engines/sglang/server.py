"""SGLang servers under test: `hybrid serve --engine sglang`, SGLang's own command line, SGLang without us."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from tests.engines import server as base
from tests.engines.server import MODEL, Server, free_port, running

# All cores of this process compute (tests/conftest.py).
ENVIRONMENT = {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))), "HF_HUB_OFFLINE": "1"}
PAGE = 16  # of the demo model's configuration


def hybrid_server(
    folder: Path, config: dict[str, Any], flags: Sequence[str] = (), environment: dict[str, str] | None = None
) -> AbstractContextManager[Server]:
    """``hybrid serve --engine sglang``."""
    return base.hybrid_server(
        folder, config, flags, engine="sglang", environment={**ENVIRONMENT, **(environment or {})}
    )


@contextmanager
def sglang_server(
    folder: Path,
    model_dir: Path,
    flags: Sequence[str],
    environment: dict[str, str] | None = None,
    python: str = sys.executable,
) -> Iterator[Server]:
    """SGLang's own command line. ``-P``: the repository's ``kernels`` must not hide the package of that name."""
    port = free_port()
    command = [python, "-P", "-m", "sglang.launch_server", "--model-path", str(model_dir)]
    command += ["--served-model-name", MODEL, "--port", str(port), *flags]
    with running(command, port, folder / f"sglang-{port}.log", {**ENVIRONMENT, **(environment or {})}) as server:
        yield server
