"""Traffic of agents: sessions of many turns over one long system prompt, with tool outputs and think time.

Texts, lengths and times follow from the seed, so that all servers get the same requests at the same times. The answers
are each server's own, and part of the next turn's prompt, as in a real session.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field

_VOCABULARY = (
    "file line test error value path name index build module return class import commit branch merge patch queue cache "
    "server client request answer token page block table column row user group host port process thread memory disk "
    "time day hour begin end open close read write find list create delete update check start stop wait run call send "
    "first last next other same small large old new true false none zero one two three four five six seven eight nine "
    "ten red green blue left right above below inside outside before after north south east west water stone paper "
    "glass river mountain garden window door table chair letter number question answer reason result report"
)
_WORDS = _VOCABULARY.split()


class Traffic(BaseModel):
    """Traffic of some agents. Lengths are in words of about one token each, times in seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    agents: int = Field(4, gt=0)
    turns: int = Field(6, gt=0)
    system: int = Field(600, gt=0)
    """Length of the system prompt, which all agents share."""
    task: int = Field(80, gt=0)
    """Length of a session's first message."""
    tool: int = Field(300, gt=0)
    """Mean length of a tool's output; lengths are uniform between half of it and one and a half."""
    answer: int = Field(48, gt=1)
    """Tokens of every answer."""
    think: float = Field(1.0, ge=0)
    """Mean time between an answer and the next turn, exponentially distributed."""
    arrival: float = Field(1.0, ge=0)
    """Mean time between the first turns of two agents, exponentially distributed."""
    calls: bool = False
    """Tool outputs have the role ``tool`` and answer a tool call, as chat templates with tools expect."""
    seed: int = 0


@dataclass(frozen=True)
class Turn:
    """A message of the user, or the output of a tool.

    ``wait_seconds`` counts from the previous answer, for the first turn from the start of the run.
    """

    wait_seconds: float
    text: str
    is_tool_output: bool = False


@dataclass(frozen=True)
class Session:
    """The system prompt and the turns of one agent."""

    system: str
    turns: tuple[Turn, ...]


def make_sessions(traffic: Traffic) -> list[Session]:
    """Return a session per agent. An agent's turns do not depend on the number of agents."""
    system = "You are an agent. " + _words(random.Random(f"system {traffic.seed}"), traffic.system)
    arrivals, start_seconds = random.Random(f"arrivals {traffic.seed}"), 0.0
    sessions = []
    for agent in range(traffic.agents):
        sessions.append(Session(system, tuple(_turns(traffic, agent, start_seconds))))
        start_seconds += _exponential(arrivals, traffic.arrival)
    return sessions


def _turns(traffic: Traffic, agent: int, start_seconds: float) -> Iterator[Turn]:
    rng = random.Random(f"agent {traffic.seed} {agent}")
    yield Turn(start_seconds, f"Task {agent}: {_words(rng, traffic.task)}")
    for _ in range(traffic.turns - 1):
        length = rng.randint(traffic.tool // 2, traffic.tool * 3 // 2)
        output = f"Output of the tool: {_words(rng, max(1, length))}"
        yield Turn(_exponential(rng, traffic.think), output, traffic.calls)


def _words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choice(_WORDS) for _ in range(count))


def _exponential(rng: random.Random, mean: float) -> float:
    return rng.expovariate(1 / mean) if mean else 0.0
