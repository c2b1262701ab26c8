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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.throughput.point import Workload

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Endpoint:
    """An OpenAI-compatible server: ``url`` without /v1, ``model`` as it names it, ``tokenizer`` a folder or hub id."""

    name: str
    url: str
    model: str
    tokenizer: str


def vllm_command(endpoint: Endpoint, workload: Workload, rate: float, seed: int, out: Path) -> list[str]:
    """`vllm bench serve`. Its `random` data set needs a tokenizer and nothing else; it ignores the end of text."""
    return [
        *("-m", "bench.throughput.vllm_client"),
        *("--backend", "openai", "--base-url", endpoint.url, "--endpoint", "/v1/completions"),
        *("--model", endpoint.model, "--tokenizer", endpoint.tokenizer),
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
        *("--model", endpoint.model, "--tokenizer", endpoint.tokenizer),
        *("--dataset-name", "random-ids", "--random-input-len", str(workload.input_length)),
        *("--random-output-len", str(workload.output_length), "--random-range-ratio", "1"),
        *("--num-prompts", str(workload.prompts), "--request-rate", _rate(rate), "--seed", str(seed)),
        *("--goodput", *_goodput(workload), "--disable-tqdm", "--warmup-requests", "0"),
        *("--output-file", str(out)),
    ]


Command = Callable[[Endpoint, Workload, float, int, Path], list[str]]
CLIENTS: Mapping[str, Command] = {"vllm": vllm_command, "sglang": sglang_command}


def installed_client() -> str | None:
    """The first client that this Python has."""
    return next((name for name in CLIENTS if importlib.util.find_spec(name) is not None), None)


def run_client(
    client: str, endpoint: Endpoint, workload: Workload, rate: float, seed: int, timeout: float = 3600
) -> Mapping[str, Any]:
    """One run; the client's own result. Raises RuntimeError with the end of its log if there is none."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "result.json")
        command = [sys.executable, *CLIENTS[client](endpoint, workload, rate, seed, out)]
        # The client needs no plugin, and its own environment must not think that it is a server.
        environment = {k: v for k, v in os.environ.items() if k != "PROMETHEUS_MULTIPROC_DIR"}
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**environment, "VLLM_PLUGINS": "none", "VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
            check=False,
        )
        if done.returncode or not out.exists():
            raise RuntimeError(f"{client}'s client failed on {endpoint.name} ({endpoint.url}):\n{done.stdout[-3000:]}")
        result: Mapping[str, Any] = json.loads(out.read_text().splitlines()[-1])
        return result


def _rate(rate: float) -> str:
    return "inf" if math.isinf(rate) else str(rate)


def _goodput(workload: Workload) -> list[str]:
    return [f"{name}:{limit:g}" for name, limit in workload.goodput.items()]
