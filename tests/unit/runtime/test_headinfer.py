"""HeadInfer: exact whatever the buffers hold, and no more device memory than the formula says."""

from __future__ import annotations

from math import prod

import pytest
import torch
from torch import Tensor

from hybrid_backend.batch import ModelSpec
from hybrid_backend.errors import ConfigError
from hybrid_backend.methods.headinfer import HeadInfer
from hybrid_backend.tiers.sizes import staging_shape
from tests.support.harness import PAGE, Engine, config, spec, watch
from tests.support.scenario import LIFE, SHORT_LIFE, play


def engine(layers: int = 3, **keys: object) -> Engine:
    return Engine(config(method="headinfer", **keys), spec(layers=layers))


def headinfer(running: Engine) -> HeadInfer:
    method = running.runtime.method
    assert isinstance(method, HeadInfer)
    return method


def test_the_device_holds_two_groups_of_heads_and_nothing_else() -> None:
    tokens = 5 * PAGE
    running = engine(staging_tokens=tokens, headinfer={"group_thresholds": [tokens]})
    m, method = running.model, headinfer(running)
    running.admit("a", 2 * tokens - 1, chunk=50)
    running.step({"a": 1})
    context = running.sequences["a"].tokens - 1
    group = m.num_kv_heads // method.groups(context)
    assert group == 1
    # 2 x group size x tokens x head_dim x 2 x element size, beside what every decode step keeps: its inputs
    held = running.runtime.gauges()["hybrid_device_bytes"] - running.runtime.executor.device_bytes
    assert held == 2 * group * (2 * tokens) * m.head_dim * 2 * 4


