"""The heads file of method clo: what is read, and what is refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_backend.config import HeadScores, read_heads
from hybrid_backend.errors import ConfigError

LAYERS, HEADS, KV_HEADS = 3, 4, 2
shares = st.floats(0, 1)
cosines = st.floats(-1, 1)


def rows(value: Any, heads: int, layers: int = LAYERS) -> list[list[Any]]:
    return [[value] * heads for _ in range(layers)]


GOOD: dict[str, Any] = {
    "model": "tiny",
    "importance": rows(0.5, HEADS),
    "kv_importance": rows(1, KV_HEADS),
    "similarity": rows(-0.25, KV_HEADS),
    "prefetch_bytes": 4096,
}


def refusal(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        read_heads(path, LAYERS, HEADS, KV_HEADS)
    return str(caught.value)


def changed(field: str, value: Any, layer: int | None = None, head: int | None = None) -> dict[str, Any]:
    """A good file but for one field, one row of it or one number."""
    data = json.loads(json.dumps(GOOD))
    if layer is None:
        data[field] = value
    elif head is None:
        data[field][layer] = value
    else:
        data[field][layer][head] = value
    return data


def without(field: str) -> dict[str, Any]:
    return {name: value for name, value in GOOD.items() if name != field}


def matrices(heads: int, values: st.SearchStrategy[float]) -> st.SearchStrategy[tuple[tuple[float, ...], ...]]:
    return st.tuples(*[st.tuples(*[values] * heads)] * LAYERS)


@given(
    matrices(HEADS, shares), matrices(KV_HEADS, shares), st.none() | matrices(KV_HEADS, cosines), st.integers(0, 2**40)
)
def test_what_was_written_is_read_bit_by_bit(
    tmp_path_factory: pytest.TempPathFactory, importance: Any, kv_importance: Any, similarity: Any, prefetch_bytes: int
) -> None:
    scores = HeadScores(
        model="tiny",
        importance=importance,
        kv_importance=kv_importance,
        similarity=similarity,
        prefetch_bytes=prefetch_bytes,
    )
    path = tmp_path_factory.getbasetemp() / "tiny.heads.json"
    path.write_text(scores.model_dump_json())
    assert read_heads(path, LAYERS, HEADS, KV_HEADS) == scores


def test_prefetch_bytes_may_be_left_out_and_similarity_may_be_null(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps({**without("prefetch_bytes"), "similarity": None}))
    scores = read_heads(str(path), LAYERS, HEADS, KV_HEADS)
    assert (scores.prefetch_bytes, scores.similarity) == (0, None)
    assert scores.importance == ((0.5,) * HEADS,) * LAYERS and scores.kv_importance == ((1.0,) * KV_HEADS,) * LAYERS


# content of the file -> what the line must contain: the place, the value, what is expected
BAD: list[tuple[Any, list[str]]] = [
    *((without(name), [f"{name} is missing"]) for name in ("model", "importance", "kv_importance", "similarity")),
    ({**GOOD, "importances": 1}, ["unknown field 'importances'", "did you mean importance?"]),
    ({**GOOD, "x": 1}, ["unknown field 'x'", "model, importance, kv_importance, similarity, prefetch_bytes"]),
    ([GOOD], ["expected a JSON object", "model, importance"]),
    (None, ["null", "expected a JSON object"]),
    (changed("model", ""), ["model: got ''", "a non-empty name"]),
    (changed("model", 7), ["model: got 7", "a non-empty name"]),
    # shapes
    (changed("importance", rows(0.5, HEADS, LAYERS - 1)), ["importance has 2 layers", "3 layers of 4 query heads"]),
    (changed("kv_importance", rows(0.5, KV_HEADS, 4)), ["kv_importance has 4 layers", "3 layers of 4 query heads"]),
    (changed("similarity", []), ["similarity has 0 layers", "3 layers"]),
    (changed("importance", [0.5] * 5, 1), ["importance[1] has 5 heads", "4 query heads"]),
    (changed("kv_importance", rows(0.5, HEADS)), ["kv_importance[0] has 4 heads", "2 KV heads on this rank"]),
    (changed("similarity", [], 2), ["similarity[2] has 0 heads", "2 KV heads"]),
    (changed("importance", 0.5), ["importance: got 0.5", "a list per layer"]),
    (changed("importance", None), ["importance: got null", "a list per layer"]),
    (changed("similarity", 1, 0), ["similarity[0]: got 1", "a list per layer with a number per head"]),
    # values
    (changed("importance", 1.5, 0, 3), ["importance[0][3]: got 1.5", "a number from 0 to 1"]),
    (changed("importance", -0.01, 2, 0), ["importance[2][0]: got -0.01", "a number from 0 to 1"]),
    (changed("kv_importance", "1", 0, 1), ["kv_importance[0][1]: got '1'", "a number from 0 to 1"]),
    (changed("kv_importance", True, 0, 1), ["kv_importance[0][1]: got true", "a number from 0 to 1"]),
    (changed("similarity", None, 0, 1), ["similarity[0][1]: got null", "a number from -1 to 1"]),
    (changed("similarity", -1.001, 1, 1), ["similarity[1][1]: got -1.001", "a number from -1 to 1"]),
    *(
        (changed(name, float("nan"), 1, 1), [f"{name}[1][1]: got NaN, expected a number from {low} to 1"])
        for name, low in (("importance", 0), ("kv_importance", 0), ("similarity", -1))
    ),
    (changed("importance", float("inf"), 1, 1), ["importance[1][1]: got Infinity, expected a number from 0 to 1"]),
    (changed("prefetch_bytes", -1), ["prefetch_bytes: got -1", "an integer >= 0"]),
    (changed("prefetch_bytes", 1.0), ["prefetch_bytes: got 1.0", "an integer >= 0"]),
    (changed("prefetch_bytes", None), ["prefetch_bytes: got null", "an integer >= 0"]),
    (changed("prefetch_bytes", float("nan")), ["prefetch_bytes: got NaN", "an integer >= 0"]),
]


@pytest.mark.parametrize(("data", "parts"), BAD)
def test_a_wrong_file_is_refused_in_one_line_with_the_value_and_the_fix(
    tmp_path: Path, data: Any, parts: list[str]
) -> None:
    path = tmp_path / "tiny.heads.json"
    path.write_text(json.dumps(data))
    line = refusal(path)
    for part in ("clo.heads", str(path), "hybrid profile", *parts):
        assert part in line
    assert "\n" not in line and len(line) < 400 + len(str(path))


@pytest.mark.parametrize(
    "content", [b"", b"heads: 1", b'{"model": "a",', b"\xff\xfe{}", json.dumps(GOOD).encode() + b"]", b"[" * 100_000]
)
def test_what_is_not_json_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content)
    line = refusal(path)
    assert (
        line.startswith((f"clo.heads: {path}: not JSON (", f"clo.heads: {path}: not UTF-8 text ("))
        and "hybrid profile" in line
        and "\n" not in line
    )


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    missing = refusal(tmp_path / "nowhere.json")
    assert missing.startswith(f"clo.heads: {tmp_path / 'nowhere.json'}: no such file") and "hybrid profile" in missing
    assert "cannot be read (Is a directory)" in refusal(tmp_path)
    assert "cannot be read" in refusal(Path("a\0b"))
