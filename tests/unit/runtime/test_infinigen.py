"""InfiniGen: the same selection as scout, copied instead of computed on the CPU."""

from __future__ import annotations

import pytest
import torch

from hybrid_backend.errors import ConfigError
from hybrid_backend.kernels import reference
from tests.support.harness import PAGE, Engine, config, decode_step, spec

LONG = 12 * PAGE


def engine(layers: int = 3, seed: int = 0, **keys: object) -> Engine:
    running = Engine(config(method="infinigen", **{**keys}), spec(layers=layers), seed=seed)
    running.add("a", LONG)
    running.prefill("a")
    return running


@pytest.mark.parametrize("ahead", [True, False])
def test_all_selected_pages_are_attended_by_the_device_and_none_by_the_cpu(ahead: bool) -> None:
    running = engine(lookahead={"enabled": ahead})
    step, method, seen = decode_step(running).toolbox, running.runtime.method, []
    attend = method.attend

    def check_attend(_, layer, q):  # type: ignore[no-untyped-def]
        out, chosen, rows = attend(step, layer, q), step.selection(layer), step.buffers.inputs
        selected = chosen.pages[0, 0, : chosen.pages_listed[0, 0]].long()
        assert len(selected) == running.cfg.budget_pages and chosen.missing_listed[0, 0] == 0
        last = int(rows.num_pages[0]) - 1
        valid = torch.where(selected == last, int(rows.seq_lens[0]) - last * PAGE, PAGE)[None, None]
        pages = rows.table[0, selected].long()[None, None]
        expected, _ = reference.paged_attention(q, running.kv[layer], pages, valid, running.model.scale)
        torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
        seen.append(layer)
        return out

    method.attend = check_attend  # type: ignore[method-assign]
    for _ in range(20):
        running.step({"a": 1}, lookahead_noise=0.5, tolerance=None)
    assert len(seen) == 60
    stats = running.runtime.stats
    assert stats.cpu_ratio() == 0
    assert sum(layer.recalled_pages for layer in stats.layers) > 20
    running.close()


def test_copies_start_before_the_layer_before_attends() -> None:
    running = engine()
    step, method, events = decode_step(running).toolbox, running.runtime.method, list[tuple[str, int]]()
    recall, attend = step.recall, method.attend

    def log_recall(layer, at_once):  # type: ignore[no-untyped-def]
        recall(layer, at_once)
        if (step.buffers.state.copies.frames[layer] >= 0).any():
            events.append(("copy", layer))

    def log_attend(_, layer, q):  # type: ignore[no-untyped-def]
        events.append(("attend", layer))
        return attend(step, layer, q)

    step.recall, method.attend = log_recall, log_attend  # type: ignore[method-assign]
    for _ in range(10):
        running.step({"a": 1}, lookahead_noise=0.5, tolerance=None)
    copies = [i for i, (what, layer) in enumerate(events) if what == "copy" and layer > 0]
    assert copies
    for i in copies:
        assert ("attend", events[i][1] - 1) == events[i + 1]
    assert (step.buffers.state.copies.frames == -1).all(), "all that was copied is visible when the step ends"
    running.close()


def test_it_selects_what_scout_selects() -> None:
    """Same budget, same selection code: with the same queries both attend the same pages."""
    outputs = []
    for method in ("infinigen", "scout"):
        running = Engine(config(method=method), spec(layers=3), seed=4)
        running.add("a", LONG)
        running.prefill("a")
        outputs.append(torch.stack([running.step({"a": 1}, tolerance=None)["a"] for _ in range(30)]))
        running.close()
    torch.testing.assert_close(outputs[0], outputs[1], atol=1e-5, rtol=1e-5)


def test_too_few_frames_for_the_budget_are_refused() -> None:
    with pytest.raises(ConfigError, match="frames_per_request: 4 is less than the budget of 4 pages"):
        engine(frames_per_request=4)
    with pytest.raises(ConfigError, match="granularity"):
        engine(selection={"granularity": "kv_head"})
