"""First sentences of a plan: how many sequences fit, how fast they are beside stock, and what bounds their number."""

from __future__ import annotations

import math

from hybrid_backend.tools.counts import counted
from hybrid_backend.tools.plan.report import Plan, Row

NEAR = 1.1
_ALL_IN_RAM = "Without a GPU both keep the KV cache in RAM: what can be won is speed."
_HOW_FAST = (
    "To see speeds: run hybrid profile --hardware on the machine and add --machine hardware.json, or add a machine's "
    "name, as --machine h100."
)
_PLACES = {"device": "device memory", "host": "host memory"}


def answer(plan: Plan) -> Row | None:
    """The configuration's own method, which `hybrid serve` runs; where it holds not a single sequence or was not asked
    for, the fastest. None: none of them holds one."""
    able = [row for row in plan.rows if row.name != "stock" and row.max_batch]
    mine = next((row for row in able if row.name == plan.configured), None)
    return mine or max(able, key=lambda row: rate(plan, row) or 0.0, default=None)


def faster(plan: Plan, row: Row) -> Row | None:
    """Another method that is faster by more than `NEAR`, with as many of the sequences as it runs at once."""
    mine = rate(plan, row)
    best = max(plan.rows, key=lambda other: rate(plan, other) or 0.0)
    return best if mine and (rate(plan, best) or 0.0) > NEAR * mine else None


def at_once(plan: Plan, row: Row) -> int:
    return min(plan.batch, row.max_batch)


def rate(plan: Plan, row: Row) -> float | None:
    """Tokens per second with that many at once."""
    return row.tokens_per_s if row.fits else row.best_tokens_per_s


def times_stock(plan: Plan, row: Row) -> float | None:
    """Against stock with as many of the sequences as it holds."""
    stock, mine = rate(plan, plan.row("stock")), rate(plan, row)
    return mine / stock if mine and stock else None


def ratio_text(ratio: float) -> str:
    """Write a ratio with two digits, in at most five characters where it is below 1,000."""
    if ratio < 0.1:
        return "< 0.1"
    return f"{ratio:.2g}" if ratio < 99.5 else f"{ratio:,.0f}"


def headline(plan: Plan) -> str:
    """Compare the largest batch of the method with stock's at the planned context, in one sentence."""
    row, stock = answer(plan), plan.row("stock")
    if row is None:
        return f"Nothing holds a single sequence of {plan.context:,} tokens."
    holds = f"{row.name} holds {counted(row.max_batch, 'sequence')} of {plan.context:,} tokens at once, stock "
    if not stock.max_batch:
        return f"{holds}none."
    ratio = row.max_batch / stock.max_batch
    if ratio >= NEAR:
        return f"{holds}{stock.max_batch:,}: {ratio_text(ratio)} times as many."
    return f"{holds}{stock.max_batch:,}: about as many." if ratio > 1 / NEAR else f"{holds}more: {stock.max_batch:,}."


def meaning(plan: Plan, row: Row) -> str:
    """Tell how fast ``row`` is against stock with the largest batches and with the planned one, and when to take stock.

    Without rates of a machine the text says how to get them; it is empty where the simulator does not know the method.
    """
    if not plan.has_times:
        return _HOW_FAST if plan.device_limit else f"{_ALL_IN_RAM} {_HOW_FAST}"
    stock, best = plan.row("stock"), row.best_tokens_per_s
    if best is None:
        return ""
    if stock.best_tokens_per_s is None:
        sentences, ratio = [f"Simulated, full: {_speed(best)} tokens/s."], None
    else:
        ratio = best / stock.best_tokens_per_s
        full = f"{_speed(best)} tokens/s against {_speed(stock.best_tokens_per_s)}"
        sentences = [f"Simulated, both full: {full}, {_as_fast(ratio)}."]
    method_rate, stock_rate = rate(plan, row), rate(plan, stock)
    if method_rate and any(plan.batch < each.max_batch for each in (row, stock)):
        sentence = f"With --batch {plan.batch}: {_speed(method_rate)} tokens/s"
        if stock_rate:
            ratio = method_rate / stock_rate
            limit = "" if stock.fits else f" with the {stock.max_batch} that stock holds"
            sentence += f" against {_speed(stock_rate)}{limit}, {_as_fast(ratio)}"
        sentences.append(f"{sentence}.")
    better = faster(plan, row)
    if better is not None and better is not stock:
        sentences.append(f"Faster: {better.name}, {_speed(rate(plan, better) or 0.0)}.")
    elif ratio is not None and ratio < NEAR and stock.fits:
        sentences.append("So take stock for this batch: it is exact.")
    return " ".join(sentences)


def _speed(tokens_per_s: float) -> str:
    return f"{tokens_per_s:,.0f}" if tokens_per_s >= 1000 else f"{tokens_per_s:.4g}"


def _as_fast(ratio: float) -> str:
    if 1 / NEAR < ratio < NEAR:
        return "about as fast"
    return f"{ratio_text(ratio)} times as fast" if ratio > 1 else f"slower ({ratio_text(ratio)} times)"


def bound(plan: Plan, row: Row) -> str:
    """What bounds the sequences at once, the numbers, and the fix."""
    most = {
        place: count for place, count in (("device", row.device_batch), ("host", row.host_batch)) if count is not None
    }
    place = min(most, key=lambda name: most[name])
    others = ", ".join(f"{_PLACES[name]} {count:,}" for name, count in most.items())
    if most[place] > plan.batch:
        room = f"There is room for more: {others}. --batch {most[place]} plans for all of it."
        return f"Bounded by --batch (--max-num-seqs) {plan.batch}. {room}"
    if most[place] == plan.batch:
        return f"All {plan.batch} fit, and no more: {others}."
    limit = plan.host_limit if place == "host" else plan.device_limit
    holds = (
        f"Bounded by {_PLACES[place]}: {limit / 2**30:.4g} GiB hold {counted(most[place], 'sequence')} of "
        f"{plan.context:,} tokens, not {plan.batch}"
    )
    if place == "device":
        return (
            f"{holds} (host memory {most['host']}). Plan --batch {most[place]}, or fewer exact_layers or "
            "frames_per_request, or a larger device."
        )
    holds += f" (device memory {most['device']})" if "device" in most else ""
    short = f" or --context {row.host_context // 1024}k" if row.host_context >= 1024 else ""
    return f"{holds}. To hold all: --ram {math.ceil(row.host_bytes / 2**30) * plan.devices}GiB{short}."
