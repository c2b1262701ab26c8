"""The pictures beside the YAML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hybrid_backend.tools.profile.recall import NEVER
from hybrid_backend.tools.profile.summary import LayerSummary, Measures, Thresholds


def draw(
    stem: Path,
    windows: Measures,
    layers: Sequence[LayerSummary],
    limits: Thresholds,
    tau: float,
    frames: int,
    gates: Mapping[str, Sequence[Sequence[float]]],
) -> list[Path]:
    """``STEM-layers.png``, ``-cpu-ratio.png``, ``-sparsity.png`` and, with gates, ``-heads.png``; the paths."""
    from matplotlib.figure import Figure  # without pyplot: no display, no state

    drawn = []

    def save(figure: Any, name: str) -> None:
        path = stem.with_name(f"{stem.name}-{name}.png")
        figure.savefig(path, dpi=110, bbox_inches="tight")
        drawn.append(path)

    figure = Figure(figsize=(9, 4))
    axes = figure.subplots()
    indices = [x.layer for x in layers]
    cosines = {x.layer: x.cosine for x in layers if x.cosine is not None}
    axes.plot(list(cosines), list(cosines.values()), "o-", label="cosine of predicted query")
    axes.plot(indices, [x.mass for x in layers], "s-", label="mass on selected pages")
    axes.plot(indices, [x.mass_best for x in layers], "--", label="mass on the best pages")
    axes.axhline(limits.cosine, color="C0", linewidth=0.7, linestyle=":")
    if limits.mass:
        axes.axhline(limits.mass, color="C1", linewidth=0.7, linestyle=":")
    for x in layers:
        if x.why:
            axes.axvspan(x.layer - 0.4, x.layer + 0.4, color="0.9")
    axes.set(xlabel="layer (grey: exact)", ylim=(0, 1.02))
    axes.legend()
    save(figure, "layers")

    figure = Figure(figsize=(9, 6))
    upper, lower = figure.subplots(2, 1)
    sparse = [x for x in layers if not x.why] or list(layers)
    by_layer = {group[0].layer: group for group in zip(*windows, strict=True)}
    for label, interval_of in (("without recall", lambda x: NEVER), ("with recall", lambda x: x.interval)):
        curves = [m.curves[frames][interval_of(x)] for x in sparse for m in by_layer[x.layer]]
        upper.plot([sum(step) / len(curves) for step in zip(*curves, strict=True)], label=label)
        lower.plot([x.layer for x in sparse], [x.ratio_without if "out" in label else x.ratio for x in sparse], "o-")
    for axes in (upper, lower):
        axes.axhline(tau, color="0.5", linewidth=0.7, linestyle=":")
        axes.set(ylabel="CPU ratio")
    upper.set(xlabel="decode step (mean of sparse layers)")
    lower.set(xlabel="layer (mean of steps)")
    upper.legend()
    figure.tight_layout()
    save(figure, "cpu-ratio")

    heads = [[sum(h) / len(h) for h in zip(*(m.tokens90 for m in group), strict=True)] for group in by_layer.values()]
    save(_map(Figure(figsize=(9, 3)), heads, indices, "share of tokens with 90 % of the mass", None), "sparsity")
    if gates:
        figure = Figure(figsize=(9, 3 * len(gates)))
        for place, (kind, values) in enumerate(gates.items(), 1):
            axes = figure.add_subplot(len(gates), 1, place)
            _map(figure, values, indices, f"gate per {kind.replace('_', ' ')}", axes)
        figure.tight_layout()
        save(figure, "heads")
    return drawn


def _map(figure: Any, values: Sequence[Sequence[float]], layers: Sequence[int], title: str, axes: Any) -> Any:
    """``values``: per layer, per head."""
    axes = figure.subplots() if axes is None else axes
    image = axes.imshow(list(zip(*values, strict=True)), aspect="auto", vmin=0, vmax=1, cmap="viridis")
    axes.set(xlabel="layer", ylabel="head", title=title)
    axes.set_xticks(range(len(layers)), [str(layer) for layer in layers], fontsize=7)
    figure.colorbar(image, ax=axes)
    return figure
