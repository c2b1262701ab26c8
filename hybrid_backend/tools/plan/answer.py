"""First sentences of a plan: how many sequences fit, how fast they are against stock, and what bounds their number."""

from __future__ import annotations

import math
from typing import Literal

from hybrid_backend.hardware import find_hardware, machine_names
from hybrid_backend.memory_plan.footprint import UTILIZATION
from hybrid_backend.methods import resolve_method
from hybrid_backend.tools.counts import counted
from hybrid_backend.tools.plan.report import Plan, Row

NEAR = 1.1
"""Ratio below which two batches, which are exact, count as about the same."""
DRAW = 1.3
"""Ratio below which two simulated speeds count as the same. Most errors are smaller (docs/lab/simulator.md)."""
_ALL_IN_RAM = "Without a GPU both keep the KV cache in RAM: what can be won is speed."
_TAKE_STOCK = "Take the stock engine for this batch: it is exact."
_DRAWN = (
    f"A gain below {DRAW:g} is within the simulation's error: take the stock engine for this batch, which is exact."
)
_PLACES = {"device": "device memory", "host": "host memory"}


def answer(plan: Plan) -> Row | None:
    """Return the row of the configuration's own method, which `hybrid serve` runs.

    If that method holds no sequence or was not planned, the fastest one is returned; None if no method holds one.
    """
    able = [row for row in plan.rows if row.name != "stock" and row.max_batch]
    configured = next((row for row in able if row.name == plan.configured), None)
    return configured or max(able, key=lambda row: rate(plan, row) or 0.0, default=None)


def faster(plan: Plan, row: Row) -> Row | None:
    """Return the fastest method that suits the device if it is at least `DRAW` times as fast as ``row``, or stock.

    Rates are at each method's own batch.
    """
    own_rate = rate(plan, row)
    suited = [candidate for candidate in plan.rows if candidate.name == "stock" or _suits(plan, candidate.name)]
    best = max(suited, key=lambda candidate: rate(plan, candidate) or 0.0)
    return best if own_rate and not _is_draw((rate(plan, best) or 0.0) / own_rate) else None


def _is_draw(ratio: float) -> bool:
    """Tell whether a ratio of two speeds, rounded as `ratio_text` prints it, is below `DRAW`."""
    return round(ratio, 2) < DRAW


def _suits(plan: Plan, name: str) -> bool:
    method = resolve_method(name)
    return method.suits_gpu if plan.device_limit else method.suits_cpu


def rate(plan: Plan, row: Row) -> float | None:
    """Return the tokens per second of the planned batch, or of the largest one if that does not fit."""
    return row.tokens_per_s if row.fits else row.best_tokens_per_s


def times_stock(plan: Plan, row: Row) -> float | None:
    """Return the ratio to stock. Each decodes the planned batch, or its largest one if that does not fit."""
    stock_rate, own_rate = rate(plan, plan.row("stock")), rate(plan, row)
    return own_rate / stock_rate if own_rate and stock_rate else None


def ratio_text(ratio: float) -> str:
    """Write a ratio with two digits, in at most five characters if it is below 1,000.

    Ratios from 1 to 1.5 have three digits, so that a reader sees on which side of `DRAW` they are.
    """
    if ratio < 0.1:
        return "< 0.1"
    if 1 < ratio < 1.5:
        return f"{ratio:.3g}"
    return f"{ratio:.2g}" if ratio < 99.5 else f"{ratio:,.0f}"


def headline(plan: Plan) -> str:
    """Compare the largest batch of the method with stock's at the planned context, in one sentence."""
    row, stock = answer(plan), plan.row("stock")
    if row is None:
        return _nothing(plan)
    holds = f"{row.name} holds {counted(row.max_batch, 'sequence')} of {plan.context:,} tokens at once, stock "
    if not stock.max_batch:
        return f"{holds}none."
    ratio = row.max_batch / stock.max_batch
    if ratio >= NEAR:
        return f"{holds}{stock.max_batch:,}: {ratio_text(ratio)} times as many."
    return f"{holds}{stock.max_batch:,}: about as many." if ratio > 1 / NEAR else f"{holds}more: {stock.max_batch:,}."


def _nothing(plan: Plan) -> str:
    """Tell what a single sequence lacks, with the method that lacks least, and the fix."""

    def short(row: Row) -> dict[str, int]:
        need = {"device": row.first_device_bytes - plan.device_limit, "host": row.first_host_bytes - plan.host_limit}
        return {place: count for place, count in need.items() if count > 0}

    methods, stock = [row for row in plan.rows if row.name != "stock" and not row.refused], plan.row("stock")
    nearest = min(methods, key=lambda row: sum(short(row).values()))
    lacking = short(nearest)
    lacks = " and ".join(f"{count / 2**30:.1f} GiB of {_PLACES[place]}" for place, count in lacking.items())
    ways = ["a smaller or a quantised model"]
    if plan.context > 1024:
        ways.append("a shorter --context")
    if "host" in lacking:
        ways.append(f"--ram {math.ceil(nearest.first_host_bytes / 2**30) * plan.devices}GiB")
    if "device" in lacking:
        ways.append("a larger device")
    nothing = f"Stock holds {stock.max_batch:,}, and no method" if stock.max_batch else "Nothing"
    return (
        f"{nothing} holds a single sequence of {plan.context:,} tokens: {nearest.name} lacks {lacks or 'memory'} for "
        f"one. Plan {', or '.join(ways)}."
    )


