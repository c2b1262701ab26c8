"""What the MODEL argument stands for."""

from __future__ import annotations

import pytest

from hybrid_backend.errors import ModelError
from hybrid_backend.tools.hub import resolve_model


@pytest.mark.parametrize("model", ["", " "])
def test_an_empty_model_is_not_the_current_folder(model: str) -> None:
    with pytest.raises(ModelError, match="MODEL is empty; give a catalog name"):
        resolve_model(model)
