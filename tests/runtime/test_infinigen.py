"""InfiniGen: the same selection as scout, copied instead of computed on the CPU."""

from __future__ import annotations

import pytest
import torch

from hybrid_backend.errors import ConfigError
from hybrid_backend.kernels import reference
from hybrid_backend.methods.infinigen import InfiniGen
from tests.runtime.harness import PAGE, Engine, config, spec

LONG = 12 * PAGE


def engine(layers: int = 3, seed: int = 0, **keys: object) -> Engine:
    running = Engine(config(method="infinigen", **{"tiers": "separate", **keys}), spec(layers=layers), seed=seed)
    running.add("a", LONG)
    running.prefill("a")
    return running


def infinigen(running: Engine) -> InfiniGen:
    method = running.runtime.method
    assert isinstance(method, InfiniGen)
    return method


@pytest.mark.parametrize("ahead", [True, False])
def test_all_selected_pages_are_attended_by_the_device_and_none_by_the_cpu(ahead: bool) -> None:
    running = engine(lookahead={"enabled": ahead})
    method, seen = infinigen(running), []
    planned = method._attend_planned

    def check_attend(layer, step, plan, entry, q):  # type: ignore[no-untyped-def]
        out, rows, selected = planned(layer, step, plan, entry, q), step.decode, entry.selected
        assert (selected >= 0).sum() == running.cfg.budget_pages
        tail = int(rows.seq_lens[0] - (rows.num_pages[0] - 1) * PAGE)
        valid = torch.where(selected == rows.num_pages[0] - 1, tail, PAGE)
        pages = rows.page_table[0][selected]
        expected, _ = reference.paged_attention(q, running.kv[layer], pages, valid, running.model.scale)
        torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
        seen.append(layer)
        return out

    method._attend_planned = check_attend  # type: ignore[method-assign]
    for _ in range(20):
        running.step({"a": 1}, lookahead_noise=0.5, tolerance=None)
    assert len(seen) == 60
    stats = running.runtime.stats
    assert stats.cpu_ratio() == 0
    assert sum(layer.recalled_pages for layer in stats.layers) > 20
    assert sum(layer.wait_seconds for layer in stats.layers) > 0
    running.close()


def test_copies_start_before_the_layer_before_attends() -> None:
    running = engine()
    running.step({"a": 1}, tolerance=None)  # fills the cold layers
    events: list[tuple[str, int]] = []
    transfers, method = running.runtime.tiers.transfers, infinigen(running)
    submit, attend = transfers.submit, method.attend

    def log_submit(recall):  # type: ignore[no-untyped-def]
        events.append(("copy", recall.layer))
        submit(recall)

    def log_attend(layer, step, q):  # type: ignore[no-untyped-def]
        events.append(("attend", layer))
        return attend(layer, step, q)

    transfers.submit, method.attend = log_submit, log_attend  # type: ignore[method-assign]
    for _ in range(10):
        running.step({"a": 1}, tolerance=None)
    copies = [i for i, (what, layer) in enumerate(events) if what == "copy" and layer > 0]
    assert copies
    for i in copies:
        assert ("attend", events[i][1] - 1) == events[i + 1]
    assert transfers.in_flight == 0
    running.close()


def test_it_selects_what_scout_selects() -> None:
    """Same budget, same selection code: with the same queries both attend the same pages."""
    outputs = []
    for method in ("infinigen", "scout"):
        running = Engine(config(method=method, tiers="separate"), spec(layers=3), seed=4)
        running.add("a", LONG)
        running.prefill("a")
        outputs.append(torch.stack([running.step({"a": 1}, tolerance=None)["a"] for _ in range(30)]))
        running.close()
    torch.testing.assert_close(outputs[0], outputs[1], atol=1e-5, rtol=1e-5)


def test_too_few_slots_for_the_budget_are_refused() -> None:
    with pytest.raises(ConfigError, match="slots_per_request: 4 is less than the budget of 4 pages"):
        engine(slots_per_request=4)
    with pytest.raises(ConfigError, match="granularity"):
        engine(selection={"granularity": "kv_head"})
