"""What vLLM's own CPU backend wrote is read as ours, and a connector's word reaches the digests."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.support.harness import PAGE, Engine, config, spec

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("page_size", "head_dim"), [(32, 64), (32, 80), (64, 128), (96, 96)])
def test_pages_that_vllms_own_operation_wrote_become_ours(dtype: torch.dtype, page_size: int, head_dim: int) -> None:
    from vllm._custom_ops import cpu_attn_reshape_and_cache
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    from hybrid_backend.engines.vllm.stock_pages import to_ours

    pages, heads, tokens = 70, 3, 66 * page_size  # more pages than are brought over at a time
    k, v = (torch.randn(tokens, heads, head_dim).to(dtype) for _ in range(2))
    blocks = torch.randn(pages, heads, 2 * page_size, head_dim).to(dtype)
    layer, before = (
        blocks.view(pages, heads, 2, page_size, head_dim),
        blocks.clone().view(pages, heads, 2, page_size, -1),
    )
    written = torch.randperm(pages)[:66]
    slots = (written[:, None] * page_size + torch.arange(page_size)).flatten()
    key_cache, value_cache = blocks.chunk(2, dim=2)
    cpu_attn_reshape_and_cache(k, v, key_cache, value_cache, slots, _get_attn_isa(dtype, page_size, head_dim))
    to_ours(layer, written)
    for half, x in enumerate((k, v)):
        assert torch.equal(layer[written, :, half], x.view(66, page_size, heads, head_dim).transpose(1, 2))
    others = torch.tensor(sorted(set(range(pages)) - set(written.tolist())))
    assert torch.equal(layer[others], before[others])


def test_a_session_tells_the_runtime_of_imported_pages() -> None:
    """After it brought them into our layout: their digests are of their keys, the last page's of its tokens so far."""
    from hybrid_backend.engines.vllm.session import Session
    from hybrid_backend.engines.vllm.stock_pages import stock_order

    engine = Engine(config(selection={"digest": "minmax"}), replace(spec(layers=3), head_dim=32))
    session = Session.__new__(Session)  # of an engine that is this test
    session.runtime = engine.runtime
    engine.add("a", 4 * PAGE + 3)
    engine.prefill("a")
    digests = engine.runtime.tiers.digests
    assert digests is not None
    pages = torch.tensor(engine.sequences["a"].pages)
    tokens = torch.tensor([PAGE] * 4 + [3])
    kept = {layer: store[pages].clone() for layer, store in digests.layers.items()}
    computed = [layer[pages].clone() for layer in engine.kv]
    for layer, ours in zip(engine.kv, computed, strict=True):
        order = stock_order(layer.dtype, PAGE, layer.shape[-1])
        as_stock = torch.empty_like(ours.flatten(2))
        as_stock[:, :, order] = ours.flatten(2)
        layer[pages] = as_stock.view_as(ours)
    for store in digests.layers.values():
        store[pages] = 99
    session.imported(pages, tokens)
    assert all(torch.equal(layer[pages], ours) for layer, ours in zip(engine.kv, computed, strict=True))
    assert all(torch.equal(digests.layers[layer][pages], before) for layer, before in kept.items())
