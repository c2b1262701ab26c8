"""The CUDA tier on a device that is not the host (far_device.py): what lies where, and who may touch it."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton has no wheel for this platform")

from hybrid_backend.batch import Batch, ModelSpec, Step
from hybrid_backend.kernels import cpu, reference
from hybrid_backend.kernels.triton import questions
from hybrid_backend.methods import headinfer
from hybrid_backend.warm_up import warm_up
from tests.slow.test_graph_step import ROWS, replay_as_a_graph
from tests.support.cases import relative_error
from tests.support.far_device import busy, capture
from tests.support.harness import PAGE, Engine, config, decode_step, spec
from tests.support.scenario import GROWTH, SHORT_LIFE, play
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


@METHODS
def test_a_captured_step_never_waits_for_the_device(device: torch.device, name: str) -> None:
    """Every launch of a decode step could be captured: nothing reads a value back, every copy is a plain one. And the
    host opens the step, lets requests go and counts while the device is still busy with the step before; it waits where
    a request begins to decode, and for the averages of a page that leaves HGCA's window."""
    made = engine(device, name, metrics={"sample_interval": 1})
    replay_as_a_graph(made, capture)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_hgca_keeps_the_same_tokens_there_as_on_the_host(device: torch.device, dtype: torch.dtype) -> None:
    """Pages leave the window, tokens are judged and attended by the CPU, a prompt goes on from a cached prefix."""
    settings = config(
        method="hgca", exact_layers=[0], hgca={"window_tokens": 2 * PAGE, "beta": 0.8},
        metrics={"sample_interval": 2},
    )  # fmt: skip
    tolerance = 1e-4 if dtype is torch.float32 else 3e-2
    there = Engine(settings, spec(2, dtype=dtype), num_pages=64, max_requests=ROWS, device=device)
    here = Engine(settings, spec(2, dtype=dtype), num_pages=64, max_requests=ROWS)
    replay_as_a_graph(there, capture)
    work: list[dict[str, int]] = [{"a": 30}, {"a": 5 * PAGE - 30}, {"a": 1}, {"a": 1, "b": PAGE + 3}]
    work += [{"b": 1, "a": 1}] * (PAGE + 2)
    for step, counts in enumerate(work):
        for each in (there, here):
            if step == 0:
                each.add("a", 5 * PAGE)
            if step == 3:
                each.add("b", 5 * PAGE + 3, shared_with="a")
                each.sequences["b"].prompt = each.sequences["b"].tokens + PAGE + 3
        outs = [each.step(counts, tolerance=None) for each in (there, here)]
        for request in counts:
            assert (outs[0][request] - outs[1][request]).abs().max() < tolerance, f"{request}, step {step}"
    kept = [each.runtime.method.kept_tokens() for each in (there, here)]  # type: ignore[attr-defined]
    counted = [each.runtime.stats.layers[1] for each in (there, here)]
    assert all(tokens > 0 for tokens in kept[0][0])  # of layer 1, which is not exact
    assert counted[0].mass_samples == 0 < counted[1].mass_samples, "samples are taken on the host"
    if dtype is torch.float32:  # bf16 may round a weight across the threshold
        assert kept[0] == kept[1]
        assert counted[0].cpu_tokens == counted[1].cpu_tokens


def test_a_graph_asks_and_takes_the_answers_when_it_is_replayed(device: torch.device) -> None:
    """Questions about another layer than the last step's, on nothing but the device's tensors and pinned ones."""
    rows, heads, dim, pages = 3, 4, 32, 20
    layers = {layer: torch.randn(pages, 2, 2, PAGE, dim) for layer in (0, 1)}
    with cpu.Pool(1) as pool, cpu.QuestionBoxes(pool, layers, heads, rows, 4, 0.2) as boxes:

        def made(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        q, out, lse = (made(*shape, dtype=torch.float32) for shape in [(rows, heads, dim)] * 2 + [(rows, heads)])
        table, numbers = made(rows, 6)[:, :4], made(rows)
        listed, requests, asks, takes, ready = (made(rows) for _ in range(5))
        waited, left = (made(rows, dtype=torch.int64) for _ in range(2))
        graphs = []
        for layer in layers:
            graphs.append(torch.cuda.CUDAGraph())
            with torch.cuda.graph(graphs[-1]):
                left.fill_(10**10)
                questions.take_rows(boxes, requests, takes, numbers, out, lse, ready, waited, left, True)
                questions.ask_rows(boxes, q, table, listed, requests, asks, boxes.position[layer], numbers)
        asked: list[tuple[int, Tensor, Tensor]] = []
        for step in range(4):
            for tensor, values in ((asks, [1, 0, 1]), (takes, [step > 0, 0, step > 0]), (requests, [2, 0, 1])):
                tensor.copy_(torch.tensor(values, dtype=torch.int32))
            new = torch.randn(rows, heads, dim), torch.randint(pages, (rows, 4), dtype=torch.int32)
            q.copy_(new[0])
            table.copy_(new[1])
            listed.fill_(1 + step % 4)
            graphs[step % 2].replay()
            asked.append((step % 2, *new))
            assert ready.tolist() == [step > 0, 0, step > 0]
            if step:
                layer, then, ids = asked[step - 1]
                listing = ids[:, None, :step].long()
                expected, _ = reference.paged_attention(
                    then, layers[layer], listing, torch.full_like(listing, PAGE), 0.2
                )
                assert relative_error(out.cpu()[[0, 2]], expected[[0, 2]]) < 1e-5 and not out.cpu()[1].any()
        assert numbers.tolist() == [0, 4, 4]
