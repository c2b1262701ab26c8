"""Requests that arrive behind prefix-cache hits, by method: what crosses the bus, in which stream, and who waits."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton has no wheel for this platform")

from hybrid_backend.tiers.prompt_fills import PromptFills
from tests.slow.test_traffic import FRAMES, ROWS, counted, page_reads
from tests.support.far_device import late
from tests.support.gpu import ON_GPU
from tests.support.harness import PAGE, Engine, config, spec, watch
from tests.support.scenario import check_nothing_is_left, is_dense
from tests.support.streams import STREAMS, Order

pytestmark = pytest.mark.skipif(ON_GPU, reason="a GPU does not say what a kernel reads over the bus")
LAYERS = 3
HIT = 4
KEYS: dict[str, dict[str, Any]] = {
    "scout": {},
    "infinigen": {},
    "hgca": {"hgca": {"window_tokens": 4 * PAGE}, "sparse": "never"},
    "headinfer": {"headinfer": {"group_thresholds": [16 * PAGE]}},
    "clo": {},
    "apex": {"apex": {"strategy": "lockstep", "hardware": "a10"}},
}
KEEP_PROMPTS = [name for name in KEYS if name != "headinfer"]


class Traffic:
    """An engine whose device is late, and what its steps have moved, in pages of one layer.

    Attributes:
        main: pages that the step's stream read.
        beside: pages that other streams read.
        waits: waits of the step's stream for pages of prompts, one for each layer of a step at most.
    """

    def __init__(self, method: str, device: torch.device, **keys: Any) -> None:
        settings = {"frames_per_request": FRAMES, "exact_layers": [0], **KEYS[method], **keys}
        self.engine = Engine(
            config(method=method, **settings), spec(LAYERS), num_pages=96, max_requests=ROWS, device=device
        )
        self.tiers = self.engine.runtime.tiers
        self.layers = len(self.tiers.frames.layers) or LAYERS
        self.main = self.beside = self.waits = 0
        watch(self.tiers.prompt_fills, "wait", before=self._wait)

    def _wait(self, layer: int) -> None:
        self.waits += layer in self.tiers.prompt_fills._begun

    def step(self, **work: int) -> tuple[int, int, int]:
        """Run a step; return the pages that the step's stream and other streams read, and the waits for them."""
        waits = self.waits
        with counted() as traffic:
            self.engine.step(work, 0.3)
        main, beside = (page_reads(traffic, is_main) // self.tiers.page_bytes for is_main in (True, False))
        self.main, self.beside = self.main + main, self.beside + beside
        return main, beside, self.waits - waits

    def decode_whole_hit(self, name: str, donor: str) -> None:
        """Add a request of which everything but one token is cached, as a decode row."""
        request = self.engine.add(name, HIT * PAGE + 1, shared_with=donor)
        request.prompt = request.tokens


@contextmanager
def traffic(method: str, device: torch.device, **keys: Any) -> Iterator[Traffic]:
    """Yield an engine with a decoding request ``a`` that has more pages than the hits of other requests."""
    made = Traffic(method, device, **keys)
    with late():
        made.engine.add("a", (HIT + 1) * PAGE + 4)
        made.step(a=(HIT + 1) * PAGE + 4)
        made.step(a=1)
        assert (made.main, made.waits) == (0, 0), "a prompt that was computed on the device came back over the bus"
        made.beside = 0
        yield made
    for name in list(made.engine.sequences):
        made.engine.drop(name)
    check_nothing_is_left(made.engine)


def check_hits(device: torch.device, method: str, order: Order) -> None:
    """Serve a hit before two chunks, a hit with a single token to compute as a chunk, and the same as a decode row.

    A decode row waits for its pages within the kernel that stores its token, so the stream waits for no event.
    """
    STREAMS.seed(3, order)
    with traffic(method, device) as made:
        hit = HIT * made.layers
        made.engine.add("b", HIT * PAGE + 6, shared_with="a")
        assert made.step(a=1, b=3) == (0, hit, made.layers)
        assert made.step(b=3, a=1) == (0, 0, 0)
        assert [made.step(a=1, b=1) for _ in range(2)] == [(0, 0, 0)] * 2
        made.engine.drop("b")
        made.engine.add("c", HIT * PAGE + 1, shared_with="a")
        assert made.step(c=1, a=1) == (0, hit, made.layers)
        assert [made.step(a=1, c=1) for _ in range(2)] == [(0, 0, 0)] * 2
        made.engine.drop("c")
        made.decode_whole_hit("d", "a")
        made.engine.add("e", PAGE - 5)
        assert made.step(d=1, e=PAGE - 5, a=1) == (0, hit, 0)
        assert made.step(a=1, d=1, e=1) == (0, 0, 0)
        assert (made.main, made.beside) == (0, 3 * hit)


@pytest.mark.parametrize("order", ["default first", "default last"])
@pytest.mark.parametrize("method", KEEP_PROMPTS)
def test_pages_of_a_prefix_hit_cross_once_and_admission_copies_nothing(
    device: torch.device, method: str, order: Order
) -> None:
    check_hits(device, method, order)


def test_headinfer_streams_a_hit_for_every_chunk_and_no_kernel_of_the_step_copies_pages(device: torch.device) -> None:
    with traffic("headinfer", device) as made:
        decoded = made.step(a=1)[1]
        made.engine.add("b", HIT * PAGE + 6, shared_with="a")
        chunks = [made.step(a=1, b=3), made.step(b=3, a=1)]
        assert chunks == [(0, decoded + HIT * LAYERS, 0), (0, decoded + (HIT + 1) * LAYERS, 0)]
        assert made.step(a=1, b=1) == (0, decoded + HIT * LAYERS, 0)


def test_the_next_layer_s_pages_are_on_their_way_while_a_layer_computes(device: torch.device) -> None:
    with traffic("apex", device) as made:
        events, copy_pages = list[tuple[str, int]](), made.tiers.prompt_fills
        watch(copy_pages, "wait", before=lambda layer: events.append(("wait", layer)))
        watch(copy_pages, "copy", before=lambda layer: layer is not None and events.append(("copy", layer)))
        made.engine.add("b", HIT * PAGE + 6, shared_with="a")
        made.step(a=1, b=6)
    first = {event: events.index(event) for event in events}
    assert all(first["copy", layer + 1] < first["wait", layer] for layer in range(LAYERS - 1))


def arrive(engine: Engine, name: str, chance: random.Random) -> bool:
    """Add a request; return whether it begins behind the pages of another one."""
    donors = [sequence for sequence in engine.sequences.values() if sequence.tokens >= sequence.prompt]
    if not donors or chance.random() < 0.3:
        engine.add(name, chance.randint(1, 8 * PAGE))
        return False
    donor = chance.choice(donors)
    request = engine.add(name, donor.tokens // PAGE * PAGE + chance.choice([1, 1, 5, 20]), shared_with=donor.name)
    if request.tokens == request.prompt - 1 and request.tokens and chance.random() < 0.3:
        request.prompt = request.tokens  # Its last prompt token comes as a decode row.
    return request.tokens > 0


@pytest.mark.parametrize("method", ["apex", "clo", "scout"])
def test_whoever_comes_and_goes_every_answer_is_exact_behind_a_hit(device: torch.device, method: str) -> None:
    """Chunks of any length, aborts and preemptions, hits that fit and hits that do not, in random order of streams."""
    chance, hits = random.Random(1), 0
    made = Traffic(method, device, staging_tokens=2 * PAGE).engine
    with late():
        for step in range(45):
            STREAMS.seed(step)
            if made.sequences and (event := chance.random()) < 0.14:
                change = made.drop if event < 0.08 else made.preempt
                change(chance.choice(list(made.sequences)))
            if len(made.sequences) < ROWS and chance.random() < 0.6:
                hits += arrive(made, f"request {step}", chance)
            work = {
                name: min(chance.randint(1, 50), max(1, request.prompt - request.tokens))
                for name, request in made.sequences.items()
            }
            if work:
                made.step(work, 0.3, 1e-4 if is_dense(made, work) else None)
        for name in list(made.sequences):
            made.drop(name)
    check_nothing_is_left(made)
    assert hits > 1


def test_a_copy_of_a_hit_that_nobody_waits_for_is_found(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PromptFills, "wait", lambda self, layer: self._begun.pop(layer, None))
    with pytest.raises(AssertionError, match="off by"):
        check_hits(device, "clo", "default first")
    STREAMS.finish()
