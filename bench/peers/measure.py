"""Order and measurement of the requests to peers, and the rates that follow from their times."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import httpx
from pydantic import BaseModel, ConfigDict

from bench.streams import Streamed, stream
from hybrid_backend.tools.bench.client import BenchError, Endpoint, headers, rotated

Prompt = list[int]
WARM_UP = 24  # tokens decoded before anything is timed
SPAN = 8  # tokens
LEAST_PROMPTS = 3  # of a depth: the first one of a length may meet kernels that are still to be made
REST = 1.5
"""vLLM's processes look for messages in a loop for a second after the last one (`SpinCondition`, busy_loop_s), on the
cores of whoever is asked next."""


class Point(BaseModel):
    """Rates of a peer at a depth and batch, in tokens per second, one per round.

    ``prefill`` has values at the smallest batch only: each prompt is computed alone.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    peer: str
    depth: int
    batch: int
    decode: tuple[float, ...]
    prefill: tuple[float, ...] = ()


def sweep(
    endpoints: Sequence[Endpoint],
    prompts: Callable[[int, int], list[Prompt]],
    depths: Sequence[int],
    batches: Sequence[int],
    rounds: int,
    tokens: int,
    deadline: float,
    least_prompts: int = LEAST_PROMPTS,
    rest: float = REST,
) -> Iterator[Point]:
    """Yield the points of one depth after the other.

    Args:
        prompts: of a depth and a number, distinct ones; those of depth 0 are for warming up.
        tokens: of an answer.
        deadline: seconds that a server may be silent.
        least_prompts: whose prefill is measured.
        rest: seconds before every turn (`REST`).

    Raises:
        BenchError: a server cannot be compared.
    """
    for endpoint in endpoints:
        ask(endpoint, prompts(0, max(batches)), WARM_UP, deadline)
    for depth in depths:
        asked = prompts(depth, max(*batches, least_prompts))
        prefill: dict[str, list[float]] = {endpoint.name: [] for endpoint in endpoints}
        for turn, prompt in enumerate(asked):
            for endpoint in rotated(endpoints, turn):
                time.sleep(rest)
                (answer,) = ask(endpoint, [prompt], 1, deadline)
                prefill[endpoint.name].append(prefill_rate(endpoint.name, answer))
        for batch in batches:
            decode: dict[str, list[float]] = {endpoint.name: [] for endpoint in endpoints}
            for turn in range(rounds):
                for endpoint in rotated(endpoints, turn):
                    time.sleep(rest)
                    answers = ask(endpoint, asked[:batch], tokens, deadline)
                    decode[endpoint.name].append(decode_rate(endpoint.name, answers, tokens))
            for endpoint in endpoints:
                rates = prefill[endpoint.name] if batch == min(batches) else []
                yield Point(
                    peer=endpoint.name, depth=depth, batch=batch, decode=tuple(decode[endpoint.name]),
                    prefill=tuple(rates),
                )  # fmt: skip


def prefill_rate(name: str, answer: Streamed) -> float:
    """Return the tokens per second until the first token of an answer to a prompt that is new to the server."""
    if 2 * (answer.cached_tokens or 0) > answer.prompt_tokens:
        raise BenchError(
            f"{name}: {answer.cached_tokens} of a prompt's {answer.prompt_tokens} tokens came from its prefix cache: "
            "its prefill cannot be timed; restart the server, or give another --seed"
        )
    return answer.prompt_tokens / (answer.times[0] if answer.times else answer.seconds)


def decode_rate(name: str, answers: Sequence[Streamed], tokens: int) -> float:
    """Return the tokens per second over all streams, from the median time that a stream takes for `SPAN` tokens.

    The time of single tokens would not do: where all cores compute, the client hears of a token at the kernel's next
    tick, and gaps are multiples of 4 ms. Where a server sends several tokens as one event, the whole stream counts.
    """
    seconds = list[float]()
    for answer in answers:
        if answer.answer_tokens != tokens or len(answer.times) < 2:
            raise BenchError(
                f"{name}: an answer has {answer.answer_tokens} tokens in {len(answer.times)} events, not {tokens}: the "
                "server does not heed ignore_eos or does not stream, and cannot be compared"
            )
        times, span = answer.times, max(1, min(SPAN, len(answer.times) // 4))
        if len(times) >= 0.9 * tokens:
            spans = [later - sooner for sooner, later in zip(times, times[span:], strict=False)]
            seconds.append(statistics.median(spans) / span)
        else:
            seconds.append((times[-1] - times[0]) / (tokens - 1))
    return len(answers) / statistics.median(seconds)


def ask(endpoint: Endpoint, prompts: Sequence[Prompt], tokens: int, deadline: float) -> list[Streamed]:
    """Request the answers to all prompts at once."""
    try:
        return asyncio.run(_ask(endpoint, prompts, tokens, deadline))
    except (httpx.HTTPError, ValueError) as error:
        raise BenchError(f"{endpoint.name}: {error or type(error).__name__}") from None


async def _ask(endpoint: Endpoint, prompts: Sequence[Prompt], tokens: int, deadline: float) -> list[Streamed]:
    async with httpx.AsyncClient(base_url=endpoint.url, headers=headers(), timeout=deadline) as client:
        bodies = [{"model": endpoint.model, "prompt": prompt, "max_tokens": tokens} for prompt in prompts]
        return list(await asyncio.gather(*(stream(client, "/v1/completions", body) for body in bodies)))
