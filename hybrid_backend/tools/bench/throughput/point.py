"""What one run of a client measured: one endpoint, one request rate."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from hybrid_backend.tools.bench.client import BenchError
from hybrid_backend.tools.counts import counted


class Workload(BaseModel):
    """What each endpoint is asked. Lengths in tokens; ``goodput``: milliseconds by ttft, tpot or e2el; ``tokenizer``: a
    folder or hub id, if it is not the model's name."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    prompts: int = Field(gt=0)
    input_length: int = Field(gt=0)
    output_length: int = Field(gt=1)
    goodput: Mapping[str, float]
    tokenizer: str = ""


class Point(BaseModel):
    """Times in milliseconds, throughputs per second. ``rate`` is None where all requests are sent at once."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    endpoint: str
    rate: float | None
    repeat: int
    seconds: float
    completed: int
    failed: int
    requests_per_second: float
    good_requests_per_second: float
    output_tokens_per_second: float
    ttft_median: float
    ttft_p99: float
    tpot_median: float
    tpot_p99: float
    itl_p99: float


def point_from(result: Mapping[str, Any], endpoint: str, rate: float, repeat: int, workload: Workload) -> Point:
    """From the JSON of `vllm bench serve` or of SGLang's client, which name most things alike.

    Raises:
        BenchError: something is missing, or a request was answered with another number of tokens than asked for.
    """
    try:
        completed = int(result["completed"])
        tokens = int(result["total_output_tokens"])
        if completed and tokens != completed * workload.output_length:
            raise BenchError(
                f"{endpoint}: {counted(tokens, 'token')} in {counted(completed, 'answer')}, not "
                f"{workload.output_length} in each: the endpoint ignores ignore_eos, and its rates cannot be compared"
            )
        return Point(
            endpoint=endpoint,
            rate=None if math.isinf(rate) else rate,
            repeat=repeat,
            seconds=result["duration"],
            completed=completed,
            failed=workload.prompts - completed,
            requests_per_second=result["request_throughput"],
            good_requests_per_second=result["request_goodput"],
            output_tokens_per_second=result["output_throughput"],
            ttft_median=result["median_ttft_ms"],
            ttft_p99=result["p99_ttft_ms"],
            tpot_median=result["median_tpot_ms"],
            tpot_p99=result["p99_tpot_ms"],
            itl_p99=result["p99_itl_ms"],
        )
    except KeyError as error:
        raise BenchError(f"{endpoint}: the client's result has no {error}") from error
