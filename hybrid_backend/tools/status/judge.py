"""The top of the page: the server's state, and the answers to three questions with the keys that would help."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hybrid_backend.config import MOST_FRAMES
from hybrid_backend.tools.counts import counted
from hybrid_backend.tools.status.model import Answer, Headline, Layer, Level, Rates, State
from hybrid_backend.tools.status.reading import Reading
from hybrid_backend.tools.status.texts import age, duration, lowered, mass, mean, rate

FAITHFUL, FAIR_MASS = 0.95, 0.9
"""Mean attention masses from which a server without `quality.min_mass` is called faithful, and below which unfaithful.

The worst sampled layer must keep ``FAIR_MASS``, or the server is called nearly faithful at best.
"""
READING_SPEED, CRAWLING = 5.0, 2.0
"""Tokens per second of one request from which it is fast, and below which it is very slow.

A person reads 238 words a minute (Brysbaert 2019), which is about 5 tokens a second.
"""
FIRST_TOKEN = 10.0
"""Seconds until a first token from which a server is slow to begin: the longest wait that keeps a user's attention.

Source: Nielsen, Usability Engineering (1993), chapter 5.
"""
WAITS = 0.1
"""Share of the time that the device tier waits for CPU workers, above which the workers slow the server down."""
FULL = 0.9
"""Share of the host pool in use from which requests are said to wait for memory."""
MOSTLY = 0.5
"""Share above which a part is said to be most of a whole: of the time, or of computed tokens."""
_UNSAMPLED = "Not measured"
"""Verdict on the faithfulness of a server of which no layer was sampled."""
_LEVELS: tuple[Level, ...] = ("unknown", "good", "fair", "bad")  # ascending
# The flags for the longest context, for the most requests at once, and for the tokens of a step with prompts.
_FLAGS = {
    "vllm": ("--max-model-len", "--max-num-seqs", "--max-num-batched-tokens"),
    "sglang": ("--context-length", "--max-running-requests", "--chunked-prefill-size"),
}


@dataclass(frozen=True)
class Load:
    """The last reading, and what happened in the seconds before it."""

    last: Reading
    rates: Rates
    layers: Sequence[Layer]

    @property
    def state(self) -> State:
        """The server's activity. If requests run and no token is counted, a prompt is read, or the step is long."""
        if self.rates.generated_per_second:
            return "decoding"
        is_busy = self.last.get("running") or self.last.get("waiting") or self.rates.prompt_per_second
        return "prompts" if is_busy else "idle"

    @property
    def is_slow(self) -> bool:
        """True if a request gets fewer tokens than a person reads."""
        return (self.rates.request_speed or READING_SPEED) < READING_SPEED

    @property
    def is_slow_to_begin(self) -> bool:
        """True if first tokens come later than a user waits for them."""
        return (self.rates.first_token_seconds or 0.0) > FIRST_TOKEN

    @property
    def bus_share(self) -> float | None:
        """Share of the time that the copies take at the bus's speed; None if that speed is not published."""
        bus = self.last.get("bus_bytes_per_second")
        return (self.rates.copied_bytes_per_second or 0.0) / bus if bus else None


def judge(load: Load) -> tuple[Headline, tuple[Answer, ...]]:
    """Judge what the server did in the last seconds."""
    is_faithful = faithful(load.last, load.layers)
    answers = (is_faithful, fast(load), limit(load, can_lower_budget=not is_faithful.change))
    return _headline(load, answers), answers


