"""Keys of single methods (`schema` says how a key is declared)."""

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
    """A token stays in a head's context cache if its weight is more than beta times the uniform weight of the tier
    that it was in. Source: HGCA (1; evaluated from 0.25 to 1)."""
    alpha: Annotated[float, number(0, 1)] = 0.1
    """Share of the newest weights in their moving average, A = (1 - alpha) A + alpha A_new. Source: default."""


class HeadInferConfig(Section):
    """Keys of method headinfer."""

    group_thresholds: Annotated[tuple[int, ...], list_of(integer(16), ordered=True, unique=True, empty=False)] = (
        500_000,
        1_000_000,
        2_000_000,
    )
    """Contexts up to the first number of tokens stream all KV heads together, up to the next one in 2 groups, then 4,
    then 8. Source: HeadInfer (500k, 1M, 2M, 4M tokens)."""
    resident_heads: Annotated[tuple[str, ...], list_of(named(r"\d+:\d+", "layer:head such as 3:1"), unique=True)] = ()
    """KV heads whose whole KV stays on the device as well. Source: default (none)."""


class CloConfig(Section):
    """Keys of method clo."""

    eta: Annotated[float, number(0, 1)] = 0.8
    """Cosine of queries from which on a head of importance 1 keeps what it has loaded; less important heads keep it
    longer. Source: CLO (0.8)."""
    power: Annotated[float, number(0)] = 3.0
    """Exponent of a head's importance in its threshold; larger: more heads keep what they have longer.
    Source: CLO (3; 2 or 3 in its text)."""
    tolerance: Annotated[float, number(0)] = 0.1
    """Error tolerance epsilon in how hard a head's pages are to reuse, which chooses the persistent heads.
    Source: CLO (0.1 for Llama3-8B, 0.05 for Qwen2.5-14B)."""
    aggregate: Annotated[Literal["harmonic", "min"], choice("harmonic", "min")] = "harmonic"
    """How the cosines of the query heads of one KV head combine: their mean, harmonic and weighted by importance, or
    the smallest. Source: CLO (harmonic)."""
    heads: Annotated[str, rule("uniform, or the path of a JSON file of hybrid profile", _is_name)] = "uniform"
    """Importance and mean cosine of each head, as `hybrid profile` writes them; uniform: all heads have importance 1.
    Source: default (CLO profiles them)."""
    persistent: Annotated[
        Literal["auto", "none"] | tuple[str, ...],
        either(choice("auto", "none"), list_of(named(r"\d+:\d+", "layer:head such as 3:1"), unique=True)),
    ] = "auto"
    """KV heads whose whole KV stays on the device as well; auto: those of the first layer, whose query cannot be
    predicted, and with a file of heads those that are hard to reuse. Source: CLO (auto)."""


class ApexConfig(Section):
    """Keys of method apex."""

    strategy: Annotated[Literal["auto", "gpu", "lockstep", "overlap"], choice("auto", "gpu", "lockstep", "overlap")] = (
        "auto"
    )
    """How requests that are not on the device are attended. lockstep: by the CPU workers, while the layer waits;
    overlap: by them too, but a row takes the answer when the layer comes round in the next step, and nobody waits; gpu:
    by the device, over the bus; auto: lockstep or overlap, step by step, by APEX's rule, and lockstep where the engine
    cannot let rows wait. Source: APEX (Algorithm 1)."""
    device_tokens: Annotated[int | Literal["auto"], auto_or(integer(16))] = "auto"
    """Tokens of all requests together that the device tier holds, whole requests at a time; auto: what a GPU has room
    for, on a CPU frames_per_request pages for each request that may run at once. Source: default."""
    min_cpu_per_gpu: Annotated[int, integer(0)] = 0
    """Rows on the CPU per row on the device from which on auto overlaps; with fewer it goes in lockstep.
    Source: default (APEX: 8, which pays for workers that are driven from Python; these are not)."""
    hardware: Annotated[
        str, rule("auto, the name of a machine, or a profile of hybrid profile --hardware", _is_name)
    ] = "auto"
    """Whose rates the rule reckons with: a named machine (`hybrid plan --help`) or a file of `hybrid profile
    --hardware`; auto: the GPU by its name, where it is none of these an A10.
    Source: default (APEX profiles offline)."""


class MethodSections(Section):
    """The sections of single methods. `HybridConfig` inherits them."""

    hgca: HgcaConfig = HgcaConfig()
    headinfer: HeadInferConfig = HeadInferConfig()
    clo: CloConfig = CloConfig()
    apex: ApexConfig = ApexConfig()
