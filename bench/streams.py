"""Streamed answers of OpenAI-compatible servers, with the times of their chunks."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx


@dataclass(frozen=True)
class Streamed:
    """A streamed answer.

    ``times`` are the seconds from the request to each chunk with text, ``seconds`` those to the end of the stream.
    ``cached_tokens`` is the part of the prompt from the prefix cache, None where the server does not report it.
    """

    text: str
    times: tuple[float, ...]
    seconds: float
    prompt_tokens: int
    answer_tokens: int
    cached_tokens: int | None


async def stream(client: httpx.AsyncClient, path: str, body: Mapping[str, Any]) -> Streamed:
    """Request a greedy answer of exactly ``max_tokens`` tokens from the API of completions or chat completions.

    Raises:
        httpx.HTTPError, ValueError: the server refuses the request or ends the stream early.
    """
    options = {"ignore_eos": True, "temperature": 0.0, "stream": True, "stream_options": {"include_usage": True}}
    texts, times, usage = list[str](), list[float](), None
    start = time.perf_counter()
    async with client.stream("POST", path, json={**body, **options}) as response:
        if response.is_error:
            raise ValueError(f"HTTP {response.status_code}: {(await response.aread()).decode(errors='replace')[:300]}")
        async for line in response.aiter_lines():
            if not line.startswith("data:") or line == "data: [DONE]":
                continue
            chunk = json.loads(line.removeprefix("data:"))
            if "error" in chunk:
                raise ValueError(str(chunk["error"]))
            usage = chunk.get("usage") or usage
            if text := _text(chunk):
                times.append(time.perf_counter() - start)
                texts.append(text)
    if not usage:
        raise ValueError("the stream ended without the number of its tokens")
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    tokens = int(usage["prompt_tokens"]), int(usage["completion_tokens"])
    return Streamed("".join(texts), tuple(times), time.perf_counter() - start, *tokens, cached)


def _text(chunk: Mapping[str, Any]) -> str:
    """Return the text of one server-sent event, of either API; empty where the event has none."""
    for choice in chunk.get("choices") or ():
        delta = choice.get("delta") or choice
        if text := delta.get("content") or delta.get("reasoning_content") or choice.get("text"):
            return str(text)
    return ""
