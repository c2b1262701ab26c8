"""One server's OpenAI-compatible API: its models, single requests, and sessions replayed with what each turn took."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx
from pydantic import BaseModel, ConfigDict

from hybrid_backend.errors import HybridError
from hybrid_backend.tools.bench.agents import Session
from hybrid_backend.tools.counts import counted

E = TypeVar("E")
Message = dict[str, Any]  # of the chat API
_CALLED = {"name": "tool", "arguments": "{}"}


class BenchError(HybridError):
    """A server that cannot be measured."""


class Endpoint(BaseModel):
    model_config = ConfigDict(frozen=True)
    name: str
    url: str  # without /v1
    model: str


class Answer(BaseModel):
    """Of one turn; times in seconds. ``cached`` is None where the server does not tell; ``error``: else empty."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    session: int
    turn: int
    ttft: float = 0.0
    tpot: float = 0.0  # of the tokens after the first
    seconds: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    answer_tokens: int = 0
    error: str = ""


class Replay(BaseModel):
    """One run against one server."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    endpoint: str
    repeat: int
    seconds: float
    answers: tuple[Answer, ...]


def find_endpoint(named: str, model: str | None, deadline: float) -> Endpoint:
    """From NAME=URL; without ``model`` the first that the server lists.

    Raises:
        BenchError: not of that form; nothing answers there in ``deadline`` seconds; it lists no model.
    """
    name, _, url = named.partition("=")
    if not name or not url:
        raise BenchError(f"{named}: write NAME=URL, as hybrid=http://localhost:8000")
    base = without_v1(named, url)
    served = served_models(name, base, deadline)
    if model is not None and model not in served:
        raise BenchError(f"{name}: {base} serves {', '.join(served)}, not {model}")
    return Endpoint(name=name, url=base, model=model or served[0])


def without_v1(given: str, url: str) -> str:
    """A server's address as requests begin.

    Raises:
        BenchError: it is none; names what was ``given``.
    """
    base = url.rstrip("/").removesuffix("/v1")
    if not base.startswith(("http://", "https://")):
        raise BenchError(f"{given}: write the address with http:// or https://, as http://localhost:8000")
    return base


def served_models(name: str, url: str, deadline: float) -> list[str]:
    """That the server at ``url``, without /v1, lists; at least one.

    Raises:
        BenchError: it does not, within ``deadline`` seconds.
    """
    try:
        answer = httpx.get(f"{url}/v1/models", headers=headers(), timeout=deadline)
        answer.raise_for_status()
        found = [str(entry["id"]) for entry in answer.json()["data"]]
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
        raise BenchError(f"{name}: {url}/v1/models does not list models: {error or type(error).__name__}") from None
    if not found:
        raise BenchError(f"{name}: {url} serves no model")
    return found


def post(url: str, path: str, body: Mapping[str, Any], deadline: float = 3600) -> Any:
    """The answer to one request that is not streamed.

    Raises:
        BenchError: there is none, within ``deadline`` seconds.
    """
    try:
        with httpx.Client(headers=headers(), timeout=deadline, transport=httpx.HTTPTransport(retries=2)) as client:
            answer = client.post(f"{url}{path}", json=body)
        if answer.is_error:
            raise BenchError(f"{url}{path}: HTTP {answer.status_code}: {answer.text[:300]}")
        return answer.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise BenchError(f"{url}{path}: {error or type(error).__name__}") from None


def in_turn(endpoints: Sequence[E], turn: int) -> list[E]:
    """All of them; who comes first changes from turn to turn, so that a machine that slows down slows all."""
    first = turn % len(endpoints)
    return [*endpoints[first:], *endpoints[:first]]


def replay(endpoint: Endpoint, sessions: Sequence[Session], answer: int, repeat: int, deadline: float) -> Replay:
    """All sessions at once.

    Args:
        answer: tokens of every answer.
        deadline: seconds that a server may be silent.

    Raises:
        BenchError: answers are not as long as asked for, so that servers cannot be compared.
    """
    began = time.perf_counter()
    answers = asyncio.run(_replay(endpoint, sessions, answer, deadline))
    took = time.perf_counter() - began
    for one in answers:
        if not one.error and one.answer_tokens != answer:
            raise BenchError(
                f"{endpoint.name}: an answer has {counted(one.answer_tokens, 'token')}, not {answer}: the server does "
                "not heed ignore_eos, and cannot be compared"
            )
    return Replay(endpoint=endpoint.name, repeat=repeat, seconds=took, answers=tuple(answers))


async def _replay(endpoint: Endpoint, sessions: Sequence[Session], answer: int, deadline: float) -> list[Answer]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=endpoint.url, headers=headers(), timeout=deadline, limits=limits) as client:
        found = await asyncio.gather(
            *(_session(client, endpoint.model, number, session, answer) for number, session in enumerate(sessions))
        )
    return [one for mine in found for one in mine]


async def _session(client: httpx.AsyncClient, model: str, number: int, session: Session, answer: int) -> list[Answer]:
    """Ends with the first turn that fails: the next ones need its answer."""
    messages, found = list[Message]([{"role": "system", "content": session.system}]), list[Answer]()
    for index, turn in enumerate(session.turns):
        await asyncio.sleep(turn.wait)
        if turn.answers_call:
            call = f"call_{number}_{index}"
            messages[-1]["tool_calls"] = [{"id": call, "type": "function", "function": _CALLED}]
            messages.append({"role": "tool", "tool_call_id": call, "content": turn.said})
        else:
            messages.append({"role": "user", "content": turn.said})
        try:
            text, numbers = await _ask(client, model, messages, answer)
        except (httpx.HTTPError, ValueError) as error:
            found.append(Answer(session=number, turn=index, error=str(error) or type(error).__name__))
            break
        found.append(Answer(session=number, turn=index, **numbers))
        messages.append({"role": "assistant", "content": text})
    return found


async def _ask(
    client: httpx.AsyncClient, model: str, messages: Sequence[Message], answer: int
) -> tuple[str, dict[str, Any]]:
    """The answer's text, and what an `Answer` says of it."""
    body = {"model": model, "messages": messages, "max_tokens": answer}
    got = await stream(client, "/v1/chat/completions", body)
    if not got.text:
        raise ValueError("the stream ended without text")
    seconds = got.times[-1] - got.times[0]
    return got.text, {
        "ttft": got.times[0], "tpot": seconds / max(1, got.answer_tokens - 1), "seconds": got.times[-1],
        "prompt_tokens": got.prompt_tokens, "cached_tokens": got.cached_tokens, "answer_tokens": got.answer_tokens,
    }  # fmt: skip


