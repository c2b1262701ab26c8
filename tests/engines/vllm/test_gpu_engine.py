"""vLLM's CUDA engine with our plugin on a GPU that is there (``pytest -m gpu``): the cases of test_simulated_gpu.py.
Each has a process of its own, as vLLM's graphs want it."""

from __future__ import annotations

import pytest

from tests.engines.probes import ROOT, Probe, reader, run

pytestmark = pytest.mark.gpu

EXACT = ["scout", "scout.compiled", "hgca", "hgca.caches", "clo", "headinfer", "dense", "apex"]
FAMILIES = ["gemma3", "gpt_oss", "lfm2"]
ON_V1 = ["scout.full", "apex.overlap", "gemma3.full", "late.full"]
SPARSE = ["scout.sparse", "scout.per_head", "scout.codes", "infinigen.sparse", "clo.sparse"]
SECONDS = 300  # of a case: Triton may have all kernels to compile


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Probe:
    """Runs a case when it is first asked for."""
    folder = tmp_path_factory.mktemp("gpu")

    def run_once(name: str) -> dict[str, object]:
        runner = "v1" if name in ON_V1 else "v2"
        if (folder / f"{name}.json").exists():
            return reader(folder)(name)
        return run(folder, "vllm/gpu_probe.py", runner, name, seconds=SECONDS, paths=[ROOT])(name)

    return run_once


@pytest.mark.parametrize("name", [*EXACT, *FAMILIES, *(each for each in ON_V1 if not each.startswith("late"))])
def test_answers_are_those_of_the_model(seen: Probe, name: str) -> None:
    """Token for token as transformers, in replayed graphs, although the frames hold a part only."""
    found = seen(name)
    assert found["tokens"] == found["expected"]
    assert found["replays"] > 0 and "aborted" in found["ran"]
    if name.startswith(("scout", "hgca", "apex", "gemma3", "gpt_oss", "lfm2")):
        assert found["cpu_tokens"] > 0


@pytest.mark.parametrize("name", SPARSE)
def test_sparse_steps_attend_exactly_what_they_select(seen: Probe, name: str) -> None:
    """Launched one by one, beside an oracle: fp64 over the pages of the host pool that were selected. In graphs they
    run to their end."""
    attention = seen(f"{name}.eager")["attention"]
    assert attention["worst"] < 1e-4 and attention["sparse_rows"] > 15
    assert seen(name)["replays"] > 0


@pytest.mark.parametrize("name", ["late", "late.full"])
def test_a_step_without_the_cpu_s_answers_is_computed_again_and_nobody_else_s(seen: Probe, name: str) -> None:
    found = seen(name)
    assert found["late"] == [["0", "1"]] == found["preempted"]
    assert found["tokens"] == found["expected"]
    assert set(found["reasons"].values()) == {"length"}
    assert found["running"] == 0
