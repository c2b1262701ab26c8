"""The answers to "Is it fast?" and "What holds it back?"."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hybrid_backend.hardware import Hardware
from hybrid_backend.tools.counts import counted
from hybrid_backend.tools.status import advice
from hybrid_backend.tools.status.model import Answer, Layer, Rates, State
from hybrid_backend.tools.status.reading import Reading
from hybrid_backend.tools.status.words import duration, mean, number, rate, size

READING_SPEED, CRAWLING = 5.0, 2.0
"""Tokens per second of one request from which it is fast, and below which it is very slow.

A person reads 238 words a minute (Brysbaert 2019), which is about 5 tokens a second.
"""
WAITS = 0.1
"""Share of the time that the device tier waits for CPU workers, above which they hold the server back."""
FULL = 0.9
"""Share of the host pool in use from which requests are said to wait for memory."""
MOSTLY = 0.5
"""Share above which a part is said to be most of a whole: of the time, of computed tokens, of a memory's bandwidth."""


@dataclass(frozen=True)
class Load:
    """The last reading, what happened in the seconds before it, and the server's machine if it is known."""

    last: Reading
    rates: Rates
    layers: Sequence[Layer]
    machine: Hardware | None = None

    @property
    def state(self) -> State:
        """The server's activity. If requests run and no token is counted, a prompt is read, or the step is long."""
        if self.rates.generated_per_second:
            return "decoding"
        is_busy = self.last.running or self.last.waiting or self.rates.prompt_per_second
        return "prompts" if is_busy else "idle"

    @property
    def is_slow(self) -> bool:
        """True if a request gets fewer tokens than a person reads."""
        return (self.rates.request_speed or READING_SPEED) < READING_SPEED

    @property
    def bus_share(self) -> float | None:
        """Share of the time that the copies take at the bus's speed; None if that speed is not published."""
        bus = self.last.gauge("bus_bytes_per_second")
        return (self.rates.copied_bytes_per_second or 0.0) / bus if bus else None

    @property
    def is_held_by_bus(self) -> bool:
        """True if copies take most of the time, and longer than the wait for the CPU.

        Copies overlap the step, and the wait for copies is not counted, so the two times are compared.
        """
        return self.bus_share is not None and self.bus_share > max(MOSTLY, self.rates.wait_share)

    @property
    def bandwidth_share(self) -> float | None:
        """Share of the machine's memory bandwidth that attention in place reaches while it runs."""
        reads = self.rates.attention_bytes_per_second
        return reads / self.machine.host_read_achieved if reads and self.machine else None


# --- is it fast? ---


def fast(load: Load) -> Answer:
    """Judge the speed of one request by how fast a person reads."""
    if load.state == "idle":
        return Answer("Idle", "No request runs or waits: there is nothing to judge.", "unknown")
    if load.state == "prompts":
        return Answer("No token yet", f"{_prompts_text(load)}{_latencies(load.rates)}", "unknown")
    speed = load.rates.request_speed
    text = f"{rate(load.rates.generated_per_second)} tokens/s"
    if speed is None:
        return Answer("Not known", f"{text}; how many requests share them is not published.", "unknown")
    running = counted(load.rates.running or 0, "request")
    text += f", {rate(speed)} for each of {running}; a person reads about {READING_SPEED:.0f}."
    text += _latencies(load.rates) + _machine_speed(load)
    if not load.is_slow:
        return Answer("Faster than reading", text, "good")
    return Answer("Slow", text, "fair") if speed >= CRAWLING else Answer("Very slow", text, "bad")


def _latencies(rates: Rates) -> str:
    """Write TTFT and TPOT, where the engine measured any."""
    gap, first = rates.token_seconds, rates.first_token_seconds
    text = "" if gap is None else f" Between two tokens {duration(gap)} passed (TPOT)."
    return text if first is None else f"{text} First tokens came after {duration(first)} (TTFT)."


def _machine_speed(load: Load) -> str:
    """Compare the server's speed with its machine's, or say why the comparison is not possible."""
    last, waits, reads = load.last, load.rates.wait_share, load.rates.attention_bytes_per_second
    if not last.is_in_place:
        if load.is_held_by_bus:
            return f" Copies take about {load.bus_share:.0%} of the time."
        # `scout` publishes the interval of its recalls. Of other methods, a wait of 0 may mean that nothing can wait.
        if (
            last.gauge("recall_interval")
            or waits
            or any(layer.wait_seconds or layer.cpu_tokens for layer in last.layers)
        ):
            return f" The device tier waits {waits:.1%} of the time for the CPU."
        return " No wait was counted by which the device tier could be judged."
    if reads is None:
        return " What share of this machine's speed that is, is not known: the server does not time its attention."
    text = f" Attention reads {size(reads)}/s of K and V while it runs"
    if load.machine is None:
        hint = "hybrid profile --hardware, hybrid top --machine FILE"
        return f"{text}; what this machine's memory can is unknown ({hint})."
    return f"{text}, {load.bandwidth_share:.0%} of the {size(load.machine.host_read_achieved)}/s of its memory."


