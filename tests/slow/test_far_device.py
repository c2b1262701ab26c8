"""The CUDA tier on a device that is not the host (far_device.py): what lies where, and who may touch it."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton has no wheel for this platform")

from hybrid_backend.batch import Batch, DecodeRows, ModelSpec, Step
from hybrid_backend.methods import headinfer
from hybrid_backend.methods.hgca import Hgca
from hybrid_backend.warm_up import warm_up
from tests.slow.test_graph_step import ROWS, replay_as_a_graph
from tests.support.far_device import busy, capture
from tests.support.harness import INT8_ERROR, PAGE, Engine, config, decode_step, spec
from tests.support.judged import judge_at_once
from tests.support.scenario import GROWTH, SHORT_LIFE, Event, Request, play
from tests.support.streams import STREAMS

FRAMES = 6
KEYS = {
    "scout": {},
    "infinigen": {"method": "infinigen"},
    "headinfer": {"method": "headinfer"},
    "dense": {"method": "dense"},
    "hgca": {"method": "hgca", "hgca": {"window_tokens": 4 * PAGE}},
    "clo": {"method": "clo", "clo": {"eta": 0.3, "persistent": ["1:1"]}},
}
METHODS = pytest.mark.parametrize("name", KEYS)


def engine(device: torch.device, name: str, model: ModelSpec | None = None, **keys: object) -> Engine:
    settings = config(
        **{"frames_per_request": FRAMES, "exact_layers": [0], "recall": {"intervals": 2}, **KEYS[name], **keys}
    )
    return Engine(settings, model or spec(2), num_pages=64, max_requests=ROWS, device=device)


@pytest.mark.parametrize(
    ("name", "dtype", "keys"),
    [
        ("scout", torch.bfloat16, {}),
        ("scout", torch.float32, {"selection": {"granularity": "kv_head"}}),
        ("headinfer", torch.bfloat16, {}),
        *((name, torch.float32, {}) for name in ("dense", "hgca", "clo")),
    ],
    ids=str,
)
def test_prompts_and_decoding_on_a_device_that_is_not_the_host(
    device: torch.device, name: str, dtype: torch.dtype, keys: dict[str, object]
) -> None:
    """Everything finds what it needs where it is, and what is not sparse is exact."""
    play([engine(device, name, spec(2, dtype=dtype), **keys)], tolerance=1e-4 if dtype is torch.float32 else 3e-2)


@pytest.mark.parametrize(
    ("name", "dtype", "keys"),
    [
        *((name, torch.float32, {}) for name in ("scout", "infinigen", "headinfer", "dense", "clo", "hgca")),
        ("scout", torch.bfloat16, {"selection": {"digest": "minmax"}}),
        ("scout", torch.float32, {"selection": {"digest": "codes", "granularity": "kv_head"}}),
        ("headinfer", torch.float32, {"headinfer": {"resident_heads": ["0:1"], "window_heads": ["1:0"]}}),
    ],
    ids=str,
)
def test_pages_in_8_bits_on_a_device_that_is_not_the_host(
    device: torch.device, name: str, dtype: torch.dtype, keys: dict[str, object]
) -> None:
    """Exact layers lie on the device whole, and all else passes through frames and staging buffers, in 8 bits."""
    model = replace(spec(2, dtype=dtype), kv_dtype=torch.int8)
    made = engine(device, name, model, kv_dtype="int8", **keys)
    play([made], SHORT_LIFE, tolerance=1e-4 if dtype is torch.float32 else 3e-2)


@METHODS
def test_a_captured_step_never_waits_for_the_device(device: torch.device, name: str) -> None:
    """Every launch of a decode step could be captured: nothing reads a value back, every copy is a plain one. And the
    host opens the step, lets requests go and counts while the device is still busy with the step before; it waits where
    a request begins to decode, and for the averages of a page that leaves HGCA's window.
    The workers begin to judge such a request without a wait."""
    made = engine(device, name, metrics={"sample_interval": 1})
    replay_as_a_graph(made, capture)
    begun: list[str] = []
    if isinstance(method := made.runtime.method, Hgca):
        begin_judging = method._begin_judging

        def begun_judging(rows: DecodeRows, r: int, request: int, first: int) -> None:
            begun.append(rows.request_ids[r])
            with busy():
                begin_judging(rows, r, request, first)

        method._begin_judging = begun_judging  # type: ignore[method-assign]
    begin, release = made.runtime.begin_step, made.runtime.release

    def opened(batch: Batch) -> Step:
        admits = any(made.runtime.tiers.frames.index(request) is None for request in batch.request_ids)
        leaves = name == "hgca" and any((tokens - 1) % PAGE == 0 for tokens in batch.seq_lens)
        with nullcontext() if admits or leaves else busy():
            return begin(batch)

    def released(names: list[str]) -> None:
        with busy():
            release(names)

    def count() -> None:
        with busy():
            held = made.runtime.gauges()["hybrid_frames_in_use"]
        buffers = decode_step(made).buffers
        if name != "clo":  # which needs no such map
            mapped, copied = (int((x >= 0).sum()) for x in (buffers.maps.page_of, buffers.state.copies.frames))
            assert mapped <= held <= mapped + copied, "a frame is in use while it is copied into, too"

    made.runtime.begin_step, made.runtime.release = opened, released  # type: ignore[method-assign, assignment]
    play([made], GROWTH, after_step=count)
    assert bool(begun) == (name == "hgca")


@METHODS
def test_after_the_warm_up_requests_launch_nothing_new_and_nothing_of_it_is_left(
    device: torch.device, name: str
) -> None:
    """What a GPU compiles when it is first launched is there before anybody waits; and nothing of it was counted."""
    made = engine(device, name, replace(spec(2), max_tokens=16 * PAGE))
    warm_up(made.runtime, page=0)  # which the harness hands to nobody
    made.runtime.forget_counts()
    gauges, figures = made.runtime.gauges(), [vars(layer) for layer in made.runtime.stats.layers]
    assert not any(value for each in figures for value in each.values())
    assert gauges["hybrid_frames_in_use"] == gauges["hybrid_resident_requests"] == gauges["hybrid_copied_bytes"] == 0
    compiled = set(STREAMS.variants)
    play([made], SHORT_LIFE)
    made.admit("moved", PAGE + 4)
    made.runtime.release(["moved"])  # All its pages are on the host, as if another server had computed them.
    made.decode("moved", tolerance=None)
    assert not STREAMS.variants - compiled


STREAMED: dict[str, tuple[int, dict[str, object]]] = {  # pieces of a layer, for three sequences of 16 pages
    "one after the other": (3, {}),
    "in groups": (6, {"staging_tokens": 8 * PAGE, "headinfer": {"group_thresholds": [2 * PAGE]}}),
    "but for resident heads": (3, {"staging_tokens": 8 * PAGE, "headinfer": {"resident_heads": ["0:1", "1:0"]}}),
    "as far as there are pieces": (2, {"staging_tokens": 2 * PAGE}),
}


@pytest.mark.parametrize("name", STREAMED)
def test_a_graph_of_streaming_is_exact_for_sequences_of_any_length(
    device: torch.device, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its launches are those of the longest sequences that there may be. Prompts pass through the buffers between its
    replays, and between two layers of a step that they share with decoding rows, which no graph holds."""
    pieces, keys = STREAMED[name]
    if name == "as far as there are pieces":
        monkeypatch.setattr(headinfer, "_PIECES", pieces)
    layers = 2
    settings = config(method="headinfer", **keys)
    made = Engine(settings, spec(layers), num_pages=16, max_requests=ROWS, device=device)
    replay_as_a_graph(made, capture)
    copy_pages, launches = made.runtime.tiers.operations.copy_pages, list[int]()

    def log_copy(*args: Tensor, **more: Tensor) -> None:
        launches[-1] += 1
        copy_pages(*args, **more)

    monkeypatch.setattr(made.runtime.tiers.operations, "copy_pages", log_copy)
    made.add("a", 4 * PAGE - 1)
    made.add("b", PAGE + 5)
    for work in ({"a": 4 * PAGE - 1}, {"a": 1}, {"a": 1}, {"a": 1, "b": PAGE}, {"b": 5, "a": 1}, {"b": 1, "a": 1}):
        launches.append(0)
        made.step(work)
    assert launches[0] == 0 and launches[1] == launches[2] == launches[5] == pieces * layers


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [(torch.float32, "auto"), (torch.bfloat16, "auto"), (torch.float32, "int8")],
    ids=["fp32", "bf16", "int8"],
)
def test_hgca_keeps_the_same_tokens_there_as_on_the_host(
    device: torch.device, dtype: torch.dtype, kv_dtype: str
) -> None:
    """Pages leave the window, tokens are judged and attended by the CPU, a prompt goes on from a cached prefix."""
    keys = {"exact_layers": [0], "hgca": {"window_tokens": 2 * PAGE, "beta": 0.8}, "metrics": {"sample_interval": 2}}
    model = replace(spec(2, dtype=dtype), kv_dtype=torch.int8 if kv_dtype == "int8" else None)
    settings = config(method="hgca", kv_dtype=kv_dtype, **keys)
    engines = [
        Engine(settings, model, num_pages=64, max_requests=ROWS, device=where)
        for where in (device, torch.device("cpu"))
    ]
    for engine in engines:
        judge_at_once(engine.runtime.workers)
    replay_as_a_graph(engines[0], capture)
    kept: list[list[list[int]]] = []

    def look() -> None:
        kept[:] = [each.runtime.method.kept_tokens() for each in engines]  # type: ignore[attr-defined]

    life = (
        Event({"a": 30}, arrivals={"a": Request(5 * PAGE)}),
        Event({"a": 5 * PAGE - 30}),
        Event({"a": 1}),
        Event({"a": 1, "b": PAGE + 3}, arrivals={"b": Request(6 * PAGE + 3, shared_with="a")}),
        Event({"b": 1, "a": 1}, PAGE + 2),
    )
    tolerance = 3e-2 if dtype is torch.bfloat16 else 1e-4 if kv_dtype == "auto" else INT8_ERROR
    play(engines, life, tolerance, look, near=tolerance)
    there, here = (each.runtime.stats.layers[1] for each in engines)
    assert all(tokens > 0 for tokens in kept[0][0])  # of layer 1, which is not exact
    assert there.mass_samples == 0 < here.mass_samples, "samples are taken on the host"
    if dtype is torch.float32:  # bf16 may round a weight across the threshold
        assert kept[0] == kept[1] and there.cpu_tokens == here.cpu_tokens