def unjudged(was_read: bool, stale_seconds: float | None, problem: str | None) -> Headline:
    """Return the headline of a server without fresh rates, of which nothing is judged.

    Args:
        was_read: True if there is any reading.
        stale_seconds: time since the last reading, if the server is silent; None after a start.
        problem: the reason why the last reading failed.
    """
    reason = problem or "The server takes long to answer"
    if stale_seconds is None:
        title, detail = "Waiting for the first reading", "The server was asked and has not answered yet."
        if was_read:
            title, detail = "Measuring the first interval", "Rates need two readings."
        return Headline(state="starting", level="unknown", title=title, detail=detail)
    title, detail = "No server answers", f"{reason}. It is asked again all the time."
    if was_read:
        title = f"No answer for {age(stale_seconds)}"
        detail = f"{reason}. Everything below is as old as the last reading; the server is asked again all the time."
    return Headline(state="silent", level="bad", title=title, detail=detail)


def _headline(load: Load, answers: Sequence[Answer]) -> Headline:
    """Sum up the answers: the worst of their levels, and the verdicts that are not good."""
    *qualities, limits = answers
    poor = [lowered(quality.verdict) for quality in qualities if quality.level in ("fair", "bad")]
    if limits.level == "fair":
        poor.append(f"held back by {lowered(limits.verdict)}")
    level = max((answer.level for answer in answers), key=_LEVELS.index)
    if load.state == "decoding" and level == "good" and qualities[0].level == "unknown":
        # A green line would promise answers that nobody has measured.
        verdict = qualities[0].verdict
        level, poor = "unknown", ["faithfulness not measured yet" if verdict == _UNSAMPLED else lowered(verdict)]
    activity = "Decoding well" if level == "good" else "Decoding"
    if load.state != "decoding":
        level = "unknown" if level == "good" else level  # A server that generates nothing is neither fast nor slow.
        reads = "Reading prompts" if load.rates.prompt_per_second else "Working, no token yet"
        activity = "Idle" if load.state == "idle" else reads
    title = f"{activity}: {', '.join(poor)}" if poor else activity
    return Headline(state=load.state, level=level, title=title, detail=_detail(load))


def _detail(load: Load) -> str:
    running, waiting, rates = load.last.get("running"), load.last.get("waiting"), load.rates
    if load.state == "idle":
        return "No request runs or waits."
    texts = [f"{rate(rates.generated_per_second)} tokens/s generated"] if load.state == "decoding" else []
    texts += [f"{rates.prompt_per_second:,.0f} tokens/s of prompts read"] if rates.prompt_per_second else []
    counts = [] if running is None else [f"{counted(running, 'request')} now"]
    counts += [] if waiting is None else [f"{waiting:,.0f} waiting" if waiting else "none waiting"]
    return f"{'; '.join([*texts, ', '.join(counts)])}; means of the last {rates.seconds:.0f} s."


# --- is it faithful? ---


def faithful(last: Reading, layers: Sequence[Layer]) -> Answer:
    """Judge how near attention is to dense attention: by promise, by samples or exactly."""

    def answer(verdict: str, level: Level, text: str, change: str = "") -> Answer:
        return Answer(question="Is it faithful?", verdict=verdict, level=level, text=text, change=change)

    promised, measured = last.get("quality_min_mass"), last.get("quality_mass")
    if promised and measured is not None:
        return answer(*_promise(last, promised, measured))
    attended = [layer.attended for layer in layers if layer.attended is not None]
    if attended and min(attended) == 1:
        return answer("Exact", "good", "What decodes attends every token of its context, in every layer.")
    masses = [(layer.mass_recall, layer.layer) for layer in layers if layer.mass_recall is not None]
    cosines = [(layer.query_cosine, layer.layer) for layer in layers if layer.query_cosine is not None]
    queries = ""
    if cosines:
        worst, index = min(cosines)
        average = mean(cosine for cosine, _ in cosines)
        queries = f" Cosine of predicted and true queries: {average:.2f}, {worst:.2f} in the worst ({index})."
    if not masses:
        left_out = f"{1 - (mean(attended) or 0):.0%} of the contexts' tokens are left out. " if attended else ""
        text = f"{left_out}No layer was sampled yet (metrics.sample_interval says how often).{queries}"
        return answer(_UNSAMPLED, "unknown", text)
    is_whole = not any(layer.mass_samples == 0 and layer.mass_recall is None for layer in layers)
    so_far = "" if is_whole else " so far"
    worst, index = min(masses)
    average = mean(share for share, _ in masses) or 0.0
    count = next(layer.mass_samples for layer in layers if layer.layer == index)
    samples = f", {counted(count, 'sample')}" if count else ""
    sampled = f"{len(masses)} sampled{so_far} of {counted(len(layers), 'layer')}"
    text = (
        f"{average:.1%} of the attention mass is kept in the {sampled}, {worst:.1%} in the worst ({index}{samples}), "
    )
    text += f"means since start.{queries}"
    if average >= FAITHFUL and worst >= FAIR_MASS:
        return answer(f"Faithful{so_far}", "good" if is_whole else "unknown", text)
    larger = _ways(
        _budget(last, 2) or "sparse=never, by which every token is attended",
        f"quality.min_mass={FAITHFUL}, by which the server finds the budget",
    )
    if average >= FAIR_MASS:
        return answer(f"Nearly faithful{so_far}", "fair", text, larger)
    return answer(f"Not faithful{so_far}", "bad", text, larger)


