"""Traffic on one server by ``vllm bench serve``: all requests at once, a model's shape with random weights.

The weights are vLLM's dummy ones, whose attention is nearly even, so that no page stays more important than another:
nothing of this part rests on a tuned input.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from bench.gpu_session.case import Context
from hybrid_backend.tools.bench.client import Endpoint
from hybrid_backend.tools.bench.load import Point, Workload, run_client, sweep
from hybrid_backend.tools.bench.servers import hybrid_server, stock_server
from hybrid_backend.tools.hub import hub_folder, resolve_model


def measure(options: Mapping[str, Any], context: Context) -> None:
    """Start one server that may take ``card_gb`` of the GPU, and emit the figures of one run."""
    from vllm.platforms import current_platform

    from bench.shapes import write_shape

    kind, card = options["kind"], options["card_gb"]
    share = min(0.92, card * 1e9 / current_platform.get_device_total_memory())
    tokenizer = Path(hub_folder(resolve_model(options["tokenizer"])))
    length = options["input"] + options["output"] + 64
    flags = [
        *("--load-format", "dummy", "--dtype", options["dtype"], "--gpu-memory-utilization", f"{share:.4f}"),
        *("--max-model-len", str(length), "--max-num-seqs", str(options["most"]), *options["flags"]),
    ]
    with tempfile.TemporaryDirectory() as place:
        model = str(write_shape(options["shape"], Path(place), tokenizer))
        if kind == "stock":
            starting = stock_server(context.logs, model, [*flags, *options["stock_flags"]], model)
        else:
            keys = {"method": kind, "host_pool.size": options["host_bytes"]}
            starting = hybrid_server(context.logs, keys, flags, model)
        limits = {"ttft": 10_000.0, "tpot": 250.0}
        workload = Workload(options["prompts"], options["input"], options["output"], limits, str(tokenizer))

        def tell(point: Point) -> None:
            context.emit(kind=kind, card_gb=card, weights="random", **point.model_dump())

        with starting as server:
            run = partial(run_client, "vllm", context.logs / "client.log")
            sweep([Endpoint(kind, server.url, server.model)], [math.inf], 1, workload, run, 0, tell)
