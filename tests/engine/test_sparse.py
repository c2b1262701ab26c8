"""Sparse and right: ScoutAttention at budget 1024 of 7,000 tokens, fp32, separate tiers, against the stock backend.

The bounds are the ones promised in the README; the figures that were measured are printed and stand in
docs/measurements.md.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bench.fidelity import FIDELITY_FLAGS, answers, compare, follow, lookups
from hybrid_backend.config import find_config, load_config
from tests.engine.answers import Distributions, StockAnswers
from tests.engine.server import MODEL, Server, hybrid_server
from tests.engine.texts import tokens_of_prose

pytestmark = pytest.mark.engine

CONTEXT, POSITIONS = 6900, 48
# English prose with twenty passwords in it: its questions, and two continuations on which distributions are compared.
LOOKUPS = lookups(haystacks=1, facts=20, tokens=CONTEXT)
CONTINUATIONS = [tokens_of_prose(POSITIONS, start) for start in (0, 20000)]
EXACT_LAYERS = set(load_config(find_config(MODEL)).exact_layers)
FLAGS = ("--dtype", "float32", "--max-num-seqs", "4", "--enforce-eager", *FIDELITY_FLAGS)
KEYS = {"tiers": "separate", "budget_tokens": 1024, "host_pool.size": "1GiB", "metrics.sample_interval": 8}


def right(server: Server) -> list[bool]:
    return [answers(server, question) for question in LOOKUPS]


def long(server: Server) -> Distributions:
    return [follow(server, LOOKUPS[0].prompt, after) for after in CONTINUATIONS]


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with hybrid_server(tmp_path_factory.mktemp("sparse"), KEYS, FLAGS) as server:
        yield server


def test_next_token_distributions_stay_near_dense(sparse: Server, stock_fp32: StockAnswers) -> None:
    dense = stock_fp32.distributions("long", long)
    results = [compare(a, b) for a, b in zip(dense, long(sparse), strict=True)]
    kl = sum(r.kl for r in results) / len(results)
    print(f"\nmean KL {kl:.4f} nats over {sum(r.positions for r in results)} positions: {results}")
    assert kl <= 0.05


def test_attention_mass_recall_of_sparse_layers_is_at_least_ninety_percent(sparse: Server) -> None:
    by_layer = sparse.metrics("hybrid_attention_mass_recall")["hybrid_attention_mass_recall"]
    mass = [value for layer, value in by_layer.items() if int(layer) not in EXACT_LAYERS]
    cosine = sparse.metrics("hybrid_predicted_query_cosine")["hybrid_predicted_query_cosine"]
    print(f"\nmass recall {sum(mass) / len(mass):.3f}, worst layer {min(mass):.3f}")
    print(f"cosine of predicted queries {sum(cosine.values()) / len(cosine):.3f}, worst {min(cosine.values()):.3f}")
    assert sum(mass) / len(mass) >= 0.90
    assert min(cosine.values()) > 0.8


def test_key_lookups_that_dense_gets_right_stay_right(sparse: Server, stock_fp32: StockAnswers) -> None:
    dense, ours = stock_fp32.once("lookups", right), right(sparse)
    asked = sum(dense)
    kept = sum(a and b for a, b in zip(dense, ours, strict=True))
    print(f"\nkey lookup: dense right {asked} of {len(ours)}, sparse keeps {kept}")
    # 135 million parameters find few of twenty passwords in 7,000 tokens.
    assert asked >= 1, "the dense model itself finds nothing: this test shows nothing"
    assert kept >= asked - max(1, asked // 20)


def test_the_cpu_workers_did_their_part_and_recall_kept_it_small(sparse: Server) -> None:
    """96 decode steps at full context. The paper reports 8.2 % on average at its recall threshold of 12 %; measured
    here: 15.8 %, with slots for the budget and three pages more."""
    layers = set(range(30)) - EXACT_LAYERS
    before = {name: sparse.total(name, layers) for name in ("hybrid_cpu_tokens_total", "hybrid_selected_tokens_total")}
    sparse.complete(LOOKUPS[0].prompt, 96, extra_body={"ignore_eos": True})  # type: ignore[arg-type]
    cpu, selected = (sparse.total(name, layers) - value for name, value in before.items())
    print(f"\nCPU share of attended tokens over 96 steps: {cpu / selected:.4f}")
    assert 0 < cpu / selected < 0.2
    assert sparse.total("hybrid_recalled_pages_total") > 0
    assert sparse.total("hybrid_lead_seconds_total", layers) > 0