def _prompts_text(load: Load) -> str:
    """Describe a server that generates nothing."""
    running, speed = load.last.running, load.rates.prompt_per_second
    text = f"{counted(running, 'request')} run{'s' if round(running) == 1 else ''}" if running else "No request decodes"
    if speed:
        return f"{text}; prompts are read at {number(speed)} tokens/s."
    reason = f"a prompt is read, or one step takes longer than {load.rates.seconds:.0f} s"
    return f"{text} and no token was counted: {reason}."


# --- what holds it back? ---


def limit(load: Load, can_lower_budget: bool) -> Answer:
    """Name what holds the server back: the first rule that applies.

    Args:
        load: the server's activity.
        can_lower_budget: False if a larger budget is recommended already.
    """
    answer = _waits(load, can_lower_budget)
    if answer is not None:
        return answer
    if load.state == "idle":
        return Answer("Nothing", "No request runs or waits.", "unknown")
    if load.state == "prompts":
        return Answer("Prompts", _prompts_text(load), "unknown")
    prompts, generated = load.rates.prompt_per_second or 0.0, load.rates.generated_per_second or 0.0
    prompt_share = prompts / (prompts + generated)
    if load.is_slow and prompt_share > MOSTLY:
        text = f"{prompt_share:.0%} of the computed tokens were prompts', and a step that reads a piece of a prompt "
        return Answer("Prompts", f"{text}takes longer for all.", "fair", advice.shorter_prompt_steps(load.last))
    if load.rates.attention_share:
        return _in_place(load, load.rates.attention_share, can_lower_budget)
    copied = load.rates.copied_bytes_per_second
    if copied and load.bus_share is None and not load.rates.wait_share:
        text = f"{copied / 1e6:,.0f} MB/s are copied to the device tier; how long it waits for them is not counted. "
        return Answer("Not measured", f"{text}hybrid profile --hardware measures what the bus carries.", "unknown")
    text = "No request waits, and nothing that is measured here takes"
    if load.is_slow:
        return Answer("The model's matrices", f"{text} the time: the rest of the model does.", "fair")
    return Answer("Nothing", f"{text} most of the time.", "good")


def _waits(load: Load, can_lower_budget: bool) -> Answer | None:
    """Judge what requests, or the device tier, wait for."""
    last, rates, fill = load.last, load.rates, load.last.pool_fill or 0.0
    pool, waiting = f"the host pool is {fill:.0%} full", last.waiting or 0.0
    text = f"{counted(waiting, 'request')} wait{'s' if round(waiting) == 1 else ''}"
    if waiting and fill >= FULL:
        return Answer("Host memory", f"{text}, and {pool}.", "fair", advice.more_memory(last))
    waits = f"the device tier waits {rates.wait_share:.0%} of"
    if load.is_held_by_bus:
        copies = f"Copies, {(rates.copied_bytes_per_second or 0) / 1e6:,.0f} MB/s, take about {load.bus_share:.0%}"
        change = advice.less_copying(last, can_lower_budget)
        return Answer("The bus", f"{copies} of the time; {waits} it for the CPU.", "fair", change)
    if rates.wait_share > WAITS:
        share = mean(layer.cpu_ratio for layer in load.layers) or 0.0
        text = f"T{waits[1:]} the time for them; they attend {share:.0%} of the tokens."
        return Answer("CPU workers", text, "fair", advice.less_waiting(last, can_lower_budget))
    if not waiting:
        return None
    running, most = rates.most_running or 0.0, advice.most_requests(last)
    if most is None or running >= most:
        return Answer("The batch", f"{text}, and {pool}.", "fair", advice.larger_batch(last))
    text += f" although only {running:,.0f} of {most:,.0f} run and {pool}"
    if rates.prompt_per_second:
        return Answer("Prompts", f"{text}; most likely those before them are being read.", "fair")
    return Answer("Not known", f"{text}.", "fair")


def _in_place(load: Load, attention: float, can_lower_budget: bool) -> Answer:
    contexts, share = mean(layer.attended for layer in load.layers), load.bandwidth_share
    text = f"Attention takes {attention:.0%} of the time"
    text += "" if contexts is None else f" for {contexts:.0%} of the contexts' tokens"
    if attention > MOSTLY:
        if share is not None and share > MOSTLY:
            text += f", and it is bound by the memory, of whose bandwidth it reaches {share:.0%}"
        elif share is not None:
            text += f"; the memory, of whose bandwidth it reaches {share:.0%}, is not what it waits for"
        return Answer("Attention", f"{text}.", "fair", advice.less_attention(load.last, can_lower_budget))
    if load.is_slow:
        return Answer("The model's matrices", f"{text}; the rest goes to the model's matrices and the engine.", "fair")
    return Answer("Nothing", f"{text}; no request waits.", "good")
