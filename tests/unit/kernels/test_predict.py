"""The kernels of a predicted query, against fp64: on a GPU if there is one, else under Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hybrid_backend.kernels import reference

pytest.importorskip("triton", reason="Triton has no wheel for this platform")

from hybrid_backend.kernels.triton.predict import RmsNorm, Rotation, finished_queries, normed_stream

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ERROR = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}  # of a row, relative
DTYPES, ROWS, EPSILONS = st.sampled_from(list(ERROR)), st.integers(0, 5), st.sampled_from([1e-6, 1e-5, 0.1])
EXAMPLES = settings(max_examples=200 if DEVICE == "cuda" else 40)


@given(
    seed=st.integers(0, 2**31), dtype=DTYPES, rows=ROWS, width=st.sampled_from([64, 96, 576, 1000]),
    epsilon=EPSILONS, adds_one=st.booleans(), with_residual=st.booleans(), stride=st.sampled_from([0, 5]),
)  # fmt: skip
@EXAMPLES
def test_the_stream_is_summed_rounded_and_normed(
    seed: int, dtype: torch.dtype, rows: int, width: int, epsilon: float, adds_one: bool, with_residual: bool,
    stride: int,
) -> None:  # fmt: skip
    rng = torch.Generator().manual_seed(seed)
    hidden, residual = 3 * torch.randn(2, rows, width + stride, generator=rng).to(dtype)[..., :width]
    weight = torch.randn(width, generator=rng).to(dtype)
    norm = RmsNorm(weight.to(DEVICE), epsilon, adds_one)
    found = normed_stream(hidden.to(DEVICE), residual.to(DEVICE) if with_residual else None, norm)
    stream = (hidden + residual if with_residual else hidden).double()
    assert found.dtype == dtype and found.is_contiguous()
    assert_rows(found, reference.rms_norm(stream, weight.double() + adds_one, epsilon) if rows else stream)


@given(
    seed=st.integers(0, 2**31), dtype=DTYPES, rows=ROWS, heads=st.sampled_from([1, 3, 4, 9]),
    dim=st.sampled_from([64, 80, 96, 128, 256]), norm_of=st.sampled_from(["none", "head", "all"]),
    share=st.sampled_from([0, 0.25, 0.5, 1]), is_neox=st.booleans(), epsilon=EPSILONS, adds_one=st.booleans(),
    cache=st.sampled_from([torch.float32, None]), kind=st.sampled_from([torch.int32, torch.int64]),
)  # fmt: skip
@EXAMPLES
def test_queries_are_normed_by_head_or_together_and_turned(
    seed: int, dtype: torch.dtype, rows: int, heads: int, dim: int, norm_of: str, share: float, is_neox: bool,
    epsilon: float, adds_one: bool, cache: torch.dtype | None, kind: torch.dtype,
) -> None:  # fmt: skip
    rng = torch.Generator().manual_seed(seed)
    q = 2 * torch.randn(rows, heads, dim, generator=rng).to(dtype)
    expected, norm, rotation = q.double(), None, None
    if norm_of != "none":
        weight = torch.randn(dim if norm_of == "head" else heads * dim, generator=rng).to(dtype)
        norm = RmsNorm(weight.to(DEVICE), epsilon, adds_one)
        if rows:
            grouped = expected.view(rows, -1, len(weight))
            expected = reference.rms_norm(grouped, weight.double() + adds_one, epsilon).view_as(q)
    if share:
        angles = 7 * torch.rand(50, int(dim * share) // 2, generator=rng).double()
        cos_sin = torch.cat([angles.cos(), angles.sin()], 1).to(cache or dtype).contiguous()
        positions = torch.randint(50, (rows,), generator=rng).to(kind)
        rotation = Rotation(positions.to(DEVICE), cos_sin.to(DEVICE), is_neox)
        expected = reference.rotated(expected, angles[positions.long()], is_neox)
    found = finished_queries(q.to(DEVICE), norm, rotation)
    assert found.dtype == dtype and found.is_contiguous()
    assert_rows(found.flatten(1), expected.flatten(1))


def assert_rows(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    for a, b in zip(found.cpu().double(), expected, strict=True):
        assert float((a - b).norm()) <= ERROR[found.dtype] * float(b.norm())
