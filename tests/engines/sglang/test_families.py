"""Families of models on SGLang's CPU engine: tiny random-weight models, stock (torch_native) and hybrid, in fp32.

Those of `tests.engines.vllm.families` that the stock engine itself serves on a CPU without Triton;
docs/reference/models.md says why not the others. All are served by one process (family_probe.py), which the first test
waits for.
"""

from __future__ import annotations

import pytest

from tests.engines.probes import Probe, run

pytestmark = pytest.mark.engine

FAMILIES = [
    "llama", "mistral", "qwen2", "qwen3", "glm4", "phi3", "stablelm", "gpt2", "granite",
    "qwen3_moe", "olmoe", "glm4_moe", "minimax_m2",
]  # fmt: skip
# fp32 sums in another order; a wrong scale or position changes them by more than 0.1
NOISE = 1e-3
TOKENS = 24


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Probe:
    return run(tmp_path_factory.mktemp("families"), "sglang/family_probe.py", *FAMILIES, seconds=1800)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("which", ["at_once", "alone"])
def test_answers_equal_torch_native_s_when_every_page_is_attended(seen: Probe, family: str, which: str) -> None:
    """In separate tiers; most pages by the CPU workers."""
    found = seen(family)
    mine, stock = found["hybrid"][which], found["stock"][which]
    assert mine["tokens"] == stock["tokens"]
    for own, other in zip(mine["logprobs"], stock["logprobs"], strict=True):
        assert own and own == pytest.approx(other, abs=NOISE)
    assert len(found["hybrid"]["frames"]) == len(found["hybrid"]["on_cpu"])
    assert all(tokens > 0 for tokens in found["hybrid"]["on_cpu"])


@pytest.mark.parametrize("family", FAMILIES)
def test_every_layer_but_the_first_is_predicted(seen: Probe, family: str) -> None:
    found = seen(family)["hybrid"]
    assert found["predicted"] == list(range(1, len(found["cosine"])))
    # A wrong rope, norm, residual or head order gives a cosine near 0 in the last layer; these models give 0.57.
    assert found["cosine"][-1] > 0.55


@pytest.mark.parametrize("family", FAMILIES)
def test_sparse_runs_end_and_attend_less(seen: Probe, family: str) -> None:
    dense, found = seen(family)["hybrid"], seen(family)["sparse"]
    assert [len(each) for each in found["at_once"]["tokens"]] == [TOKENS] * 4
    for on_cpu, selected, all_of_it in zip(found["on_cpu"], found["selected"], dense["selected"], strict=True):
        assert 0 < on_cpu < selected < all_of_it
    assert found["at_once"]["tokens"][0] == dense["at_once"]["tokens"][0]  # this request fits the budget


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_follow_the_weights_that_a_running_engine_gets(seen: Probe, family: str) -> None:
    """Dense as torch_native, where both get an update from disk and every parameter is moved; sparse, by predicted
    queries, as an engine that starts with the new weights."""
    results = seen(family)
    stock = results["stock"]["changed"]
    assert stock["tokens"] != results["stock"]["at_once"]["tokens"]
    for changed, expected in ((results["hybrid"], stock), (results["sparse"], results["started"]["sparse"])):
        assert changed["changed"]["tokens"] == expected["tokens"]
        for own, other in zip(changed["changed"]["logprobs"], expected["logprobs"], strict=True):
            assert own and own == pytest.approx(other, abs=NOISE)
    # The engine that starts anew attends all of the first request, which fits the budget, as torch_native does.
    assert results["started"]["sparse"]["tokens"][0] == stock["tokens"][0]
