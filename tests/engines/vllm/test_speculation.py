"""Speculative decoding by n-grams with the methods that attend in place: a tiny model and the demo model, each in a
process of its own (speculation_probe.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engines.probes import ROOT, Probe, run

pytestmark = pytest.mark.engine
KINDS = ("at once", "again", "alone", "stopped", "at least")


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Probe:
    folder = tmp_path_factory.mktemp("speculation")
    return run(folder, "vllm/speculation_probe.py", str(model_dir), seconds=1500, paths=[ROOT])


@pytest.mark.parametrize("method", ["quest", "dense", "cached"])
def test_greedy_tokens_with_drafts_are_stocks_without(seen: Probe, method: str) -> None:
    """Eight requests at once in chunks, found prefixes, one alone, stop tokens and a least number of tokens."""
    found = seen("exact")
    for kind in KINDS:
        assert found[method][kind]["tokens"] == found["stock"][kind]["tokens"], kind
        close(found[method][kind]["logprobs"], found["stock"][kind]["logprobs"])
    assert 0 < found[method]["accepted"] < found[method]["draft"], "drafts must be both accepted and rejected"
    assert found[method]["kept"] == 0
    assert len(found["stock"]["stopped"]["tokens"][0]) < 12 <= len(found["stock"]["at least"]["tokens"][0])


def test_preempted_requests_with_drafts_answer_as_stock(seen: Probe) -> None:
    found = seen("exact")
    assert found["preempted"]["preemptions"] > 0 and found["preempted"]["accepted"] > 0
    assert found["preempted"]["tokens"] == found["stock"]["at once"]["tokens"]


def test_sparse_answers_do_not_depend_on_drafts(seen: Probe) -> None:
    """Each query selects by itself, so the pages that it attends are those that it attends without drafts."""
    found = seen("sparse")
    assert found["drafted"]["tokens"] == found["plain"]["tokens"]
    close(found["drafted"]["logprobs"], found["plain"]["logprobs"])
    assert 0 < found["accepted"] < found["draft"]


def test_requests_that_are_aborted_among_drafts_leave_nothing(seen: Probe) -> None:
    found = seen("sparse")
    assert found["kept"] == 0
    assert found["after aborts"]["tokens"] == found["drafted"]["tokens"]


def test_stop_strings_and_structured_output_with_drafts_are_stocks(seen: Probe) -> None:
    found = seen("text")
    for kind in ("plain", "stopped", "structured"):
        assert found["drafted"][kind] == found["stock"][kind], kind
    assert found["drafted"]["accepted"] > 20
    assert any("a - b" not in text and "banana" not in text for text in found["stock"]["stopped"])


def close(first: Any, second: Any) -> None:
    for one, other in zip(first, second, strict=True):
        assert one == pytest.approx(other, abs=2e-3)
