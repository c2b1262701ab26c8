"""All generated tasks by name: RULER's thirteen and the extraction task."""

from __future__ import annotations

from hybrid_backend.errors import ConfigError
from hybrid_backend.tools.bench.accuracy import aggregation, extraction, needles, questions
from hybrid_backend.tools.bench.accuracy.task import Generator

GENERATORS: dict[str, Generator] = {
    **needles.GENERATORS,
    **aggregation.GENERATORS,
    **questions.GENERATORS,
    **extraction.GENERATORS,
}


def chosen(names: str) -> list[str]:
    """Names separated by commas; ``all`` is all of them."""
    if names == "all":
        return list(GENERATORS)
    found = listed("--tasks", names)
    for name in found:
        if name not in GENERATORS:
            raise ConfigError(f"--tasks: no task {name!r}; there are {', '.join(GENERATORS)}")
    return found


def listed(option: str, given: str) -> list[str]:
    """Names separated by commas, at least one."""
    found = [name.strip() for name in given.split(",") if name.strip()]
    if not found:
        raise ConfigError(f"{option}: got {given!r}, expected names separated by commas")
    return found
