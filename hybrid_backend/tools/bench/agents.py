"""Traffic of agents: sessions of many turns over one long system prompt, with tool outputs and think time between them.

Everything follows from the seed, so that servers are asked the same at the same times, and no network is needed. Only
what an assistant says is the server's own: it becomes part of the next turn's prompt, as in a real session.
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
    """Lengths in words of about one token each; times in seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    agents: int = Field(4, gt=0)
    turns: int = Field(6, gt=0)
    system: int = Field(600, gt=0)  # shared by all agents: instructions and descriptions of tools
    task: int = Field(80, gt=0)
    tool: int = Field(300, gt=0)  # a tool's output, on average: half of it to one and a half
    answer: int = Field(48, gt=1)  # tokens of every answer
    think: float = Field(1.0, ge=0)  # between an answer and the next turn, on average; exponential
    arrival: float = Field(1.0, ge=0)  # between the first turns of two agents, on average; exponential
    calls: bool = False  # each output of a tool answers a call of it, as chat templates that know tools have it
    seed: int = 0


@dataclass(frozen=True)
class Turn:
    wait: float  # seconds after the answer before, or of the first turn after the run began
    said: str  # the task, then outputs of tools
    answers_call: bool = False  # of a tool, which the answer before is then said to have made


@dataclass(frozen=True)
class Session:
    """One agent's."""

    system: str
    turns: tuple[Turn, ...]


def sessions(traffic: Traffic) -> list[Session]:
    """One per agent. An agent with the same seed says the same whatever the number of agents."""
    system = "You are an agent. " + " ".join(_words(random.Random(f"system {traffic.seed}"), traffic.system))
    arrivals, begin = random.Random(f"arrivals {traffic.seed}"), 0.0
    found = []
    for agent in range(traffic.agents):
        found.append(Session(system, tuple(_turns(traffic, agent, begin))))
        begin += _exponential(arrivals, traffic.arrival)
    return found


def _turns(traffic: Traffic, agent: int, begin: float) -> Iterator[Turn]:
    rng = random.Random(f"agent {traffic.seed} {agent}")
    yield Turn(begin, f"Task {agent}: " + " ".join(_words(rng, traffic.task)))
    for _ in range(traffic.turns - 1):
        length = rng.randint(traffic.tool // 2, traffic.tool * 3 // 2)
        output = "Output of the tool: " + " ".join(_words(rng, max(1, length)))
        yield Turn(_exponential(rng, traffic.think), output, traffic.calls)


def _words(rng: random.Random, count: int) -> list[str]:
    return [rng.choice(_WORDS) for _ in range(count)]


def _exponential(rng: random.Random, mean: float) -> float:
    return rng.expovariate(1 / mean) if mean else 0.0
