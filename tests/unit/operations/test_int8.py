"""Contract of the operations on pages in 8 bits (`KvFormat`), of the oracle and of the native kernels."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from hybrid_backend.kernels import cpu, oracle
from hybrid_backend.kernels.digest_format import CODES, MINMAX, MINMAX_INT8
from hybrid_backend.kernels.kv_format import KvFormat
from hybrid_backend.kernels.operations import Operations
from tests.unit.implementations import over_implementations
from tests.unit.operations.cases import DTYPES, SEEDS, ints, same_bits, shuffled

ERROR = 2e-4
"""Largest error of attention over pages in 8 bits, of outputs whose values are about 1, against fp64 over the decoded
pages: kernels of VNNI keep 16 bits of queries and of weights. Measured: up to 1.2e-4."""
TRITON_ERROR = {torch.float32: 1e-5, torch.float16: 1.5e-3, torch.bfloat16: 1.2e-2}
"""The same of Triton's kernels, which round weights to the queries' type. Measured: 1.6e-6, 9.1e-4, 7.7e-3."""
LSE_ERROR = 1e-5
"""Largest error of their log-sum-exp, which takes fp32 alone. Measured: 2.2e-6."""
SHAPES = [(1, 4, 64, 16), (2, 3, 80, 32), (2, 8, 128, 64), (1, 1, 256, 16), (1, 2, 512, 16)]
"""KV heads, query heads of each, head_dim, page_size."""


def filled(kv: KvFormat, pages: int, dtype: torch.dtype, rng: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Return pages full of random tokens, and the keys and values of these ``[tokens, kv_heads, head_dim]``."""
    layer = torch.randint(-128, 128, kv.shape(pages), generator=rng, dtype=torch.int8)
    where = torch.arange(pages * kv.page_size)
    k, v = torch.randn(2, len(where), kv.kv_heads, kv.head_dim, generator=rng).to(dtype)
    kv.write(layer, where // kv.page_size, where % kv.page_size, k, v)
    return layer, k, v


def errors(operations: Operations, dtype: torch.dtype, peak: float = 1.0) -> tuple[float, float]:
    """Return the largest errors of outputs and of log-sum-exp of an implementation; ``peak`` is the queries' size."""
    is_triton = getattr(operations, "__name__", "triton").startswith("hybrid_backend.kernels.triton")
    return (TRITON_ERROR[dtype], LSE_ERROR) if is_triton else (ERROR * peak, ERROR * peak)


def attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """fp64 attention of ``q`` ``[n, heads, dim]`` over ``[tokens, kv_heads, dim]``, where ``seen`` ``[n, tokens]``."""
    grouped = q.double().unflatten(1, (k.shape[1], -1))
    logits = torch.einsum("nhgd,thd->nhgt", grouped, k.double()) * scale
    logits = logits.masked_fill(~seen[:, None, None], float("-inf"))
    out = torch.einsum("nhgt,thd->nhgd", logits.softmax(-1).nan_to_num(0.0), v.double())
    return out.flatten(1, 2), logits.logsumexp(-1).flatten(1, 2)


@over_implementations(
    seed=SEEDS,
    dtype=DTYPES,
    shape=st.sampled_from(SHAPES),
    rows=st.integers(0, 5),
    digest=st.sampled_from([None, MINMAX, MINMAX_INT8, CODES]),
)
def test_new_tokens_are_quantised_into_page_and_frame_and_digests_are_of_what_is_stored(
    operations: Operations, seed: int, dtype: torch.dtype, shape: tuple[int, ...], rows: int, digest: Any
) -> None:
    chance, rng = random.Random(seed), torch.Generator().manual_seed(seed)
    kv_heads, _, dim, size = shape
    kv = KvFormat(kv_heads, size, dim, torch.int8)
    (host, *_), (frames, *_) = (filled(kv, count, dtype, rng) for count in (8, 7))
    k, v = torch.randn(rows, 3, kv_heads, dim, generator=rng).to(dtype).unbind(1)[1:]
    pages, requests = shuffled(8, chance)[:rows], shuffled(6, chance)[:rows]
    positions = [chance.choice([size - 1, 0, chance.randrange(size)]) for _ in range(rows)]
    frame_of = torch.tensor([[chance.choice([-1, frame])] for frame in range(6)], dtype=torch.int32)
    for row in range(rows):
        frames[frame_of[requests[row], 0]] = host[pages[row]]  # of -1 a frame that is not used
    digests = None
    if digest is not None:
        digests = torch.zeros(digest.shape(8, kv_heads, dim), dtype=digest.dtype(dtype))
        operations.build_digests(host, digests, ints(range(8)), ints([size] * 8))
    expected = [host.clone(), frames.clone()]
    offsets = torch.tensor(positions, dtype=torch.int64)
    kv.write(expected[0], torch.tensor(pages, dtype=torch.int64), offsets, k, v)
    for row in range(rows):
        if (frame := int(frame_of[requests[row], 0])) >= 0:
            kv.write(expected[1], torch.tensor([frame]), offsets[row : row + 1], k[row : row + 1], v[row : row + 1])
    operations.append_tokens(k, v, host, ints(pages), ints(positions), frames, ints(requests), frame_of, digests)
    assert torch.equal(host, expected[0]) and torch.equal(frames, expected[1])
    whole = [page for page, position in zip(pages, positions, strict=True) if position == size - 1]
    if digests is not None and digest is not MINMAX and whole:
        again = torch.zeros_like(digests)
        operations.build_digests(host, again, ints(whole), ints([size] * len(whole)))
        assert same_bits(digests[whole], again[whole])
    if digests is not None and digest is MINMAX:
        for row, page in enumerate(pages):
            if positions[row] == 0:
                assert torch.equal(digests[page, :, 0], kv.stored(k[row])) and same_bits(*digests[page].unbind(1))


@over_implementations(
    names=["native", "triton"],
    seed=SEEDS,
    dtype=DTYPES,
    shape=st.sampled_from(SHAPES),
    digest=st.sampled_from([MINMAX, MINMAX_INT8, CODES]),
)
def test_digests_built_from_pages_are_the_oracle_s(
    operations: Operations, seed: int, dtype: torch.dtype, shape: tuple[int, ...], digest: Any
) -> None:
    rng = torch.Generator().manual_seed(seed)
    kv_heads, _, dim, size = shape
    kv = KvFormat(kv_heads, size, dim, torch.int8)
    host, *_ = filled(kv, 5, dtype, rng)
    counts = [size, 3, size, 1, 0]
    found, expected = (torch.zeros(digest.shape(5, kv_heads, dim), dtype=digest.dtype(dtype)) for _ in range(2))
    for module, store in ((operations, found), (oracle, expected)):
        module.build_digests(host, store, ints(range(5)), ints(counts))  # type: ignore[attr-defined]
    if digest is MINMAX:
        assert same_bits(found, expected)
    else:  # a rounding of a byte, or of a code's spread, may differ
        assert (found.float() - expected.float()).abs().gt(1).float().mean() < 0.01


@over_implementations(
    seed=SEEDS,
    dtype=DTYPES,
    shape=st.sampled_from(SHAPES),
    rows=st.integers(1, 3),
    per_head=st.booleans(),
    peak=st.sampled_from([1.0, 4.0]),
)
def test_attention_over_pages_is_that_over_what_they_decode_to(
    operations: Operations, seed: int, dtype: torch.dtype, shape: tuple[int, ...], rows: int, per_head: bool,
    peak: float,
) -> None:  # fmt: skip
    chance, rng = random.Random(seed), torch.Generator().manual_seed(seed)
    kv_heads, group, dim, size = shape
    kv = KvFormat(kv_heads, size, dim, torch.int8)
    layer, *_ = filled(kv, 6, dtype, rng)
    lists, scale = kv_heads if per_head else 1, dim**-0.5
    q = (peak * torch.randn(rows, kv_heads * group, dim, generator=rng)).to(dtype)
    ids = torch.tensor([[shuffled(6, chance)[:4] for _ in range(lists)] for _ in range(rows)], dtype=torch.int32)
    tokens = torch.tensor([[chance.randint(0, 4 * size) for _ in range(lists)] for _ in range(rows)])
    out, lse = operations.paged_partial(q, layer, ids, tokens.int(), scale)
    keys, values = kv.decode(layer)
    for row in range(rows):
        for head in range(kv_heads):
            listed = ids[row, min(head, lists - 1)].long()
            k, v = (x[listed, head].flatten(0, 1)[:, None] for x in (keys, values))
            seen = (torch.arange(len(k)) < tokens[row, min(head, lists - 1)])[None]
            heads = slice(head * group, (head + 1) * group)
            expected, total = attention(q[row : row + 1, heads], k, v, seen, scale)
            out_error, lse_error = errors(operations, dtype, peak)
            assert (out[row, heads, 0].double() - expected[0]).abs().max() < out_error
            near = (lse[row, heads, 0].double() - total[0]).abs()
            assert (near[total[0].isfinite()] < lse_error).all() and lse[row, heads, 0][
                ~total[0].isfinite()
            ].isinf().all()


@pytest.mark.skipif(not cpu.available(), reason=str(cpu.why_unavailable()))
@pytest.mark.parametrize("isa", cpu.isas() if cpu.available() else [])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_instruction_set_attends_pages_in_8_bits(isa: str, shape: tuple[int, ...]) -> None:
    kv_heads, group, dim, size = shape
    rng, scale = torch.Generator().manual_seed(3), dim**-0.5
    kv = KvFormat(kv_heads, size, dim, torch.int8)
    layer, *_ = filled(kv, 5, torch.bfloat16, rng)
    q = torch.randn(2, kv_heads * group, dim, generator=rng).bfloat16()
    ids, valid = torch.tensor([[[3, 0, 4]], [[1, 2, 0]]]), torch.tensor([[[size, size, 5]], [[size, 1, 0]]])
    out, lse = cpu.partial(q, layer, ids, valid, scale, isa=isa)
    keys, values = kv.decode(layer)
    for row in range(2):
        seen = (torch.arange(size) < valid[row, 0, :, None]).flatten()[None]
        k, v = (x[ids[row, 0]].transpose(1, 2).flatten(0, 1) for x in (keys, values))
        expected, total = attention(q[row : row + 1], k, v.nan_to_num(0.0), seen, scale)
        assert (out[row].double() - expected[0]).abs().max() < ERROR
        assert (lse[row].double() - total[0]).abs().max() < ERROR


@over_implementations(
    names=["native"],
    share=0.5,
    seed=SEEDS,
    dtype=DTYPES,
    shape=st.sampled_from(SHAPES),
    tokens=st.integers(1, 70),
    window=st.sampled_from([None, 20]),
    as_computed=st.booleans(),
)
def test_a_prompt_chunk_attends_itself_as_computed_and_earlier_tokens_as_stored(
    operations: Any, seed: int, dtype: torch.dtype, shape: tuple[int, ...], tokens: int, window: int | None,
    as_computed: bool,
) -> None:  # fmt: skip
    chance, rng = random.Random(seed), torch.Generator().manual_seed(seed)
    kv_heads, group, dim, size = shape
    kv = KvFormat(kv_heads, size, dim, torch.int8)
    layer, k, v = filled(kv, 6, dtype, rng)
    pages, seq_len = shuffled(6, chance), chance.randint(tokens, 6 * size)
    order = torch.cat([torch.arange(size) + size * page for page in pages])[:seq_len]
    q = torch.randn(tokens, kv_heads * group, dim, generator=rng).to(dtype)
    new = (k[order[-tokens:]], v[order[-tokens:]]) if as_computed else None
    out = torch.empty_like(q)
    operations.attend_prompt(q, layer, ints(pages), seq_len, dim**-0.5, window, None, out, new=new)
    keys, values = (x.transpose(1, 2).flatten(0, 1)[order].clone() for x in kv.decode(layer))
    if new is not None:
        keys[-tokens:], values[-tokens:] = new[0].float(), new[1].float()
    position = torch.arange(seq_len - tokens, seq_len)[:, None]
    seen = torch.arange(seq_len) <= position
    if window is not None:
        seen &= torch.arange(seq_len) > position - window
    expected, _ = attention(q, keys, values, seen, dim**-0.5)
    limit = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    assert (out.double() - expected).abs().max() < limit * expected.abs().max()


@over_implementations(seed=SEEDS, dtype=DTYPES, shape=st.sampled_from(SHAPES[:3]), largest=st.booleans())
def test_shares_of_tokens_are_those_of_decoded_keys(
    operations: Operations, seed: int, dtype: torch.dtype, shape: tuple[int, ...], largest: bool
) -> None:
    rng = torch.Generator().manual_seed(seed)
    kv_heads, group, dim, size = shape
    kv = KvFormat(kv_heads, size, dim, torch.int8)
    layer, *_ = filled(kv, 4, dtype, rng)
    q = torch.randn(1, kv_heads * group, dim, generator=rng).to(dtype)
    ids, tokens = ints([[[2, 0, 3]]]), ints([2 * size + 3])
    _, lse = operations.paged_partial(q, layer, ids, tokens[:, None], dim**-0.5)
    average = torch.rand(4, kv_heads, size, generator=rng)
    before = average.clone()
    operations.page_weights(
        q, layer, ids, ids, tokens[:, None], lse[..., 0].contiguous(), average, dim**-0.5, 0.5, largest
    )
    keys, _ = kv.decode(layer)
    k = keys[[2, 0, 3]].transpose(1, 2).flatten(0, 1)[: int(tokens)]
    logits = torch.einsum("hgd,thd->hgt", q[0].double().unflatten(0, (kv_heads, -1)), k.double()) * dim**-0.5
    shares = logits.softmax(-1)
    shares = shares.amax(1) if largest else shares.mean(1)
    found = average[[2, 0, 3]].transpose(1, 2).flatten(0, 1)[: int(tokens)]
    kept = before[[2, 0, 3]].transpose(1, 2).flatten(0, 1)[: int(tokens)]
    assert (found.double() - (0.5 * kept.double() + 0.5 * shares.T)).abs().max() < ERROR
