"""Which layers select by their own query."""

from __future__ import annotations

from dataclasses import replace

from hybrid_backend.tools.profile.ahead import Ahead

# Layer 16 loses nearly all by its predicted query, layer 13 little, layer 1 nothing.
ALONE = {
    "text": {1: (0.0001, 0.0001), 13: (0.0002, 0.0003), 16: (0.0006, 0.0007)},
    "lookups": {1: (0.0, 0.0), 13: (0.0001, 0.0008), 16: (0.0, 0.095)},
}
AHEAD = Ahead(ALONE, true={"text": 0.005, "lookups": 0.002}, little=0.0)


def test_the_layer_that_loses_most_in_any_kind_comes_first() -> None:
    assert AHEAD.ranking == [16, 13, 1]


def test_as_few_layers_as_bring_all_kinds_near_what_true_queries_cost_select_by_their_own() -> None:
    together = [
        {"text": 0.0055, "lookups": 0.129},
        {"text": 0.0055, "lookups": 0.0031},
        {"text": 0.005, "lookups": 0.002},
    ]
    assert replace(AHEAD, together=together).own == [13, 16]
    assert replace(AHEAD, together=together, little=0.005).own == [16]  # nobody asks where 0.003 comes from
    assert replace(AHEAD, together=together[:1]).own is None  # more must be measured
    assert replace(AHEAD, together=together[2:]).own == []


def test_where_nothing_helps_all_select_by_their_own() -> None:
    assert replace(AHEAD, together=[{"text": 1.0, "lookups": 1.0}] * 4).own == [1, 13, 16]
