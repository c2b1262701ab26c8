"""What the MODEL argument stands for."""

from __future__ import annotations

import re

import pytest

from hybrid_backend.errors import ModelError
from hybrid_backend.tools.hub import resolve_model
from hybrid_backend.tools.hub.resolve import check_model


@pytest.mark.parametrize("model", ["", " "])
def test_an_empty_model_is_not_the_current_folder(model: str) -> None:
    with pytest.raises(ModelError, match="MODEL is empty; give a catalog name"):
        resolve_model(model)


@pytest.mark.parametrize(
    ("model", "meant"),
    [
        ("qwn3-8b", "Qwen/Qwen3-8B"),
        ("Qwen3-8B", "Qwen/Qwen3-8B"),
        ("smollm2-135m-instuct", "smollm2-135m-instruct"),
        ("SmolLM2-135M", "smollm2-135m-instruct"),
    ],
)
def test_a_misspelt_model_is_told_the_name_that_it_comes_nearest_to(model: str, meant: str) -> None:
    with pytest.raises(ModelError, match=re.escape(f"did you mean {meant}?")):
        check_model(model)


def test_a_model_that_is_like_none_is_told_what_a_model_is() -> None:
    with pytest.raises(ModelError, match=r"nor a hub id like org/name; give one of these$"):
        check_model("gibberish")
