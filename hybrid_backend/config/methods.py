"""Sections of the configuration that one method reads each (`schema` says how a key is declared)."""

from __future__ import annotations

from typing import Annotated, Literal

from hybrid_backend.config.rules import (
    auto_or,
    choice,
    either,
    integer,
    list_of,
    named,
    number,
    rule,
)
from hybrid_backend.config.section import Section


def _is_name(value: object) -> bool:
    return isinstance(value, str) and value.strip() != ""


class HgcaConfig(Section):
    """Keys of method hgca."""

    window_tokens: Annotated[int, integer(16)] = 1024
    """Most recent tokens that the device keeps and attends densely; rounded up to pages. Source: default (HGCA
    keeps 5 to 75 % of the context on the device)."""
    beta: Annotated[float, number(0)] = 1.0
    """Factor of the uniform weight of a token's tier above which the token stays in a head's context cache. Source:
    HGCA (1; evaluated from 0.25 to 1)."""
    alpha: Annotated[float, number(0, 1)] = 0.1
    """Share of the newest attention weights in their moving average, A = (1 - alpha) A + alpha A_new. Source: default
    (HGCA names the factor and no value)."""


class HeadInferConfig(Section):
    """Keys of method headinfer."""

    group_thresholds: Annotated[tuple[int, ...], list_of(integer(16), ordered=True, unique=True, empty=False)] = (
        500_000,
        1_000_000,
        2_000_000,
    )
    """Context lengths in tokens at which KV heads are divided. Up to the first length all heads stream together, up to
    the second in 2 groups, then in 4, then in 8. Source: HeadInfer (500k, 1M, 2M, 4M tokens)."""
    resident_heads: Annotated[tuple[str, ...], list_of(named(r"\d+:\d+", "layer:head such as 3:1"), unique=True)] = ()
    """KV heads whose whole KV stays on the device as well. Source: default (none)."""
    window_heads: Annotated[tuple[str, ...], list_of(named(r"\d+:\d+", "layer:head such as 3:1"), unique=True)] = ()
    """KV heads that attend the first sinks pages and the last window_tokens tokens alone in decode steps; their other
    pages are not read. With such heads, these pages of a running request lie on the device for all heads. Source:
    default (none: every head attends every token; HeadInfer, appendix D, calls such heads streaming heads)."""
    window_tokens: Annotated[int, integer(16)] = 256
    """Last tokens that window_heads attend at least; rounded up to pages. Source: DuoAttention (256)."""


class CloConfig(Section):
    """Keys of method clo."""

    eta: Annotated[float, number(0, 1)] = 0.8
    """Least cosine of adjacent queries at which a head of importance 1 keeps its loaded pages. A less important head
    keeps them at smaller cosines. Source: CLO (0.8)."""
    power: Annotated[float, number(0)] = 3.0
    """Exponent of a head's importance in its threshold; with a larger exponent more heads keep their pages longer.
    Source: CLO (3; 2 or 3 in its text)."""
    tolerance: Annotated[float, number(0)] = 0.1
    """Error tolerance epsilon in the difficulty of reusing a head's pages, by which persistent heads are chosen.
    Source: CLO (0.1 for Llama3-8B, 0.05 for Qwen2.5-14B)."""
    aggregate: Annotated[Literal["harmonic", "min"], choice("harmonic", "min")] = "harmonic"
    """Combination of the cosines of one KV head's query heads: the harmonic mean weighted by importance, or the
    smallest. Source: CLO (harmonic; min is the baseline of its ablation)."""
    heads: Annotated[str, rule("uniform, or the path of a JSON file of hybrid profile", _is_name)] = "uniform"
    """File with the importance and mean cosine of each head, which `hybrid profile` writes; uniform: all heads have
    importance 1. Source: default (CLO profiles them)."""
    persistent: Annotated[
        Literal["auto", "none"] | tuple[str, ...],
        either(choice("auto", "none"), list_of(named(r"\d+:\d+", "layer:head such as 3:1"), unique=True)),
    ] = "auto"
    """KV heads whose whole KV stays on the device as well. auto: the heads of the first layer, whose query cannot be
    predicted, and with a file of heads also the heads whose pages are hard to reuse. Source: CLO (auto)."""


class ApexConfig(Section):
    """Keys of method apex."""

    strategy: Annotated[Literal["auto", "gpu", "lockstep", "overlap"], choice("auto", "gpu", "lockstep", "overlap")] = (
        "auto"
    )
    """Attention of requests that are not on the device. lockstep: the CPU workers attend while the layer waits.
    overlap: the CPU workers attend, the layer does not wait, and the row takes the answer in the same layer of the next
    step. gpu: the device attends over the bus. auto: lockstep or overlap in each step by APEX's rule; lockstep where
    the engine cannot let rows wait. Source: APEX (Algorithm 1)."""
    device_tokens: Annotated[int | Literal["auto"], auto_or(integer(16))] = "auto"
    """Tokens that the device tier holds for all requests together, which are on it whole or not at all. auto: what a
    GPU has room for; on a CPU frames_per_request pages for each request that may run at once. Source: default."""
    min_cpu_per_gpu: Annotated[int, integer(0)] = 0
    """Least number of CPU rows per device row at which strategy auto overlaps; with fewer rows it goes in lockstep.
    Source: default (APEX: 8, which pays for workers that are driven from Python; the workers here are native)."""
    hardware: Annotated[
        str, rule("auto, the name of a machine, or a profile of hybrid profile --hardware", _is_name)
    ] = "auto"
    """Machine whose rates APEX's rule uses: a named machine (`hybrid plan --help`) or a file of `hybrid profile
    --hardware`. auto: the GPU by its name, or an A10 if the name is unknown; on a GPU the rates of attention are
    measured at start. Source: default (APEX profiles offline)."""


class MethodSections(Section):
    """The sections of single methods. `HybridConfig` inherits them."""

    hgca: HgcaConfig = HgcaConfig()
    headinfer: HeadInferConfig = HeadInferConfig()
    clo: CloConfig = CloConfig()
    apex: ApexConfig = ApexConfig()
