"""Heads file of method ``clo``: importance and similarity of each attention head, as ``hybrid profile`` measures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import ValidationError

from hybrid_backend.config.paths import user_path
from hybrid_backend.config.reading import read_text, reading
from hybrid_backend.config.rules import Rule, did_you_mean, fail, integer, rule, show
from hybrid_backend.config.section import Section

_KEY = "clo.heads"
_FIX = "write the file with `hybrid profile MODEL`"


def _between(low: int, high: int) -> Rule:
    def accepts(value: object) -> bool:  # NaN is refused, because it compares with no bound.
        return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high

    return rule(f"a number from {low} to {high}", accepts)


_NAME = rule("a non-empty name", lambda v: isinstance(v, str) and v.strip() != "")
Share = Annotated[float, _between(0, 1)]
Cosine = Annotated[float, _between(-1, 1)]


class HeadScores(Section):
    """Scores of each head of a model, as ``[layers][heads]`` or ``[layers][kv_heads]``.

    Layers with a sliding window are included; no method reads their values.

    Source: CLO (arXiv 2511.14510), sections 3.2 and 3.3, appendix A.
    """

    model: Annotated[str, _NAME]
    """Name of the model that was profiled."""
    importance: tuple[tuple[Share, ...], ...]
    """Gate of each query head, 0 (sink and recent tokens suffice) to 1: s_i of Eq. 10, trained by Eq. 15."""
    kv_importance: tuple[tuple[Share, ...], ...]
    """Gate of each KV head, 0 to 1: s_j of Eq. 8, trained by Eq. 14."""
    similarity: tuple[tuple[Cosine, ...], ...] | None
    """Mean cosine of the queries of adjacent decode steps, over the query heads of a KV head: s^_j of Eq. 11; None if
    it was not measured."""
    prefetch_bytes: Annotated[int, integer(0, 2**63 - 1)] = 0
    """Bytes that cross the bus while one layer of one step computes: T_comp * B_PCIe of Eq. 12."""


def read_heads(path: str | Path, layers: int, heads: int | None, kv_heads: int) -> HeadScores:
    """Read the heads file at ``path``.

    Args:
        path: JSON file; ``~`` is the home directory.
        layers: attention layers of the model, those with a sliding window included.
        heads: query heads of a layer on this rank; None if the number is not known yet, so that it is not compared.
        kv_heads: KV heads of a layer on this rank.

    Raises:
        ConfigError: the file cannot be read, is not JSON, has a wrong field or a value out of range, or belongs to a
            model of another shape. The line names ``clo.heads``, the file, the value and the fix.
    """
    source = f"{_KEY}: {user_path(path)}"
    content = read_text(path, f"check the path, or {_FIX}", name=source)
    with reading(source, _FIX):
        try:
            scores = HeadScores.model_validate_json(content)
        except ValidationError as error:
            fail(f"{source}: {_explain(error.errors(include_url=False)[0])}; {_FIX}")
    for field, values, count in (
        ("importance", scores.importance, heads),
        ("kv_importance", scores.kv_importance, kv_heads),
        ("similarity", scores.similarity, kv_heads),
    ):
        if values is not None and (wrong := _misshapen(values, layers, count)):
            queries = "" if heads is None else f"{heads} query heads and "
            shape = f"{layers} layers of {queries}{kv_heads} KV heads on this rank"
            fail(f"{source}: {field}{wrong}, but the model has {shape}; {_FIX} for the model that is served")
    return scores


def _misshapen(values: Sequence[Sequence[float]], layers: int, count: int | None) -> str:
    """Say how ``values`` differs from ``[layers][count]``; empty if it does not.

    If ``count`` is None, all layers must have as many heads as the first one.
    """
    if len(values) != layers:
        return f" has {len(values)} layers"
    count = len(values[0]) if count is None and values else count
    return next((f"[{i}] has {len(row)} heads" for i, row in enumerate(values) if len(row) != count), "")


def _explain(error: Mapping[str, Any]) -> str:
    """Describe one pydantic error in the words of a user."""
    field, *places = error["loc"] or ("",)
    key = str(field) + "".join(f"[{place}]" for place in places)
    match error["type"]:
        case "json_invalid":
            return f"not JSON ({error['ctx']['error']})"
        case "missing":
            return f"{key} is missing"
        case "extra_forbidden":
            fields = ", ".join(HeadScores.model_fields)
            hint = did_you_mean(field, list(HeadScores.model_fields)) or f"the file has the fields {fields}"
            return f"unknown field {show(field)} ({hint})"
        case "hybrid":
            return f"{key}: {error['msg']}"
    got = show(error["input"])
    return (
        f"{key}: got {got}, expected a list per layer with a number per head"
        if key
        else (f"got {got}, expected a JSON object with the fields {', '.join(HeadScores.model_fields)}")
    )