def _promise(last: Reading, promised: float, measured: float) -> tuple[str, Level, str, str]:
    """Return verdict, level, text and change of a server that promises an attention mass."""
    budget, kl = last.get("quality_budget_tokens") or 0.0, last.get("quality_max_kl")
    share_text, promise_text = f"{mass(measured)} of the attention mass", f"{100 * promised:.4g}%"
    if math.isinf(budget):
        # Nothing is sampled while all tokens are attended, so the mass is of the time before.
        text = (
            f"The largest budget kept {share_text} when that was last measured, less than the promised {promise_text}. "
        )
        text += "So every token is attended; after a while the budget is tried again."
        keepable = _setting("quality.max_kl", 2 * kl, kl) if kl else ""
        if not kl and (share := math.floor(100 * measured) / 100):
            keepable = f"{_setting('quality.min_mass', share, promised)}, which the largest budget keeps"
        return "Everything attended", "good", text, _ways(_frames(last), keepable)
    of_budget = f" at {budget:,.0f} tokens of budget" if budget else ""
    profiled = f", which kept answers within {kl:g} nats of dense attention's where it was profiled" if kl else ""
    text = f"{share_text} is kept{of_budget}; promised: {promise_text}{profiled}."
    is_kept = measured >= promised
    return "Promise kept" if is_kept else "Promise broken", "good" if is_kept else "bad", text, ""


# --- is it fast? ---


def fast(load: Load) -> Answer:
    """Judge the speed of one request by how fast a person reads."""

    def answer(verdict: str, text: str, level: Level) -> Answer:
        return Answer(question="Is it fast?", verdict=verdict, level=level, text=text)

    rates, speed = load.rates, load.rates.request_speed
    if load.state == "idle":
        return answer("Idle", "No request runs or waits: there is nothing to judge.", "unknown")
    if load.state == "prompts":
        return answer("No token yet", f"{_prompts_text(load)}{_latencies(rates)}", "unknown")
    text = f"{rate(rates.generated_per_second)} tokens/s"
    if speed is None:
        return answer("Not known", f"{text}; how many requests share them is not published.", "unknown")
    running = counted(rates.running or 0, "request")
    text += f", {rate(speed)} for each of {running}; a person reads about {READING_SPEED:.0f}.{_latencies(rates)}"
    if not load.is_slow:
        begins_late = load.is_slow_to_begin
        return answer("Slow to begin", text, "fair") if begins_late else answer("Faster than reading", text, "good")
    return answer("Slow", text, "fair") if speed >= CRAWLING else answer("Very slow", text, "bad")


