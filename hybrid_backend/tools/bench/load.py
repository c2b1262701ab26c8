"""Load on servers by the engines' own serving benchmarks: servers take turns at each request rate."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hybrid_backend.errors import ConfigError, EngineError, ModelError
from hybrid_backend.tools.bench.client import BenchError, Endpoint, rotated
from hybrid_backend.tools.counts import counted

WARM_UP = 3
"""Prompts that warm an endpoint up."""


@dataclass(frozen=True)
class Workload:
    """Requests of one run.

    Lengths are in tokens. ``goodput`` has the limits of a good request, in milliseconds by ttft, tpot or e2el.
    ``tokenizer`` is a folder or hub id; empty: the model's name.
    """

    prompts: int
    input_length: int
    output_length: int
    goodput: Mapping[str, float]
    tokenizer: str = ""


class Point(BaseModel):
    """Figures of a client's run, read from its result; both engines' clients use the names that are aliases here.

    Times are in milliseconds, throughputs per second. ``rate`` is None where all requests are sent at once.
    """

    model_config = ConfigDict(frozen=True, allow_inf_nan=False, validate_by_name=True, validate_by_alias=True)
    endpoint: str
    rate: float | None
    repeat: int
    completed: int
    failed: int
    seconds: float = Field(alias="duration")
    requests_per_second: float = Field(alias="request_throughput")
    good_requests_per_second: float = Field(alias="request_goodput")
    output_tokens_per_second: float = Field(alias="output_throughput")
    ttft_median: float = Field(alias="median_ttft_ms")
    ttft_p99: float = Field(alias="p99_ttft_ms")
    tpot_median: float = Field(alias="median_tpot_ms")
    tpot_p99: float = Field(alias="p99_tpot_ms")


Run = Callable[[Endpoint, Workload, float, int], Mapping[str, Any]]
"""Runs an engine's client with an endpoint, a workload, a request rate and a seed; returns the client's result."""


def sweep(
    endpoints: Sequence[Endpoint],
    rates: Sequence[float],
    repeats: int,
    workload: Workload,
    run: Run,
    seed: int,
    tell: Callable[[Point], None],
) -> list[Point]:
    """Return the points of all runs, ordered by endpoint, after a warm-up of each endpoint.

    The endpoints of one turn share a seed, so that they get the same prompts and arrival times. No other turn has it.
    A rate of infinity sends all requests at once. ``tell`` gets each point as soon as it is measured.
    """
    for endpoint in endpoints:
        run(endpoint, replace(workload, prompts=WARM_UP), math.inf, seed)
    points = []
    for turn in range(repeats * len(rates)):
        repeat, rate = turn // len(rates), rates[turn % len(rates)]
        for endpoint in rotated(endpoints, turn):
            result = run(endpoint, workload, rate, seed + 1 + turn)
            points.append(point_from(result, endpoint.name, rate, repeat, workload))
            tell(points[-1])
    order = [endpoint.name for endpoint in endpoints]
    return sorted(points, key=lambda point: order.index(point.endpoint))


def point_from(result: Mapping[str, Any], endpoint: str, rate: float, repeat: int, workload: Workload) -> Point:
    """Return the point that a client's result describes.

    Raises:
        BenchError: the result lacks a figure, or answers have another number of tokens than the workload's.
    """
    run = {"endpoint": endpoint, "rate": None if math.isinf(rate) else rate, "repeat": repeat}
    try:
        completed, tokens = int(result["completed"]), int(result["total_output_tokens"])
        point = Point.model_validate({**result, **run, "failed": workload.prompts - completed})
    except (KeyError, ValidationError) as error:
        raise BenchError(f"{endpoint}: the client's result lacks a figure: {error}") from error
    if completed and tokens != completed * workload.output_length:
        raise BenchError(
            f"{endpoint}: {counted(tokens, 'token')} in {counted(completed, 'answer')}, not {workload.output_length} "
            "in each: the endpoint ignores ignore_eos, and its rates cannot be compared"
        )
    return point


def _vllm_flags(out: Path) -> list[str]:
    """Return the flags of `vllm bench serve` alone, whose ``random`` data set needs nothing but a tokenizer."""
    return [
        *("-m", "hybrid_backend.tools.bench.vllm_client", "--backend", "openai"),
        *("--endpoint", "/v1/completions", "--dataset-name", "random", "--random-range-ratio", "0"),
        *("--percentile-metrics", "ttft,tpot", "--metric-percentiles", "99", "--temperature", "0"),
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
    if option not in ("auto", *CLIENTS):
        raise ConfigError(f"--client {option}: write {' or '.join(('auto', *CLIENTS))}")
    for name in CLIENTS if option == "auto" else [option]:
        if importlib.util.find_spec(name) is not None:
            return name
    raise EngineError(
        f"--client {option}: the load comes from an engine's own client, and none of it is installed here; "
        "install vLLM or SGLang, as README says under Install"
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
        flags = [
            *("--base-url", endpoint.url, "--model", endpoint.model),
            *("--tokenizer", workload.tokenizer or endpoint.model, "--random-input-len", str(workload.input_length)),
            *("--random-output-len", str(workload.output_length), "--num-prompts", str(workload.prompts)),
            *("--request-rate", "inf" if math.isinf(rate) else str(rate), "--seed", str(seed), "--disable-tqdm"),
            *("--goodput", *(f"{name}:{limit:g}" for name, limit in workload.goodput.items())),
        ]
        # The client needs no plugin, and must not take itself for a server's process.
        environment = {**os.environ, "VLLM_PLUGINS": "none", "VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1"}
        environment.pop("PROMETHEUS_MULTIPROC_DIR", None)
        message = f"{client}'s client failed on {endpoint.name} ({endpoint.url})"
        try:
            done = subprocess.run(
                [sys.executable, *CLIENTS[client](out), *flags],
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

    from hybrid_backend.tools.hub import check_hub, resolve_model

    try:
        tokenizer = resolve_model(option or served_name)
        if not Path(tokenizer).is_dir():
            check_hub(tokenizer)
            hf_hub_download(tokenizer, "tokenizer_config.json")
    except (ModelError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        source = f"--tokenizer {option}" if option else f"the server's model {served_name!r} names no tokenizer here"
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        fix = "give --tokenizer FOLDER (of the model) or org/name"
        raise BenchError(f"{source}: {reason}; {fix}") from None
    return tokenizer
