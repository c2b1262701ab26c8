"""Decode rows whose pages are on the host alone when they begin: the pages cross beside the step, and the kernel that
stores the row's token waits for them (`AwaitedPages`), in a CUDA graph as well."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="Triton has no wheel for this platform")

from hybrid_backend.errors import DeadlineError
from tests.slow import test_whole_graph
from tests.slow.test_prefix_traffic import HIT, KEEP_PROMPTS, Traffic, traffic
from tests.slow.test_traffic import counted, page_reads
from tests.support.far_device import late
from tests.support.gpu import ON_GPU
from tests.support.harness import PAGE, decode_step, watch
from tests.support.streams import STREAMS, Event, Order
from tests.support.tiny_engine import random_prompt

on_simulated_gpu = pytest.mark.skipif(ON_GPU, reason="a GPU does not say what a kernel reads over the bus")
ORDERS: tuple[Order, ...] = ("default first", "default last")


def check_whole_hits(device: torch.device, method: str, order: Order) -> None:
    """Serve two requests of which everything but one token is cached: whole pages, then a page that goes on."""
    with traffic(method, device) as made:
        STREAMS.seed(1, order)
        made.decode_whole_hit("b", "a")
        assert made.step(a=1, b=1) == (0, HIT * made.layers, 0)
        assert [made.step(a=1, b=1)[0] for _ in range(2)] == [0, 0]
        assert made.beside == HIT * made.layers, "a page crossed twice"
        made.engine.runtime.release(["b"])  # Another server has decoded it until now.
        made.beside = 0
        assert made.step(b=1, a=1)[0] == 0
        assert [made.step(a=1, b=1)[0] for _ in range(2)] == [0, 0]
        assert made.beside == (HIT + 1) * made.layers, "a page crossed twice"


@on_simulated_gpu
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("method", KEEP_PROMPTS)
def test_a_row_that_begins_with_its_pages_on_the_host_copies_nothing_in_the_step_s_stream(
    device: torch.device, method: str, order: Order
) -> None:
    check_whole_hits(device, method, order)


@on_simulated_gpu
def test_the_window_of_a_sequence_that_is_longer_than_its_frames_crosses_beside_the_step(device: torch.device) -> None:
    with traffic("hgca", device, hgca={"window_tokens": 2 * PAGE}) as made:
        made.decode_whole_hit("b", "a")
        main, beside, waits = made.step(a=1, b=1)
        assert (main, waits) == (0, 0) and 0 < beside < HIT * made.layers
        assert made.step(b=1, a=1) == (0, 0, 0)


@on_simulated_gpu
def test_a_request_that_comes_back_from_the_cpu_crosses_beside_the_step(device: torch.device) -> None:
    apex = {"strategy": "lockstep", "hardware": "a10", "device_tokens": 8 * PAGE}
    with traffic("apex", device, apex=apex) as made:
        made.engine.add("b", 3 * PAGE + 2)
        made.step(a=1, b=3 * PAGE + 2)
        made.step(a=1, b=1)
        assert made.engine.runtime.gauges()["hybrid_resident_requests"] == 1, "b is on the CPU"
        made.engine.drop("a")
        made.beside = 0
        assert made.step(b=1) == (0, 4 * made.layers, 0)
        assert made.step(b=1) == (0, 0, 0)
        assert made.engine.runtime.gauges()["hybrid_moved_requests"] == 1


@on_simulated_gpu
def test_sinks_and_window_of_headinfer_cross_beside_the_first_decode_step(device: torch.device) -> None:
    """Its prompts attend head by head through the staging buffers, and leave nothing in frames."""
    heads = {"group_thresholds": [16 * PAGE], "window_heads": ["1:0"], "window_tokens": PAGE}
    made = Traffic("headinfer", device, headinfer=heads)
    with late():
        made.engine.add("a", (HIT + 1) * PAGE + 4)
        assert made.step(a=(HIT + 1) * PAGE + 4)[0] == 0
        reads = list[tuple[int, int]]()
        for _ in range(2):
            with counted() as found:
                made.engine.step({"a": 1}, tolerance=None)
            reads.append((page_reads(found, True), page_reads(found, False)))
    (main, first), (later_main, later) = reads
    assert main == later_main == 0 and first - later == 3 * made.layers * made.tiers.page_bytes


@on_simulated_gpu
def test_more_rows_than_processors_may_wait_wait_before_the_step(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rows are four programs, and the simulated GPU has four processors, one of which must stay free."""
    waited = list[Event]()
    wait = Event.wait
    monkeypatch.setattr(Event, "wait", lambda self, stream=None: (waited.append(self), wait(self, stream))[1])
    with traffic("clo", device) as made:
        fills = decode_step(made.engine).buffers.awaited_fills
        for names, is_waited in (("b", False), ("cd", True)):
            for name in names:
                made.decode_whole_hit(name, "a")
            assert made.step(**dict.fromkeys(names, 1)) == (0, len(names) * HIT * made.layers, 0)
            assert {fills._begun[made.tiers.frames.index(name)][1] in waited for name in names} == {is_waited}
            made.engine.drop(names[0])


