"""The result of a profile: the comments of its YAML, and its tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml
from rich import box
from rich.table import Table

from hybrid_backend.config import HeadScores, HybridConfig
from hybrid_backend.tools.profile.options import Options
from hybrid_backend.tools.profile.spread import Spread
from hybrid_backend.tools.profile.summary import KL, KLSearch, LayerSummary


@dataclass(frozen=True)
class Profile:
    """Decisions of a profile and the measurements that they follow from.

    ``checks``: the sparse layers on text that decided nothing (``--check``), ``unseen_exact``: the layers that the same
    rule makes exact on it. ``true``: KL of all sparse layers by true queries, ``own``: search for those that select by
    their own query; both are None if no query is predicted. ``tau``: largest CPU ratio and its source, ``aim``: the
    ratio below which intervals are chosen. ``fewest``: fewest frames with which every sparse layer stays below it.
    """

    model: str
    config: HybridConfig
    options: Options
    layers: list[LayerSummary]
    checks: list[LayerSummary]
    exact: KLSearch
    unseen_exact: list[int]
    true: KL | None
    own: KLSearch | None
    spread: Spread | None
    gates: dict[str, list[list[float]]]
    heads: HeadScores | None
    tau: tuple[float, str]
    aim: float
    frames: int
    fewest: int | None
    files: tuple[Path, ...] = ()

    @property
    def sparse(self) -> list[LayerSummary]:
        """The layers that are not exact."""
        return [layer for layer in self.layers if not layer.why]

    @property
    def tokens(self) -> Mapping[int, int]:
        """Tokens of each sparse layer, empty where all budgets are alike."""
        return self.spread.tokens if self.spread is not None and self.spread.helps else {}


def to_yaml(config: HybridConfig, comments: Mapping[str, Sequence[str]], head: Sequence[str]) -> str:
    """Return the keys that differ from their defaults, each under its comments; `load_config` reads the same back."""
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


def comments_of(profile: Profile) -> dict[str, list[str]]:
    """Return the comments of each key of the YAML: the measurements that decided its value."""
    fewest = f"the fewest of the simulated ones that keep every sparse layer's CPU ratio below {profile.aim:g}"
    return {
        "budget_factors": _budget_comments(profile.spread),
        "exact_layers": _exact_comments(profile),
        "lookahead.skip_layers": _skip_comments(profile),
        "recall.intervals": _interval_comments(profile),
        "frames_per_request": [f"{fewest}: {profile.fewest}"],
    }


def _budget_comments(spread: Spread | None) -> list[str]:
    if spread is None:
        return []
    sizes = ", ".join(map(str, spread.sizes))
    return [
        f"measured as exact_layers: each sparse layer alone at {sizes} tokens; as many tokens in all, page by page",
        "to the layer whose KL they lower most, in texts' continuations and in lookups; of others 1.0, not used;",
        f"all sparse layers together, all budgets alike -> these: {kl_text(spread.even, spread.spread)}",
    ]


def _exact_comments(profile: Profile) -> list[str]:
    options, sparse = profile.options, profile.sparse
    more_rules = ", and any that more than halves what is left" if options.outliers else ""
    more_rules += f", or mass below {options.min_mass:g}" if options.min_mass else ""
    lines = [
        "measured; exact: those of the largest KL to dense with this layer alone sparse, as few as bring the KL of all",
        f"others together to {options.max_kl:g} nats in texts' continuations and in lookups{more_rules}",
    ]
    lines += exact_lines(profile.exact)
    for layer in profile.layers:
        if layer.why:
            reasons = " and ".join(layer.why)
            lines.append(f"layer {layer.layer}: mass {layer.mass:.3f}, alone {kl_text(layer.kl)} ({reasons})")
    if sparse:
        most = {kind: max(layer.kl[kind] for layer in sparse) for kind in sparse[0].kl}
        lines.append(f"elsewhere mass >= {min(layer.mass for layer in sparse):.3f}, alone at most {kl_text(most)}")
    return lines


def _skip_comments(profile: Profile) -> list[str]:
    min_cosine = profile.options.min_cosine
    lines = [f"cosine of predicted queries below {min_cosine:g}, or a KL by them that others do not have"]
    lines += [f"layer {layer.layer}: {layer.cosine:.3f}" for layer in profile.sparse if layer.skips]
    predicted = [layer.cosine for layer in profile.sparse if layer.cosine is not None and layer.is_predicted]
    lines += [f"elsewhere >= {min(predicted):.3f}"] if predicted else []
    if profile.true is None or profile.own is None:
        return lines
    lines.append(f"all sparse layers: {predicted_text(profile.true, profile.own)}")
    true = {layer.layer: layer.kl for layer in profile.layers}
    for index in profile.own.chosen:
        ahead = {kind: true[index][kind] + lost[index] for kind, lost in profile.own.alone.items()}
        lines.append(f"layer {index} alone, true -> predicted query: {kl_text(true[index], ahead)}")
    return lines


def _interval_comments(profile: Profile) -> list[str]:
    sparse, aim = profile.sparse, f"{profile.aim:g}"
    lines = [
        f"measured as exact_layers: the longest interval whose mean CPU ratio stays below {aim} on every window",
        "(ScoutAttention, section 3.4, with a margin); those of exact and of sliding layers are not used",
    ]
    if sparse:
        mean, without = fmean(layer.ratio for layer in sparse), fmean(layer.ratio_without for layer in sparse)
        lines.append(f"mean CPU ratio of sparse layers {mean:.3f}, without recall {without:.3f}")
    above = ", ".join(str(layer.layer) for layer in sparse if not layer.below)
    if above:
        lines += [f"NOT below {aim} at any interval: layers {above}", frames_line(profile)]
    return lines


def exact_lines(exact: KLSearch) -> list[str]:
    """Return the KL of the sparse layers together, with one exact layer more in each line."""
    ranking = exact.ranking
    names = [f"layers {', '.join(map(str, sorted(ranking[:count])))}" for count in range(1, len(exact.together))]
    return [f"{name} exact: {kl_text(kl)}" for name, kl in zip(["none", *names], exact.together, strict=False)]


def kl_text(kl: KL, after: KL | None = None) -> str:
    """Format a KL by kind of probe; ``after``: the KL that it becomes."""
    changed = {kind: "" if after is None else f" -> {after[kind]:.4f}" for kind in kl}
    return "KL " + ", ".join(f"{nats:.4f}{changed[kind]} ({kind})" for kind, nats in kl.items())


def predicted_text(true: KL, own: KLSearch) -> str:
    """Format the KL by true and by predicted queries: in all sparse layers, and with some by their own."""
    text = kl_text(true, own.together[0])
    if not own.chosen:
        return text
    layers, left = ", ".join(map(str, own.chosen)), kl_text(own.together[-1]).removeprefix("KL ")
    return f"{text}; layers {layers} by their own: {left}"


def frames_line(profile: Profile) -> str:
    """Say which setting would bring every layer below the aim."""
    if profile.fewest is None:
        return f"up to {2 * profile.frames} frames_per_request would not change that; a larger budget may"
    return f"frames_per_request: {profile.fewest} would keep all of them below it (--fit-frames)"


def gate_line(kind: str, gates: Sequence[Sequence[float]], layers: Sequence[LayerSummary]) -> str:
    """Say how many heads need the whole context, and which need it least."""
    named = sorted(
        (gate, f"{layer.layer}:{head}")
        for layer, row in zip(layers, gates, strict=True)
        for head, gate in enumerate(row)
    )
    below = sum(gate < 0.5 for gate, _ in named)
    least = ", ".join(name for _, name in named[:8])
    return f"Gates per {kind.replace('_', ' ')} (layer:head): {below} of {len(named)} below 0.5, the lowest {least}."


def layer_table(profile: Profile) -> Table:
    """Return the table of all layers."""
    rows = []
    for layer in profile.layers:
        ratio = f"{layer.ratio:.3f}{'' if layer.below else ' !'}"
        rows.append(
            {
                **_names(layer),
                "best": f"{layer.mass_best:.3f}",
                **{f"KL {kind}": f"{nats:.4f}" for kind, nats in layer.kl.items()},
                **({"budget": str(profile.tokens.get(layer.layer, "-"))} if profile.tokens else {}),
                "interval": "exact" if layer.why else str(layer.interval),
                "CPU ratio": "+".join(layer.why) if layer.why else ratio,
            }
        )
    return _table(f"layers (KL alone; tau {profile.tau[0]:g}, intervals chosen below {profile.aim:g})", rows)


def check_table(profile: Profile, texts: Sequence[str]) -> Table:
    """Return the table of the sparse layers on the held-out texts."""
    checks, tau = profile.checks, profile.tau[0]
    profiled = {layer.layer: layer.ratio for layer in profile.layers}
    rows = [
        {
            **_names(layer),
            "interval": str(layer.interval),
            "profiled": f"{profiled[layer.layer]:.3f}",
            "held out": f"{layer.ratio:.3f}",
            "below tau": "yes" if layer.ratio < tau else "NO",
        }
        for layer in checks
    ]
    mean = {
        "layer": "mean",
        "mass": f"{fmean(layer.mass for layer in checks):.3f}",
        "profiled": f"{fmean(profiled[layer.layer] for layer in checks):.3f}",
        "held out": f"{fmean(layer.ratio for layer in checks):.3f}",
        "below tau": f"{sum(layer.ratio < tau for layer in checks)} of {len(checks)}",
    }
    return _table(f"held out: {', '.join(texts)} (tau {tau:g})", [*rows, mean])


def _names(layer: LayerSummary) -> dict[str, str]:
    cosine = "-" if layer.cosine is None else f"{layer.cosine:.3f}"
    return {"layer": str(layer.layer), "cosine": cosine, "mass": f"{layer.mass:.3f}"}


def _table(title: str, rows: Sequence[Mapping[str, str]]) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in rows[0]:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*(row.get(name, "") for name in rows[0]))
    return table
