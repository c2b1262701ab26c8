"""Requests to an OpenAI-compatible server."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx

from hybrid_backend.errors import HybridError

Item = TypeVar("Item")


class BenchError(HybridError):
    """The server cannot be measured."""


@dataclass(frozen=True)
class Endpoint:
    """A running server. ``url`` is without /v1, ``model`` the model's name in requests."""

    name: str
    url: str
    model: str


def find_endpoint(argument: str, model: str | None, deadline: float) -> Endpoint:
    """Return the server of a command-line argument NAME=URL, with the first model that it lists if ``model`` is None.

    Raises:
        BenchError: the argument has another form, or the server does not list the model in ``deadline`` seconds.
    """
    name, _, address = argument.partition("=")
    if not name or not address:
        raise BenchError(f"{argument}: write NAME=URL, as hybrid=http://localhost:8000")
    url = address.rstrip("/").removesuffix("/v1")
    if not url.startswith(("http://", "https://")):
        raise BenchError(f"{argument}: write the address with http:// or https://, as http://localhost:8000")
    try:
        answer = httpx.get(f"{url}/v1/models", headers=headers(), timeout=deadline)
        answer.raise_for_status()
        models = [str(entry["id"]) for entry in answer.json()["data"]]
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
        raise BenchError(f"{name}: {url}/v1/models does not list models: {error or type(error).__name__}") from None
    if not models:
        raise BenchError(f"{name}: {url} serves no model")
    if model is not None and model not in models:
        raise BenchError(f"{name}: {url} serves {', '.join(models)}, not {model}")
    return Endpoint(name, url, model or models[0])


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


def rotated(items: Sequence[Item], turn: int) -> list[Item]:
    """Return all items, another one first in each turn, so that a machine that slows down slows all endpoints."""
    first = turn % len(items)
    return [*items[first:], *items[:first]]
