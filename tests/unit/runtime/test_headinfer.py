"""HeadInfer: exact whatever the buffers hold, and no more device memory than the formula says."""

from __future__ import annotations

from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hybrid_backend.batch import ModelSpec
from hybrid_backend.errors import ConfigError
from hybrid_backend.methods.headinfer import HeadInfer
from hybrid_backend.tiers.sizes import staging_shape
from hybrid_backend.tiers.stream import cut
from tests.support.harness import PAGE, Engine, config, spec, watch


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
    assert prod(staging_shape(llama, 32, 2**20 // 8)) * llama.dtype.itemsize == 2**30


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


@given(counts=st.lists(st.integers(0, 9), min_size=1, max_size=7), capacity=st.integers(1, 8), spare=st.integers(0, 20))
@settings(max_examples=60, deadline=None)
def test_every_head_page_of_every_list_is_in_one_piece(counts: list[int], capacity: int, spare: int) -> None:
    most = sum(counts) + spare
    pieces = cut(torch.tensor(counts), most, capacity, PAGE, lambda lists, nth: (lists * 100 + nth).int())
    assert len(pieces) == -(-most // capacity), "empty ones too: a graph holds as many in every step"
    found: list[list[int]] = [[] for _ in counts]
    for piece in pieces:
        buffer = torch.full((capacity,), -1)
        placed = piece.places >= 0
        buffer[piece.places[placed].long()] = piece.pages[placed].long()
        for i, (first, tokens) in enumerate(zip(piece.first.flatten(), piece.tokens.flatten(), strict=True)):
            assert tokens % PAGE == 0
            found[i] += buffer[first : first + tokens // PAGE].tolist()
    assert found == [[i * 100 + nth for nth in range(count)] for i, count in enumerate(counts)]


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
