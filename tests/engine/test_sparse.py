"""Sparse and right: ScoutAttention at budget 1024 of 7,000 tokens, bf16, separate tiers, against the stock backend.

The bounds are the ones promised in the README; the figures that were measured are printed and stand in
docs/measurements.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from bench.fidelity import FIDELITY_FLAGS, Comparison, answers, compare, follow, lookups
from hybrid_backend.config import find_config, load_config
from tests.engine.server import MODEL, Server, hybrid_server, stock_server
from tests.engine.texts import tokens_of_prose

pytestmark = pytest.mark.engine

CONTEXT, POSITIONS = 6900, 64
# English prose with ten passwords in each text: its questions, and the prose with which distributions are compared.
LOOKUPS = lookups(haystacks=2, facts=10, tokens=CONTEXT)
TEXTS = {tuple(question.prompt): tokens_of_prose(POSITIONS, 20000 * i) for i, question in enumerate(LOOKUPS[::10])}
SHORT = (40, 300, 700, 900)
EXACT_LAYERS = set(load_config(find_config(MODEL)).exact_layers)
FLAGS = ("--dtype", "bfloat16", "--max-num-seqs", "4", "--enforce-eager", *FIDELITY_FLAGS)
KEYS = {"tiers": "separate", "budget_tokens": 1024, "host_pool.size": "1GiB", "metrics.sample_interval": 8}


@dataclass(frozen=True)
class Dense:
    """What the stock backend says."""

    followed: list[list[dict[int, float]]]
    short: list[list[dict[int, float]]]
    noise: list[Comparison]  # stock, four at once, against stock, alone
    found: list[bool]


def short(server: Server) -> list[list[dict[int, float]]]:
    return [follow(server, tokens_of_prose(n, 900 * n), tokens_of_prose(24, 901 * n)) for n in SHORT]


def right(server: Server) -> list[bool]:
    return [answers(server, question) for question in LOOKUPS]


def long(server: Server) -> list[list[dict[int, float]]]:
    return [follow(server, text, after) for text, after in TEXTS.items()]


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Dense:
    flags = [*FLAGS, "--kv-cache-memory-bytes", str(2**30)]
    with stock_server(tmp_path_factory.mktemp("stock"), model_dir, flags) as server:
        alone = short(server)
        with ThreadPoolExecutor(4) as pool:
            crowd = list(
                pool.map(lambda n: follow(server, tokens_of_prose(n, 900 * n), tokens_of_prose(24, 901 * n)), SHORT)
            )
        noise = [compare(a, b) for a, b in zip(alone, crowd, strict=True)]
        return Dense(long(server), alone, noise, right(server))


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with hybrid_server(tmp_path_factory.mktemp("sparse"), KEYS, FLAGS) as server:
        yield server


def test_short_contexts_in_bf16_stay_within_the_stock_backends_own_noise(sparse: Server, dense: Dense) -> None:
    """They fit the slots, so they are dense; bf16 rounds differently wherever sums are taken in another order."""
    ours = [compare(a, b) for a, b in zip(dense.short, short(sparse), strict=True)]
    noise = sum(c.kl for c in dense.noise) / len(dense.noise)
    kl = sum(c.kl for c in ours) / len(ours)
    print(f"\nbf16 KL: hybrid against stock {kl:.2e}, stock against itself {noise:.2e}")
    assert kl <= max(2 * noise, 2e-3)


def test_next_token_distributions_stay_near_dense(sparse: Server, dense: Dense) -> None:
    results = [compare(a, b) for a, b in zip(dense.followed, long(sparse), strict=True)]
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


def test_key_lookups_that_dense_gets_right_stay_right(sparse: Server, dense: Dense) -> None:
    ours = right(sparse)
    asked = sum(dense.found)
    kept = sum(a and b for a, b in zip(dense.found, ours, strict=True))
    print(f"\nkey lookup: dense right {asked} of {len(ours)}, sparse keeps {kept}")
    # 135 million parameters find few passwords among ten in 7,000 tokens (measured: 15 of 40).
    assert asked >= 1, "the dense model itself finds nothing: this test shows nothing"
    assert kept >= asked - max(1, asked // 20)


def test_the_cpu_workers_did_their_part_and_recall_kept_it_small(sparse: Server) -> None:
    """256 decode steps at full context. The paper reports 8.2 % on average at its recall threshold of 12 %; measured
    here: 15.8 %, with slots for the budget and three pages more."""
    layers = set(range(30)) - EXACT_LAYERS
    before = {name: sparse.total(name, layers) for name in ("hybrid_cpu_tokens_total", "hybrid_selected_tokens_total")}
    sparse.complete(LOOKUPS[0].prompt, 256, extra_body={"ignore_eos": True})  # type: ignore[arg-type]
    cpu, selected = (sparse.total(name, layers) - value for name, value in before.items())
    print(f"\nCPU share of attended tokens over 256 steps: {cpu / selected:.4f}")
    assert 0 < cpu / selected < 0.2
    assert sparse.total("hybrid_recalled_pages_total") > 0
    assert sparse.total("hybrid_lead_seconds_total", layers) > 0
