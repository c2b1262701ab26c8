"""K and V in 8 bits: lives of requests whose steps are exact over what pages hold, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from hybrid_backend.batch import ModelSpec
from hybrid_backend.config import HybridConfig
from hybrid_backend.errors import ConfigError
from hybrid_backend.kernels import cpu
from hybrid_backend.methods.hgca import Hgca
from tests.support.harness import METHODS, PAGE, Engine, config, spec
from tests.support.in_place import CheckedEngine
from tests.support.judged import judge_at_once

pytestmark = pytest.mark.skipif(not cpu.available(), reason=str(cpu.why_unavailable()))

ERROR = 3e-4  # of outputs that are about 1: kernels of VNNI keep 16 bits of queries and weights


ENABLED = sorted(set(METHODS) - {"quest"})
"""Methods that attend pages in 8 bits with separate tiers: all of them."""


def int8(**keys: Any) -> ModelSpec:
    return replace(spec(**keys), kv_dtype=torch.int8)


@pytest.mark.parametrize("windows", [(), (None, 20, None)], ids=["full", "sliding"])
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("method", ["quest", "dense"])
def test_a_life_is_exact_over_what_pages_hold(method: str, sinks: bool, windows: tuple[int | None, ...]) -> None:
    """Chunks, a prefix that is shared, a preemption, requests that come and go."""
    live(config(method=method, kv_dtype="int8", sparse="never"), int8(windows=windows, sinks=sinks))


@pytest.mark.parametrize(
    ("method", "kernels"),
    [*((method, "native") for method in ENABLED), ("scout", "torch"), ("dense", "torch"), ("hgca", "torch")],
)
def test_a_life_with_separate_tiers_is_exact_over_what_pages_hold(method: str, kernels: str) -> None:
    """Of fewer frames than pages: the device tier attends some of them and the workers the others."""
    keys = {"exact_layers": [1], "frames_per_request": 5, "staging_tokens": 3 * PAGE, "recall": {"intervals": 2}}
    workers = {"threads": 2, "deadline_seconds": 20, "kernel": kernels}
    settings = METHODS[method] | keys | {"workers": workers, "device_kernels": kernels}
    live(config(**settings, kv_dtype="int8", sparse="never"), int8(windows=(None, 20, None), sinks=True))


def live(cfg: HybridConfig, model: ModelSpec) -> None:
    """Play a life of three requests, every output of which is dense attention."""
    engine = Engine(cfg, model)
    step = {"tolerance": ERROR}

    def prefill(name: str, chunk: int) -> None:
        request = engine.sequences[name]
        while request.tokens < request.prompt:
            engine.step({name: min(chunk, request.prompt - request.tokens)}, **step)  # type: ignore[arg-type]

    engine.add("a", 5 * PAGE + 3)
    prefill("a", 2 * PAGE + 5)
    engine.decode("a", steps=PAGE, **step)  # type: ignore[arg-type]
    engine.add("b", 6 * PAGE, shared_with="a")
    engine.step({"a": 1, "b": PAGE}, **step)  # type: ignore[arg-type]
    prefill("b", PAGE)
    engine.decode("a", "b", steps=3, **step)  # type: ignore[arg-type]
    engine.preempt("b")
    prefill("b", 100)
    engine.drop("a")
    engine.add("c", 2 * PAGE + 1)
    prefill("c", 7)
    engine.decode("b", "c", steps=3, **step)  # type: ignore[arg-type]
    engine.close()


@pytest.mark.parametrize("digest", ["auto", "minmax", "codes"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_quest_selects_by_digests_of_stored_keys_and_attends_what_it_selected(digest: str, dtype: torch.dtype) -> None:
    keys = {"selection": {"digest": digest, "candidates": 2, "interval": 4}, "sparse": "always"}
    cfg = config(method="quest", kv_dtype="int8", **keys)
    model = ModelSpec(2, 8, 2, 64, 64**-0.5, dtype, kv_dtype=torch.int8)
    engine = CheckedEngine(cfg, model, 256)
    engine.add_imported("long", 30 * PAGE, 33 * PAGE)
    engine.prefill("long", 2 * PAGE)
    engine.add("twin", 31 * PAGE, shared_with="long")
    engine.prefill("twin")
    for _ in range(2 * PAGE):
        engine.step({"long": 1, "twin": 1}, tolerance=None)
    assert engine.sparse_rows == engine.rows == 2 * 2 * 2 * PAGE
    engine.close()


def test_a_pool_holds_almost_twice_the_tokens() -> None:
    """Of 64 channels a token takes 66 bytes instead of 128."""
    plain, encoded = (
        ModelSpec(1, 3, 3, 64, 1.0, torch.bfloat16, kv_dtype=x).page_bytes(32) for x in (None, torch.int8)
    )
    assert plain / encoded == 128 / 66 > 1.9


def test_methods_of_other_packages_that_do_not_say_that_they_read_8_bits_refuse_them_in_one_line() -> None:
    class Plain(Hgca):
        reads_int8 = False

    cfg = config(method="hgca", kv_dtype="int8")
    with pytest.raises(ConfigError, match="kv_dtype: int8 is not supported with method hgca; write kv_dtype: auto"):
        Plain.check(cfg, torch.device("cpu"), 3, 2)


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_hgca_attends_the_tokens_that_each_head_kept_in_8_bits(kernels: str) -> None:
    """Judged by the prompt's last queries, and when their pages leave the window: fp64 attention of exactly these."""
    workers = {"threads": 2, "deadline_seconds": 20, "kernel": kernels}
    keys = {"hgca": {"window_tokens": 3 * PAGE, "alpha": 0.5}, "workers": workers, "device_kernels": kernels}
    engine = Engine(config(method="hgca", kv_dtype="int8", **keys), int8(layers=2), is_witnessed=True)
    judge_at_once(engine.runtime.workers)
    engine.add("a", 12 * PAGE + 5)
    while engine.sequences["a"].tokens < 12 * PAGE + 5:
        engine.step({"a": min(50, 12 * PAGE + 5 - engine.sequences["a"].tokens)}, tolerance=None)
    for _ in range(2 * PAGE):
        engine.step({"a": 1}, tolerance=None)
    method = engine.runtime.method
    assert isinstance(method, Hgca) and engine.witness is not None and engine.witness.sparse_rows > 0
    for kept in method.kept_tokens():
        assert all(0 < tokens < 10 * PAGE for tokens in kept)
    cache = engine.runtime.tiers.cache
    assert cache.stores[0].dtype is torch.int8
    assert engine.runtime.gauges()["hybrid_context_cache_bytes"] == cache.nbytes + cache.whole_bytes
    engine.close()


def test_workers_that_do_not_attend_8_bits_are_refused_in_one_line() -> None:
    cfg = config(method="scout", kv_dtype="int8", workers={"kernel": "ipex"})
    with pytest.raises(ConfigError, match=r"workers.kernel: ipex does not attend pages of kv_dtype: int8; write"):
        Engine(cfg, int8())
