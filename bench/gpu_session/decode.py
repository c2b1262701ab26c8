"""Decoding of a long context by one backend or method: `bench.gpu_decode`, one run."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.gpu_session.case import Context


def measure(options: Mapping[str, Any], context: Context) -> None:
    """Emit the figures of one run, then its profile, each with the tuned input that it rests on."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from bench import gpu_decode
    from bench.shapes import write_config

    with tempfile.TemporaryDirectory() as folder:
        model = str(write_config(options["shape"], Path(folder)))
        run = gpu_decode.Run(**{"model": model, **options["run"]})
        for figures in gpu_decode.measure(run):
            context.emit(
                kind=run.kind, card_gb=run.card_gb, context=run.context, page_spread=run.page_spread, **figures
            )
