"""Seeded requests in chunks, budgets of streaming sessions, a worker that refuses, and requests of a warm-up: a tiny
model in a process of its own (requests_probe.py)."""

from __future__ import annotations

import pytest

from tests.engines.probes import ROOT, Probe, run

pytestmark = pytest.mark.engine
PAGE = 32


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Probe:
    return run(tmp_path_factory.mktemp("requests"), "vllm/requests_probe.py", seconds=600, paths=[ROOT])


def test_seeded_answers_are_the_same_whether_prompts_are_computed_whole_or_in_chunks(seen: Probe) -> None:
    found = seen("chunks")
    assert found["in chunks"] == found["whole"]
    assert len({tuple(answer[:4]) for answer in found["whole"]}) == len(found["whole"]), "nothing was sampled"


def test_a_piece_of_a_streaming_session_that_names_no_budget_has_the_configurations(seen: Probe) -> None:
    assert seen("sessions")["budgets"] == [8 * PAGE, 0]


def test_a_worker_refuses_a_connector_that_vllm_derived_after_the_platforms_check(seen: Probe) -> None:
    found = seen("derived")
    assert found["refused"].startswith("the hybrid backend does not support KV connectors that write pages behind")
    assert "OffloadingConnector" in found["refused"] and "\n" not in found["refused"]
    assert not found["has_device"], "something was made before the refusal"


def test_requests_of_the_engines_own_warm_up_show_in_no_counter(seen: Probe) -> None:
    counted, published = seen("warm_up")["counted"], seen("warm_up")["published"]
    assert counted[0] == counted[1] > 0, "the second time is the first of a user's requests"
    assert published[0] == 0 < published[1]
