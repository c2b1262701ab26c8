"""Plots of bench.gpu_decode's rows beside ScoutAttention's numbers (its Figures 8, 9, 11 and 12)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import paper_numbers

Row = dict[str, Any]  # card_gb, context, backend, most (the largest batch that fits), batch, tokens_per_second, idle


def best(rows: Sequence[Row], kinds: Sequence[str], field: str) -> dict[int, float]:
    """Return the best figure of these backends by context."""
    found: dict[int, float] = {}
    for row in rows:
        if row["backend"] in kinds and field in row:
            found[row["context"]] = max(found.get(row["context"], 0.0), row[field])
    return found


def ratios(rows: Sequence[Row], of: Sequence[str], over: Sequence[str]) -> dict[int, float]:
    """Return the tokens per second of one group's best over the other's, by context."""
    mine, others = best(rows, of, "tokens_per_second"), best(rows, over, "tokens_per_second")
    return {context: mine[context] / others[context] for context in mine if others.get(context)}


def plot(rows: Sequence[Row], stock: Sequence[str], path: Path) -> None:
    """Throughput by context, each at its largest batch and at equal batch; idle; what lookahead and recall give.

    ``stock``: names of the engine's own backends. The largest card of ``rows`` is shown.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    card = max(row["card_gb"] for row in rows)
    rows = [row for row in rows if row["card_gb"] == card]
    figure, axes = pyplot.subplots(2, 2, figsize=(13, 9))
    kinds = list(dict.fromkeys(row["backend"] for row in rows))
    for axis, most, title in (
        (axes[0, 0], True, "largest batch that fits (Figure 8)"),
        (axes[0, 1], False, "equal batch"),
    ):
        mine = [row for row in rows if row["most"] is most]
        for kind in kinds:
            points = sorted(best(mine, [kind], "tokens_per_second").items())
            axis.plot([x for x, _ in points], [y for _, y in points], marker="o", label=kind)
        over_stock = ratios(mine, ["scout"], stock)
        said = ", ".join(f"{x // 1024}k: {y:.2f}" for x, y in sorted(over_stock.items()))
        axis.set(
            xlabel="context, tokens",
            ylabel="tokens/s",
            ylim=(0, None),
            title=f"{title}\nscout over stock: {said or '-'}",
        )
        axis.legend()
    largest = [row for row in rows if row["most"]]
    idle = {kind: best(largest, [kind], "idle") for kind in ("scout", "hgca", "infinigen")}
    bars(axes[1, 0], "device idle, share of a step (Figure 11)", {
        f"{kind}\n{context // 1024}k": (share, paper_numbers.IDLE[kind])
        for kind, by_context in idle.items() for context, share in sorted(by_context.items())
    })  # fmt: skip
    claims = (
        ("scout over stock, 64k", ratios(largest, ["scout"], stock).get(65536), paper_numbers.OVER_STOCK_AT_64K),
        ("scout over hgca, infinigen, best",
         max(ratios(largest, ["scout"], ["hgca", "infinigen"]).values(), default=None),
         paper_numbers.OVER_BEST_OFFLOADING),
        ("lookahead, no recall", ratios(largest, ["no-recall"], ["neither"]).get(32768), paper_numbers.PRECOMPUTATION),
        ("recall", ratios(largest, ["scout"], ["no-recall"]).get(32768), paper_numbers.PERIODIC_RECALL),
    )  # fmt: skip
    bars(axes[1, 1], "ratios (Figures 9 and 12)", {name: (here, paper) for name, here, paper in claims if here})
    figure.suptitle(f"Qwen3-14B's shape, {card:.0f} GB")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def bars(axis: Any, title: str, values: dict[str, tuple[float, float]]) -> None:
    """Draw measured values beside the paper's."""
    places = range(len(values))
    axis.bar([x - 0.2 for x in places], [here for here, _ in values.values()], 0.4, label="measured")
    axis.bar([x + 0.2 for x in places], [paper for _, paper in values.values()], 0.4, label="paper")
    axis.set_xticks(list(places), list(values), fontsize=8)
    axis.set_title(title)
    axis.legend()
