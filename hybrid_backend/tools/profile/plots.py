"""Plots of a profile beside its YAML."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from hybrid_backend.tools.profile.measure import NEVER, Measures
from hybrid_backend.tools.profile.report import Profile


def draw(stem: Path, windows: Measures, profile: Profile) -> list[Path]:
    """Draw ``STEM-layers.png``, ``-cpu-ratio.png``, ``-sparsity.png`` and, with gates, ``-heads.png``."""
    from matplotlib.figure import Figure  # Without pyplot matplotlib needs no display and keeps no state.

    layers = [layer.layer for layer in profile.layers]
    heads = [
        list(map(fmean, zip(*(m.tokens90 for m in measures), strict=True))) for measures in zip(*windows, strict=True)
    ]
    gates = {f"gate per {kind.replace('_', ' ')}": values for kind, values in profile.gates.items()}
    figures: dict[str, Any] = {
        "layers": Figure(figsize=(9, 4)),
        "cpu-ratio": Figure(figsize=(9, 6)),
        "sparsity": Figure(figsize=(9, 3)),
    }
    _draw_layers(figures["layers"].subplots(), profile)
    _draw_ratios(figures["cpu-ratio"].subplots(2, 1), windows, profile)
    _draw_heads(figures["sparsity"].subplots(), heads, layers, "share of tokens with 90 % of the mass")
    if gates:
        figures["heads"] = Figure(figsize=(9, 3 * len(gates)))
        for axes, (title, values) in zip(figures["heads"].subplots(len(gates), 1), gates.items(), strict=True):
            _draw_heads(axes, values, layers, title)
    paths = []
    for name, figure in figures.items():
        figure.tight_layout()
        paths.append(stem.with_name(f"{stem.name}-{name}.png"))
        figure.savefig(paths[-1], dpi=110, bbox_inches="tight")
    return paths


def _draw_layers(axes: Any, profile: Profile) -> None:
    layers = [layer.layer for layer in profile.layers]
    cosines = {layer.layer: layer.cosine for layer in profile.layers if layer.cosine is not None}
    axes.plot(list(cosines), list(cosines.values()), "o-", label="cosine of predicted query")
    axes.plot(layers, [layer.mass for layer in profile.layers], "s-", label="mass on selected pages")
    axes.plot(layers, [layer.mass_best for layer in profile.layers], "--", label="mass on the best pages")
    axes.axhline(profile.options.min_cosine, color="C0", linewidth=0.7, linestyle=":")
    if profile.options.min_mass:
        axes.axhline(profile.options.min_mass, color="C1", linewidth=0.7, linestyle=":")
    for layer in profile.layers:
        if layer.why:
            axes.axvspan(layer.layer - 0.4, layer.layer + 0.4, color="0.9")
    axes.set(xlabel="layer (grey: exact)", ylim=(0, 1.02))
    axes.legend()


def _draw_ratios(both_axes: Any, windows: Measures, profile: Profile) -> None:
    upper, lower = both_axes
    sparse = {layer.layer: layer for layer in profile.sparse or profile.layers}
    measures = [m for window in windows for m in window if m.layer in sparse]
    without = [m.curves[profile.frames][NEVER] for m in measures]
    recalled = [m.curves[profile.frames][sparse[m.layer].interval] for m in measures]
    upper.plot(list(map(fmean, zip(*without, strict=True))), label="without recall")
    upper.plot(list(map(fmean, zip(*recalled, strict=True))), label="with recall")
    lower.plot(list(sparse), [layer.ratio_without for layer in sparse.values()], "o-")
    lower.plot(list(sparse), [layer.ratio for layer in sparse.values()], "o-")
    for axes in both_axes:
        axes.axhline(profile.tau[0], color="0.5", linewidth=0.7, linestyle=":")
        axes.set(ylabel="CPU ratio")
    upper.set(xlabel="decode step (mean of sparse layers)")
    lower.set(xlabel="layer (mean of steps)")
    upper.legend()


def _draw_heads(axes: Any, heads: Sequence[Sequence[float]], layers: Sequence[int], title: str) -> None:
    image = axes.imshow(list(zip(*heads, strict=True)), aspect="auto", vmin=0, vmax=1, cmap="viridis")
    axes.set(xlabel="layer", ylabel="head", title=title)
    axes.set_xticks(range(len(layers)), list(map(str, layers)), fontsize=7)
    axes.figure.colorbar(image, ax=axes)
