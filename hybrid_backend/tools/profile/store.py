"""Finished measurements of a profile in one JSON file: a second run goes on where the first one stopped."""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

from hybrid_backend.config.paths import write_whole
from hybrid_backend.config.reading import read_object, reading
from hybrid_backend.errors import ConfigError
from hybrid_backend.tools.profile.gates import GateState
from hybrid_backend.tools.profile.measure import LayerMeasure

_FIX = "move it away, or start anew with --fresh"


def stage_key(kind: str, *inputs: object) -> str:
    """Return a name that changes with everything that the measurement depends on."""
    return f"{kind}:{sha256(repr(inputs).encode()).hexdigest()[:16]}"


class Measurement(BaseModel):
    """Raw result of a stage, as far as it is measured: layers of a window, KL of sets of layers, or a gate training."""

    label: str = ""
    layers: list[LayerMeasure] = []
    sparse: Any = None
    kl: list[float] = []
    state: GateState | None = None


class _File(BaseModel):
    format: Literal[1]
    stages: dict[str, Measurement]


class Store:
    """The measurements in a profile's JSON file. `put` writes at once, whole or not at all."""

    def __init__(self, path: Path, fresh: bool = False) -> None:
        """Read the measurements in ``path``, unless it does not exist or all is measured afresh.

        Raises:
            ConfigError: the file has other content than a profile of this version.
        """
        self.path, self.stages = path, dict[str, Measurement]()
        self._head: dict[str, Any] = {}
        if path.exists() and not fresh:
            content = read_object(path, _FIX)
            with reading(path, _FIX, form="profile of this version"):
                self.stages = _File.model_validate(content).stages

    def get(self, key: str) -> Measurement:
        """Return a copy of what is measured under ``key``, which may be nothing yet."""
        return self.stages.get(key, Measurement()).model_copy(deep=True)

    def put(self, key: str, measurement: Measurement) -> None:
        """Store a measurement."""
        self.stages[key] = measurement
        self._write()

    def finish(self, head: Mapping[str, Any]) -> None:
        """Add the options and decisions of the profile. Measurements with other options stay for later runs."""
        self._head = dict(head)
        self._write()

    def _write(self) -> None:
        stages = {key: stage.model_dump(mode="json", exclude_defaults=True) for key, stage in self.stages.items()}
        try:
            write_whole(self.path, json.dumps({"format": 1, **self._head, "stages": stages}).encode())
        except OSError as error:
            raise ConfigError(f"{self.path}: cannot be written ({error.strerror}); give another --out") from None
