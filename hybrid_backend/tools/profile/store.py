"""Finished stages of a profile, in one JSON file: a second run goes on where the first one stopped."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybrid_backend.errors import ConfigError

FORMAT = 1


def stage_key(kind: str, *parts: object) -> str:
    """A name that changes with everything that the stage's result depends on."""
    return f"{kind}:{hashlib.sha256(repr(parts).encode()).hexdigest()[:16]}"


class Store:
    """``stages[key]``: the raw result of a stage, as JSON holds it. `put` writes at once, whole or not at all."""

    def __init__(self, path: Path, fresh: bool = False) -> None:
        self.path = path
        self._head: dict[str, Any] = {}
        self._stages: dict[str, Any] = {}
        if not fresh and path.exists():
            self._stages = self._read()

    def _read(self) -> dict[str, Any]:
        try:
            data = json.loads(self.path.read_text(encoding="utf-8"))
            stages = data["stages"]
            known = data["format"] == FORMAT and isinstance(stages, dict)
        except (OSError, ValueError, KeyError, TypeError):
            known, stages = False, {}
        if not known:
            raise ConfigError(
                f"{self.path}: is not a profile of this version; move it away, or start anew with --fresh"
            )
        return dict(stages)

    @property
    def stages(self) -> int:
        """Number of results in the file."""
        return len(self._stages)

    def get(self, key: str) -> Any:
        """The stage's result, None if it is still to do."""
        return self._stages.get(key)

    def put(self, key: str, result: Any) -> None:
        self._stages[key] = result
        self._write()

    def finish(self, head: Mapping[str, Any]) -> None:
        """Add what the profile was made with and decided. Stages of other options stay: they may be asked for again."""
        self._head = dict(head)
        self._write()

    def _write(self) -> None:
        part = self.path.with_name(f".{self.path.name}.part")
        try:
            part.write_text(json.dumps({"format": FORMAT, **self._head, "stages": self._stages}), encoding="utf-8")
            part.replace(self.path)
        except OSError as error:
            raise ConfigError(f"{self.path}: cannot be written ({error.strerror}); give another --out") from None
