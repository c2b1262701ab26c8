"""The text with which a call is refused."""

from __future__ import annotations

import pytest

from hybrid_backend.errors import ConfigError


def refusal(call, *args, **kwargs) -> str:
    """Return the text of the `ConfigError` that the call raises."""
    with pytest.raises(ConfigError) as caught:
        call(*args, **kwargs)
    return str(caught.value)
