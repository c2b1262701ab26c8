"""Arrivals, lengths and the service-level objective (SLO) of simulated traffic."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable
from dataclasses import dataclass

from hybrid_backend.errors import ConfigError

REQUESTS = 1000
"""Requests of one simulation."""
MOST_TOKENS = 2**22
"""Longest prompt or answer that is simulated."""
ATTAINMENT = 0.9
"""Share of the requests that must meet the SLO, as in DistServe (arXiv 2401.09670)."""


@dataclass(frozen=True)
class Workload:
    """Requests of equal lengths that arrive as a Poisson process.

    Attributes:
        prompt: tokens of each prompt.
        answer: tokens of each answer.
        seed: seed of the arrivals.
        requests: number of requests.
    """

    prompt: int
    answer: int
    seed: int = 0
    requests: int = REQUESTS

    @property
    def context(self) -> int:
        """Tokens of a request, its answer included."""
        return self.prompt + self.answer

    @classmethod
    def parse(cls, text: str, tokens: Callable[[str], int], seed: int = 0) -> Workload:
        """Read ``PROMPT:ANSWER``, such as ``32k:200``.

        Args:
            text: the value of ``--traffic``.
            tokens: reads one number of tokens.
            seed: seed of the arrivals.

        Raises:
            ConfigError: the text does not have that form.
        """
        match = re.fullmatch(r"\s*([0-9]+[kKmM]?)\s*:\s*([0-9]+[kKmM]?)\s*", text)
        try:
            lengths = [tokens(part) for part in match.groups()] if match else []
        except ConfigError:
            lengths = []
        if not lengths or max(lengths) > MOST_TOKENS:
            raise ConfigError(
                f"--traffic: got {text!r}, expected tokens of a prompt and of an answer, each up to {MOST_TOKENS:,}, "
                "such as 32k:200 or 8192:1000"
            )
        return cls(lengths[0], lengths[1], seed)

    def arrivals(self, rate: float) -> list[float]:
        """Return the seconds at which the requests arrive at ``rate`` requests per second.

        Arrivals of one seed keep their order and their relative gaps at every rate, so that simulations at several
        rates can be compared.
        """
        source, time, times = random.Random(self.seed), 0.0, []
        for _ in range(self.requests):
            time += source.expovariate(1.0) / rate
            times.append(time)
        return times


@dataclass(frozen=True)
class Slo:
    """Largest times that a request may take.

    Attributes:
        ttft_times: time to the first token (TTFT), relative to the stock engine's own without load.
        tpot_seconds: time per output token (TPOT) after the first.
    """

    ttft_times: float = 1.5
    tpot_seconds: float = 0.05

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            ConfigError: a number is not above 0, or not finite.
        """
        for flag, value, unit, example in (
            ("--slo-ttft", self.ttft_times, "times stock's TTFT without load", "1.5"),
            ("--slo-tpot", 1e3 * self.tpot_seconds, "milliseconds", "50"),
        ):
            if not (value > 0 and math.isfinite(value)):
                raise ConfigError(f"{flag}: got {value:g}, expected a number above 0 ({unit}), such as {example}")