def _latencies(rates: Rates) -> str:
    """Write TTFT and TPOT, where the engine measured any."""
    gap, first = rates.token_seconds, rates.first_token_seconds
    text = "" if gap is None else f" Between two tokens {duration(gap)} passed (TPOT)."
    return text if first is None else f"{text} First tokens came after {duration(first)} (TTFT)."


def _prompts_text(load: Load) -> str:
    """Describe a server that generates nothing."""
    running, speed = load.last.get("running"), load.rates.prompt_per_second
    text = f"{counted(running, 'request')} run{'s' if round(running) == 1 else ''}" if running else "No request decodes"
    if speed:
        return f"{text}; prompts are read at {speed:,.0f} tokens/s."
    return (
        f"{text} and no token was counted: a prompt is read, or one step takes longer than {load.rates.seconds:.0f} s."
    )


# --- what holds it back? ---


def limit(load: Load, can_lower_budget: bool) -> Answer:
    """Name what holds the server back: the first rule that applies.

    Args:
        load: the server's activity.
        can_lower_budget: False if a larger budget is recommended already.
    """
    smaller = _smaller_budget(load.last) if can_lower_budget else ""
    return _waits(load, smaller) or _work(load, smaller)


def _limit(verdict: str, text: str, level: Level = "fair", change: str = "") -> Answer:
    return Answer(question="What holds it back?", verdict=verdict, level=level, text=text, change=change)


def _waits(load: Load, smaller_budget: str) -> Answer | None:
    """Judge what requests, or the device tier, wait for."""
    last, rates, fill = load.last, load.rates, load.last.get("pool_fill") or 0.0
    waiting, (context_flag, batch_flag, _) = last.get("waiting") or 0.0, _flags(last)
    queue = f"{counted(waiting, 'request')} wait{'s' if round(waiting) == 1 else ''}, the host pool is {fill:.0%} full"
    if waiting and fill >= FULL:
        change = f"a larger host_pool.size, or a smaller {context_flag}: hybrid plan reckons both"
        return _limit("Host memory", f"{queue}.", change=change)
    # Copies overlap the step, and the wait for copies is not counted, so the two times are compared.
    if load.bus_share is not None and load.bus_share > max(MOSTLY, rates.wait_share):
        text = f"Copies, {(rates.copied_bytes_per_second or 0) / 1e6:,.0f} MB/s, take about {load.bus_share:.0%} of "
        text += f"the time; the device tier waits {rates.wait_share:.0%} of it for the CPU."
        return _limit("The bus", text, change=_ways(_frames(last), _interval(last, 2), smaller_budget))
    if rates.wait_share > WAITS:
        share = mean(layer.cpu_ratio for layer in load.layers) or 0.0
        text = (
            f"The device tier waits {rates.wait_share:.0%} of the time for them; they attend {share:.0%} of the tokens."
        )
        threads, cpus = last.get("worker_threads"), last.get("worker_cpus")
        more_threads = _setting("workers.threads", cpus, threads) if threads and cpus and cpus > threads else ""
        ways = _ways(more_threads, _frames(last), _interval(last, 0.5), smaller_budget)
        return _limit("CPU workers", text, change=ways)
    if not waiting:
        return None
    running, most = rates.most_running or 0.0, last.get("max_requests")
    if most is None or running >= most * last.replicas:
        larger = f"{batch_flag} {2 * most:.0f} (now {most:.0f})" if most else f"a larger {batch_flag}"
        return _limit("The batch", f"{queue}.", change=f"{larger}; hybrid plan reckons how many fit")
    text = f"{queue}, and only {running:,.0f} of {most * last.replicas:,.0f} run: most likely prompts are being read."
    return _limit("Prompts", text)


