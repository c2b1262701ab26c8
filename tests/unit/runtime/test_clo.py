"""CLO: per-head caches of selected pages, labels, persistent heads."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hybrid_backend.errors import ConfigError
from hybrid_backend.methods.clo import Clo, persistent_heads, threshold
from hybrid_backend.tiers.stream import head_pages
from tests.support.harness import PAGE, Engine, config, spec, watch

LAYERS, KV_HEADS, HEADS, DIM = 3, 2, 4, 16
LONG, CACHED, BUDGET = 12 * PAGE, 2, 4  # the budget holds one sink, one recent and two cached pages
EVERY = [f"{layer}:{head}" for layer in range(LAYERS) for head in range(KV_HEADS)]


def engine(seed: int = 0, clo: dict[str, object] | None = None, long: int = LONG, **keys: object) -> Engine:
    running = Engine(config(method="clo", clo=clo or {}, **keys), spec(layers=LAYERS), seed=seed, is_witnessed=True)
    running.admit("a", long)
    return running


def method_of(running: Engine) -> Clo:
    assert isinstance(running.runtime.method, Clo)
    return running.runtime.method


def run(running: Engine, steps: int, noise: float = 0.0) -> list[Tensor]:
    return list(running.decode("a", steps=steps, noise=noise, tolerance=None))


def heads_file(folder: Path, importance: float, similarity: float | None, **more: object) -> str:
    scores = {
        "model": "test",
        "importance": [[importance] * HEADS] * LAYERS,
        "kv_importance": [[importance] * KV_HEADS] * LAYERS,
        "similarity": None if similarity is None else [[similarity] * KV_HEADS] * LAYERS,
        **more,
    }
    path = folder / "heads.json"
    path.write_text(json.dumps(scores))
    return str(path)


# --- what is decided ---


def test_the_threshold_of_the_most_important_head_is_eta_and_of_the_least_minus_one() -> None:
    assert threshold(1, 0.8, 3) == pytest.approx(0.8)
    assert threshold(0, 0.8, 3) == pytest.approx(-1)
    assert threshold(0.85, 0.8, 3) < 0 < threshold(0.86, 0.8, 3)


@given(st.floats(0, 1), st.floats(0, 1), st.floats(0.1, 1), st.floats(0.5, 4))
def test_more_important_heads_never_keep_their_pages_longer(a: float, b: float, eta: float, power: float) -> None:
    low, high = sorted((a, b))
    assert threshold(low, eta, power) <= threshold(high, eta, power) + 1e-12


def test_persistent_are_the_hardest_heads_that_cannot_be_loaded_in_time() -> None:
    tau, similarity = [[0.8, 0.8, 0.2], [0.8, 0.8, 0.8]], [[0.5, 0.7, 0.5], [0.95, 0.6, 0.8]]
    found = persistent_heads(tau, similarity, 0.1, prefetched=0)
    assert [x[1:] for x in found] == [(0, 0), (1, 1), (0, 1), (1, 2)]
    assert [x[0] for x in found] == pytest.approx([0.4, 0.3, 0.2, 0.1])
    assert [x[1:] for x in persistent_heads(tau, similarity, 0.1, prefetched=1)] == [(0, 0), (1, 1)]


# --- what is attended, loaded and counted ---


def test_with_eta_one_every_step_attends_what_a_fresh_selection_would() -> None:
    """Against persistent heads, which select by the same (true) query in every step: first all, then one per layer."""
    for ahead, persistent in ((False, EVERY), (True, EVERY[::2])):
        keys: dict[str, object] = {"lookahead": {"enabled": ahead}}
        always = run(engine(clo={"eta": 1, "persistent": "none"}, **keys), 20)
        fresh = run(engine(clo={"eta": 1, "persistent": persistent}, **keys), 20)
        torch.testing.assert_close(torch.stack(always), torch.stack(fresh), atol=1e-5, rtol=1e-5)


def test_heads_without_importance_load_once(tmp_path: Path) -> None:
    running = engine(clo={"heads": heads_file(tmp_path, 0.0, None), "persistent": "none"})
    run(running, 20, noise=0.5)
    for layer in running.runtime.stats.layers:
        assert (layer.head_lookups, layer.head_hits) == (20 * KV_HEADS, 19 * KV_HEADS)
        assert layer.loaded_head_pages == KV_HEADS * CACHED


@pytest.mark.parametrize("eta", [0.2, 0.9])
def test_copied_bytes_are_those_of_the_heads_that_missed(eta: float) -> None:
    running = engine(clo={"eta": eta, "persistent": "none"})
    running.step({"a": 1}, tolerance=None)
    run(running, 40, noise=0.2)
    stats, page = running.runtime.stats.layers, PAGE * 2 * DIM * 4
    missed = sum(layer.head_lookups - layer.head_hits for layer in stats)
    assert 0 < missed < 41 * LAYERS * KV_HEADS or eta == 0.9
    assert running.runtime.gauges()["hybrid_copied_bytes"] == missed * CACHED * page, "admission copied pages"


def test_every_cached_page_is_its_host_page_bit_by_bit() -> None:
    running = engine(clo={"eta": 0.3, "persistent": "none"})
    method, tiers = method_of(running), running.runtime.tiers
    running.admit("b", LONG + 5)
    for _ in range(20):
        running.step({"b": 1, "a": 1}, lookahead_noise=0.5, tolerance=None)
        for name in ("a", "b"):
            request, pages = tiers.frames.indices([name])[0], running.sequences[name].pages
            for layer in range(LAYERS):
                frames, host = tiers.frames.layers[layer], tiers.host.views[layer]
                for head in range(KV_HEADS):
                    cached = method._state.pages[layer, request * KV_HEADS + head].tolist()
                    for i, page in enumerate(cached):
                        assert 1 <= page < len(pages) - 1
                        frame = frames[request + (1 + i) * tiers.frames.requests, head]
                        assert torch.equal(frame, host[pages[page], head])


def test_persistent_heads_copy_nothing_and_their_stores_are_the_host_pool() -> None:
    running = engine(clo={"persistent": EVERY})
    running.step({"a": 1}, tolerance=None)
    before = running.runtime.gauges()["hybrid_copied_bytes"]
    method = method_of(running)
    run(running, 20, noise=0.5)
    assert running.runtime.gauges()["hybrid_copied_bytes"] == before
    assert running.runtime.gauges()["hybrid_persistent_heads"] == LAYERS * KV_HEADS
    assert sum(layer.head_lookups for layer in running.runtime.stats.layers) == 0
    pages = running.sequences["a"].pages[:-1]
    for layer in range(LAYERS):
        assert torch.equal(method._persistent.stores[layer][pages], running.kv[layer][pages])


def test_pages_that_a_connector_wrote_reach_the_stores_of_persistent_heads() -> None:
    running = engine(clo={"persistent": ["0:1", "1:0"]})
    pages = torch.tensor(running.sequences["a"].pages[:3])
    for layer in range(LAYERS):
        running.kv[layer][pages] = torch.randn_like(running.kv[layer][pages])
    running.runtime.imported(pages)
    stores = method_of(running)._persistent.stores
    assert torch.equal(stores[0][pages, 0], running.kv[0][pages, 1])
    assert torch.equal(stores[1][pages, 0], running.kv[1][pages, 0])


def test_the_first_layer_is_persistent_and_so_are_heads_that_are_hard_to_reuse(tmp_path: Path) -> None:
    assert method_of(engine())._persistent.heads == {0: (0, 1)}
    scores = heads_file(tmp_path, 1.0, 0.5)
    assert method_of(engine(clo={"heads": scores}))._persistent.heads == {0: (0, 1), 1: (0, 1), 2: (0, 1)}
    loaded_in_time = heads_file(tmp_path, 1.0, 0.5, prefetch_bytes=CACHED * PAGE * 2 * DIM * 4)
    assert method_of(engine(clo={"heads": loaded_in_time})).tiers.persistent_heads == 2 + 1 + 1


def test_a_request_that_comes_after_an_aborted_one_finds_no_label_of_it() -> None:
    running = engine(clo={"eta": 1e-6, "persistent": "none"})
    running.decode("a", steps=3, tolerance=None)
    index = running.runtime.tiers.frames.indices(["a"])[0]
    running.drop("a")
    running.admit("b", LONG)
    before = [layer.head_hits for layer in running.runtime.stats.layers]
    running.step({"b": 1}, tolerance=None)
    assert running.runtime.tiers.frames.indices(["b"]) == [index]
    assert [layer.head_hits for layer in running.runtime.stats.layers] == before


def test_a_request_whose_prompt_is_computed_again_leaves_no_label() -> None:
    running = engine(clo={"eta": 1e-6, "persistent": "none"})
    running.step({"a": 1}, tolerance=None)
    sequence = running.sequences["a"]
    sequence.prompt = sequence.tokens + 3  # the engine goes on with a chunk, and never says that it took its KV away
    running.step({"a": 3})
    assert not method_of(running)._state.labels.any()


@pytest.mark.parametrize("pages", [5, 6, 7])
def test_exact_layers_attend_everything_whatever_fits_the_frames(pages: int) -> None:
    """``sparse: always`` leaves pages out from the budget on, although the frames hold two more."""
    running = engine(long=pages * PAGE - 3, sparse="always", exact_layers=[1], frames_per_request=6)
    run(running, 20, noise=0.5)


def test_layers_with_a_sliding_window_have_a_pool_of_their_own() -> None:
    keys = config(method="clo", clo={"persistent": "none"})
    running = Engine(keys, spec(layers=3, windows=(32, None, None)), is_witnessed=True)
    running.admit("a", LONG)
    run(running, 10)
    assert sorted(method_of(running)._row) == [1, 2]


def test_a_step_that_failed_half_way_leaves_no_label() -> None:
    running = engine(clo={"eta": 1e-6, "persistent": "none"})
    running.step({"a": 1}, tolerance=None)
    running.begin_and_die("a", is_told=True)
    assert not method_of(running)._state.labels.any()
    run(running, 3)


def test_a_hit_selects_nothing() -> None:
    """Lists of heads that hit are padding to the operations that score and select."""
    running = engine(clo={"eta": 1e-6, "persistent": "none"}, lookahead={"enabled": False})
    operations, scored = SimpleNamespace(**vars(running.runtime.tiers.operations)), list[int]()
    running.runtime.tiers.operations = operations  # type: ignore[assignment]
    watch(operations, "page_scores", before=lambda q, digests, table, num_pages, *_: scored.append(
        int((num_pages > 0).sum())))  # fmt: skip
    method_of(running)._state.thresholds.fill_(-1.0)
    run(running, 3)
    assert scored == [KV_HEADS] * LAYERS + [0] * 2 * LAYERS


# --- what is refused ---


def test_what_cannot_be_served_is_refused_in_one_line(tmp_path: Path) -> None:
    without = heads_file(tmp_path, 1.0, None)
    for keys, words in (
        ({"clo": {"heads": without}}, "clo.persistent: auto needs the mean cosines"),
        ({"clo": {"persistent": ["3:0"]}}, "clo.persistent: 3:0 is no layer:head of the model"),
        ({"frames_per_request": 3}, "frames_per_request: 3 is less than the budget of 4 pages"),
        ({"clo": {"heads": str(tmp_path / "nothing.json")}}, "nothing.json"),
    ):
        with pytest.raises(ConfigError) as error:
            engine(**keys)  # type: ignore[arg-type]
        assert words in str(error.value) and "\n" not in str(error.value)
    other = json.loads(Path(without).read_text())
    other["kv_importance"] = [[1.0] * 3] * LAYERS
    Path(without).write_text(json.dumps(other))
    with pytest.raises(ConfigError, match=r"clo\.heads"):
        engine(clo={"heads": without, "persistent": "none"})


def test_head_pages_of_frames_are_numbered_as_those_of_the_host_pool() -> None:
    store = torch.arange(5 * KV_HEADS * 2 * PAGE * DIM).view(5, KV_HEADS, 2, PAGE, DIM)
    assert torch.equal(head_pages(store)[3 * KV_HEADS + 1, 0], store[3, 1]) and math.prod(store.shape) == store.numel()
