"""Sizes that `KvFormat` and `DigestFormat` name, against the tensors that a runtime allocates."""

from __future__ import annotations

import pytest
import torch

from hybrid_backend.kernels.kv_format import KvFormat
from hybrid_backend.tiers import Tiers
from tests.support.harness import PAGE, Engine, config, spec

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def tiers_of(dtype: torch.dtype, **keys: object) -> Tiers:
    return Engine(config(**keys), spec(dtype=dtype), num_pages=40, max_requests=3).runtime.tiers


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pools_frames_and_buffers_take_the_bytes_that_the_format_names(dtype: torch.dtype) -> None:
    tiers, kv = tiers_of(dtype, exact_layers=[1], whole_layers=[1]), spec(dtype=dtype).kv_format(PAGE)
    assert [layer.nbytes for layer in tiers.host.layers] == [40 * kv.page_bytes] * 3
    assert {layer: frames.nbytes for layer, frames in tiers.frames.layers.items()} == {
        layer: 3 * 6 * kv.page_bytes for layer in (0, 2)
    }
    assert tiers.whole.nbytes == 40 * kv.page_bytes
    assert tiers.stream is not None
    assert tiers.stream.nbytes == 2 * tiers.stream.capacity * kv.with_heads(1).page_bytes
    assert kv.page_bytes == PAGE * kv.token_bytes == 2 * kv.with_heads(1).page_bytes
    assert all(KvFormat.of(layer) == kv for layer in (*tiers.host.layers, *tiers.frames.layers.values()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("method", ["quest", "scout"])
@pytest.mark.parametrize("digest", ["auto", "minmax", "minmax_int8", "codes"])
def test_digests_take_the_bytes_that_their_format_names(method: str, digest: str, dtype: torch.dtype) -> None:
    tiers = tiers_of(dtype, method=method, selection={"digest": digest})
    assert tiers.digests is not None and tiers.layout.digests is not None
    assert tiers.digests.nbytes == 3 * 40 * tiers.layout.digests.page_bytes(dtype, 2, 16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_decoded_pages_hold_the_tokens_that_were_encoded(dtype: torch.dtype) -> None:
    kv = KvFormat(kv_heads=2, page_size=16, head_dim=32, dtype=dtype)
    k, v = torch.randn(2, 16, 2, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    page = torch.empty(kv.shape(1), dtype=kv.dtype)
    kv.write(page, torch.zeros(16, dtype=torch.int64), torch.arange(16), k, v)
    keys, values = kv.decode(page[0])
    assert torch.equal(keys, k.transpose(0, 1).float()) and torch.equal(values, v.transpose(0, 1).float())


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pages_in_8_bits_are_off_by_half_a_step_of_their_token_s_scale(dtype: torch.dtype, size: float) -> None:
    """One byte for a number, two for a scale, contiguous; a token of zeros stays zero."""
    kv = KvFormat(kv_heads=2, page_size=16, head_dim=32, dtype=torch.int8)
    assert kv.page_bytes == 2 * 2 * 16 * (32 + 2) and kv.is_int8
    pages = torch.full(kv.shape(3), 77, dtype=torch.int8)
    assert KvFormat.of(pages) == kv
    k, v = (size * torch.randn(2, 20, 2, 32, generator=torch.Generator().manual_seed(0))).to(dtype)
    v[7] = 0
    where, offsets = torch.tensor([2] * 16 + [0] * 4), torch.tensor([*torch.randperm(16), *range(4)])
    kv.write(pages, where, offsets, k, v)
    keys, values = (x[where, :, offsets] for x in kv.decode(pages))
    for found, given in ((keys, k.float()), (values, v.float())):
        step = given.abs().amax(-1, keepdim=True) / 127
        assert ((found - given).abs() <= 0.501 * step + 6e-8).all()  # a scale is rounded up to fp16
        assert torch.equal(kv.stored(given.to(dtype)), found.to(dtype))
    assert not values[7].any() and (pages[1] == 77).all()


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), 3e38])
def test_a_number_that_8_bits_cannot_hold_makes_its_token_nan_and_no_other(odd: float) -> None:
    kv = KvFormat(kv_heads=1, page_size=16, head_dim=16, dtype=torch.int8)
    k = torch.ones(2, 1, 16)
    k[0, 0, 3] = odd
    pages = torch.zeros(kv.shape(1), dtype=torch.int8)
    kv.write(pages, torch.zeros(2, dtype=torch.int64), torch.arange(2), k, torch.ones(2, 1, 16))
    keys, values = kv.decode(pages)
    assert keys[0, 0, 0].isnan().all() and (keys[0, 0, 1] - 1).abs().max() < 0.004
    assert not values[0, 0, :2].isnan().any()


def test_pages_of_another_layout_are_refused() -> None:
    pages = torch.zeros(4, 2, 2, 16, 32)
    for other in (pages.transpose(1, 2), pages[:, :, :1], pages[0]):
        with pytest.raises(ValueError, match=r"expected contiguous \[pages, kv_heads, 2, page_size, head_dim\]"):
            KvFormat.of(other)
