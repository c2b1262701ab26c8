"""Context caches: each head's tokens in order, memory only where tokens are, and nothing of a request that is gone."""

from __future__ import annotations

import mmap
import random

import pytest
import torch

from hybrid_backend.errors import ConfigError
from hybrid_backend.kernels.kv_format import KvFormat
from hybrid_backend.tiers import context_cache
from hybrid_backend.tiers.context_cache import ContextCache

LAYERS, REQUESTS, PAGES, HEADS, PAGE, HOST_PAGES = (1, 4), 3, 200, 2, 16, 256


def host_layers(dim: int, dtype: torch.dtype = torch.float32) -> dict[int, torch.Tensor]:
    rng, kv = torch.Generator().manual_seed(dim), KvFormat(HEADS, PAGE, dim, dtype)
    layers = {layer: torch.zeros(kv.shape(HOST_PAGES), dtype=dtype) for layer in LAYERS}
    where = torch.arange(HOST_PAGES * PAGE)
    for layer in layers.values():
        k, v = torch.randn(2, len(where), HEADS, dim, generator=rng)
        kv.write(layer, where // PAGE, where % PAGE, k, v)
    return layers


def token_of(layer: torch.Tensor, page: int, head: int, offset: int) -> torch.Tensor:
    """Return K and V ``[2, head_dim]`` of a token in a page, decoded."""
    return torch.stack(KvFormat.of(layer).decode(layer[page, head]))[:, offset]


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
@pytest.mark.parametrize("dim", [24, 64])  # a page of 24 channels is no multiple of the system's page
def test_lists_hold_what_each_head_kept_whatever_the_others_do(dim: int, dtype: torch.dtype) -> None:
    """Tokens in 8 bits take their scales with them."""
    chance, rng = random.Random(dim), torch.Generator().manual_seed(dim)
    host = host_layers(dim, dtype)
    cache = ContextCache(host, REQUESTS, PAGES)
    expected: dict[tuple[int, int, int], list[tuple[int, torch.Tensor]]] = {}
    reached = [0] * REQUESTS  # pages of each sequence
    for _ in range(30):
        request = chance.randrange(REQUESTS)
        if chance.random() < 0.15 or reached[request] > PAGES - 75:
            cache.release(request)
            reached[request] = 0
            for key in [key for key in expected if key[1] == request]:
                del expected[key]
        else:
            first, count = reached[request] + chance.randrange(2), chance.choice([0, 1, 1, 70])  # 70: more than a piece
            reached[request] = first + count
            keep = torch.rand(len(LAYERS), HEADS, count * PAGE, generator=rng) < chance.choice([0.1, 0.9])
            pages = torch.randint(HOST_PAGES, (count,), generator=rng)
            cache.add(request, first * PAGE, keep, pages)
            for row, head, token in keep.nonzero().tolist():
                kv = token_of(host[LAYERS[row]], int(pages[token // PAGE]), head, token % PAGE)
                expected.setdefault((LAYERS[row], request, head), []).append((first * PAGE + token, kv))
        layer, asked = chance.choice(LAYERS), chance.sample(range(REQUESTS), 2)
        ids, valid = cache.lists(layer, asked)
        for row, request in enumerate(asked):
            for head in range(HEADS):
                tokens = expected.get((layer, request, head), [])
                assert cache.positions(layer, request)[head].tolist() == [position for position, _ in tokens]
                assert int(cache.tokens[cache.row[layer], request, head]) == int(valid[row, head].sum()) == len(tokens)
                listed = [
                    token_of(cache.stores[layer], page, head, token)
                    for page, count in zip(ids[row, head].tolist(), valid[row, head].tolist(), strict=True)
                    for token in range(count)
                ]
                for found, (_, kv) in zip(listed, tokens, strict=True):
                    assert torch.equal(found, kv)


def test_memory_is_that_of_the_pages_that_lists_reached() -> None:
    """Of the process, too: what was reserved takes none before it is written, nor after it is given back."""
    host = {0: torch.ones(HOST_PAGES, HEADS, 2, PAGE, 64)}
    page = host[0][0].nbytes
    cache, before = ContextCache(host, 1000, 10000), resident_bytes()
    assert cache.stores[0].nbytes > 2**37 and cache.nbytes == 0
    cache.add(7, 0, torch.ones(1, HEADS, 200 * PAGE, dtype=torch.bool), torch.arange(200))
    keep = torch.zeros(1, HEADS, 2 * PAGE, dtype=torch.bool)
    keep[:, 1, : PAGE + 1] = True  # a head that keeps nothing takes nothing
    cache.add(9, 0, keep, torch.arange(2))
    assert cache.nbytes == 200 * page + 2 * page // HEADS
    held = resident_bytes() - before
    assert held >= 200 * page
    cache.release(7)
    cache.release(9)
    assert cache.nbytes == 0
    assert resident_bytes() - before < held - 150 * page


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE


def test_address_space_that_is_refused_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(context_cache.mmap, "mmap", refuse)
    with pytest.raises(ConfigError, match=r"^method: hgca reserves .*vm\.overcommit_memory") as told:
        ContextCache(host_layers(16), REQUESTS, PAGES)
    assert "\n" not in str(told.value)
