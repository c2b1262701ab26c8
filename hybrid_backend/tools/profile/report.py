"""The result of a profile: its YAML with comments, and its table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
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
    """Results of `hybrid profile`: the chosen configuration and the measurements behind it.

    Attributes:
        true: KL of all sparse layers by true queries; None if no query is predicted.
        own: search for the layers that select by their own query; None if no query is predicted.
        aim: largest share of selected pages that the CPU may attend; recall intervals are chosen to keep below it.
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
    aim: float
    files: tuple[Path, ...] = ()

    @property
    def sparse(self) -> list[LayerSummary]:
        """The layers that are not exact."""
        return [layer for layer in self.layers if not layer.is_exact]

    @property
    def tokens(self) -> Mapping[int, int]:
        """Tokens of each sparse layer, empty where all budgets are alike."""
        return self.spread.tokens if self.spread is not None and self.spread.helps else {}


def to_yaml(config: HybridConfig, head: Sequence[str]) -> str:
    """Return the keys that differ from their defaults under a head of comments; `load_config` reads the same back."""
    data: dict[str, Any] = config.model_dump(mode="json", exclude_defaults=True)
    data = {"model": config.model.model_dump(mode="json", exclude_defaults=True), **data}
    keys: str = yaml.safe_dump(data, sort_keys=False, default_flow_style=None, width=10_000)
    return "".join(f"# {line}\n" for line in head) + keys


def summary_lines(profile: Profile) -> list[str]:
    """Return the measurements that decided the keys, as comments of the YAML."""
    options, spread = profile.options, profile.spread
    lines = [
        "exact_layers: those of the largest KL to dense alone, until that of all others together is at most "
        f"{options.max_kl:g} nats per token:",
        *(f"  {line}" for line in exact_lines(profile.exact)),
    ]
    if profile.true is not None and profile.own is not None:
        predicted = predicted_text(profile.true, profile.own)
        lines.append(f"lookahead.skip_layers: cosine below {options.min_cosine:g}, or by true -> predicted {predicted}")
    if spread is not None and spread.helps:
        lines.append(f"budget_factors: all budgets alike -> these: {kl_text(spread.even, spread.spread)}")
    lines.append(f"recall.intervals: CPU ratio below {profile.aim:g} on every window")
    return [*lines, *above_lines(profile)]


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


def above_lines(profile: Profile) -> list[str]:
    """Name the layers that are above the aim at every interval."""
    above = ", ".join(str(layer.layer) for layer in profile.sparse if not layer.below)
    hint = "more frames_per_request, or a larger budget"
    return [f"NOT below {profile.aim:g} at any interval, without {hint}: layers {above}"] if above else []


def layer_table(profile: Profile) -> Table:
    """Return the table of all layers."""
    title = f"layers (KL alone; intervals chosen for a CPU ratio below {profile.aim:g})"
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
