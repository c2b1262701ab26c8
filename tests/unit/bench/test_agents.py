"""`python -m bench.agents`: what it asks follows from the seed, what it says from what servers answered."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.responses import PlainTextResponse

from bench.agents import Answer, Replay, Traffic, figures_of, main, make_sessions
from hybrid_backend.tools.bench.client import BenchError
from tests.unit.status.server_stand import serving

SMALL = ["--agents=2", "--turns=3", "--system=40", "--tool=10", "--task=5", "--answer=4", "--think=0.01", "--arrival=0"]


class Speaks:
    """A server that speaks the protocol; ``answers`` tokens whatever is asked, None: as many as asked."""

    def __init__(self, answers: int | None = None, fails_at: int | None = None) -> None:
        self.answers, self.fails_at = answers, fails_at
        self.asked: list[dict[str, Any]] = []
        self.url = ""

    def reply(self, body: dict[str, Any]) -> tuple[int, str]:
        self.asked.append(body)
        if self.fails_at is not None and len(body["messages"]) >= self.fails_at:
            return 400, json.dumps({"error": {"message": "the context is too long"}})
        tokens = self.answers or body["max_tokens"]
        prompt = sum(len(message["content"].split()) for message in body["messages"])
        chunks: list[dict[str, Any]] = [{"choices": [{"delta": {"role": "assistant", "content": ""}}]}]
        chunks += [{"choices": [{"delta": {"content": f"word{i} "}}]} for i in range(tokens)]
        usage = {"prompt_tokens": prompt, "completion_tokens": tokens, "prompt_tokens_details": {"cached_tokens": 30}}
        chunks.append({"choices": [], "usage": usage})
        return 200, "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"


@contextmanager
def served(speaks: Speaks) -> Iterator[Speaks]:
    app = FastAPI()
    app.add_api_route("/v1/models", lambda: {"data": [{"id": "model"}]}, methods=["GET"])

    @app.post("/v1/chat/completions")
    def answer(body: dict[str, Any]) -> PlainTextResponse:
        status, text = speaks.reply(body)
        return PlainTextResponse(text, status)

    with serving(app) as speaks.url:
        yield speaks


def run(*arguments: str) -> None:
    main([*SMALL, *arguments])


def test_sessions_follow_from_the_seed_alone() -> None:
    (system, few), (same, many) = make_sessions(Traffic(agents=2, seed=3)), make_sessions(Traffic(agents=5, seed=3))
    assert system == same and many[:2] == few and make_sessions(Traffic(agents=2, seed=4)) != (system, few)
    assert len({turn.text for turns in many for turn in turns}) == 5 * 6, "only the system prompt is shared"
    begins = [turns[0].wait_seconds for turns in many]
    assert begins == sorted(begins) and begins[0] == 0 < begins[-1]


def test_servers_are_asked_the_same_and_their_own_answers_become_the_next_turns_prompt(tmp_path: Path) -> None:
    with served(Speaks()) as first, served(Speaks()) as second:
        run(f"a={first.url}", f"b={second.url}/v1", "--repeats=2", "--calls", f"--out={tmp_path / 'found.json'}")
    assert sorted(map(json.dumps, first.asked)) == sorted(map(json.dumps, second.asked))
    assert len(first.asked) == 1 + 2 * 2 * 3, "one to warm up, then every turn of every session of every run"
    last = max(first.asked, key=lambda body: len(body["messages"]))["messages"]
    assert [message["role"] for message in last] == ["system", "user", "assistant", "tool", "assistant", "tool"]
    calls = [call["id"] for message in last if message["role"] == "assistant" for call in message["tool_calls"]]
    assert calls == [message["tool_call_id"] for message in last if message["role"] == "tool"]
    assert len(set(calls)) == 2 and last[2]["content"] == "word0 word1 word2 word3 "
    assert len({body["messages"][0]["content"] for body in first.asked}) == 3, "no run is cached by the one before"
    figures = json.loads((tmp_path / "found.json").read_text())["figures"]
    assert list(figures) == ["a", "b"]
    assert all((row["turns"], row["failed"]) == ([12], [0]) for row in figures.values())


def test_a_session_ends_with_the_turn_that_fails_and_the_reason_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with served(Speaks(fails_at=4)) as server:
        run(f"a={server.url}", "--repeats=1", f"--out={tmp_path / 'found.json'}")
    assert "the context is too long" in capsys.readouterr().out
    figures = json.loads((tmp_path / "found.json").read_text())["figures"]["a"]
    assert (figures["turns"], figures["failed"]) == ([2], [2])


def test_servers_that_answer_as_long_as_they_like_are_not_compared() -> None:
    with served(Speaks(answers=7)) as server, pytest.raises(BenchError, match="7 tokens, not 4"):
        run(f"a={server.url}")


def test_figures_by_hand() -> None:
    def answer(turn: int, ttft: float, tpot: float = 0.1) -> Answer:
        return Answer(0, turn, ttft, tpot, answer_tokens=10, prompt_tokens=100)

    runs = [
        Replay("a", 0, 4, (answer(0, 3), answer(1, 1), answer(2, 2))),
        Replay("a", 1, 2, (answer(0, 5), Answer(0, 1, error="gone"))),
        Replay("b", 0, 2, (answer(0, 1), answer(1, 1, tpot=0.2), answer(2, 1))),
    ]
    first, second = figures_of(runs, {"ttft": 2000, "tpot": 150}).values()
    assert first["answer_tokens_per_second"] == [30 / 4, 10 / 2] and first["good_turns_per_second"] == [2 / 4, 0]
    assert (first["first_ttft_median"], first["ttft_median"], first["ttft_p90"]) == ([3, 5], [1.5], [1])
    assert (first["cached"], first["turns"], first["failed"]) == ([], [4], [1])
    assert first["times_first"] == [1, 1] and second["times_first"] == [2], "run by run, as a busy machine slows both"
    assert second["good_turns_per_second"] == [1.0]
