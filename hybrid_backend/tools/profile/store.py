"""Finished stages of a profile, in one JSON file: a second run goes on where the first one stopped."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from hybrid_backend.config.paths import write_whole
from hybrid_backend.config.reading import read_object, reading
from hybrid_backend.errors import ConfigError
from hybrid_backend.tools.profile.gates import GateState
from hybrid_backend.tools.profile.measure import LayerMeasure

FORMAT = 1
_FIX = "move it away, or start anew with --fresh"


def stage_key(kind: str, *inputs: object) -> str:
    """Return a name that changes with everything that the stage's result depends on."""
    return f"{kind}:{hashlib.sha256(repr(inputs).encode()).hexdigest()[:16]}"


def _check(key: str, stage: Any) -> None:
    """Raise an error of any kind unless ``stage`` is what a profile stores under a `stage_key` of this kind."""
    kind = key.partition(":")[0]
    if kind == "divergence":
        TypeAdapter(list[float]).validate_python(stage["kl"], strict=True)
    elif kind == "gates":
        GateState.model_validate(stage["state"])
    else:
        TypeAdapter(list[LayerMeasure]).validate_python(stage["layers"])
    TypeAdapter(float).validate_python(stage["seconds"], strict=True)


class Store:
    """``stages[key]``: the raw result of a stage, as JSON holds it. `put` writes at once, whole or not at all."""

    def __init__(self, path: Path, fresh: bool = False) -> None:
        self.path = path
        self._head: dict[str, Any] = {}
        self._stages: dict[str, Any] = {}
        if not fresh and path.exists():
            self._stages = self._read()

    def _read(self) -> dict[str, Any]:
        data = read_object(self.path, _FIX)
        stages = data.get("stages")
        if data.get("format") != FORMAT or not isinstance(stages, dict):
            raise ConfigError(f"{self.path}: is not a profile of this version; {_FIX}")
        return stages

    @property
    def stages(self) -> int:
        """Number of results in the file."""
        return len(self._stages)

    def get(self, key: str) -> Any:
        """Return the stage's result, None if it is still to do.

        Raises:
            ConfigError: the file holds something else under ``key``.
        """
        stage = self._stages.get(key)
        if stage is not None:
            with reading(f"{self.path}: {key}", _FIX, form="result"):
                _check(key, stage)
        return stage

    def put(self, key: str, result: Any) -> None:
        self._stages[key] = result
        self._write()

    def finish(self, head: Mapping[str, Any]) -> None:
        """Add what the profile was made with and decided. Stages of other options stay: they may be asked for again."""
        self._head = dict(head)
        self._write()

    def _write(self) -> None:
        text = json.dumps({"format": FORMAT, **self._head, "stages": self._stages})
        try:
            write_whole(self.path, text.encode())
        except OSError as error:
            raise ConfigError(f"{self.path}: cannot be written ({error.strerror}); give another --out") from None
