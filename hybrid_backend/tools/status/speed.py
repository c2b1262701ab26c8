"""The answers to "Is it fast?" and "What holds it back?"."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hybrid_backend.hardware import Hardware
from hybrid_backend.tools.counts import counted
from hybrid_backend.tools.status import advice
from hybrid_backend.tools.status.model import Answer, Change, Layer, Level, Rates, State
from hybrid_backend.tools.status.reading import Reading
from hybrid_backend.tools.status.words import bandwidth, duration, mean, number, rate

READING_SPEED, CRAWLING = 5.0, 2.0
"""Tokens per second of one request. A person reads 238 words a minute (Brysbaert 2019), about 5 tokens a second: from
there on a request is fast. Below the second number it is very slow."""
WAITS = 0.1
"""Share of the time that the device tier waits for CPU workers, above which they hold the server back."""
FULL = 0.9
"""Share of the host pool in use from which requests are said to wait for memory."""
MOSTLY = 0.5
"""Share of the time from which attention in place, or copies on the bus, hold the server back; share of the computed
tokens from which prompts do; share of the memory's bandwidth from which attention is bound by it."""


@dataclass(frozen=True)
class Load:
    """The server's work in the time of ``rates``, and the machine that it runs on."""

    last: Reading
    rates: Rates
    layers: Sequence[Layer]
    machine: Hardware | None = None

    @property
    def state(self) -> State:
        """The server's activity. A request that runs without any token counted is read, or its step is long."""
        if self.rates.generated_per_second:
            return "decoding"
        is_busy = self.last.running or self.last.waiting or self.rates.prompt_per_second
        return "prompts" if is_busy else "idle"

    @property
    def fill(self) -> float:
        """Share of the host pool in use."""
        return self.last.pool_fill or 0.0

    @property
    def prompt_share(self) -> float:
        """Share of the computed tokens that were prompts'."""
        prompts, generated = self.rates.prompt_per_second or 0.0, self.rates.generated_per_second or 0.0
        return prompts / (prompts + generated) if prompts else 0.0

    @property
    def counts_waits(self) -> bool:
        """True if waits for CPU partials can occur: `scout` has an interval of recalls, others have waited before."""
        return (
            "hybrid_recall_interval" in self.last.gauges
            or any(layer.wait_seconds or layer.cpu_tokens for layer in self.last.layers)
            or self.rates.wait_share > 0
        )

    @property
    def copied(self) -> float:
        """Bytes per second that were copied to the device tier."""
        return self.rates.copied_bytes_per_second or 0.0

    @property
    def bus(self) -> float | None:
        """Share of the time that the copies take at the bus's speed; None if that speed is not known."""
        carried = self.last.gauges.get("hybrid_bus_bytes_per_second")
        return self.copied / carried if carried else None

    @property
    def is_held_by_bus(self) -> bool:
        """True if copies take most of the time and longer than the CPU is waited for. Copies go on beside the step, and
        nobody counts what is waited for them, so the two times are compared."""
        return self.bus is not None and self.bus > max(MOSTLY, self.rates.wait_share)

    @property
    def bandwidth_share(self) -> float | None:
        """Share of the machine's memory bandwidth that attention in place reaches while it runs."""
        reads = self.rates.attention_bytes_per_second
        return reads / self.machine.host_read_achieved if reads and self.machine else None


def fast(load: Load) -> Answer:
    """Judge the speed of one request by how fast a person reads."""

    def answer(verdict: str, text: str, level: Level) -> Answer:
        return Answer(question="Is it fast?", verdict=verdict, text=text, level=level)

    if load.state == "idle":
        return answer("Idle", "No request runs or waits: there is nothing to judge.", "unknown")
    if load.state == "prompts":
        return answer("No token yet", f"{_reading_prompts(load)}{_latencies(load.rates)}", "unknown")
    speed = load.rates.request_speed
    text = f"{rate(load.rates.generated_per_second)} tokens/s"
    if speed is None:
        return answer("Not known", f"{text}; how many requests share them is not published.", "unknown")
    level: Level = "good" if speed >= READING_SPEED else "fair" if speed >= CRAWLING else "bad"
    verdict = {"good": "Faster than reading", "fair": "Slow", "bad": "Very slow"}[level]
    running = counted(load.rates.running or 0, "request")
    text += f", {rate(speed)} for each of {running}; a person reads about {READING_SPEED:.0f}."
    return answer(verdict, f"{text}{_latencies(load.rates)}{_machine_speed(load)}", level)


def limit(load: Load, budget_may_fall: bool) -> tuple[Answer, Change | None]:
    """Name what the server's time goes to, and what would change that."""
    verdict, text, level, change = _limit(load, budget_may_fall)
    return Answer(question="What holds it back?", verdict=verdict, text=text, level=level), change


_Limit = tuple[str, str, Level, Change | None]


