"""What a plan says first: which method, how many times stock, and what bounds the number of sequences."""

from __future__ import annotations

import math

from hybrid_backend.tools.plan.report import Plan, Row

NEAR = 1.1
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


def headline(plan: Plan) -> str:
    """The answer in one line."""
    row, stock = answer(plan), plan.row("stock")
    if row is None:
        return f"Nothing holds a single sequence of {plan.context:,} tokens."
    mine, times, now = rate(plan, row), times_stock(plan, row), at_once(plan, row)
    here = f"{now} at once" if now == plan.batch else f"{now} of {plan.batch} at once"
    if mine is None:
        return f"{row.name}: {here}; stock holds {stock.max_batch}."
    fast = f"{row.name}: {mine:,.4g} tokens/s, {here}"
    if times is None:
        return f"{fast}; stock holds no such sequence."
    better = faster(plan, row)
    other = f" Faster: {better.name}, {rate(plan, better):,.4g}." if better else ""
    return f"{fast}: {times:.2g} times stock, which holds {at_once(plan, stock)}.{other}"


def bound(plan: Plan, row: Row) -> str:
    """What bounds the sequences at once, the numbers, and the fix."""
    most = {
        place: count for place, count in (("device", row.device_batch), ("host", row.host_batch)) if count is not None
    }
    place = min(most, key=lambda name: most[name])
    others = ", ".join(f"{_PLACES[name]} {count:,}" for name, count in most.items())
    if most[place] > plan.batch:
        return f"Bounded by --batch (--max-num-seqs) {plan.batch}. There is room for more: {others}."
    if most[place] == plan.batch:
        return f"All {plan.batch} fit, and no more: {others}."
    limit = plan.host_limit if place == "host" else plan.device_limit
    holds = (
        f"Bounded by {_PLACES[place]}: {limit / 2**30:.4g} GiB hold {most[place]} sequences of {plan.context:,} "
        f"tokens, not {plan.batch}"
    )
    if place == "device":
        return (
            f"{holds} (host memory {most['host']}). Plan --batch {most[place]}, or fewer exact_layers or "
            "frames_per_request, or a larger device."
        )
    holds += f" (device memory {most['device']})" if "device" in most else ""
    short = f" or --context {row.host_context // 1024}k" if row.host_context >= 1024 else ""
    return f"{holds}. To hold all: --ram {math.ceil(row.host_bytes / 2**30) * plan.devices}GiB{short}."
