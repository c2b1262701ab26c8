"""Local (sliding-window) layers: exact at every window, and no work per row in Python."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from hybrid_backend.batch import DecodeRows, LayerShape, WindowRows
from hybrid_backend.in_place.windows import decode_windows
from hybrid_backend.kernels import cpu
from hybrid_backend.kernels.reference import paged_attention
from tests.support.harness import PAGE, Engine, config, spec

KERNELS = ["torch", pytest.param("native", marks=pytest.mark.skipif(not cpu.available(), reason="no native kernels"))]


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def engines() -> Iterator[list[Engine]]:
    made: list[Engine] = []
    yield made


def engine(kernel: str, windows: tuple[int | None, ...], engines: list[Engine]) -> Engine:
    workers = {"threads": 2, "kernel": kernel, "deadline_seconds": 20}
    made = Engine(config(method="dense", workers=workers), spec(len(windows), windows), num_pages=512)
    engines.append(made)
    return made


def test_rows_of_unlike_length_are_exact_at_every_place_of_the_window(kernel: str, engines: list[Engine]) -> None:
    """Windows that begin in the middle of a page, at its edge, or before the sequence; one of a single token."""
    e = engine(kernel, (None, 24, 2 * PAGE, 1, 1000), engines)
    for name, prompt in {"a": 1, "b": PAGE, "c": 3 * PAGE + 5, "d": 150}.items():
        e.admit(name, prompt)
    for _ in range(PAGE + 2):  # every offset of a page comes by; `step` compares all layers with fp64
        e.step(dict.fromkeys("abcd", 1))
    e.add("late", 40)
    e.step({"b": 1, "late": 40, "d": 1})  # decoding rows beside a prompt
    e.step({"d": 1, "late": 1, "a": 1})


@pytest.mark.parametrize(
    "keys", [{"method": "dense"}, {"method": "scout", "sparse": "never"}], ids=lambda k: k["method"]
)
def test_windows_of_another_shape_than_full_attention_are_exact(
    kernel: str, keys: dict[str, Any], engines: list[Engine]
) -> None:
    """More and narrower heads, another scale, as in Gemma 4; beside layers that the method serves as any others."""
    windows = (24, None, 2 * PAGE, None)
    model = replace(spec(len(windows), windows), window_shape=LayerShape(6, 3, 32, 0.1))
    workers = {"threads": 2, "kernel": kernel, "deadline_seconds": 20}
    e = Engine(config(workers=workers, **keys), model, num_pages=512)
    engines.append(e)
    for name, prompt in {"a": 1, "b": PAGE, "c": 3 * PAGE + 5}.items():
        e.admit(name, prompt, chunk=20)
    for _ in range(PAGE + 2):
        e.step(dict.fromkeys("abc", 1))
    e.add("late", 40)
    e.step({"b": 1, "late": 40})


@given(
    seed=st.integers(0, 999),
    seq_lens=st.lists(st.integers(1, 120), min_size=1, max_size=5),
    window=st.integers(1, 130),
    has_sinks=st.booleans(),
)
@settings(deadline=None)
def test_all_rows_at_once_with_torch_equal_fp64(seed: int, seq_lens: list[int], window: int, has_sinks: bool) -> None:
    rng = torch.Generator().manual_seed(seed)
    pool = torch.randn(64, 2, 2, PAGE, 16, generator=rng)
    lengths = torch.tensor(seq_lens)
    counts = -(-lengths // PAGE)
    table = torch.randperm(64, generator=rng)[: len(seq_lens) * int(counts.max())].view(len(seq_lens), -1)
    for row, length in enumerate(seq_lens):
        if length % PAGE:
            pool[table[row, length // PAGE], :, :, length % PAGE :] = float("nan")
    names = [str(row) for row in range(len(seq_lens))]
    starts = torch.arange(len(names) + 1, dtype=torch.int32)
    rows = DecodeRows(names, starts, torch.arange(len(names)), lengths, counts, table, whole_batch=True)
    seen = WindowRows.of(rows, window, PAGE)
    assert seen.pages.shape[1] <= -(-min(window, max(seq_lens)) // PAGE) + 1
    q = torch.randn(len(seq_lens), 8, 16, generator=rng)[:, :4]  # as engines have it, beside K and V
    sinks = torch.randn(4, generator=rng) if has_sinks else None
    out = decode_windows(q, pool.flatten(0, 2), seen, 2, 0.25, sinks)
    column = torch.arange(seen.pages.shape[1])[None]
    valid = (seen.tokens[:, None] - column * PAGE).clamp(0, PAGE)[:, None]
    expected, _ = paged_attention(q, pool, seen.pages[:, None], valid, 0.25, skips=seen.skips, sinks=sinks)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(seen.tokens - seen.skips, lengths.clamp(max=window))


class Operations(TorchDispatchMode):
    """Counts what reaches torch's kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def operations(e: Engine, names: str) -> int:
    """Torch operations of the local layer in one decode step."""
    step, _ = e._begin(dict.fromkeys(names, 1))
    m = e.model
    q, out = (torch.zeros(len(names), m.num_heads, m.head_dim) for _ in range(2))
    k, v = (torch.zeros(len(names), m.num_kv_heads, m.head_dim) for _ in range(2))
    with Operations() as seen:
        e.runtime.forward(1, step, q, k, v, out)
    e.runtime.end_step(step)
    return seen.count


def test_a_decode_step_of_a_local_layer_does_nothing_row_by_row(kernel: str, engines: list[Engine]) -> None:
    e = engine(kernel, (None, 24), engines)
    for name in "abcdefgh":
        e.admit(name, 20 + ord(name) % 7)
    assert operations(e, "abcdefgh") <= operations(e, "ab")


@pytest.mark.skipif(not cpu.available(), reason="no native kernels")
def test_a_decode_step_of_local_layers_is_one_native_call_per_layer(
    engines: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Append included: between them torch does nothing."""
    e = engine("native", (None, 24, 24, 40), engines)
    for name in "abcde":
        e.admit(name, 30)
    real, calls = cpu.Decoder.layer, []

    def counted(self: cpu.Decoder, index: int, *args: Any, **keys: Any) -> None:
        calls.append(index)
        real(self, index, *args, **keys)

    monkeypatch.setattr(cpu.Decoder, "layer", counted)
    e.step(dict.fromkeys("abcde", 1))
    assert calls == [0, 1, 2, 3]
