"""What the plan says of memory is what the real runtime then allocates, byte for byte and page for page."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_backend.config import HybridConfig
from hybrid_backend.kernels import cpu
from hybrid_backend.memory_plan.blocks import Blocks
from hybrid_backend.memory_plan.footprint import MemoryRoom, MethodMemory, StockMemory, largest
from hybrid_backend.methods import method_names
from hybrid_backend.model import ModelShape, spec_of
from tests.support.harness import PAGE, Engine, config
from tests.support.judged import judge_at_once

PAGES, REQUESTS = 48, 3
SHAPE = ModelShape(
    name="small", layers=4, heads=4, kv_heads=2, head_dim=16, hidden=64, intermediate=128, vocab=512, dtype="float32",
    tied=True, weight_bytes=4 * 10**6, windows=(None,) * 4, max_context=4096,
)  # fmt: skip
SHAPES = {
    "small": SHAPE,
    "bf16": replace(SHAPE, dtype="bfloat16", kv_heads=1, head_dim=64),
    "odd": replace(SHAPE, heads=9, kv_heads=3, head_dim=40, dtype="float16"),  # No in-place kernel has this width.
    "windows": replace(SHAPE, windows=(32, None, 32, None)),
}
CONFIGS: dict[str, dict[str, Any]] = {
    "default": {},
    "few frames": {"frames_per_request": 6, "exact_layers": [0, 1], "staging_tokens": 64},
    "much staging": {"staging_tokens": 10**6},
    "ahead": {"lookahead": {"enabled": True}},
    "digests as they are": {"selection": {"digest": "minmax"}, "exact_layers": [3]},
    "codes": {"selection": {"digest": "codes"}},
    "large pages": {"page_size": 32, "budget_tokens": 128, "recent": 2},
}
OF_METHOD: dict[str, dict[str, Any]] = {
    "clo": {"clo": {"persistent": ["1:0", "3:0"]}},
    "hgca": {"hgca": {"window_tokens": 100}},
    "headinfer": {"headinfer": {"resident_heads": ["0:0", "1:0", "3:0"], "group_thresholds": [64, 256]}},
}


def planned(shape: ModelShape, cfg: HybridConfig) -> MethodMemory:
    return MethodMemory(shape, Blocks.of(shape, cfg.page_size), MemoryRoom(0, 2**34, 512), cfg)


def gauges_agree(shape: ModelShape, cfg: HybridConfig, pages: int = PAGES, requests: int = REQUESTS) -> None:
    engine = Engine(cfg, spec_of(shape), num_pages=pages, max_requests=requests)
    real = engine.runtime.gauges()
    expected = planned(shape, cfg).gauges(pages, requests)
    assert {name: real[name] for name in expected} == expected


def configuration(method: str, **keys: Any) -> HybridConfig:
    return config(**{"method": method, **keys, **OF_METHOD.get(method, {})})


@pytest.mark.parametrize(
    ("method", "keys", "shape"),
    [case for case in product(method_names(), CONFIGS, SHAPES) if (case[0], case[2]) != ("quest", "odd")],
)
def test_every_gauge_of_the_runtime_is_what_was_planned(method: str, keys: str, shape: str) -> None:
    gauges_agree(SHAPES[shape], configuration(method, **CONFIGS[keys]))


def test_these_cases_are_no_zeros() -> None:
    """Of every gauge, some case above has something to plan."""
    largest_seen: dict[str, int] = {}
    for method in method_names():
        on_gpu = [] if method == "quest" else [{"device_kernels": "triton"}]  # A GPU's plan has mailboxes.
        for keys in [*CONFIGS.values(), *on_gpu]:
            cfg = configuration(method, **keys)
            for name, value in planned(SHAPE, cfg).gauges(PAGES, REQUESTS).items():
                largest_seen[name] = max(value, largest_seen.get(name, 0))
    assert all(largest_seen.values()), largest_seen


@pytest.mark.parametrize(
    ("method", "keys"),
    [
        ("scout", {}),
        ("scout", {"quality": {"min_mass": 0.9}}),
        ("scout", {"metrics": {"sample_interval": 0}}),
        ("infinigen", {}),
        ("clo", {}),
        ("hgca", {}),
        ("apex", {}),
        ("apex", {"apex": {"strategy": "lockstep", "device_tokens": 7 * PAGE}}),
    ],
)
def test_the_device_kernels_state_is_planned_too(method: str, keys: dict[str, Any]) -> None:
    pytest.importorskip("triton", reason="Triton has no wheel for this platform")
    base = {"device_kernels": "triton", "exact_layers": [0], "frames_per_request": 6}
    cfg = config(method=method, **base, **keys)
    gauges_agree(SHAPE, cfg)
    gauges_agree(SHAPES["bf16"], cfg, pages=200, requests=5)
    limited = replace(spec_of(SHAPE), max_tokens=10 * PAGE)
    engine = Engine(cfg, limited, num_pages=PAGES, max_requests=REQUESTS)
    real = engine.runtime.gauges()
    expected = planned(SHAPE, cfg).gauges(PAGES, REQUESTS, max_tokens=10 * PAGE)
    assert {name: real[name] for name in expected} == expected
    assert expected["hybrid_device_bytes"] < planned(SHAPE, cfg).gauges(PAGES, REQUESTS)["hybrid_device_bytes"]


@settings(max_examples=25)
@given(
    method=st.sampled_from(method_names()),
    layers=st.integers(1, 5),
    kv_heads=st.integers(1, 4),
    head_dim=st.sampled_from([16, 24, 64, 128]),
    dtype=st.sampled_from(["bfloat16", "float16", "float32"]),
    page=st.sampled_from([16, 32, 64]),
    pages=st.integers(2, 70),
    requests=st.integers(1, 9),
    budget=st.integers(4, 9),
)
def test_any_shape_is_planned_exactly(
    method: str, layers: int, kv_heads: int, head_dim: int, dtype: str, page: int, pages: int,
    requests: int, budget: int,
) -> None:  # fmt: skip
    shape = replace(
        SHAPE, layers=layers, heads=2 * kv_heads, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype,
        windows=(None,) * layers,
    )  # fmt: skip
    cfg = config(method=method, page_size=page, budget_tokens=budget * page, exact_layers=[0])
    if method == "quest" and not cpu.decodes(shape.heads, kv_heads, head_dim, page):
        assert "the native kernels have none for" in str(planned(shape, cfg).refusal())
    else:
        assert planned(shape, cfg).refusal() is None
        gauges_agree(shape, cfg, pages, requests)


@pytest.mark.parametrize("requests", [1, 2])
def test_context_caches_never_outgrow_the_plan(requests: int) -> None:
    """With beta near 0 every token between sinks and window is kept: one request then takes exactly what it must."""
    cfg = config(method="hgca", hgca={"window_tokens": 2 * PAGE, "beta": 1e-6})
    engine = Engine(cfg, spec_of(SHAPE), num_pages=128, max_requests=2)
    judge_at_once(engine.runtime.workers)
    memory, tokens = planned(SHAPE, cfg), 20 * PAGE
    for name in ("a", "b")[:requests]:
        engine.add(name, tokens)
        engine.step({name: tokens}, tolerance=None)
        engine.step({name: 1}, tolerance=None)
    real = engine.runtime.gauges()["hybrid_context_cache_bytes"]
    start = memory.gauges(128, 2)["hybrid_context_cache_bytes"]
    item = next(x for x in memory.memory(tokens + 1, requests).items if x.name == "growth")
    assert item.kind == "at most"
    needed = requests * SHAPE.layers * (21 - cfg.sinks - 2) * SHAPE.page_bytes(PAGE)
    assert real == start + needed == start + item.bytes


@pytest.mark.skipif(not cpu.available(), reason=str(cpu.why_unavailable()))
@pytest.mark.parametrize("pages", [9, 10, 40, 60, 129])
def test_second_level_digests_never_outgrow_the_plan(pages: int) -> None:
    cfg = config(
        method="quest",
        sparse="always",
        lookahead={"enabled": False},
        selection={"candidates": 1, "interval": 1},
        exact_layers=[0],
    )
    engine = Engine(cfg, spec_of(SHAPE), num_pages=256, max_requests=1)
    engine.add("long", pages * PAGE)
    engine.step({"long": pages * PAGE}, tolerance=None)
    engine.step({"long": 1}, tolerance=None)
    real = engine.runtime.gauges()["hybrid_context_cache_bytes"]
    items = {x.name: x.bytes for x in planned(SHAPE, cfg).memory(pages * PAGE + 1, 1).items}
    assert real <= items["growth"]
    if pages == 129:
        assert real == items["growth"] > 0, "the bound is reached where the spans are a power of two"


@pytest.mark.skipif(not cpu.available(), reason=str(cpu.why_unavailable()))
@pytest.mark.parametrize("granularity", ["layer", "kv_head"])
def test_pages_that_are_kept_to_select_among_never_outgrow_the_plan(granularity: str) -> None:
    selection = {"candidates": 0, "interval": 3, "granularity": granularity}
    cfg = config(method="quest", sparse="always", lookahead={"enabled": False}, selection=selection, exact_layers=[0])
    engine = Engine(cfg, spec_of(SHAPE), num_pages=64, max_requests=1)
    engine.add("long", 40 * PAGE)
    engine.step({"long": 40 * PAGE}, tolerance=None)
    engine.decode("long", steps=3, tolerance=None)
    real = engine.runtime.gauges()["hybrid_context_cache_bytes"]
    engine.drop("long")
    assert engine.runtime.gauges()["hybrid_context_cache_bytes"] == 0
    items = {x.name: x.bytes for x in planned(SHAPE, cfg).memory(40 * PAGE + 1, 1).items}
    assert 0 < real <= items["growth"]


def test_tiers_lie_on_the_device_only_where_they_are_copies() -> None:
    cfg = config(method="infinigen")
    on_gpu = MethodMemory(SHAPE, Blocks.of(SHAPE, PAGE), MemoryRoom(2**34, 2**34, 512), cfg).memory(2048, 4)
    on_cpu = planned(SHAPE, cfg).memory(2048, 4)
    places = {x.name: x.place for x in on_gpu.items}
    assert places["frames"] == places["digests"] == places["staging"] == places["weights"] == "device"
    assert places["host pool"] == places["server"] == "host"
    assert not on_cpu.at("device")


def test_stock_holds_all_kv_where_it_attends() -> None:
    blocks = Blocks.of(SHAPE, PAGE)
    memory = StockMemory(SHAPE, blocks, MemoryRoom(2**34, 2**34, 512)).memory(context=100, batch=3)
    assert memory.pages == 3 * 7 + 1  # 100 tokens are 7 pages of 16; the engine keeps one block back
    kv = next(x for x in memory.items if x.name == "KV cache")
    assert (kv.place, kv.bytes) == ("device", 22 * 4 * SHAPE.page_bytes(PAGE))


@given(
    limit=st.integers(1, 300), each=st.lists(st.integers(0, 50), min_size=300, max_size=300), room=st.integers(0, 9000)
)
def test_largest_finds_the_last_that_fits(limit: int, each: list[int], room: int) -> None:
    taken = list(accumulate(each))
    last = max((n for n in range(1, limit + 1) if taken[n - 1] <= room), default=0)
    assert largest(lambda n: room - taken[n - 1], limit) == last


@given(page=st.sampled_from([1, 16, 128]), token_bytes=st.integers(100, 200_000), room=st.integers(2**24, 2**40))
def test_where_memory_is_pages_few_numbers_are_tried(page: int, token_bytes: int, room: int) -> None:
    tried = []

    def spare(tokens: int) -> int:
        tried.append(tokens)
        return room - -(-tokens // page) * page * token_bytes - 4 * tokens

    found = largest(spare, 2**27)
    assert spare(found) >= 0 and (found == 2**27 or spare(found + 1) < 0)
    assert len(tried) <= 22