def _work(load: Load, smaller_budget: str) -> Answer:
    """Judge what the steps take their time for. No request waits."""
    last, rates = load.last, load.rates
    if load.state == "idle":
        return _limit("Nothing", "No request runs or waits.", "unknown")
    if load.state == "prompts":
        return _limit("Prompts", _prompts_text(load), "unknown")
    prompts = rates.prompt_per_second or 0.0
    prompt_share = prompts / (prompts + (rates.generated_per_second or 0.0))
    # A single request waits for its own prompt only, which smaller pieces do not shorten.
    if load.is_slow and prompt_share > MOSTLY and (rates.most_running or 0) > 1:
        text = f"{prompt_share:.0%} of the computed tokens were prompts', and a step that reads a piece of a prompt "
        change = f"{_smaller_pieces(last)}: tokens then come between shorter pieces"
        return _limit("Prompts", f"{text}takes longer for all.", change=change)
    copied, attention = rates.copied_bytes_per_second, rates.attention_share
    text = "No request waits, and nothing that is measured here takes most of the time."
    if attention:
        contexts = mean(layer.attended for layer in load.layers)
        text = f"Attention takes {attention:.0%} of the time"
        text += "." if contexts is None else f" for {contexts:.0%} of the contexts' tokens."
        if attention > MOSTLY:
            if last.get("budget_tokens") is None:
                smaller_budget = "method=auto, which attends budget_tokens=2048 of longer contexts"
            return _limit("Attention", text, change=smaller_budget)
    elif copied and load.bus_share is None and not rates.wait_share:
        text = f"{copied / 1e6:,.0f} MB/s are copied to the device tier; how long it waits for them is not counted."
        return _limit("Not measured", text, "unknown")
    if load.is_slow:
        return _limit("The model's matrices", f"{text} The rest goes to the model's matrices and the engine.")
    if load.is_slow_to_begin:
        text = f"First tokens came after {duration(rates.first_token_seconds or 0.0)}: prompts take that long."
        hits = rates.prefix_hit_ratio
        text += "" if hits is None else f" The prefix cache had {hits:.0%} of their tokens."
        change = "prompts that begin with the same text, which the prefix cache then keeps; or shorter prompts"
        return _limit("Prompts", text, change=change)
    return _limit("Nothing", text, "good")


# --- changes: one step each, twice or half of what is served; a key whose gauge is not published does nothing ---


def _ways(*ways: str) -> str:
    return "; or ".join(filter(None, ways))


def _setting(key: str, value: float, current: float) -> str:
    return f"{key}={value:.12g} (now {current:.12g})"


def _frames(last: Reading) -> str:
    frames = last.get("frames_per_request")
    if not frames or frames >= MOST_FRAMES:
        return ""
    return _setting("frames_per_request", min(2 * frames, MOST_FRAMES), frames)


def _interval(last: Reading, factor: float) -> str:
    interval = last.get("recall_interval")
    proposed = factor * (interval or 0) // 1
    return _setting("recall.intervals", proposed, interval) if interval and proposed >= 1 else ""


def _budget(last: Reading, factor: float) -> str:
    """Propose another budget, in whole pages."""
    budget, page = last.get("budget_tokens"), last.get("page_tokens")
    return _setting("budget_tokens", factor * budget // page * page, budget) if budget and page else ""


def _smaller_budget(last: Reading) -> str:
    """Propose a smaller budget, or a smaller promise if the budget follows one."""
    if last.get("quality_max_kl") is not None:
        return "a larger quality.max_kl, of which hybrid profile makes a promise"
    if (promised := last.get("quality_min_mass")) is not None:
        return f"a quality.min_mass below {promised:g}, which the budget follows"
    return _budget(last, 0.5)


def _smaller_pieces(last: Reading) -> str:
    """Propose half of the tokens that a step with prompts may have."""
    flag, tokens = _flags(last)[2], last.get("step_tokens")
    return f"{flag} {tokens // 2:.0f} (now {tokens:.0f})" if tokens else f"half of {flag}"


def _flags(last: Reading) -> tuple[str, str, str]:
    return _FLAGS.get(last.engine or "", _FLAGS["vllm"])
