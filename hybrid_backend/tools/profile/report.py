"""The result of a profile: its YAML with comments, and its table."""

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

    Attributes:
        true: KL of all sparse layers by true queries; None if no query is predicted.
        own: search for the layers that select by their own query; None if no query is predicted.
        tau: largest CPU ratio, and its source.
        aim: CPU ratio below which intervals are chosen.
        fewest: fewest frames with which every sparse layer stays below ``aim``.
    """

    model: str
    config: HybridConfig
    options: Options
    layers: list[LayerSummary]
    exact: KLSearch
    true: KL | None
    own: KLSearch | None
    spread: Spread | None
    heads: HeadScores | None
    tau: tuple[float, str]
    aim: float
    frames: int
    fewest: int | None
    files: tuple[Path, ...] = ()

    @property
    def sparse(self) -> list[LayerSummary]:
        """The layers that are not exact."""
        return [layer for layer in self.layers if not layer.is_exact]

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
    aim, spread = f"{profile.aim:g}", profile.spread
    comments = {
        "exact_layers": _exact_comments(profile),
        "lookahead.skip_layers": _skip_comments(profile),
        "recall.threshold": [profile.tau[1]],
        "recall.intervals": [
            f"the longest interval whose mean CPU ratio stays below {aim} on every window (ScoutAttention, section",
            "3.4, with a margin); those of exact and of sliding layers are not used",
            *(
                [f"mean CPU ratio of sparse layers {fmean(x.ratio for x in profile.sparse):.3f}"]
                if profile.sparse
                else []
            ),
            *frames_lines(profile),
        ],
        "frames_per_request": [
            f"the fewest of the simulated ones that keep every sparse layer's CPU ratio below {aim}: {profile.fewest}"
        ],
    }
    if spread is not None:
        comments["budget_factors"] = [
            f"each sparse layer alone at {', '.join(map(str, spread.sizes))} tokens; as many tokens in all, page by",
            "page to the layer whose KL they lower most, in texts' continuations and in lookups; of others 1.0, not",
            f"used; all sparse layers together, all budgets alike -> these: {kl_text(spread.even, spread.spread)}",
        ]
    return comments


def _exact_comments(profile: Profile) -> list[str]:
    options, sparse = profile.options, profile.sparse
    more = ", and any that more than halves what is left" if options.outliers else ""
    lines = [
        "exact: those of the largest KL to dense with this layer alone sparse, as few as bring the KL of all others",
        f"together to {options.max_kl:g} nats in texts' continuations and in lookups{more}",
        *exact_lines(profile.exact),
    ]
    lines += [f"layer {layer.layer}: alone {kl_text(layer.kl)}" for layer in profile.layers if layer.is_exact]
    if sparse:
        most = {kind: max(layer.kl[kind] for layer in sparse) for kind in sparse[0].kl}
        lines.append(f"elsewhere mass >= {min(layer.mass for layer in sparse):.3f}, alone at most {kl_text(most)}")
    return lines


def _skip_comments(profile: Profile) -> list[str]:
    lines = [
        f"cosine of predicted queries below {profile.options.min_cosine:g}, or a KL by them that others do not have"
    ]
    lines += [f"layer {layer.layer}: {layer.cosine:.3f}" for layer in profile.sparse if layer.skips]
    if profile.true is not None and profile.own is not None:
        lines.append(f"all sparse layers: {predicted_text(profile.true, profile.own)}")
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


def frames_lines(profile: Profile) -> list[str]:
    """Name the layers above the aim, and the setting that would bring them below it."""
    above = ", ".join(str(layer.layer) for layer in profile.sparse if not layer.below)
    if not above:
        return []
    fix = f"frames_per_request: {profile.fewest} would keep all of them below it (--fit-frames)"
    if profile.fewest is None:
        fix = f"up to {2 * profile.frames} frames_per_request would not change that; a larger budget may"
    return [f"NOT below {profile.aim:g} at any interval: layers {above}", fix]


def layer_table(profile: Profile) -> Table:
    """Return the table of all layers."""
    title = f"layers (KL alone; tau {profile.tau[0]:g}, intervals chosen below {profile.aim:g})"
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    budgets, kinds = profile.tokens, list(profile.exact.alone)
    columns = ["layer", "cosine", "mass", *(f"KL {kind}" for kind in kinds), "interval", "CPU ratio"]
    for name in [*columns, *(["budget"] if budgets else [])]:
        table.add_column(name, justify="right")
    for layer in profile.layers:
        table.add_row(
            str(layer.layer),
            "-" if layer.cosine is None else f"{layer.cosine:.3f}",
            f"{layer.mass:.3f}",
            *(f"{layer.kl[kind]:.4f}" for kind in kinds),
            "exact" if layer.is_exact else str(layer.interval),
            "-" if layer.is_exact else f"{layer.ratio:.3f}{'' if layer.below else ' !'}",
            *([str(budgets.get(layer.layer, "-"))] if budgets else []),
        )
    return table
