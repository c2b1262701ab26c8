"""InfiniGen: the same selection as scout, copied instead of computed on the CPU."""

from __future__ import annotations

import pytest
import torch

from hybrid_backend.errors import ConfigError
from tests.support.harness import PAGE, Engine, config, decode_step, spec, watch

LONG = 12 * PAGE


def engine(layers: int = 3, seed: int = 0, **keys: object) -> Engine:
    running = Engine(config(method="infinigen", **keys), spec(layers=layers), seed=seed, is_witnessed=True)
    running.admit("a", LONG)
    return running


@pytest.mark.parametrize("ahead", [True, False])
def test_all_selected_pages_are_attended_by_the_device_and_none_by_the_cpu(ahead: bool) -> None:
    """The witnessed engine checks that they are attended."""
    running = engine(lookahead={"enabled": ahead})
    step, selected = decode_step(running).toolbox, list[tuple[int, int]]()

    def note(out: torch.Tensor, _: object, layer: int, q: torch.Tensor) -> None:
        chosen = step.selection(layer)
        assert chosen is not None
        selected.append((int(chosen.pages_listed[0, 0]), int(chosen.missing_listed[0, 0])))

    watch(running.runtime.method, "attend", after=note)
    running.decode("a", steps=20, noise=0.5, tolerance=None)
    assert selected == [(running.cfg.budget_pages, 0)] * 60
    stats = running.runtime.stats
    assert stats.cpu_ratio() == 0
    assert sum(layer.recalled_pages for layer in stats.layers) > 20


def test_copies_start_before_the_layer_before_attends() -> None:
    running = engine()
    step, events = decode_step(running).toolbox, list[tuple[str, int]]()

    def note(_: object, layer: int, at_once: object) -> None:
        if (step.buffers.state.copies.frames[layer] >= 0).any():
            events.append(("copy", layer))

    watch(step, "recall", after=note)
    watch(running.runtime.method, "attend", before=lambda step, layer, q: events.append(("attend", layer)))
    running.decode("a", steps=10, noise=0.5, tolerance=None)
    copies = [i for i, (what, layer) in enumerate(events) if what == "copy" and layer > 0]
    assert copies
    for i in copies:
        assert ("attend", events[i][1] - 1) == events[i + 1]
    assert (step.buffers.state.copies.frames == -1).all(), "all that was copied is visible when the step ends"


def test_it_selects_what_scout_selects() -> None:
    """Same budget, same selection code: with the same queries both attend the same pages."""
    outputs = []
    for method in ("infinigen", "scout"):
        running = Engine(config(method=method), spec(layers=3), seed=4)
        running.admit("a", LONG)
        outputs.append(running.decode("a", steps=30, tolerance=None))
    torch.testing.assert_close(outputs[0], outputs[1], atol=1e-5, rtol=1e-5)


def test_too_few_frames_for_the_budget_are_refused() -> None:
    with pytest.raises(ConfigError, match="frames_per_request: 4 is less than the budget of 4 pages"):
        engine(frames_per_request=4)
    with pytest.raises(ConfigError, match="granularity"):
        engine(selection={"granularity": "kv_head"})
