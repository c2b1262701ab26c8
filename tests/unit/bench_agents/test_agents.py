"""`hybrid bench agents`: what it asks follows from the seed, what it says from what servers answered."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from fastapi import FastAPI
from fastapi.responses import PlainTextResponse
from typer.testing import CliRunner

from hybrid_backend.cli import app
from hybrid_backend.tools.bench.agents import Traffic, make_sessions
from hybrid_backend.tools.bench.options import parse_limits
from hybrid_backend.tools.bench.replay import Answer, Replay, figures_of, is_good, summaries
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


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", "agents", *SMALL, *arguments])


def test_sessions_follow_from_the_seed_alone() -> None:
    few, many = make_sessions(Traffic(agents=2, seed=3)), make_sessions(Traffic(agents=5, seed=3))
    assert many[:2] == few and make_sessions(Traffic(agents=2, seed=4)) != few
    assert len({session.system for session in many}) == 1, "all agents share their instructions"
    assert len({turn.text for session in many for turn in session.turns}) == 5 * 6, "and nothing else"
    begins = [session.turns[0].wait_seconds for session in many]
    assert begins == sorted(begins) and begins[0] == 0 < begins[-1]


def test_lengths_are_those_that_were_asked_for() -> None:
    (session,) = make_sessions(Traffic(agents=1, turns=200, system=70, task=9, tool=40, think=0.5))
    assert len(session.system.split()) == 4 + 70 and len(session.turns[0].text.split()) == 2 + 9
    outputs = [len(turn.text.split()) - 5 + 1 for turn in session.turns[1:]]
    assert min(outputs) >= 20 and max(outputs) <= 61 and 36 < sum(outputs) / len(outputs) < 46
    assert 0.35 < sum(turn.wait_seconds for turn in session.turns) / 200 < 0.65


@pytest.mark.slow
def test_servers_are_asked_the_same_and_their_own_answers_become_the_next_turns_prompt(tmp_path: Path) -> None:
    with served(Speaks()) as first, served(Speaks()) as second:
        result = run(f"a={first.url}", f"b={second.url}/v1", "--repeats=2", f"--out={tmp_path / 'out' / 'found.json'}")
    assert result.exit_code == 0, result.output
    assert sorted(map(json.dumps, first.asked)) == sorted(map(json.dumps, second.asked))
    assert len(first.asked) == 1 + 2 * 2 * 3, "one to warm up, then every turn of every session of every run"
    last = max(first.asked, key=lambda body: len(body["messages"]))["messages"]
    assert [message["role"] for message in last] == ["system", "user", "assistant", "user", "assistant", "user"]
    assert last[2]["content"] == "word0 word1 word2 word3 "
    assert len({body["messages"][0]["content"] for body in first.asked}) == 3, "no run is cached by the one before"
    found = json.loads((tmp_path / "out" / "found.json").read_text())
    assert [row["endpoint"] for row in found["endpoints"]] == ["a", "b"]
    for row in found["endpoints"]:
        assert (row["turns"], row["failed"]) == (12, 0)
        runs = [run["answers"] for run in found["runs"] if run["endpoint"] == row["endpoint"]]
        cached = [30 * 6 / sum(answer["prompt_tokens"] for answer in answers) for answers in runs]
        assert row["range"]["cached"] == pytest.approx([min(cached), max(cached)])


def test_outputs_of_tools_answer_the_calls_of_the_turns_before(tmp_path: Path) -> None:
    with served(Speaks()) as server:
        result = run(f"a={server.url}", "--repeats=1", "--calls", f"--out={tmp_path / 'found.json'}")
    assert result.exit_code == 0, result.output
    last = max(server.asked, key=lambda body: len(body["messages"]))["messages"]
    assert [message["role"] for message in last] == ["system", "user", "assistant", "tool", "assistant", "tool"]
    calls = [call["id"] for message in last if message["role"] == "assistant" for call in message["tool_calls"]]
    assert calls == [message["tool_call_id"] for message in last if message["role"] == "tool"]
    assert len(set(calls)) == 2 and last[2]["content"] == "word0 word1 word2 word3 "
    assert json.loads((tmp_path / "found.json").read_text())["traffic"]["calls"] is True


def test_a_session_ends_with_the_turn_that_fails_and_the_reason_is_said(tmp_path: Path) -> None:
    with served(Speaks(fails_at=4)) as server:
        result = run(f"a={server.url}", "--repeats=1", f"--out={tmp_path / 'found.json'}")
    assert result.exit_code == 0 and "the context is too long" in result.output
    (row,) = json.loads((tmp_path / "found.json").read_text())["endpoints"]
    assert (row["turns"], row["failed"]) == (2, 2)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["a:8000"], "write NAME=URL"),
        (["a=http://127.0.0.1:1"], "/v1/models does not list models"),
        (["a=http://127.0.0.1:1", "--out=/dev/null/x"], "--out /dev/null/x: cannot be written (Not a directory)"),
        (["a=http://127.0.0.1:1", "--out=/dev"], "--out /dev: cannot be written (Is a directory)"),
        (["a=http://127.0.0.1:1", "--good=itl:3"], "--good itl:3: write ttft:MILLISECONDS"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(given: list[str], words: str) -> None:
    result = run(*given)
    assert result.exit_code == 1 and words in result.stderr and result.stderr.count("\n") == 1


def test_servers_that_answer_as_long_as_they_like_are_not_compared() -> None:
    with served(Speaks(answers=7)) as server:
        result = run(f"a={server.url}")
        other = run(f"a={server.url}", "--model=another")
    assert result.exit_code == 1 and "7 tokens, not 4" in result.stderr
    assert other.exit_code == 1 and "serves model, not another" in other.stderr


def test_figures_by_hand() -> None:
    def limits_of(text: str) -> dict[str, float]:
        return parse_limits("--good", text, ("ttft", "tpot"))

    def answer(turn: int, ttft: float, **more: Any) -> Answer:
        return Answer(session=0, turn=turn, ttft=ttft, tpot=0.1, answer_tokens=10, prompt_tokens=100, **more)

    runs = [
        Replay(endpoint="a", repeat=0, seconds=4, answers=(answer(0, 3), answer(1, 1), answer(2, 2))),
        Replay(endpoint="a", repeat=1, seconds=2, answers=(answer(0, 5), Answer(session=0, turn=1, error="gone"))),
    ]
    limits = limits_of("ttft:2000,tpot:150")
    (row,) = summaries(figures_of(runs, limits))
    assert row["answer_tokens_per_second"] == pytest.approx((30 / 4 + 10 / 2) / 2)
    assert row["range"]["answer_tokens_per_second"] == pytest.approx([10 / 2, 30 / 4])
    assert row["good_turns_per_second"] == pytest.approx((2 / 4 + 0) / 2)
    assert (row["first_ttft_median"], row["ttft_median"], row["ttft_p90"], row["cached"]) == (4, 1.5, 1, None)
    assert not is_good(answer(0, 1), limits_of("tpot:99")) and is_good(answer(0, 9), limits_of("tpot:101"))


def test_servers_are_compared_run_by_run() -> None:
    """Not by the ratio of their medians: a machine that slows down slows both."""
    turns = (Answer(session=0, turn=0, answer_tokens=12, ttft=1, tpot=0.1),)
    seconds = {"a": (1.0, 2.0, 4.0), "b": (2.0, 2.0, 3.0)}
    runs = [
        Replay(endpoint=n, repeat=r, seconds=s, answers=turns)
        for n, all_ in seconds.items()
        for r, s in enumerate(all_)
    ]
    first, second = summaries(figures_of(runs, {}))
    assert (first["times_first"], first["range"]["times_first"]) == (1, [1, 1])
    assert second["times_first"] == 1 and second["range"]["times_first"] == pytest.approx([1 / 2, 4 / 3])
