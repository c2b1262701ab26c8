"""The YAML that a profile writes, and its tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import yaml
from rich import box
from rich.table import Table

from hybrid_backend.config import HybridConfig
from hybrid_backend.tools.profile.ahead import Ahead
from hybrid_backend.tools.profile.spread import Spread
from hybrid_backend.tools.profile.summary import Check, LayerSummary, SparsityKL, Thresholds


def to_yaml(config: HybridConfig, comments: Mapping[str, Sequence[str]], head: Sequence[str]) -> str:
    """The keys that differ from their defaults, each under its comment lines; `load_config` reads the same back."""
    data: dict[str, Any] = config.model_dump(mode="json", exclude_defaults=True)
    data = {"model": config.model.model_dump(mode="json", exclude_defaults=True), **data}
    lines = [f"# {line}" for line in head]
    for key, value in data.items():
        lines += [f"# {line}" for line in comments.get(key, ())]
        if isinstance(value, dict):
            lines.append(f"{key}:")
            for name, item in value.items():
                lines += [f"  # {line}" for line in comments.get(f"{key}.{name}", ())]
                lines.append(f"  {name}: {_flow(item)}")
        else:
            lines.append(f"{key}: {_flow(value)}")
    return "\n".join(lines) + "\n"


def _flow(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("...\n").strip()


def comments_of(
    layers: Sequence[LayerSummary],
    sparsity_kl: SparsityKL,
    limits: Thresholds,
    aim: float,
    tau_source: str,
    frames: int,
    fewest: int | None,
    spread: Spread | None = None,
    ahead: Ahead | None = None,
) -> dict[str, list[str]]:
    """Return the comments of each key of the YAML: the measurements that decided its value."""
    exact = [layer for layer in layers if layer.why]
    sparse = [layer for layer in layers if not layer.why]
    more_rules = ", and any that more than halves what is left" if limits.outliers else ""
    more_rules += f", or mass below {limits.mass:g}" if limits.mass else ""
    reasons = [
        "measured; exact: those of the largest KL to dense with this layer alone sparse, as few as bring the KL of all",
        f"others together to {limits.kl:g} nats in texts' continuations and in lookups{more_rules}",
    ]
    reasons += [f"{name} exact: {_kinds(kl)}" for name, kl in _steps(sparsity_kl)]
    for layer in exact:
        alone = f"alone {_kinds(layer.kl)}"
        reasons.append(f"layer {layer.layer}: mass {layer.mass:.3f}, {alone} ({' and '.join(layer.why)})")
    if sparse:
        most = {kind: max(x.kl[kind] for x in sparse) for kind in sparse[0].kl}
        reasons.append(f"elsewhere mass >= {min(x.mass for x in sparse):.3f}, alone at most {_kinds(most)}")
    skipped = [f"cosine of predicted queries below {limits.cosine:g}, or a KL by them that others do not have"]
    skipped += [f"layer {x.layer}: {x.cosine:.3f}" for x in sparse if x.skips]
    least = min((x.cosine for x in sparse if x.cosine is not None and x.predicted), default=None)
    skipped += [] if least is None else [f"elsewhere >= {least:.3f}"]
    if ahead is not None:
        skipped += [f"all sparse layers: {ahead_kinds(ahead)}"]
        for index in ahead.own or ():
            by_kind = {kind: kl[index] for kind, kl in ahead.alone.items()}
            alone = ", ".join(f"{true:.4f} -> {predicted:.4f} ({kind})" for kind, (true, predicted) in by_kind.items())
            skipped.append(f"layer {index} alone, true -> predicted query: KL {alone}")
    recall = [
        f"measured as exact_layers: the longest interval whose mean CPU ratio stays below {aim:g} on every window",
        "(ScoutAttention, section 3.4, with a margin); those of exact and of sliding layers are not used",
    ]
    if sparse:
        mean, without = fmean(x.ratio for x in sparse), fmean(x.ratio_without for x in sparse)
        recall.append(f"mean CPU ratio of sparse layers {mean:.3f}, without recall {without:.3f}")
    above = [str(layer.layer) for layer in sparse if not layer.below]
    if above:
        recall.append(f"NOT below {aim:g} at any interval: layers {', '.join(above)}")
        recall.append(frames_line(frames, fewest))
    placed = [f"the fewest of the simulated ones that keep every sparse layer's CPU ratio below {aim:g}: {fewest}"]
    spread_out = list[str]()
    if spread is not None:
        sizes = ", ".join(map(str, spread.sizes))
        spread_out = [
            f"measured as exact_layers: each sparse layer alone at {sizes} tokens; as many tokens in all, page by page",
            "to the layer whose KL they lower most, in texts' continuations and in lookups; of others 1.0, not used;",
            f"all sparse layers together, all budgets alike -> these: {spread_kinds(spread)}",
        ]
    return {
        "budget_factors": spread_out,
        "exact_layers": reasons,
        "lookahead.skip_layers": skipped,
        "recall.threshold": [tau_source],
        "recall.intervals": recall,
        "frames_per_request": placed,
    }


def _steps(sparsity_kl: SparsityKL) -> list[tuple[str, Mapping[str, float]]]:
    """Return the names of the exact layers, one layer more at a time, and the KL of the others together."""
    ranking = sparsity_kl.ranking
    names = [f"layers {', '.join(map(str, sorted(ranking[:count])))}" for count in range(1, len(sparsity_kl.together))]
    return list(zip(["none", *names], sparsity_kl.together, strict=True)) if sparsity_kl.together else []


def _kinds(kl: Mapping[str, float]) -> str:
    return "KL " + ", ".join(f"{cost:.4f} ({kind})" for kind, cost in kl.items())


def spread_kinds(spread: Spread) -> str:
    """Return the KL without and with budgets per layer, in words."""
    return "KL " + ", ".join(f"{kl:.4f} -> {spread.spread[kind]:.4f} ({kind})" for kind, kl in spread.even.items())


def ahead_kinds(ahead: Ahead) -> str:
    """Return the KL by true and by predicted queries, in words: in all sparse layers, and with some by their own."""
    first = ", ".join(f"{kl:.4f} -> {ahead.together[0][kind]:.4f} ({kind})" for kind, kl in ahead.true.items())
    if not ahead.own:
        return f"KL {first}"
    after = ", ".join(f"{cost:.4f} ({kind})" for kind, cost in ahead.together[-1].items())
    return f"KL {first}; layers {', '.join(map(str, ahead.own))} by their own: {after}"


def exact_table(sparsity_kl: SparsityKL, limits: Thresholds) -> Table:
    table = Table(
        title=f"KL to dense, nats per token, all other layers sparse (at most {limits.kl:g})", box=box.SIMPLE_HEAD
    )
    table.add_column("exact")
    for kind in sparsity_kl.alone:
        table.add_column(kind, justify="right")
    for name, kl in _steps(sparsity_kl):
        table.add_row(name, *(f"{cost:.4f}" for cost in kl.values()))
    return table


def frames_line(frames: int, fewest: int | None) -> str:
    """Return which setting would bring every layer below the aim, in words."""
    if fewest is None:
        return f"up to {2 * frames} frames_per_request would not change that; a larger budget may"
    return f"frames_per_request: {fewest} would keep all of them below it (--fit-frames)"


def gate_line(kind: str, gates: Sequence[Sequence[float]], layers: Sequence[int]) -> str:
    """Return how many heads need the whole context, and which need it least, in words."""
    named = sorted(
        (gate, f"{layer}:{head}") for layer, row in zip(layers, gates, strict=True) for head, gate in enumerate(row)
    )
    below = sum(gate < 0.5 for gate, _ in named)
    least = ", ".join(name for _, name in named[:8])
    return f"Gates per {kind.replace('_', ' ')} (layer:head): {below} of {len(named)} below 0.5, the lowest {least}."


def layer_table(
    layers: Sequence[LayerSummary], tau: float, aim: float, budgets: Mapping[int, int] | None = None
) -> Table:
    """``budgets``: tokens of each sparse layer, where they are not alike."""
    title = f"layers (KL alone; tau {tau:g}, intervals chosen below {aim:g})"
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    kinds = layers[0].kl if layers else {}
    measured = ("cosine", "mass", "best", *(f"KL {kind}" for kind in kinds))
    own = ("budget",) if budgets else ()
    for name in ("layer", *measured, *own, "interval", "CPU ratio"):
        table.add_column(name, justify="right")
    for x in layers:
        ratio = f"{x.ratio:.3f}" + ("" if x.below else " !")
        table.add_row(
            *(str(x.layer), _number(x.cosine), f"{x.mass:.3f}", f"{x.mass_best:.3f}"),
            *(f"{cost:.4f}" for cost in x.kl.values()),
            *((str(budgets.get(x.layer, "-")),) if budgets else ()),
            *(("exact", "+".join(x.why)) if x.why else (str(x.interval), ratio)),
        )
    return table


def check_table(checks: Sequence[Check], tau: float, names: Sequence[str]) -> Table:
    table = Table(title=f"held out: {', '.join(names)} (tau {tau:g})")
    for name in ("layer", "cosine", "mass", "interval", "profiled", "held out", "below tau"):
        table.add_column(name, justify="right")
    for x in checks:
        holds = "yes" if x.holds else "NO"
        table.add_row(
            *(str(x.layer), _number(x.cosine), f"{x.mass:.3f}", str(x.interval)),
            *(f"{x.profiled:.3f}", f"{x.ratio:.3f}", holds),
        )
    if checks:
        table.add_section()
        table.add_row(
            *("mean", "", f"{fmean(x.mass for x in checks):.3f}", "", f"{fmean(x.profiled for x in checks):.3f}"),
            *(f"{fmean(x.ratio for x in checks):.3f}", f"{sum(x.holds for x in checks)} of {len(checks)}"),
        )
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
