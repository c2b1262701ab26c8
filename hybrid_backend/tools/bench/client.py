"""Requests to an OpenAI-compatible server: the models that it lists, whole answers and streamed answers."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx
from pydantic import BaseModel, ConfigDict

from hybrid_backend.errors import HybridError

Item = TypeVar("Item")


class BenchError(HybridError):
    """The server cannot be measured."""


class Endpoint(BaseModel):
    """A running server. ``url`` is without /v1, ``model`` the model's name in requests."""

    model_config = ConfigDict(frozen=True)
    name: str
    url: str
    model: str


def find_endpoint(argument: str, model: str | None, deadline: float) -> Endpoint:
    """Return the server of a command-line argument NAME=URL, with the first model that it lists if ``model`` is None.

    Raises:
        BenchError: the argument has another form, or the server does not list the model in ``deadline`` seconds.
    """
    name, _, url = argument.partition("=")
    if not name or not url:
        raise BenchError(f"{argument}: write NAME=URL, as hybrid=http://localhost:8000")
    url = base_url(argument, url)
    models = served_models(name, url, deadline)
    if model is not None and model not in models:
        raise BenchError(f"{name}: {url} serves {', '.join(models)}, not {model}")
    return Endpoint(name=name, url=url, model=model or models[0])


def base_url(argument: str, url: str) -> str:
    """Return a server's address without /v1; BenchError, which names ``argument``, if it is no HTTP address."""
    base = url.rstrip("/").removesuffix("/v1")
    if not base.startswith(("http://", "https://")):
        raise BenchError(f"{argument}: write the address with http:// or https://, as http://localhost:8000")
    return base


def served_models(name: str, url: str, deadline: float) -> list[str]:
    """Return the models that the server at ``url`` lists; BenchError if it lists none within ``deadline`` seconds."""
    try:
        answer = httpx.get(f"{url}/v1/models", headers=headers(), timeout=deadline)
        answer.raise_for_status()
        models = [str(entry["id"]) for entry in answer.json()["data"]]
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
        raise BenchError(f"{name}: {url}/v1/models does not list models: {error or type(error).__name__}") from None
    if not models:
        raise BenchError(f"{name}: {url} serves no model")
    return models


def headers() -> dict[str, str]:
    """Return the headers of every request: the API key, from the variable that the engines' clients read."""
    key = os.environ.get("OPENAI_API_KEY")
    return {"Authorization": f"Bearer {key}"} if key else {}


def post(url: str, path: str, body: Mapping[str, Any], deadline: float = 3600) -> Any:
    """Return the JSON answer to one request; BenchError if there is none within ``deadline`` seconds."""
    try:
        with httpx.Client(headers=headers(), timeout=deadline, transport=httpx.HTTPTransport(retries=2)) as client:
            answer = client.post(f"{url}{path}", json=body)
        if answer.is_error:
            raise BenchError(f"{url}{path}: HTTP {answer.status_code}: {answer.text[:300]}")
        return answer.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise BenchError(f"{url}{path}: {error or type(error).__name__}") from None


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


def rotated(items: Sequence[Item], turn: int) -> list[Item]:
    """Return all items, another one first in each turn, so that a machine that slows down slows all endpoints."""
    first = turn % len(items)
    return [*items[first:], *items[:first]]
