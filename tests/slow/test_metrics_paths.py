"""The slow paths of tests/unit/runtime/test_metrics_paths.py: Triton's kernels, and the device that is not the host."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton has no wheel for this platform")

from tests.unit.runtime.test_metrics_paths import KERNELS, MORE, check_figures

PATHS: dict[str, dict[str, object]] = {
    "kernels": KERNELS,
    "far device": {},
}
CASES = [(path, ahead, "as is") for path in PATHS for ahead in (True, False)]
CASES += [("kernels", True, more) for more in ("per head", "infinigen")]


@pytest.mark.parametrize(("path", "ahead", "more"), CASES, ids=lambda x: str(x).replace(" ", "-"))
def test_every_figure_is_what_an_independent_count_says(
    path: str, ahead: bool, more: str, request: pytest.FixtureRequest
) -> None:
    device = request.getfixturevalue("device") if path == "far device" else None
    check_figures(PATHS[path] | MORE[more], ahead, device)
