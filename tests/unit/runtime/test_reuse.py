"""A selection that lasts several steps (`selection.interval`): who attends it again, who selects, and what is split."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from hybrid_backend.errors import ConfigError, DeadlineError
from hybrid_backend.kernels.operations import Selection
from tests.support.harness import PAGE, Engine, config, decode_step, spec, watch

INTERVAL, LONG = 4, 12 * PAGE + 3
KEYS: dict[str, dict[str, Any]] = {
    "scout": {"recall": {"intervals": 2}},
    "scout, per head": {"recall": {"intervals": 2}, "granularity": "kv_head"},
    "infinigen": {"frames_per_request": 5},
}
over_methods = pytest.mark.parametrize("name", KEYS)


class Seen(NamedTuple):
    """The lists of one request in one layer and step."""

    pages: list[list[int]]
    fresh: list[list[int]]
    """Pages that the step's own query selects."""
    missing: int


def observed(name: str) -> tuple[Engine, list[dict[tuple[int, int], Seen]]]:
    """Return an engine whose outputs are compared with fp64, and what each layer and row of its steps selected."""
    keys = dict(KEYS[name])
    selection = {"interval": INTERVAL, "granularity": keys.pop("granularity", "layer")}
    cfg = config(method=name.split(",")[0], sparse="always", selection=selection, **keys)
    engine = Engine(cfg, spec(layers=3), num_pages=128, max_requests=4, is_witnessed=True)
    driver, log = decode_step(engine), list[dict[tuple[int, int], Seen]]()
    toolbox = driver.toolbox

    def note(result: Selection, layer: int, q: torch.Tensor) -> None:
        own, buffers = toolbox.selection(layer), toolbox.buffers.layers[layer]
        assert own is not None and buffers.reuse is not None
        toolbox.buffers.layers[layer] = buffers._replace(reuse=None)
        kept, scores = toolbox._selections[layer]
        operations, inputs, sizes = toolbox._ops, toolbox.inputs(len(q)), toolbox.shape
        budgets, how = toolbox.buffers.budgets_of(layer, inputs), cfg.selection
        fresh_scores = operations.page_scores(
            q, buffers.digests, inputs.table, inputs.num_pages, budgets, how.aggregate, sizes.lists > 1, how.bound,
            engine.model.scale, PAGE,
        )  # fmt: skip
        fresh = operations.select_pages(
            fresh_scores, inputs.num_pages, inputs.seq_lens, budgets, inputs.requests, buffers.frame_of, inputs.table,
            PAGE, cfg.sinks, cfg.recent, sizes.max_list_pages,
        )  # fmt: skip
        toolbox.buffers.layers[layer], toolbox._selections[layer] = buffers, (kept, scores)
        for row in range(len(q)):
            log[-1][layer, row] = Seen(lists_of(own, row), lists_of(fresh, row), int(own.missing_listed[row].sum()))

    watch(toolbox, "select", after=note)
    watch(driver, "begin", before=lambda step: log.append({}))
    return engine, log


def lists_of(selection: Selection, row: int) -> list[list[int]]:
    lengths = selection.pages_listed[row].tolist()
    return [selection.pages[row, listing, :length].tolist() for listing, length in enumerate(lengths)]


def selects(log: list[dict[tuple[int, int], Seen]], row: int = 0) -> list[bool]:
    """Tell for each step if the row attends what its query selects. If not, it attends the pages of the step before."""
    result = []
    for earlier, step in zip([{}, *log], log, strict=False):
        rows = [(seen, earlier.get((layer, row))) for (layer, r), seen in step.items() if r == row]
        is_fresh = all(seen.pages == seen.fresh for seen, _ in rows)
        assert is_fresh or all(old is not None and seen.pages == old.pages for seen, old in rows)
        result.append(is_fresh)
    return result


