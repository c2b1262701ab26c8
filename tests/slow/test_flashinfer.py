"""FlashInfer as attention of the CUDA tier: a stand-in on a device that is not the host, the real one on a GPU."""

from __future__ import annotations

import ast
import logging
import math
import re
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton has no wheel for this platform")

from hybrid_backend.attention import flashinfer
from hybrid_backend.attention.flashinfer import USED_API, FlashInfer, missing_api
from hybrid_backend.attention.prefill import KVBlock
from hybrid_backend.batch import ModelSpec
from hybrid_backend.config import HybridConfig
from hybrid_backend.errors import ConfigError
from hybrid_backend.kernels import reference
from hybrid_backend.kernels.operations import Operations
from hybrid_backend.step.operations import flashinfer_bytes, resolve_flashinfer, resolve_operations
from tests.support import flashinfer_stand_in
from tests.support.cases import relative_error
from tests.support.far_device import late
from tests.support.gpu import ON_GPU
from tests.support.harness import PAGE, Engine, config
from tests.support.streams import STREAMS

HEADS, KV_HEADS, DIM, SCALE = 6, 2, 128 if ON_GPU else 64, 0.17
ERROR = 1e-2  # of bf16, relative


def model(**changes: Any) -> ModelSpec:
    shape = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": DIM, "scale": SCALE, "dtype": torch.bfloat16}
    return ModelSpec(2, **{**shape, **changes})


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The stand-in is what ``import flashinfer`` gives."""
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer_stand_in)
    return flashinfer_stand_in


@pytest.fixture
def operations(device: torch.device) -> Operations:
    return resolve_operations(HybridConfig(), device)


@pytest.fixture
def made(device: torch.device, operations: Operations) -> FlashInfer:
    return FlashInfer(flashinfer_stand_in, operations, model(), device)


@pytest.fixture(params=["the stand-in", pytest.param("the real one", marks=pytest.mark.gpu)])
def each(request: pytest.FixtureRequest) -> tuple[FlashInfer, torch.device]:
    """The stand-in on a device that is not the host, and the real one on a GPU."""
    if request.param == "the stand-in":
        return request.getfixturevalue("made"), request.getfixturevalue("device")
    pytest.importorskip("flashinfer", exc_type=ImportError)
    if not ON_GPU:
        pytest.skip("no GPU")
    device = torch.device("cuda")
    found = FlashInfer.try_create(resolve_operations(HybridConfig(), device), model(), device)
    assert isinstance(found, FlashInfer), found
    return found, device


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, DIM, generator=torch.Generator().manual_seed(len(shape))).bfloat16()


# --- what it computes ---


def test_prompts_are_exact(each: tuple[FlashInfer, torch.device]) -> None:
    """Chunks with a decoding row between them, out of a projection to queries, keys and values; earlier tokens in
    blocks of all and of some KV heads, padded as staging buffers are. Against the oracle, token by token."""
    (found, device), chunks, total = each, [(1, 6), (7, 20)], 21
    whole = drawn(total, HEADS + 2 * KV_HEADS).to(device)
    q, k, v = whole[:, :HEADS], whole[:, HEADS:-KV_HEADS], whole[:, -KV_HEADS:]
    owns = found.prompts.own(q, k, v, chunks)
    buffer = drawn(KV_HEADS, 2, 48).to(device)
    blocks = [KVBlock((0, 1), *buffer[:, :, :33].unbind(1)), KVBlock((1,), *buffer[1:, :, 33:37].unbind(1))]
    blocks.append(KVBlock((0,), *buffer[:1, :, 33:37].unbind(1)))
    near, earlier = whole.cpu(), buffer.cpu()[:, :, :37]
    for (start, end), own in zip(chunks, owns, strict=True):
        out = found.prompts.attend(q[start:end], own, blocks)
        assert out.dtype == torch.float32 and out.shape == (end - start, HEADS, DIM)
        for token in range(start, end):
            new = [near[start : token + 1, first : first + KV_HEADS] for first in (HEADS, HEADS + KV_HEADS)]
            pages = torch.cat([earlier, torch.stack(new, 2).permute(1, 2, 0, 3)], 2)[None]
            one = torch.zeros(1, 1, 1, dtype=torch.int64)
            expected, _ = reference.paged_attention(
                near[token : token + 1, :HEADS], pages, one, torch.full_like(one, pages.shape[3]), SCALE
            )
            assert relative_error(out[token - start].cpu(), expected[0]) < ERROR
    (alone,) = found.prompts.own(q, k, v, [(0, 9)])
    assert relative_error(alone.lse[0].cpu(), (near[0, :HEADS] * near[0, HEADS:-KV_HEADS].repeat_interleave(3, 0)).sum(
        -1, dtype=torch.float64) * SCALE) < ERROR, "natural log, although there is one key only"  # fmt: skip


def test_lists_are_exact(each: tuple[FlashInfer, torch.device]) -> None:
    """One plan for lists of other pages in another store; new ones for rows that grow, and for other rows."""
    found, device = each
    for counts in ([PAGE, 3 * PAGE + 5, 1], [PAGE, 3 * PAGE + 5, 1], [PAGE + 1, 3 * PAGE + 6, 2], [7]):
        kv = torch.randn(10, KV_HEADS, 2, PAGE, DIM).bfloat16()
        q, ids = drawn(len(counts), HEADS), torch.stack([torch.randperm(10)[:5] for _ in counts])[:, None]
        full = torch.tensor(counts)[:, None, None]
        valid = (full - torch.arange(5) * PAGE).clamp(0, PAGE)
        table = ids.masked_fill(valid == 0, 10**6).int()  # must not be followed
        out, lse = found.decode.attend(q.to(device), kv.to(device), table.to(device), full[:, 0, 0])
        expected, expected_lse = reference.paged_attention(q, kv, ids, valid, SCALE)
        assert relative_error(out[:, :, 0].cpu(), expected) < ERROR
        assert relative_error(lse[:, :, 0].cpu(), expected_lse) < 1e-3


def test_chunks_attend_pages_with_their_earlier_tokens_in_one_call(each: tuple[FlashInfer, torch.device]) -> None:
    """Of other pages and in another store with the same plan; then of longer lists."""
    found, device = each
    for tokens in ([PAGE + 5, 3 * PAGE], [PAGE + 5, 3 * PAGE], [PAGE + 6, 3 * PAGE + 1]):
        kv, chunks = torch.randn(9, KV_HEADS, 2, PAGE, DIM).bfloat16(), [(1, 6), (8, 20)]
        q = drawn(21, HEADS)
        ids = [torch.randperm(9)[: -(-count // PAGE)] for count in tokens]
        lists = [(x.int().to(device), count) for x, count in zip(ids, tokens, strict=True)]
        partials = found.prompts.over_pages(q.to(device), kv.to(device), chunks, lists)
        for (start, end), pages, count, partial in zip(chunks, ids, tokens, partials, strict=True):
            for token in range(start, end):
                seen = torch.tensor(count - (end - 1 - token))
                valid = (seen - torch.arange(len(pages)) * PAGE).clamp(0, PAGE)[None, None]
                expected, lse = reference.paged_attention(q[token : token + 1], kv, pages[None, None], valid, SCALE)
                assert relative_error(partial.out[token - start].cpu(), expected[0]) < ERROR
                assert relative_error(partial.lse[token - start].cpu(), lse[0]) < 1e-2


def test_frames_are_read_where_they_lie(
    made: FlashInfer, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K and V are views of one store, without a copy."""
    seen: list[tuple[Any, ...]] = []
    wrapper = flashinfer_stand_in.BatchDecodeWithPagedKVCacheWrapper
    run = wrapper.run

    def watched(self: Any, q: Tensor, paged_kv_cache: Any, **more: Any) -> Any:
        seen.append(paged_kv_cache)
        return run(self, q, paged_kv_cache, **more)

    monkeypatch.setattr(wrapper, "run", watched)
    kv = torch.randn(3, KV_HEADS, 2, PAGE, DIM).bfloat16()
    made.decode.attend(
        drawn(1, HEADS).to(device), kv.to(device), torch.zeros(1, 1, 1).int().to(device), torch.ones(1).long()
    )
    ((k, v),) = seen
    k, v = (x if ON_GPU else x.inner for x in (k, v))
    assert k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
    assert k.storage_offset() == 0 and v.storage_offset() == PAGE * DIM and k.shape == (3, KV_HEADS, PAGE, DIM)


