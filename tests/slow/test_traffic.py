"""A life of traffic on a device that is not the host: what crosses the bus, in which stream, and who waits for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton has no wheel for this platform")

from hybrid_backend.step import fills
from hybrid_backend.step.residency import MappedResidency
from tests.support.far_device import late
from tests.support.gpu import ON_GPU
from tests.support.harness import PAGE, Engine, config, decode_step, spec, watch
from tests.support.scenario import check_nothing_is_left
from tests.support.streams import STREAMS, Event

pytestmark = pytest.mark.skipif(ON_GPU, reason="a GPU does not say what a kernel reads over the bus")
FRAMES, ROWS, LAYERS = 6, 3, 2
LONG = 9 * PAGE + 10
SMALL = {"_merge_kernel", "_await_kernel", "_commit_kernel"}  # answers of the CPU workers; generations
Traffic = dict[tuple[str, bool], list[int]]


@contextmanager
def counted() -> Iterator[Traffic]:
    """Count what kernels read and write over the bus in the block: bytes by kernel and whether in the main stream."""
    STREAMS.traffic = found = {}
    try:
        yield found
        STREAMS.finish()
    finally:
        STREAMS.traffic = None


def engine(device: torch.device, **keys: object) -> Engine:
    settings: dict[str, Any] = {
        "frames_per_request": FRAMES, "exact_layers": [0], "sparse": "never", "recall": {"intervals": 2},
    }  # fmt: skip
    return Engine(config(**settings | keys), spec(LAYERS), num_pages=96, max_requests=ROWS, device=device)


def page_reads(traffic: Traffic, is_main: bool) -> int:
    return sum(read for (kind, main), (read, _) in traffic.items() if main == is_main and kind == "_copy_kernel")


def read_by_main(traffic: Traffic) -> set[str]:
    return {kind for (kind, is_main), (read, _) in traffic.items() if is_main and read}


@pytest.mark.parametrize("chunk", [2 * PAGE, 2 * PAGE + 5])
@pytest.mark.parametrize("digest", ["minmax", "minmax_int8"])
def test_a_prompt_that_fits_crosses_the_bus_once_and_begins_to_decode_with_what_it_left(
    device: torch.device, chunk: int, digest: str
) -> None:
    """In chunks that end within a page too. The prompt needs the frames of two requests."""
    made = engine(device, selection={"digest": digest})
    token = 2 * made.model.num_kv_heads * made.model.head_dim * 4
    with late():
        with counted() as prompt:
            made.admit("a", LONG, chunk=chunk)
        assert not {kind for (kind, _), (read, _) in prompt.items() if read}
        assert prompt["_store_kernel", False][1] == LAYERS * LONG * token
        with counted() as first:
            made.decode("a", steps=3)
    assert read_by_main(first) <= SMALL
    assert page_reads(first, False) <= (LAYERS - 1) * 3 * made.runtime.tiers.page_bytes * FRAMES
    assert made.runtime.gauges()["hybrid_frames_in_use"] == FRAMES * (LAYERS - 1)


def test_no_arrival_makes_the_step_wait_for_the_bus(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of any length, a prefix hit with and without tokens to compute, an abort and a preemption, while others
    decode: every output is exact. No kernel of the main stream reads pages over the bus, the copies that fill frames
    are a layer of a request per step, and nobody waits for them until they are done."""
    monkeypatch.setattr(fills, "FILL_BYTES", 1)
    waited = list[Event]()
    wait = Event.wait
    monkeypatch.setattr(Event, "wait", lambda self, stream=None: (waited.append(self), wait(self, stream))[1])
    made = engine(device, recall={"enabled": False})
    residency = decode_step(made).residency
    assert isinstance(residency, MappedResidency)
    filled, begun = 0, set[Event]()

    def step(**work: int) -> int:
        """Run a step; return the bytes of pages that were read beside it."""
        nonlocal filled
        is_prompt = any(made.sequences[name].tokens < made.sequences[name].prompt for name in work)
        with counted() as traffic:
            made.step(work, 0.3)
            begun.update(fill.done for fill in residency._fills._begun if fill.done is not None)
        assert read_by_main(traffic) <= SMALL
        beside = page_reads(traffic, False)
        if not is_prompt:
            assert beside <= FRAMES * made.runtime.tiers.page_bytes
            filled += beside
        return beside

    with late():
        made.add("a", LONG)
        assert [step(a=40), step(a=40), step(a=LONG - 80)] == [0, 0, 0]
        assert step(a=1) == 0
        made.add("b", 4 * PAGE + 6, shared_with="a")
        prefix = made.sequences["b"].tokens // PAGE * made.runtime.tiers.page_bytes
        assert step(a=1, b=PAGE + 6 - 10) == prefix * (LAYERS - 1), "the hit crosses once"
        assert step(b=10, a=1) == 0
        for _ in range(5):
            step(a=1, b=1)
        made.add("c", LONG)  # while the others decode its own frames are not enough
        streamed = [step(a=1, b=1, c=4 * PAGE), step(c=4 * PAGE, a=1, b=1), step(c=LONG - 8 * PAGE, b=1, a=1)]
        assert streamed[0] == 0 < streamed[1] < streamed[2]
        for _ in range(4):
            step(c=1, a=1, b=1)
        made.drop("b")
        whole = made.add("d", 3 * PAGE + 1, shared_with="c")
        whole.prompt = whole.tokens  # a decoding row of the prompt's last token: nothing of it is on the device
        for _ in range(4):
            step(c=1, d=1, a=1)
        assert filled > 0
        assert not begun.intersection(waited), "a step waited for pages on their way"
        made.preempt("a")
        again = made.sequences["a"].prompt
        step(c=1, a=5 * PAGE)
        made.drop("c")
        step(a=again - 5 * PAGE)
        step(a=1, d=1)
        for name in list(made.sequences):
            made.drop(name)
    check_nothing_is_left(made)
    pool = made.runtime.tiers.frames
    assert all(pool.reserve(name) is not None for name in "xyz"), "an index is lost"


def test_a_streamed_prompt_copies_the_next_layers_first_block_while_this_layer_computes(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk's prefix is three staging buffers long. Each block crosses once, and the first block of a layer begins
    before the layer does. A step in which a row may still write the prefix begins nothing early."""
    made = Engine(config(method="dense", staging_tokens=PAGE), spec(3), num_pages=64, max_requests=2, device=device)
    stream, events = made.runtime.tiers.stream, list[tuple[str, int]]()
    assert stream is not None
    gather = stream._gather
    monkeypatch.setattr(stream, "_gather", lambda layer, *rest: (events.append(("copy", layer)), gather(layer, *rest)))
    watch(made.runtime, "forward", before=lambda layer, *_: events.append(("layer", layer)))
    made.add("a", 5 * PAGE)
    with late():
        for tokens in (3 * PAGE, PAGE):
            events.clear()
            made.step({"a": tokens})
    in_order = [("layer", 0), *[("copy", 0)] * 3, ("copy", 1), ("layer", 1), *[("copy", 1)] * 2, ("copy", 2)]
    assert events == [*in_order, ("layer", 2), *[("copy", 2)] * 2]
    made.add("b", 9)
    events.clear()
    with late():
        made.step({"b": 9, "a": PAGE})
    assert events == [event for layer in range(3) for event in (("layer", layer), *[("copy", layer)] * 4)]
