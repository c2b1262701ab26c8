"""Prompts' tokens that cross to the host pool beside the step, on a device whose streams go on in any order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton has no wheel for this platform")

from hybrid_backend.tiers.host_pool import HostPool
from hybrid_backend.tiers.write_back import WriteBack
from tests.support.far_device import late, views
from tests.support.gpu import ON_GPU
from tests.support.harness import PAGE, Engine, config, spec
from tests.support.streams import STREAMS, Order

KEYS: dict[str, dict[str, Any]] = {
    "scout": {"frames_per_request": 6, "exact_layers": [0]},
    "dense": {"method": "dense", "staging_tokens": 2 * PAGE},
}


def shares_what_is_being_written(engine: Engine) -> None:
    """``b`` begins with pages of ``a`` that are computed in the same step, as vLLM schedules it."""
    engine.add("a", 2 * PAGE + 3)
    engine.add("b", 2 * PAGE + 7)
    a, b = engine.sequences["a"], engine.sequences["b"]
    a.pages = [engine.free.pop() for _ in range(3)]
    b.pages, b.tokens = a.pages[:2], 2 * PAGE
    for page in a.pages:
        engine.refs[page] = 1 + (page in b.pages)


def check(
    device: torch.device, name: str, seed: int, steps: int = 7, order: Order | None = None, layers: int = 3
) -> None:
    """Chunks that end anywhere in a page, beside decoding rows, against the same on a CPU by native kernels."""
    keys, shape = {"metrics": {"sample_interval": 1}, **KEYS[name]}, spec(layers)  # both draw as many predictions
    far = Engine(config(**keys), shape, num_pages=64, max_requests=4, device=device)
    near = Engine(config(**keys, device_kernels="native"), shape, num_pages=64, max_requests=4)
    work: list[dict[str, int]] = [{"a": 2 * PAGE + 3, "b": 7}, {"c": 21}, {"c": 40, "a": 1}, {"c": 19, "b": 1}]
    work += [{"a": 1, "b": 1, "c": 1}, {"d": 30}, {"d": 1, "a": 1}]
    STREAMS.seed(seed, order)
    for each in (far, near):
        shares_what_is_being_written(each)
        each.add("c", 80)
        each.add("d", 30)
    with late():
        for step, counts in enumerate(work[:steps]):
            found, expected = (each.step(counts, tolerance=None) for each in (far, near))
            for request in counts:
                error = (found[request] - expected[request]).abs().max()
                assert error < 1e-4, f"request {request} in step {step} is off by {error}"
    if steps < len(work):
        return
    used = sorted({page for each in far.sequences.values() for page in each.pages[:-1]})
    for layer in range(layers):
        assert torch.equal(far.kv[layer][used], near.kv[layer][used])


@pytest.mark.parametrize("name", KEYS)
def test_whoever_reads_a_page_finds_the_prompts_tokens_in_it(device: torch.device, name: str) -> None:
    orders: tuple[Order, ...] = ("default first", "default last", "random")
    for seed, order in enumerate(orders):
        check(device, name, seed, order=order)


@pytest.mark.skipif(ON_GPU, reason="a GPU's streams go on as they like")
def test_a_reader_that_does_not_wait_is_found(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WriteBack, "join", lambda self: None)
    with pytest.raises(AssertionError, match="request"):
        for seed in range(16):  # of the last layer's streams either may go on first
            check(device, "scout", seed, 1, "default first", layers=2)
    STREAMS.finish()


def test_what_is_written_is_what_the_step_had_whatever_becomes_of_its_memory(device: torch.device) -> None:
    """The engine overwrites a layer's K and V before they have crossed; of three layers one may wait for the first."""
    from hybrid_backend.kernels.triton import operations

    pools = [torch.zeros(4, 2, 2, PAGE, 16) for _ in range(3)]
    seen = views(pools)
    back = WriteBack(HostPool(pools, seen), operations, device)  # type: ignore[arg-type]
    new = torch.randn(3, 2, 20, 2, 16)
    pages, offsets = torch.tensor([2] * PAGE + [1] * 4).int().to(device), torch.arange(20).to(device) % PAGE
    STREAMS.seed(0, "default first")
    kept: list[tuple[Tensor, Tensor]] = []
    with late():
        memory = torch.zeros(2, 20, 2, 16, device=device)
        for layer in range(3):
            memory.copy_(new[layer])
            kept.append(back.store(layer, *memory, pages, offsets))
            memory.fill_(99.0)
        back.join()
    for layer, (k, v) in enumerate(kept):
        assert torch.equal(torch.stack([k.cpu(), v.cpu()]), new[layer])
        for half in range(2):
            tokens = pools[layer][[2, 1], :, half].transpose(1, 2).flatten(0, 1)[:20]
            assert torch.equal(tokens, new[layer, half])