def test_a_plan_waits_until_the_device_has_read_the_one_before(made: FlashInfer, device: torch.device) -> None:
    """The device is late: what the second plan writes would spoil the first one's lengths."""
    q, kv = drawn(2, HEADS), torch.randn(4, KV_HEADS, 2, PAGE, DIM).bfloat16()
    ids = torch.tensor([[[1, 2]], [[3, 0]]])
    there = q.to(device), kv.to(device), ids.int().to(device)
    for counts in ([2 * PAGE, 3], [4, 2 * PAGE - 1]):
        made.decode.attend(*there, torch.tensor(counts))
    found = []
    with late():
        for counts in ([2 * PAGE, 5], [7, 2 * PAGE - 2], [1, 1]):
            found.append((counts, made.decode.attend(*there, torch.tensor(counts))[0]))
    for counts, out in found:
        valid = (torch.tensor(counts)[:, None, None] - torch.arange(2) * PAGE).clamp(0, PAGE)
        expected, _ = reference.paged_attention(q, kv, ids, valid, SCALE)
        assert relative_error(out[:, :, 0].cpu(), expected) < ERROR


# --- the runtime ---


RUNS: dict[str, dict[str, Any]] = {
    "scout": {"exact_layers": [0], "whole_layers": [0]},
    "dense": {"method": "dense"},
    "headinfer": {"method": "headinfer", "staging_tokens": 2 * PAGE, "headinfer": {"group_thresholds": [2 * PAGE]}},
}