@over_methods
def test_a_selection_lasts_until_the_interval_or_the_page_ends(name: str) -> None:
    engine, log = observed(name)
    engine.admit("a", 12 * PAGE + 3)
    for _ in range(PAGE):
        engine.step({"a": 1}, lookahead_noise=0.3, tolerance=None)
    # The first step writes token 12 * PAGE + 3, and step PAGE - 3 begins a page.
    expected = [step % INTERVAL == 0 for step in range(PAGE - 3)] + [True, False, False]
    assert selects(log) == expected
    missing = [[seen.missing for seen in step.values()] for step in log]
    if name.startswith("scout"):
        between = [i for i in range(1, len(log)) if not expected[i] and missing[i] != missing[i - 1]]
        assert between, "a recalled page of a selection that lasts becomes resident"
    engine.close()


@over_methods
def test_a_request_in_another_row_or_after_a_preemption_selects_again(name: str) -> None:
    engine, log = observed(name)
    for request in ("a", "b"):
        engine.admit(request, LONG)
    for order in ("ab", "ab", "ba", "ba"):
        engine.step(dict.fromkeys(order, 1), lookahead_noise=0.3, tolerance=None)
    assert [selects(log, row) for row in (0, 1)] == [[True, False, True, False]] * 2
    engine.preempt("b")
    engine.prefill("b")
    log.clear()
    engine.step(dict.fromkeys("ba", 1), lookahead_noise=0.3, tolerance=None)
    assert all(log[0][layer, 0].pages == log[0][layer, 0].fresh for layer in range(1, 3))
    engine.drop("b")
    log.clear()
    engine.add("c", LONG)
    engine.prefill("c")
    engine.step(dict.fromkeys("ca", 1), lookahead_noise=0.3, tolerance=None)
    assert all(log[0][layer, 0].pages == log[0][layer, 0].fresh for layer in range(1, 3)), "c has the index of b"
    engine.close()


@over_methods
def test_a_layer_that_a_failed_step_did_not_reach_selects_in_the_next_one(name: str) -> None:
    engine, log = observed(name)
    engine.admit("a", LONG)
    engine.step({"a": 1}, tolerance=None)
    engine.preempt("a")
    engine.prefill("a")
    engine.begin_and_die("a", is_told=True)
    log.clear()
    for _ in range(2):
        engine.step({"a": 1}, lookahead_noise=0.3, tolerance=None)
    reached = range(1, 3)
    assert all(log[0][layer, 0].pages == log[0][layer, 0].fresh for layer in reached)
    assert any(log[1][layer, 0].pages != log[1][layer, 0].fresh for layer in reached)
    engine.close()


def test_rows_of_a_step_without_a_partial_select_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layers after a missing partial had wrong queries."""
    engine, log = observed("scout")
    engine.admit("a", LONG)
    engine.step({"a": 1}, tolerance=None)
    step, _ = engine._begin({"a": 1})
    driver = decode_step(engine)
    driver.begin(step)
    monkeypatch.setattr(driver.cpu_attention, "failure", lambda number: DeadlineError("late"))
    assert driver.failure(step) is not None
    log.clear()
    engine.step({"a": 1}, lookahead_noise=0.3, tolerance=None)
    assert selects(log) == [True]
    engine.close()


def test_an_interval_of_one_needs_no_memory_and_a_longer_one_is_planned() -> None:
    sizes = {}
    for interval in ("auto", 1, INTERVAL):
        engine = Engine(config(selection={"interval": interval}), spec())
        state = decode_step(engine).buffers.state
        sizes[interval] = state.reuse.nbytes
        shape = decode_step(engine).buffers.shape
        assert (
            decode_step(engine).device_bytes
            == state.nbytes
            == shape.state_bytes(len(decode_step(engine).buffers.layers))
        )
        engine.close()
    assert sizes["auto"] == sizes[1] == 0 < sizes[INTERVAL]


def test_an_interval_that_no_selection_can_last_is_refused() -> None:
    with pytest.raises(ConfigError, match=rf"selection.interval: {PAGE + 1} is more than page_size {PAGE}, and scout"):
        Engine(config(selection={"interval": PAGE + 1}), spec())
    with pytest.raises(ConfigError, match=r"selection.interval: heads of clo select by the rule of clo.eta"):
        Engine(config(method="clo", selection={"interval": 2}), spec())
