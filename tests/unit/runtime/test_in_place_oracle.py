"""The in-place decode step at the shipped settings, step by step against `kernels.in_place_oracle`."""

from __future__ import annotations

import pytest
import torch

from hybrid_backend.kernels import cpu
from hybrid_backend.kernels.in_place_oracle import SHORTLIST_BUDGETS, SPAN_PAGES
from tests.support.in_place import CheckedEngine, model, shipped

pytestmark = [
    pytest.mark.skipif(not cpu.available(), reason=str(cpu.why_unavailable())),
    pytest.mark.usefixtures("one_thread"),
]

ISAS = cpu.isas() if cpu.available() else []
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SHAPES = ((1, 4, 64), (2, 1, 128), (1, 8, 64), (2, 4, 64))  # KV heads, query heads of each, head_dim
FILES = ("default", "smollm2-135m", "qwen2.5-coder-0.5b")
CASES = [
    (isa, name, DTYPES[(i + j) % 3], SHAPES[(i + 2 * j) % 4])
    for i, isa in enumerate(ISAS)
    for j, name in enumerate(FILES)
]


def live(engine: CheckedEngine, steps: int) -> None:
    """Requests of several lengths and budgets share steps, prefixes and pages; some are preempted, some aborted.

    The longest one has more pages than any shortlist keeps. Another one fits at first and soon does not.
    """
    size, budget = engine.cfg.page_size, engine.cfg.budget_tokens
    long, near = (SHORTLIST_BUDGETS + 2) * budget, budget + 2 * size
    engine.add_imported("long", long, long + 3 * size + 5)
    engine.prefill("long", chunk=size + 7)
    engine.add("short", 2 * size).budget = 5 * size
    engine.add_imported("near", near, near + size - 5)
    engine.prefill("near")
    engine.prefill("short")
    for number in range(steps):
        names = ["long", "near", "short", "twin", "asking"]
        running = [name for name in names[number % 3 :] + names[: number % 3] if name in engine.sequences]
        engine.step(dict.fromkeys(running, 1), tolerance=None)
        if number == steps // 6:
            engine.add("twin", engine.sequences["long"].tokens + 3, shared_with="long")
            engine.prefill("twin")
        elif number == steps // 3:
            engine.drop("short")
            engine.add_imported("asking", budget, budget + size // 2).budget = budget // 2
            engine.prefill("asking")
        elif number == steps // 2:
            engine.preempt("near")
            engine.prefill("near", chunk=budget // 2)
        elif number == steps * 2 // 3:
            engine.drop("long")


@pytest.mark.parametrize(("isa", "name", "dtype", "shape"), CASES, ids=str)
def test_every_instruction_set_selects_and_attends_as_the_oracle_does(
    isa: str, name: str, dtype: torch.dtype, shape: tuple[int, int, int]
) -> None:
    """The first layers of a shipped configuration, one of which is exact."""
    config = shipped(name, layers=3, exact_layers=[2])
    spec = model(config, 3, dtype, *shape)
    engine = CheckedEngine(
        config, spec, num_pages=8 * config.budget_tokens // config.page_size + 300, isa=isa, query_scale=2.0
    )
    live(engine, steps=30)
    engine.close()
    assert engine.sparse_rows > 100 and engine.differing_rows < engine.rows / 20


@pytest.mark.parametrize("name", ["smollm2-135m", "qwen2.5-coder-0.5b"])
def test_every_layer_attends_its_share_of_the_budget(name: str) -> None:
    """All layers, exact ones and budget factors as they are shipped."""
    config = shipped(name)
    engine = CheckedEngine(config, model(config, 0, torch.bfloat16, 1, 4, 64), num_pages=500, query_scale=2.0)
    budget, size = config.budget_tokens, config.page_size
    engine.add_imported("long", 2 * budget, 2 * budget + 5)
    engine.add_imported("near", budget + 2 * size, budget + 3 * size - 4)
    for request in ("long", "near"):
        engine.prefill(request)
    for _ in range(size + 2):
        engine.step({"near": 1, "long": 1}, tolerance=None)
    engine.close()
    exact = len(config.exact_layers)
    assert engine.sparse_rows > (size + 2) * (len(config.budget_factors) - exact)


def test_long_sequences_are_searched_by_spans_and_sliding_windows_are_no_matter() -> None:
    """Two levels of digests and two threads, in a model every other layer of which has a sliding window."""
    torch.set_num_threads(2)
    config = shipped("default", exact_layers=[0])
    windows = (None, 100, None, 100, None)
    engine = CheckedEngine(config, model(config, 5, torch.bfloat16, 1, 4, 64, windows), num_pages=1400, query_scale=2.0)
    size, pages = config.page_size, 75 * SPAN_PAGES
    for name, length in (("a", pages), ("b", pages + 4)):
        engine.add_imported(name, length * size, (length + 1) * size - 3)
        engine.prefill(name)
    for _ in range(12):
        engine.step({"a": 1, "b": 1}, tolerance=None)
    assert engine.fused.host_bytes > 2 * 2 * pages // SPAN_PAGES * 2 * 64, "no spans were made"
    engine.close()
    assert engine.sparse_rows == 2 * 2 * 12


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("name", FILES)
def test_a_row_that_begins_with_a_page_that_another_one_fills_in_the_same_step_selects_by_the_whole_page(
    name: str, is_first: bool
) -> None:
    """A preempted request comes back with all of its tokens cached but one."""
    config = shipped(name, layers=2, exact_layers=[], recent=1)
    engine = CheckedEngine(config, model(config, 2, torch.float32, 1, 2, 64), num_pages=1300, query_scale=2.0)
    size, pages = (
        config.page_size,
        75 * SPAN_PAGES if name == "default" else 3 * config.budget_tokens // config.page_size,
    )
    engine.add_imported("donor", (pages - 1) * size, pages * size - 1)
    engine.prefill("donor")
    engine.add_filled_twin("twin", "donor")
    for _ in range(10):
        engine.step(dict.fromkeys(["twin", "donor"] if is_first else ["donor", "twin"], 1), tolerance=None)
    engine.close()
    assert engine.sparse_rows >= 2 * 19