@on_simulated_gpu
def test_pages_that_never_arrive_end_their_row_s_step_with_an_error_and_no_other_row_s(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    with traffic("scout", device, workers={"threads": 1, "deadline_seconds": 0.2}) as made:
        fills = decode_step(made.engine).buffers.awaited_fills
        with monkeypatch.context() as patch:
            patch.setattr(fills, "_signal", SimpleNamespace(arrive=lambda *_: None))
            made.decode_whole_hit("b", "a")
            made.engine.step({"a": 1, "b": 1}, tolerance=None)
        failure = made.engine.runtime.failure(made.engine.ran)
        assert failure is not None and isinstance(failure.error, DeadlineError)
        assert failure.request_ids == ["b"] and len(failure.pages) == 1
        assert str(failure.error) == "the pages of b were not copied to the GPU within workers.deadline_seconds=0.2"
        assert fills._state.awaited.time_left.tolist() == [0], "all layers together wait no longer"
        made.engine.drop("b")
        made.decode_whole_hit("c", "a")
        assert made.step(a=1, c=1) == (0, HIT * made.layers, 0)
        assert made.engine.runtime.failure(made.engine.ran) is None


@pytest.mark.parametrize("is_told", [True, False])
@pytest.mark.parametrize("method", ["apex", "clo", "scout"])
def test_an_abort_between_the_copies_and_their_step_leaves_nothing(
    device: torch.device, method: str, is_told: bool
) -> None:
    """The next request gets the frames of the aborted one, whose copies are not done yet."""
    with traffic(method, device) as made:
        STREAMS.seed(1, "default first")
        made.decode_whole_hit("b", "a")
        made.engine.begin_and_die("b", is_told)
        made.engine.drop("b")
        made.engine.add("c", HIT * PAGE + 3)
        made.step(c=HIT * PAGE + 3)
        made.step(a=1, c=1)


def test_a_step_that_dies_is_computed_again_with_the_pages_that_it_began_to_copy(device: torch.device) -> None:
    with traffic("clo", device) as made:
        made.decode_whole_hit("b", "a")
        made.engine.begin_and_die("b", is_told=True)
        assert [made.step(a=1, b=1) for _ in range(2)] == [(0, 0, 0)] * 2, "a page crossed again"


@pytest.mark.parametrize("name", ["scout", "hgca", "clo"])
def test_a_replayed_graph_waits_for_the_pages_of_a_request_that_comes_from_another_server(
    device: torch.device, name: str
) -> None:
    """Its frames are taken away between two steps, so that all of its pages cross again, the begun one among them."""
    made = test_whole_graph.engine(device, test_whole_graph.EXACT[name])
    copied, fills = list[int](), made.executor.buffers.awaited_fills
    watch(fills, "add", before=lambda layer, *_: copied.append(layer))
    with late():
        for request, length in (("a", PAGE + 5), ("b", 2 * PAGE + 9)):
            made.add(request, random_prompt(length))
        made.advance(3)
        assert not copied
        for order in ORDERS:
            STREAMS.seed(1, order)
            made.runtime.release(["a", "b"] if order == "default last" else ["b"])
            made.advance(2)
        made.check_answers()
    assert len(copied) == 3 * len(made.runtime.tiers.frames.layers) and not made.failed
    for request in ("a", "b"):
        made.drop(request)


@on_simulated_gpu
@pytest.mark.parametrize("method", ["apex", "hgca"])
def test_a_row_that_does_not_wait_for_its_pages_is_found(device: torch.device, method: str) -> None:
    with pytest.raises(AssertionError, match="off by"), traffic(method, device) as made:
        layers = decode_step(made.engine).buffers.layers
        layers |= {layer: buffers._replace(awaited=None) for layer, buffers in layers.items()}
        made.decode_whole_hit("b", "a")
        STREAMS.seed(1, "default first")
        made.step(a=1, b=1)
    STREAMS.finish()