@pytest.mark.parametrize("name", RUNS)
def test_the_runtime_is_exact_with_it(
    device: torch.device, installed: ModuleType, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of several requests in one step, one of which begins with the other's pages; then decoding beside a
    prompt and alone, on a device that is late."""
    calls: list[str] = []
    for kind in (
        installed.BatchPrefillWithRaggedKVCacheWrapper,
        installed.BatchPrefillWithPagedKVCacheWrapper,
        installed.BatchDecodeWithPagedKVCacheWrapper,
    ):

        def counted(*args: Any, run: Any = kind.run, name: str = kind.__name__, **more: Any) -> Any:
            calls.append(name)
            return run(*args, **more)

        monkeypatch.setattr(kind, "run", counted)
    shape = model(scale=0.125, num_heads=4)
    settings = config(frames_per_request=6, device_kernels="flashinfer", **RUNS[name])
    made = Engine(settings, shape, num_pages=64, max_requests=3, device=device)
    assert made.runtime.tiers.kernel_bytes == flashinfer_bytes(settings, shape, device) > 128 << 20
    STREAMS.seed(0)
    calls.clear()  # of the trial
    steps: list[dict[str, int]] = [{"a": 35}, {"a": 13, "c": 5}, {"b": 9, "c": 12}, {"a": 1}, {"a": 1, "c": 8}]
    made.add("a", 3 * PAGE)
    made.add("c", 25)
    with late():
        for step, work in enumerate(steps):
            if step == 2:
                made.add("b", 2 * PAGE + 9, shared_with="a")
            made.step(work, tolerance=3e-2)
        for _ in range(3):
            made.step({"b": 1, "a": 1, "c": 1}, tolerance=3e-2)
    # In scout's layers a chunk attends its pages on the device in one call, and itself alone if nothing came before it.
    alone, in_pages = (2, 3) if name == "scout" else (4, 0)  # steps
    assert calls.count("BatchPrefillWithRaggedKVCacheWrapper") == 2 * alone
    assert calls.count("BatchPrefillWithPagedKVCacheWrapper") == 2 * in_pages
    # In a layer that frames hold, and in one that is on the device whole. b fits its frames, so the prefix that it
    # lacks there is copied before its first step, and the host knows what they hold.
    decoded = {"headinfer": 0, "dense": 2 * 5, "scout": 2 * 5}
    assert calls.count("BatchDecodeWithPagedKVCacheWrapper") == decoded[name]


# --- whether it is used ---


def resolved(device: torch.device, operations: Operations, kernels: str, **changes: Any) -> FlashInfer | None:
    return resolve_flashinfer(config(device_kernels=kernels), model(**changes), operations, device)


def test_auto_takes_it_where_it_computes_what_it_should(
    device: torch.device, operations: Operations, installed: ModuleType
) -> None:
    assert isinstance(resolved(device, operations, "auto"), FlashInfer)
    assert isinstance(resolved(device, operations, "flashinfer"), FlashInfer)
    assert resolved(device, operations, "triton") is None
    planned = {name: flashinfer_bytes(config(device_kernels=name), model(), device) for name in ("auto", "triton")}
    assert planned == {"auto": flashinfer.device_bytes(), "triton": 0}
    assert flashinfer_bytes(config(), model(dtype=torch.float32), device) == 0


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "another log-sum-exp": ({"single_prefill_with_kv_cache": "natural"}, "is off by"),
    "no numbers": ({"single_prefill_with_kv_cache": "nan"}, "is off by nan"),
    "another signature": ({"single_prefill_with_kv_cache": lambda q, k, v: None}, "sm_scale|causal|return_lse"),
    "no wrapper": ({"BatchDecodeWithPagedKVCacheWrapper": None}, "no BatchDecodeWithPagedKVCacheWrapper"),
    "no compiler": ({"single_prefill_with_kv_cache": "nvcc"}, "RuntimeError: no nvcc"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_one_that_is_not_as_we_know_it_is_not_used(
    device: torch.device, operations: Operations, monkeypatch: pytest.MonkeyPatch, name: str,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    changes, reason = BROKEN[name]
    original = flashinfer_stand_in.single_prefill_with_kv_cache

    def natural(q, k, v, causal=False, sm_scale=None, return_lse=False):  # type: ignore[no-untyped-def]
        out, lse = original(q, k, v, causal=causal, sm_scale=sm_scale, return_lse=return_lse)
        return out, lse * 0.6931

    def nvcc(q, k, v, causal=False, sm_scale=None, return_lse=False):  # type: ignore[no-untyped-def]
        raise RuntimeError("no nvcc")

    def nan(q, k, v, causal=False, sm_scale=None, return_lse=False):  # type: ignore[no-untyped-def]
        out, lse = original(q, k, v, causal=causal, sm_scale=sm_scale, return_lse=return_lse)
        return out * math.nan, lse

    given = {"natural": natural, "nvcc": nvcc, "nan": nan}
    other = ModuleType("flashinfer")
    other.__spec__ = SimpleNamespace(name="flashinfer")  # type: ignore[assignment]
    vars(other).update({key: value for key, value in vars(flashinfer_stand_in).items() if key[0] != "_"})
    vars(other).update({key: given[value] if isinstance(value, str) else value for key, value in changes.items()})
    monkeypatch.setitem(sys.modules, "flashinfer", other)
    with caplog.at_level(logging.WARNING):
        assert resolved(device, operations, "auto") is None
    assert re.search(reason, caplog.text) and "hybrid-backend[cuda]" in caplog.text
    with pytest.raises(ConfigError, match=reason):
        resolved(device, operations, "flashinfer")


def test_what_it_cannot_do_is_refused_with_the_fix(
    device: torch.device, operations: Operations, installed: ModuleType
) -> None:
    assert resolved(device, operations, "auto", dtype=torch.float32) is None
    for changes, reason in (({"dtype": torch.float32}, "not float32"), ({"head_dim": 80}, "not of 80")):
        with pytest.raises(ConfigError, match=f"device_kernels: flashinfer cannot be used: .*{reason}.*write auto"):
            resolved(device, operations, "flashinfer", **changes)
    with pytest.raises(ConfigError, match=r"device_kernels: flashinfer needs a GPU, .*write auto"):
        resolve_operations(config(device_kernels="flashinfer"), torch.device("cpu"))


def test_without_it_auto_goes_on_and_flashinfer_says_how_to_get_it(
    device: torch.device, operations: Operations, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    monkeypatch.setattr(flashinfer, "is_installed", lambda: False)
    assert resolved(device, operations, "auto") is None
    with pytest.raises(ConfigError, match=r"ModuleNotFoundError.*pip install 'hybrid-backend\[cuda\]'"):
        resolved(device, operations, "flashinfer")


# --- the real one ---


def definitions(path: Path) -> dict[str, ast.arguments]:
    """Parameters of functions, and of methods of classes, at the top of a module; of overloads the last one's."""
    found = {}
    for node in ast.parse(path.read_text()).body:
        owner = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
        for each in node.body if isinstance(node, ast.ClassDef) else [node]:
            if isinstance(each, ast.FunctionDef):
                found[owner + each.name] = each.args
    return found


def parameters(spec: ast.arguments) -> list[str]:
    """In order, with what is their default, without types."""
    for each in (*spec.posonlyargs, *spec.args, *spec.kwonlyargs, *filter(None, (spec.vararg, spec.kwarg))):
        each.annotation = None
    return ast.unparse(spec).split(", ")


def test_the_stand_in_has_the_signatures_of_the_real_one() -> None:
    """From its sources: an import needs much else."""
    spec = find_spec("flashinfer")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("flashinfer-python is not installed")
    folder = Path(next(iter(spec.submodule_search_locations)))
    if version("flashinfer-python") != flashinfer_stand_in.__version__:
        pytest.skip(f"another version than {flashinfer_stand_in.__version__}")
    theirs = definitions(folder / "prefill.py") | definitions(folder / "decode.py")
    ours = definitions(Path(flashinfer_stand_in.__file__))
    for name in USED_API:
        name = name if "." in name or name[0].islower() else f"{name}.__init__"
        assert parameters(ours[name]) == parameters(theirs[name]), name


def test_the_real_one_has_what_we_lean_on() -> None:
    assert not missing_api(pytest.importorskip("flashinfer", exc_type=ImportError))
