"""HeadInfer: exact whatever the buffers hold, and no more device memory than the formula says."""

from __future__ import annotations

import pytest
import torch

from hybrid_backend.errors import ConfigError
from hybrid_backend.methods.headinfer import HeadInfer
from hybrid_backend.step import ModelSpec
from hybrid_backend.tiers.stream import staging_bytes
from tests.runtime.harness import PAGE, Engine, config, spec


def engine(layers: int = 3, **keys: object) -> Engine:
    return Engine(config(method="headinfer", **{"tiers": "separate", **keys}), spec(layers=layers))


def headinfer(running: Engine) -> HeadInfer:
    method = running.runtime.method
    assert isinstance(method, HeadInfer)
    return method


@pytest.mark.parametrize("staging", [PAGE, 3 * PAGE, 64 * PAGE])
@pytest.mark.parametrize("thresholds", [[10**6], [2 * PAGE, 4 * PAGE]])
def test_every_step_is_exact_whatever_the_buffers_hold(staging: int, thresholds: list[int]) -> None:
    """Chunked prompts and decoding of two requests, down to buffers of one page."""
    running = engine(staging_tokens=staging, headinfer={"group_thresholds": thresholds})
    running.add("a", 8 * PAGE + 3)
    running.prefill("a", chunk=37)
    running.add("b", 5)
    running.step({"a": 1, "b": 5})
    for _ in range(20):
        running.step({"b": 1, "a": 1})
    assert running.runtime.stats.cpu_ratio() == 0
    running.close()


def test_the_device_holds_two_groups_of_heads_and_nothing_else() -> None:
    tokens = 5 * PAGE
    running = engine(staging_tokens=tokens, headinfer={"group_thresholds": [tokens]})
    m, method = running.model, headinfer(running)
    running.add("a", 2 * tokens - 1)
    running.prefill("a", chunk=50)
    running.step({"a": 1})
    context = running.sequences["a"].tokens - 1
    group = m.num_kv_heads // method.groups(context)
    assert group == 1
    # 2 x group size x tokens x head_dim x 2 x element size
    assert running.runtime.gauges()["hybrid_device_bytes"] == 2 * group * (2 * tokens) * m.head_dim * 2 * 4
    running.close()


def test_the_papers_table_llama_3_8b_at_one_million_tokens() -> None:
    """HeadInfer, table 1: 128 GB of KV, of which one GB is on the device when single heads stream."""
    llama = ModelSpec(32, num_heads=32, num_kv_heads=8, head_dim=128, scale=1.0, dtype=torch.bfloat16)
    assert llama.num_layers * llama.page_bytes(2**20) == 128 * 2**30
    assert staging_bytes(llama, 2**20, heads=1) == 2**30


def test_groups_double_beyond_each_threshold() -> None:
    running = engine()
    method = headinfer(running)
    assert [method.groups(n) for n in (1, 500_000, 500_001, 1_000_000, 2_000_000, 4_000_000)] == [1, 1, 2, 2, 4, 8]
    running.close()


def test_the_next_layers_first_piece_is_fetched_while_this_layer_is_attended() -> None:
    running = engine(staging_tokens=4 * PAGE)
    running.add("a", 8 * PAGE)
    running.prefill("a")
    stream = running.runtime.tiers.stream
    assert stream is not None
    fetched, attended = [], []
    fetch, attend = stream._fetch, running.runtime.method.attend

    def log_fetch(layer, piece):  # type: ignore[no-untyped-def]
        fetched.append((layer, len(attended)))
        return fetch(layer, piece)

    def log_attend(layer, step, q):  # type: ignore[no-untyped-def]
        out = attend(layer, step, q)
        attended.append(layer)
        return out

    stream._fetch, running.runtime.method.attend = log_fetch, log_attend  # type: ignore[method-assign]
    running.step({"a": 1})
    firsts = {layer: min(when for x, when in fetched if x == layer) for layer in (1, 2)}
    assert firsts == {1: 0, 2: 1}, "layer l's first copy starts before layer l-1 is done"
    running.close()


def test_resident_heads_never_cross_the_bus_and_count_as_device_memory() -> None:
    plain, resident = (engine(headinfer={"resident_heads": heads}) for heads in ([], ["0:0", "0:1", "1:1"]))
    copied = []
    for running in (plain, resident):
        running.add("a", 6 * PAGE)
        running.prefill("a")
        before = running.runtime.tiers.copied_bytes
        running.step({"a": 1})
        copied.append(running.runtime.tiers.copied_bytes - before)
    assert copied[1] * 6 == copied[0] * 3, "three of six heads stay"
    page_of_a_head = 2 * PAGE * 16 * 4
    extra = resident.runtime.gauges()["hybrid_device_bytes"] - plain.runtime.gauges()["hybrid_device_bytes"]
    assert extra == 3 * resident.num_pages * page_of_a_head
    store = headinfer(resident)._resident[1][1]
    for page in resident.sequences["a"].pages[:-1]:
        assert torch.equal(store[page, 0], resident.kv[1][page, 1])
    for running in (plain, resident):
        running.close()


@pytest.mark.parametrize("tiers", ["separate", "unified"])
def test_streaming_heads_attend_sinks_and_recent_pages_only(tiers: str) -> None:
    running = engine(layers=1, tiers=tiers, headinfer={"streaming_heads": ["0:1"]})
    running.add("a", 6 * PAGE + 4)
    running.prefill("a")
    method, seen = headinfer(running), []
    attend = method.attend

    def log_attend(layer, step, q):  # type: ignore[no-untyped-def]
        out = attend(layer, step, q)
        seen.append((q[0].double(), out[0].double()))
        return out

    method.attend = log_attend  # type: ignore[method-assign]
    running.step({"a": 1}, tolerance=None)
    q, out = seen[0]
    kv = torch.stack(running.sequences["a"].kv[0]).double()
    few = [*range(PAGE), *range(6 * PAGE, len(kv))]
    for head, tokens in ((0, list(range(len(kv)))), (1, few)):
        logits = q[2 * head : 2 * head + 2] @ kv[tokens, head, 0].T * running.model.scale
        expected = logits.softmax(-1) @ kv[tokens, head, 1]
        torch.testing.assert_close(out[2 * head : 2 * head + 2], expected, atol=1e-5, rtol=1e-5)
    running.close()


def test_a_head_that_the_model_lacks_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"headinfer\.resident_heads: 1:2 is no layer:head"):
        engine(headinfer={"resident_heads": ["1:2"]})
    with pytest.raises(ConfigError, match=r"0:1 is in headinfer\.streaming_heads too"):
        engine(headinfer={"resident_heads": ["0:1"], "streaming_heads": ["0:1"]})