def test_the_papers_table_llama_3_8b_at_one_million_tokens() -> None:
    """HeadInfer, table 1: 128 GB of KV, of which one GB is on the device when single heads stream."""
    llama = ModelSpec(32, num_heads=32, num_kv_heads=8, head_dim=128, scale=1.0, dtype=torch.bfloat16)
    assert llama.num_layers * llama.page_bytes(2**20) == 128 * 2**30
    # A buffer for an eighth of the tokens of eight heads is one for all tokens of a head.
    assert prod(staging_shape(llama.kv_format(32), 2**20 // 8)) * llama.dtype.itemsize == 2**30


def test_groups_double_beyond_each_threshold() -> None:
    running = engine()
    method = headinfer(running)
    assert [method.groups(n) for n in (1, 500_000, 500_001, 1_000_000, 2_000_000, 4_000_000)] == [1, 1, 2, 2, 4, 8]


@pytest.mark.parametrize("staging", [2 * PAGE, 64 * PAGE], ids=["many pieces", "one piece"])
def test_the_next_layers_first_piece_is_fetched_while_this_layer_is_attended(
    staging: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not beside a prompt, whose chunks pass through the same buffers before the next layer decodes; nothing is fetched
    twice."""
    running = engine(staging_tokens=staging)
    running.admit("a", 8 * PAGE)
    running.add("b", 2 * PAGE)
    running.step({"b": PAGE})
    fetched: list[tuple[int, int]] = []  # layer, and how many layers were attended before
    attended: list[int] = []

    def note(host: Tensor, *_: Tensor, **__: Tensor) -> None:
        layer = next(i for i, kv in enumerate(running.kv) if kv.data_ptr() == host.data_ptr())
        if host.shape[3] == PAGE:  # a prompt's copies are of K or V
            fetched.append((layer, len(attended)))

    operations = running.runtime.tiers.operations
    monkeypatch.setattr(operations, "copy_pages", operations.copy_pages)  # whatever watches it goes with the test
    watch(operations, "copy_pages", before=note)
    watch(running.runtime.method, "attend", after=lambda out, step, layer, q: attended.append(layer))
    running.step({"a": 1})
    firsts = [min(before for each, before in fetched if each == layer) for layer in range(3)]
    assert firsts == [0, 0, 1], "layer l's first copy starts before layer l-1 is done"
    alone = len(fetched)
    assert alone == 3 * (1 if staging > 8 * PAGE else 4)
    running.step({"a": 1, "b": PAGE})
    assert [(layer, before - 3) for layer, before in fetched[alone:]] == [(x, x) for x, _ in fetched[:alone]]


def test_resident_heads_never_cross_the_bus_and_count_as_device_memory() -> None:
    plain, resident = (engine(headinfer={"resident_heads": heads}) for heads in ([], ["0:0", "0:1", "1:1"]))
    copied = []
    for running in (plain, resident):
        running.admit("a", 6 * PAGE)
        before = running.runtime.tiers.copied_bytes
        running.step({"a": 1})
        copied.append(running.runtime.tiers.copied_bytes - before)
    assert copied[1] * 6 == copied[0] * 3, "three of six heads stay"
    page_of_a_head = 2 * PAGE * 16 * 4
    extra = resident.runtime.gauges()["hybrid_device_bytes"] - plain.runtime.gauges()["hybrid_device_bytes"]
    assert extra == 3 * resident.num_pages * page_of_a_head
    store = headinfer(resident)._stores[1]
    for page in resident.sequences["a"].pages[:-1]:
        assert torch.equal(store[page, 0], resident.kv[1][page, 1])


WINDOW_HEADS = {"window_heads": ["0:1", "1:0", "1:1"], "window_tokens": PAGE}  # of three layers with two heads


@pytest.mark.parametrize(
    ("kernels", "keys"),
    [("native", {}), ("native", {"staging_tokens": 2 * PAGE}), ("torch", {"sinks": 0}), ("triton", {})],
    ids=str,
)
def test_heads_with_a_window_attend_first_and_last_pages_and_all_others_everything(
    kernels: str, keys: dict[str, object]
) -> None:
    """While requests arrive, grow over pages, are preempted and end; another head's whole KV stays on the device."""
    if kernels == "triton":
        pytest.importorskip("triton", reason="Triton has no wheel for this platform")
    heads = {**WINDOW_HEADS, "resident_heads": ["2:1"]}
    settings = config(method="headinfer", device_kernels=kernels, **{"sinks": 1, **keys}, headinfer=heads)
    played = Engine(settings, spec(3, sinks=True), is_witnessed=True)
    play([played], SHORT_LIFE if kernels == "triton" else LIFE)
    assert played.witness is not None and played.witness.sparse_rows > 0


@pytest.mark.parametrize(("heads", "streamed"), [(["0:0"], 5), (["0:0", "0:1", "1:1"], 3), (["0:0", "0:1"], 4)])
def test_sinks_and_windows_lie_on_the_device_and_only_what_is_between_crosses_the_bus(
    heads: list[str], streamed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the heads that stream alone; nothing of a sequence that the frames hold."""
    running = engine(sinks=1, headinfer={"window_heads": heads, "window_tokens": PAGE})
    copied = list[int]()

    def note(host: Tensor, frames: Tensor, host_pages: Tensor, frame_ids: Tensor) -> None:
        copied.append(int((frame_ids >= 0).sum()) * host[0].nbytes)

    running.admit("a", 6 * PAGE)
    running.admit("b", 2 * PAGE)
    running.step({"a": 1, "b": 1}, tolerance=None)  # admission fills the frames
    page_of_a_head, counted = 2 * PAGE * 16 * 4, running.runtime.tiers.copied_bytes
    operations = running.runtime.tiers.operations
    monkeypatch.setattr(operations, "copy_pages", operations.copy_pages)  # whatever watches it goes with the test
    watch(operations, "copy_pages", before=note)
    running.step({"a": 1, "b": 1}, tolerance=None)
    # Seven pages, of which the first and the last two are in frames; the other sequence has three.
    assert sum(copied) == streamed * (7 - 3) * page_of_a_head
    assert running.runtime.tiers.copied_bytes - counted == sum(copied)


def test_a_step_that_died_half_way_leaves_nothing_in_the_buffers() -> None:
    """The next layer's first piece was fetched for it."""
    running = engine(staging_tokens=2 * PAGE)
    running.add("a", 5 * PAGE)
    running.add("b", 4 * PAGE)
    running.prefill("a")
    step, _ = running._begin({"a": 1})
    q, kv = torch.randn(1, 4, 16), torch.randn(1, 2, 16)
    running.runtime.forward(0, step, q, kv, kv, torch.empty_like(q))
    running.runtime.abandon(step)
    running.step({"b": 3 * PAGE})
    running.decode("a", steps=2)


def test_a_head_that_the_model_lacks_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"headinfer\.resident_heads: 1:2 is no layer:head"):
        engine(headinfer={"resident_heads": ["1:2"]})
    with pytest.raises(ConfigError, match=r"headinfer\.window_heads: 3:0 is no layer:head"):
        engine(headinfer={"window_heads": ["3:0"]})


def test_a_head_cannot_stay_as_a_whole_and_as_a_window() -> None:
    with pytest.raises(ConfigError, match=r"headinfer\.window_heads: 1:1 is also in headinfer\.resident_heads"):
        engine(headinfer={"window_heads": ["0:1", "1:1"], "resident_heads": ["1:1"]})