@dataclass(frozen=True)
class Streamed:
    """One streamed answer. ``times``: seconds from the request to every chunk with text, ``seconds``: to the end;
    ``cached_tokens`` is None where the server does not tell."""

    text: str
    times: tuple[float, ...]
    seconds: float
    prompt_tokens: int
    answer_tokens: int
    cached_tokens: int | None


async def stream(client: httpx.AsyncClient, path: str, body: Mapping[str, Any]) -> Streamed:
    """A greedy answer of exactly ``max_tokens``, from the completions or the chat ``path``.

    Raises:
        httpx.HTTPError, ValueError: the server refuses it, or breaks off.
    """
    whole = {
        **body, "ignore_eos": True, "temperature": 0.0, "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    parts, times, usage = list[str](), list[float](), None
    began = time.perf_counter()
    async with client.stream("POST", path, json=whole) as response:
        if response.is_error:
            raise ValueError(f"HTTP {response.status_code}: {(await response.aread()).decode(errors='replace')[:300]}")
        async for line in response.aiter_lines():
            if not line.startswith("data:") or line == "data: [DONE]":
                continue
            chunk = json.loads(line.removeprefix("data:"))
            if "error" in chunk:
                raise ValueError(str(chunk["error"]))
            usage = chunk.get("usage") or usage
            for choice in chunk.get("choices") or ():
                delta = choice.get("delta") or choice
                if said := delta.get("content") or delta.get("reasoning_content") or choice.get("text"):
                    times.append(time.perf_counter() - began)
                    parts.append(said)
    if not usage:
        raise ValueError("the stream ended without the number of its tokens")
    details = usage.get("prompt_tokens_details") or {}
    return Streamed(
        "".join(parts), tuple(times), time.perf_counter() - began, int(usage["prompt_tokens"]),
        int(usage["completion_tokens"]), details.get("cached_tokens"),
    )  # fmt: skip


def headers() -> dict[str, str]:
    """That every request carries."""
    key = os.environ.get("OPENAI_API_KEY")  # as the engines' own clients have it
    return {"Authorization": f"Bearer {key}"} if key else {}
