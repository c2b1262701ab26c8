"""Every method serves one life of requests (`tests.support.scenario.LIFE`): each output is attention of what the method
says that it attended, with attention sinks and a sliding window, whoever computes it; and nothing is left behind."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch

from hybrid_backend.methods.registry import method_names
from tests.support.harness import PAGE, Engine, config, spec
from tests.support.judged import judge_at_once
from tests.support.scenario import LIFE, SHORT_LIFE, check_digests, play

pytestmark = pytest.mark.slow
# The least device memory that each method takes: what does not fit is the CPU's, streamed, or read where it lies.
FRAMES = {"frames_per_request": 6, "recall": {"intervals": 2}}
LEAST: dict[str, dict[str, Any]] = {
    "apex": {"apex": {"device_tokens": 6 * PAGE, "strategy": "lockstep"}},
    "clo": {"budget_tokens": 16 * PAGE, "clo": {"persistent": ["1:1"]}},
    "dense": {},
    "headinfer": {
        "staging_tokens": 2 * PAGE,
        "headinfer": {"resident_heads": ["1:1"], "group_thresholds": [2 * PAGE]},
    },
    "hgca": {"hgca": {"window_tokens": 4 * PAGE}},
    "infinigen": FRAMES,
    "quest": {},
    "scout": FRAMES,
}
BYTES, CODES = {"selection": {"digest": "minmax_int8"}}, {"selection": {"digest": "codes"}}
PER_HEAD = {"selection": {"granularity": "kv_head"}}
PREDICTED, REAL, NONE = (
    {"lookahead": {"enabled": True, "partial_query": "predicted"}},
    {"lookahead": {"enabled": True, "partial_query": "real"}},
    {"lookahead": {"enabled": False}},
)
SPARSE: dict[str, dict[str, Any]] = {
    "quest": {},
    "quest, per head": PER_HEAD,
    "quest, codes": CODES,
    "quest, bytes": BYTES,
    "scout, predicted": FRAMES | PREDICTED,
    "scout, predicted, per head": FRAMES | PREDICTED | PER_HEAD,
    "scout, real": FRAMES | REAL,
    "scout, none, per head": FRAMES | NONE | PER_HEAD,
    "scout, predicted, again": FRAMES | PREDICTED | {"selection": {"interval": 3}},
    "scout, codes": FRAMES | CODES,
    "scout, bytes": FRAMES | BYTES,
    "infinigen, predicted": FRAMES | PREDICTED,
    "infinigen, none, codes": FRAMES | NONE | CODES,
    "infinigen, predicted, again": FRAMES | PREDICTED | {"selection": {"interval": 3}},
    "hgca": {"hgca": {"window_tokens": 4 * PAGE}},
    "clo, predicted": FRAMES | PREDICTED | {"clo": {"eta": 0.3, "persistent": ["0:1"]}},
    "clo, none, codes": FRAMES | NONE | CODES | {"clo": {"eta": 0.3, "persistent": "none"}},
    "clo, all persistent": FRAMES | {"clo": {"persistent": [f"{i}:{head}" for i in range(4) for head in (0, 1)]}},
}


def with_kernels(names: Iterable[str], *kernels: str) -> pytest.MarkDecorator:
    """Parametrize over names, which begin with a method's, and over the kernels. Method quest has native ones only."""
    cases = [(name, kind) for name in names for kind in kernels if kind == "native" or not name.startswith("quest")]
    return pytest.mark.parametrize(("name", "kernels"), cases)


def engine(method: str, kernels: str, layers: int = 3, dtype: torch.dtype = torch.float32, **keys: Any) -> Engine:
    if kernels == "triton":
        pytest.importorskip("triton", reason="Triton has no wheel for this platform")
    workers = {"threads": 2, "kernel": "torch" if kernels == "torch" else "native", "deadline_seconds": 60}
    cfg = config(method=method, device_kernels=kernels, workers=workers, **keys)
    windows = (*[None] * (layers - 1), 24)
    return Engine(cfg, spec(layers, windows, dtype, sinks=True), num_pages=128, max_requests=4, is_witnessed=True)


@with_kernels(method_names(), "native", "torch", "triton")
def test_a_method_that_attends_everything_is_dense(name: str, kernels: str) -> None:
    """No frame or buffer holds the long request, and its outputs are dense attention's all the same."""
    played = engine(name, kernels, sparse="never", **LEAST.get(name, {}))
    play([played], SHORT_LIFE if kernels == "triton" else LIFE)
    assert played.witness is not None and played.witness.sparse_rows == 0


@pytest.mark.parametrize("staging", [PAGE, 3 * PAGE, 64 * PAGE])
@pytest.mark.parametrize("thresholds", [[10**6], [2 * PAGE, 4 * PAGE]])
@pytest.mark.parametrize("kernels", ["torch", "native"])
def test_headinfer_is_dense_whatever_its_buffers_hold(kernels: str, staging: int, thresholds: list[int]) -> None:
    heads = {"group_thresholds": thresholds, "resident_heads": ["1:1", "2:1", "2:0"]}
    played = engine("headinfer", kernels, 4, staging_tokens=staging, headinfer=heads)
    play([played])
    assert played.runtime.stats.cpu_ratio() == 0


@with_kernels(SPARSE, "native", "torch")
def test_a_method_that_leaves_tokens_out_attends_what_it_says(name: str, kernels: str) -> None:
    """With ``sparse: auto`` requests that fit are dense. Digests are those of what was written."""
    keys = {"exact_layers": [1], "sparse": "always" if kernels == "torch" else "auto", **SPARSE[name]}
    played = engine(name.partition(",")[0], kernels, 4, **keys)
    judge_at_once(played.runtime.workers)  # hgca's requests attend everything until they are judged
    play([played], after_step=lambda: "codes" not in name or check_digests(played))
    witness = played.witness
    assert witness is not None and witness.sparse_rows >= 2 * 8, "the long request was dense"
    # Only the CPU's partial is of a predicted query, which scout's default is too.
    ahead = played.cfg.lookahead
    is_guessing = played.cfg.method == "scout" and ahead.enabled and ahead.partial_query == "predicted"
    assert (witness.guessed_rows > 0) == is_guessing


@pytest.mark.parametrize("name", ["quest", "scout"])
def test_automatic_exact_layers_are_dense_where_the_first_layer_slides(name: str) -> None:
    cfg = config(method=name, exact_layers="auto", sparse="always", **SPARSE.get(name, FRAMES))
    played = Engine(cfg, spec(4, (24, None, None, None)), num_pages=128, max_requests=4, is_witnessed=True)
    assert played.runtime.config.exact_layers == (1, 2)
    play([played])
    layers = played.runtime.stats.layers
    attended = [layer.selected_tokens for layer in layers[1:]]
    assert attended[0] == attended[1] > attended[2]
    digests = played.runtime.tiers.digests
    assert digests is not None and set(digests.layers) == {3}