def meaning(plan: Plan, row: Row) -> str:
    """Tell how fast ``row`` is against stock with the largest batches and with the planned one, and when to take stock.

    Without rates of a machine the text says how to get them. It is empty if the simulator does not know the method.
    """
    if not plan.has_times:
        return _how_to_see_speeds(plan) if plan.device_limit else f"{_ALL_IN_RAM} {_how_to_see_speeds(plan)}"
    stock, best = plan.row("stock"), row.best_tokens_per_s
    if best is None:
        return ""
    sentences, ratio = [f"Simulated, full: {_speed(best)} tokens/s."], None
    if stock.best_tokens_per_s is not None:
        ratio = best / stock.best_tokens_per_s
        speeds = f"{_speed(best)} tokens/s against {_speed(stock.best_tokens_per_s)}"
        sentences = [f"Simulated, both full: {speeds}, {_as_fast(ratio)}."]
    own_rate = rate(plan, row)
    if own_rate and plan.batch < max(row.max_batch, stock.max_batch):
        sentence = f"With --batch {plan.batch}: {_speed(own_rate)} tokens/s"
        if stock_rate := rate(plan, stock):
            ratio = own_rate / stock_rate
            limit = "" if stock.fits else f" with the {stock.max_batch} that stock holds"
            sentence += f" against {_speed(stock_rate)}{limit}, {_as_fast(ratio)}"
        sentences.append(f"{sentence}.")
    better = faster(plan, row)
    if better is not None and better is not stock:
        sentences.append(f"Faster: {better.name}, {_speed(rate(plan, better) or 0.0)}.")
    elif ratio is not None and _is_draw(ratio) and stock.fits:
        is_gain = f"{ratio:.2g}" != "1" and ratio > 1
        sentences.append(_DRAWN if is_gain else _TAKE_STOCK)
    return " ".join(sentences)


def prompts(plan: Plan) -> str:
    """Tell how long prompts take on a CPU, which every method computes densely; empty on a GPU or without rates."""
    seconds = plan.prompt_s
    if seconds is None:
        return ""
    together = f", {plan.batch} of them {duration(plan.batch * seconds)}" if plan.batch > 1 else ""
    return (
        f"Until its first token a prompt of {plan.context:,} tokens takes about {duration(seconds)}{together}, with "
        "stock as with any method."
    )


def duration(seconds: float) -> str:
    """Write a time in seconds, minutes or hours, with two digits."""
    if seconds < 90:
        return f"{seconds:.2g} s"
    return f"{seconds / 60:.2g} min" if seconds < 90 * 60 else f"{seconds / 3600:.2g} h"


def _how_to_see_speeds(plan: Plan) -> str:
    """Tell how to get speeds, with a named machine of the planned kind whose memory is nearest."""
    kind: Literal["gpu", "cpu"] = "gpu" if plan.device_limit else "cpu"
    memory = plan.device_limit / UTILIZATION if plan.device_limit else plan.host_limit
    machines = [find_hardware(name) for name in machine_names(kind)]
    nearest = min(machines, key=lambda machine: abs(machine.device_memory_bytes.value - memory))
    return (
        "To see speeds: run hybrid profile --hardware on the machine and add --machine hardware.json, or add the name "
        f"of a similar {kind.upper()}, as --machine {nearest.name}."
    )


def _speed(tokens_per_s: float) -> str:
    return f"{tokens_per_s:,.0f}" if tokens_per_s >= 1000 else f"{tokens_per_s:.4g}"


def _as_fast(ratio: float) -> str:
    if f"{ratio:.2g}" == "1":
        return "as fast"
    return f"{ratio_text(ratio)} times as fast" if ratio > 1 else f"slower ({ratio_text(ratio)} times)"


def bound(plan: Plan, row: Row) -> str:
    """Tell what bounds the sequences at once, with the numbers and the fix."""
    batches = {"device": row.device_batch, "host": row.host_batch}
    limits = {place: count for place, count in batches.items() if count is not None}
    place, most = min(limits.items(), key=lambda item: item[1])
    numbers = ", ".join(f"{_PLACES[name]} {count:,}" for name, count in limits.items())
    if most > plan.batch:
        room = f"There is room for more: {numbers}. --batch {most} plans for all of it."
        return f"Bounded by --batch (--max-num-seqs) {plan.batch}. {room}"
    if most == plan.batch:
        return f"All {plan.batch} fit, and no more: {numbers}."
    limit = plan.host_limit if place == "host" else plan.device_limit
    holds = (
        f"Bounded by {_PLACES[place]}: {limit / 2**30:.4g} GiB hold {counted(most, 'sequence')} of "
        f"{plan.context:,} tokens, not {plan.batch}"
    )
    if place == "device":
        return (
            f"{holds} (host memory {limits['host']}). Plan --batch {most}, or fewer exact_layers or "
            "frames_per_request, or a larger device."
        )
    holds += f" (device memory {limits['device']})" if "device" in limits else ""
    shorter = f" or --context {row.host_context // 1024}k" if row.host_context >= 1024 else ""
    return f"{holds}. To hold all: --ram {math.ceil(row.host_bytes / 2**30) * plan.devices}GiB{shorter}."