def _limit(load: Load, budget_may_fall: bool) -> _Limit:
    last, waits = load.last, load.rates.wait_share
    if last.waiting and load.fill >= FULL:
        text = f"{_waiting(load)}, and the host pool is {load.fill:.0%} full."
        return "Host memory", text, "fair", advice.more_memory(last)
    if load.is_held_by_bus:
        text = (
            f"Copies, {load.copied / 1e6:,.0f} MB/s, take about {load.bus:.0%} of the time; the device tier waits "
            f"{waits:.0%} of it for the CPU."
        )
        return "The bus", text, "fair", advice.less_copying(last, budget_may_fall)
    if waits > WAITS:
        share = mean(layer.cpu_ratio for layer in load.layers) or 0.0
        text = f"The device tier waits {waits:.0%} of the time for them; they attend {share:.0%} of the tokens."
        return "CPU workers", text, "fair", advice.less_waiting(last, budget_may_fall)
    if last.waiting:
        return _queue(load)
    if load.state == "idle":
        return "Nothing", "No request runs or waits.", "unknown", None
    if load.state == "prompts":
        return "Prompts", _reading_prompts(load), "unknown", None
    is_slow = (load.rates.request_speed or READING_SPEED) < READING_SPEED
    if is_slow and load.prompt_share > MOSTLY:
        text = (
            f"{load.prompt_share:.0%} of the computed tokens were prompts', and a step that reads a piece of a prompt "
            "takes longer for all."
        )
        return "Prompts", text, "fair", advice.shorter_prompt_steps(last)
    if load.rates.attention_share:
        return _in_place(load, is_slow, budget_may_fall)
    if load.copied and load.bus is None and not waits:
        text = (
            f"{load.copied / 1e6:,.0f} MB/s are copied to the device tier; how long it waits for them is not counted. "
            "hybrid profile --hardware measures what the bus carries."
        )
        return "Not measured", text, "unknown", None
    if is_slow:
        text = "No request waits, and nothing that is measured here takes the time: the rest of the model does."
        return "The model's matrices", text, "fair", None
    return "Nothing", "No request waits, and nothing that is measured here takes most of the time.", "good", None


def _queue(load: Load) -> _Limit:
    """Judge requests that wait although the host pool has room."""
    most, full = advice.most_requests(load.last), f"the host pool is {load.fill:.0%} full"
    if most is None or (load.rates.most_running or 0.0) >= most:
        return "The batch", f"{_waiting(load)}, and {full}.", "fair", advice.larger_batch(load.last)
    text = f"{_waiting(load)} although only {load.rates.most_running or 0.0:,.0f} of {most:,.0f} run and {full}"
    if load.rates.prompt_per_second:
        return "Prompts", f"{text}; most likely those before them are being read.", "fair", None
    return "Not known", f"{text}.", "fair", None


def _in_place(load: Load, is_slow: bool, budget_may_fall: bool) -> _Limit:
    attention, contexts = load.rates.attention_share or 0.0, mean(layer.attended for layer in load.layers)
    text = f"Attention takes {attention:.0%} of the time"
    text += "" if contexts is None else f" for {contexts:.0%} of the contexts' tokens"
    if attention > MOSTLY:
        share = load.bandwidth_share
        if share is not None and share > MOSTLY:
            text += f", and it is bound by the memory, of whose bandwidth it reaches {share:.0%}"
        elif share is not None:
            text += f"; the memory, of whose bandwidth it reaches {share:.0%}, is not what it waits for"
        return "Attention", f"{text}.", "fair", advice.less_attention(load.last, budget_may_fall)
    if is_slow:
        return "The model's matrices", f"{text}; the rest goes to the model's matrices and the engine.", "fair", None
    return "Nothing", f"{text}; no request waits.", "good", None


def _waiting(load: Load) -> str:
    waiting = load.last.waiting or 0.0
    return f"{counted(waiting, 'request')} wait{'s' if round(waiting) == 1 else ''}"


def _reading_prompts(load: Load) -> str:
    running = load.last.running
    who = f"{counted(running, 'request')} run{'s' if round(running) == 1 else ''}" if running else "No request decodes"
    if load.rates.prompt_per_second:
        return f"{who}; prompts are read at {number(load.rates.prompt_per_second)} tokens/s."
    return (
        f"{who} and no token was counted: a prompt is read, or one step takes longer than {load.rates.seconds:.0f} s."
    )


def _latencies(rates: Rates) -> str:
    """Write TTFT and TPOT, where the engine measured any."""
    text = ""
    if rates.token_seconds is not None:
        text += f" Between two tokens {duration(rates.token_seconds)} passed (TPOT)."
    if rates.first_token_seconds is not None:
        text += f" First tokens came after {duration(rates.first_token_seconds)} (TTFT)."
    return text


def _machine_speed(load: Load) -> str:
    """Say how near the server is to what its machine can do, or why that is not known."""
    if not load.last.is_in_place:
        if load.is_held_by_bus:
            return f" Copies take about {load.bus:.0%} of the time."
        if not load.counts_waits:
            return " No wait was counted by which the device tier could be judged."
        return f" The device tier waits {load.rates.wait_share:.1%} of the time for the CPU."
    reads = load.rates.attention_bytes_per_second
    if reads is None:
        return " What share of this machine's speed that is, is not known: the server does not time its attention."
    text = f" Attention reads {bandwidth(reads)} of K and V while it runs"
    if load.machine is None:
        return (
            f"{text}; what this machine's memory can is unknown (hybrid profile --hardware, hybrid top --machine FILE)."
        )
    return f"{text}, {load.bandwidth_share:.0%} of the {bandwidth(load.machine.host_read_achieved)} of its memory."
