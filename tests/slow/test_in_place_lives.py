"""Random lives of requests at the shipped settings: the in-place decode step against its oracle, step by step."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hybrid_backend.kernels import cpu
from hybrid_backend.kernels.in_place_oracle import SHORTLIST_BUDGETS
from tests.support.in_place import CheckedEngine, model, shipped

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not cpu.available(), reason=str(cpu.why_unavailable())),
]

FILES = ("default", "smollm2-135m", "qwen2.5-coder-0.5b")
CHANGES: tuple[dict[str, object], ...] = (
    {},
    {},
    {"recent": 1},
    {"sinks": 0, "selection.interval": 3},
    {"selection.granularity": "kv_head"},
    {"selection.interval": 1},
    {"sparse": "always"},
)
"""Keys that differ from the shipped file; mostly none do."""


@pytest.fixture(autouse=True)
def restored_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def act(engine: CheckedEngine, data: st.DataObject, number: int) -> None:
    """Let one thing happen to some request."""
    size, pages = engine.cfg.page_size, engine.cfg.budget_tokens // engine.cfg.page_size
    names = sorted(engine.sequences)
    kind = data.draw(st.sampled_from(["add", "share", "fill", "drop", "preempt", "decode", "decode", "decode"]))
    name = data.draw(st.sampled_from(names)) if names else ""
    free = len(engine.free) - 8 * len(names)
    if kind == "add" or not names:
        length = data.draw(st.sampled_from([pages - 2, pages + 3, 2 * pages, (SHORTLIST_BUDGETS + 2) * pages]))
        if len(names) < 6 and free > length + 2:
            tail = data.draw(st.integers(1, 2 * size))
            added = engine.add_imported(f"r{number}", length * size, length * size + tail)
            added.budget = data.draw(st.sampled_from([0, 0, 5 * size, pages * size // 2, 2 * pages * size + 3]))
    elif kind == "share" and len(names) < 6:
        engine.add(f"r{number}", engine.sequences[name].tokens + data.draw(st.integers(1, size)), shared_with=name)
    elif kind == "fill" and len(names) < 6:
        donor = engine.sequences[name]
        while donor.tokens < donor.prompt or donor.tokens % size != size - 1:
            engine.step({name: 1}, tolerance=None)
        engine.add_filled_twin(f"r{number}", name)
        order = [f"r{number}", name] if data.draw(st.booleans()) else [name, f"r{number}"]
        engine.step(dict.fromkeys(order, 1), tolerance=None)
    elif kind == "drop":
        engine.drop(name)
    elif kind == "preempt" and engine.sequences[name].tokens < 4 * pages * size // 3:
        engine.preempt(name)
    elif kind == "decode":
        for _ in range(data.draw(st.integers(1, 20))):
            work = {}
            for one in data.draw(st.permutations(names)):
                request = engine.sequences[one]
                missing = request.prompt - request.tokens
                work[one] = min(missing, data.draw(st.sampled_from([1, size, 5 * size]))) if missing > 0 else 1
            if sum(-(-count // size) for count in work.values()) + len(work) < len(engine.free):
                engine.step(work, tolerance=None)


def sparse_rows_of_a_life(data: st.DataObject) -> int:
    """Let an engine live, checked step by step. Returns how many of its rows left pages out."""
    name, changes = data.draw(st.sampled_from(FILES)), data.draw(st.sampled_from(CHANGES))
    torch.set_num_threads(1)  # steps are so small that a second thread mostly waits
    kv_dtype = data.draw(st.sampled_from(["auto", "auto", "int8"]))
    config = shipped(name, layers=3, kv_dtype=kv_dtype, exact_layers=data.draw(st.sampled_from([[], [1]])), **changes)
    dtype = data.draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32]))
    shape = data.draw(st.sampled_from([(1, 4, 64), (2, 1, 128), (1, 8, 64), (3, 3, 64)]))
    windows = data.draw(st.sampled_from([(), (None, None, 100)]))
    pages = 8 * config.budget_tokens // config.page_size + 600
    isa, seed = data.draw(st.sampled_from(cpu.isas())), data.draw(st.integers(0, 1000))
    engine = CheckedEngine(config, model(config, 3, dtype, *shape, windows), pages, seed=seed, isa=isa)
    engine.query_scale = data.draw(st.sampled_from([1.0, 3.0]))
    try:
        for number in range(data.draw(st.integers(4, 14))):
            act(engine, data, number)
    finally:
        engine.close()
    return engine.sparse_rows


def test_whatever_requests_do_every_step_is_the_oracle_s() -> None:
    sparse_rows: list[int] = []

    @settings(max_examples=25, suppress_health_check=list(HealthCheck), deadline=None)
    @given(data=st.data())
    def live(data: st.DataObject) -> None:
        sparse_rows.append(sparse_rows_of_a_life(data))

    live()
    assert sum(sparse_rows) > 100, "the lives left hardly any page out: this test shows little"
