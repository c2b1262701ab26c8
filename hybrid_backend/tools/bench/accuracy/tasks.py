"""All generated tasks by name: RULER's thirteen and the extraction task."""

from __future__ import annotations

from hybrid_backend.tools.bench.accuracy import aggregation, needles, questions
from hybrid_backend.tools.bench.accuracy.extraction import extraction
from hybrid_backend.tools.bench.accuracy.task import Generator

GENERATORS: dict[str, Generator] = {
    **needles.GENERATORS,
    **aggregation.GENERATORS,
    **questions.GENERATORS,
    "extraction": extraction,
}
